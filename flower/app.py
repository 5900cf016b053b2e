"""A Flower app as an App of ours: its ClientApp trains and judges, unchanged, wherever an App runs.

    anabranch simulate --flower FOLDER       or, wherever an App is named, flower:FOLDER

The ClientApp reads its own data, so what stands for a device's examples is the partition that it shall read:
`partition-id` and `num-partitions` of its node config, as in Flower's simulation. A task is one message to
it, of the kind that the app's own ServerApp sends (`rehearsal.py`); what it leaves in `context.state` is
there again in the device's next task, also after a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from anabranch.core.config.flower import FlowerTable
from anabranch.core.config.goal import AUTO_GOAL, Goal
from anabranch.core.config.model import ModelTable
from anabranch.core.config.tables import FleetTable, build
from anabranch.core.engine.buffers import matching
from anabranch.core.errors import AppError
from anabranch.core.model.chains import AUTO
from anabranch.core.model.metrics import ACCURACY, LOSS
from anabranch.core.model.updates import LocalPlan
from anabranch.core.rng import seed_of
from anabranch.flower.installed import flwr_version
from anabranch.flower.messages import (
    EVALUATE,
    TRAIN,
    Reply,
    ServerAppMessage,
    evaluates,
    instruct,
    new_context,
)
from anabranch.flower.played import Judge, judge_of
from anabranch.flower.project import Project
from anabranch.flower.records import from_bytes, to_bytes
from anabranch.workloads.app import App, Array, Examples, Shard
from anabranch.workloads.trainer import ENDLESS_STEPS

if TYPE_CHECKING:
    from anabranch.flower.rehearsal import Rehearsed

log = logging.getLogger(__name__)

LIKE = {ACCURACY: "acc", LOSS: "loss"}  # what the names of such metrics have in them


@dataclass(frozen=True, eq=False)
class Partition(Examples):
    """Stands for data that only the ClientApp reads: x is the partition's number, y how many there are."""

    @classmethod
    def of(cls, index: int, count: int) -> Self:
        """The partition `index` of `count`."""
        return cls(np.array([index]), np.array([count]))

    @property
    def index(self) -> int:
        """Which one it is."""
        return int(self.x[0])

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.y[0])


class FlowerApp(App):
    """The App that a folder's Flower app is: its ClientApp trains and judges, unchanged.

    The node config has a device's `options`, and its `data_path` as `data-path`.

    Raises `AppError` for a folder without a Flower app, an app that cannot be loaded, and without flwr.
    """

    any_model, measures = True, False

    def __init__(self, folder: str | Path, data_path: str = "") -> None:
        super().__init__(data_path)
        flwr_version()
        self.project = Project.read(Path(folder))
        self.name = self.project.name
        self._client = self.project.client_app()  # now: who sets the threads of torch must find it loaded
        self._table, self._model = FlowerTable(), ModelTable()
        self._clients = FleetTable().clients
        self._goal, self._seed = AUTO_GOAL, 0
        self._told: dict[str, ServerAppMessage] = {}  # by what they ask for: the same in every task

    def join(self, config: Mapping[str, Any]) -> None:
        """See `App`: `[flower]`, how buffers are called, how many devices there are, what it is judged by."""
        self._goal = Goal.of_json(config)
        self._seed = seed_of(config.get("run", {}).get("seed", 0), "initial")  # as who starts the run has it
        self._table = build(FlowerTable, config.get("flower", {}), "flower")
        self._model = build(ModelTable, config.get("model", {}), "model")
        self._clients = build(FleetTable, config.get("fleet", {}), "fleet").clients
        self._told = {}

    def settings(self, seed: int) -> Mapping[str, Mapping[str, Any]]:
        """What the ServerApp tells its ClientApps, where the run's configuration does not say it.

        And the run config that it was told of, which goes with its messages.
        """
        return {"flower": {**self._heard(seed).settings, "run_config": dict(self._table.run_config)}}

    def model(self, seed: int = 0) -> dict[str, Array]:
        """The ServerApp's first arrays, by name."""
        return {name: array.copy() for name, array in self._heard(seed).arrays.items()}

    def buffers(self, model: Mapping[str, Array]) -> tuple[str, ...]:
        """Flower's arrays have names and no more: those that `model.buffer_names` fits."""
        return matching(model, self._model.buffer_names)

    def data(self, shard: Shard) -> Partition:
        """The device's partition; to be judged on are all of them."""
        if shard.role == "train":
            return Partition.of(shard.index, shard.count)
        return Partition.of(0, shard.count if shard.count > 1 else self._clients)

    def train(
        self, model: dict[str, Array], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        """One message for training. How long and how fast it trains, the ClientApp decides."""
        if plan.steps >= ENDLESS_STEPS:
            raise AppError(
                f"{self.name}: client.push = 'elastic' looks at the model between local steps, and a "
                "ClientApp shows none: take client.push = 'overlap' or 'task'"
            )
        part = _partition(examples, self.name)
        context = new_context(part.index, part.count, *self._configs())
        context.state = from_bytes(self.kept)
        said = self._said(TRAIN)
        reply = instruct(self._client, TRAIN, said, model, self.version + 1, context, seed)
        self._take(model, reply)
        self.kept = to_bytes(context.state)
        return {**reply.metrics, "examples": reply.examples}

    def evaluate(self, model: dict[str, Array], examples: Examples) -> dict[str, float]:
        """The ClientApp's metrics, the mean over partitions weighted by their examples; no state is kept.

        Or the ServerApp's own, if `[flower]` says so. `accuracy` and `loss` are those that it names, or whose
        names sound like it. Where there is no number, as Flower wants none, the version is not measured.
        """
        is_judged = self._table.central or evaluates(self._client)
        if self._table.central:
            found = self._judge()(self.version, model)
        elif is_judged:
            found = self._by_partitions(model, _partition(examples, self.name).count)
        else:
            found = {}
        # Who judges may skip a version, whatever is named; what nobody could measure may not be named.
        is_skipped = is_judged and not found
        metrics = {} if is_skipped else {**found, **named(found, self._table, self.name, self._goal)}
        if not metrics:
            _tell_unmeasured(self.name)
        return metrics

    def _judge(self) -> Judge:
        return judge_of(self._heard(self._seed).played, self.name)

    def _by_partitions(self, model: dict[str, Array], count: int) -> dict[str, float]:
        said, replies = self._said(EVALUATE), []
        for index in _spread(count, self._table.evaluate_partitions):
            context = new_context(index, count, *self._configs())
            seed = seed_of(0, "flower", "evaluate", index)
            replies.append(instruct(self._client, EVALUATE, said, model, self.version, context, seed))
        return mean_metrics(replies)

    def _configs(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The run's and the node's."""
        path = {"data-path": self.data_path} if self.data_path else {}
        return self.project.fused(self._table.run_config), {**path, **self.options}

    def _said(self, what: str) -> ServerAppMessage:
        """What a message says: as configured, or as the ServerApp says it."""
        if what not in self._told:
            self._told[what] = self._to_say(what)
        return self._told[what]

    def _to_say(self, what: str) -> ServerAppMessage:
        table = getattr(self._table, what)
        if table:
            return ServerAppMessage.from_json(table, f"flower.{what}")
        heard = self._heard(self._seed)
        return heard.train if what == TRAIN else heard.evaluate

    def _heard(self, seed: int) -> Rehearsed:
        from anabranch.flower.rehearsal import rehearse

        return rehearse(self.project.folder, self._table.run_config, self._clients, seed)

    def _take(self, model: dict[str, Array], reply: Reply) -> None:
        """Put the trained arrays in the model's place. Raises `AppError` where they are others."""
        if set(reply.arrays) != set(model):
            strange = sorted(set(reply.arrays) ^ set(model))[0]
            where = "is only in the reply" if strange in reply.arrays else "is not in it"
            raise AppError(
                f"{self.name}: the reply to 'train' has other arrays than the model: {strange!r} {where}"
            )
        for name, array in reply.arrays.items():
            if array.shape != model[name].shape:
                raise AppError(
                    f"{self.name}: array {name!r} came back with shape {array.shape}, not {model[name].shape}"
                )
            model[name] = array


@lru_cache
def _tell_unmeasured(name: str) -> None:
    """Once in a process, whichever version it is."""
    log.warning(
        "%s: a version is not measured where neither the ClientApp's function under @app.evaluate() nor the "
        "evaluate_fn of the ServerApp's strategy has given a metric that is one number",
        name,
    )


def mean_metrics(replies: Iterable[Reply]) -> dict[str, float]:
    """The mean of each metric over the replies that have it, weighted by their examples."""
    return weighted_mean((reply.examples, reply.metrics) for reply in replies)


def weighted_mean(weighted: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """The mean of each metric over those that have it, each with a weight above 0."""
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for weight, metrics in weighted:
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + weight * value
            weights[name] = weights.get(name, 0) + weight
    return {name: total / weights[name] for name, total in sums.items()}


def named(
    metrics: Mapping[str, float], table: FlowerTable, who: str, goal: Goal = AUTO_GOAL
) -> dict[str, float]:
    """`accuracy` and `loss`, by the names in `[flower]`, or else what sounds like it, as far as any is there.

    Raises `AppError` where there is neither among some and the run is not judged by another metric, or none
    of a name that `[flower]` has or is the run's.
    """
    found, chosen = dict[str, float](), {ACCURACY: table.accuracy, LOSS: table.loss}
    for what, like in LIKE.items():
        name = chosen[what] or next(
            (m for m in (what, *sorted(metrics)) if m in metrics and like in m.lower()), ""
        )
        if name in metrics:
            found[what] = metrics[name]
        elif name or (metrics and what == LOSS and not found and goal.metric in (AUTO, *LIKE)):
            told = ", ".join(sorted(metrics)) or "none that is one number"
            raise AppError(
                f"{who}: the ClientApp's evaluation has no metric {name or ACCURACY!r} (it has {told}): "
                f"name one, flower.{what if name else ACCURACY} = ..., or run.metric and run.mode"
            )
    if lack := goal.lacking([*metrics, *found]):
        raise AppError(f"{who}: {lack}")
    return found


def _spread(count: int, at_most: int) -> list[int]:
    """As many partitions as are to be judged on, evenly spaced."""
    wanted = min(count, at_most) if at_most else count
    return [i * count // wanted for i in range(wanted)]


def _partition(examples: Examples, who: str) -> Partition:
    if not isinstance(examples, Partition):
        raise AppError(
            f"{who}: a ClientApp reads its own data, so nothing can be done to it from outside: "
            "another fleet.attack than 'label_flip' works"
        )
    return examples
