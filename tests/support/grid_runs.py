"""Runs of our engine over a Grid whose nodes are in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from anabranch.core.config.goal import Goal
from anabranch.core.config.tables import Config
from anabranch.flower import server_app
from anabranch.flower.driver import GridRun
from anabranch.flower.local_grid import LocalGrid, Node
from anabranch.flower.logbook import Logbook
from anabranch.flower.messages import EVALUATE, TRAIN, ServerAppMessage
from anabranch.host.build import WHOLE
from anabranch.reports.recorder import Recorder

FIRST = {"w": np.zeros(4, np.float32), "count": np.array(3)}


def config(**tables: dict[str, Any]) -> Config:
    run = {"updates_max": 12, "evaluate_every_versions": 4, **tables.pop("run", {})}
    told = {"arrays": "arrays", "records": {"config": {"server-round": 0}}}
    strategy = tables.pop("strategy", {"name": "fedasync"})
    return Config.from_json(
        {
            **server_app.PRESETS,
            **WHOLE,
            "run": run,
            "flower": {"train": told, "evaluate": told},
            "strategy": strategy,
            **tables,
        }
    )


def adding(amount: float, log: list[int] | None = None, variance: float | None = None) -> Node:
    """A node that adds so much to each weight, and finds a norm's running variance to be so."""

    def answer(message: Message) -> Message:
        if log is not None:
            log.append(message.content["config"]["server-round"])
        arrays = {n: a.numpy() for n, a in message.content["arrays"].items()}
        if message.metadata.message_type == "evaluate":
            metrics = {"num-examples": 1, "accuracy": float(np.tanh(arrays["w"].mean())), "loss": 1.0}
            return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
        arrays["w"] = arrays["w"] + np.float32(amount)
        if variance is not None:
            arrays["norm.running_var"] = np.full_like(arrays["norm.running_var"], variance)
        record = ArrayRecord({n: Array(np.asarray(a)) for n, a in arrays.items()})
        content = RecordDict(
            {"arrays": record, "metrics": MetricRecord({"num-examples": 5, "train_loss": 0.5})}
        )
        return Message(content, reply_to=message)

    return answer


class Clock:
    """Seconds that pass with every look."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.25
        return self.now


class Run:
    """A run in a folder, over nodes in this process."""

    def __init__(
        self,
        folder: Path,
        nodes: dict[int, Node],
        settings: Config | None = None,
        first: Mapping[str, Any] = FIRST,
    ) -> None:
        self.settings = settings or config()
        self.grid = LocalGrid(nodes)
        self.book = Logbook(folder, self.settings, first)
        self.recorder = Recorder("fedasync", "app", 0, Goal(), self.settings.to_json(), "live")
        train = ServerAppMessage.from_json(self.settings.flower.train, "flower.train")
        said = {TRAIN: train, EVALUATE: train}
        self.clock = Clock()
        try:
            self.run = GridRun(self.grid, self.settings, self.book, self.recorder, said, self.clock)
        except BaseException:
            self.close()
            raise

    def steps(self, most: int = 300) -> GridRun:
        for _ in range(most):
            if self.run.done:
                return self.run
            self.run.step()
        raise AssertionError("the run does not end")

    def close(self) -> None:
        self.book.__exit__()
        self.recorder.close()

    def result(self) -> Any:
        self.book.pack()
        result = self.recorder.result(self.run.model_sha256, self.book.sha256, 1.0)
        result.write(self.book.folder)
        self.close()
        return result
