"""A device process of `study_shadow`: trains so many steps in one of its modes, and tells how fast.

    python -m benchmarks.shadow_device MODE ADDRESS INDEX COUNT STEPS FOLDER STEPS_ALONE

Before and after, it trains STEPS_ALONE steps (0: not at all) without any server, in the same process, so that
others' load on the machine hits both.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabranch.client import elastic
from anabranch.client.agent import Agent
from anabranch.client.live_training import LiveTraining
from anabranch.client.shards import shard_of
from anabranch.client.transport import GrpcTransport
from anabranch.core.config.tables import ClientTable
from anabranch.core.model.live import LiveWeights
from anabranch.core.model.updates import LocalPlan
from anabranch.host.elastic import ElasticAnswer
from anabranch.workloads.app import Shard, load_app
from anabranch.workloads.batches import watched
from anabranch.workloads.trainer import trainer_for

APP = "fashion-mnist"
GAP = 5  # local steps between two exchanges of the foreground
PLAN = LocalPlan(steps=GAP, batch_size=32, learning_rate=0.05)
WARM_UP = 50  # steps whose time does not count
ELASTIC_FOREGROUND = "elastic, in the foreground"


class ForegroundTraining(LiveTraining):
    """The same exchanges, but the steps wait for the answer: ShadowSync's foreground counterpart."""

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        self._answered = threading.Event()

    def answer(self, answer: ElasticAnswer) -> None:
        """Let the training go on."""
        super().answer(answer)
        self._answered.set()

    def stop(self) -> None:
        """End, also where the answer does not come."""
        self._over = True
        self._answered.set()
        super().stop()

    def _snapped(self, live: LiveWeights) -> None:
        super()._snapped(live)
        self._answered.wait()
        self._answered.clear()
        with self._lock:
            self._between.merge(live, self._clock())


def alone(index: int, count: int, steps: int) -> float:
    """No server at all: the steps a second of the same training by itself."""
    app, moments = load_app(APP), [0.0]
    trainer, examples = trainer_for(app), app.data(Shard("train", index, count))
    weights, plan = trainer.initial(0), replace(PLAN, steps=steps + WARM_UP)
    vector, frozen = trainer.spec.flatten(weights), trainer.spec.frozen(weights)
    with watched(lambda: moments.append(time.monotonic())):
        trainer.train(vector, frozen, examples, plan, 0)
    timed = moments[1 + WARM_UP :]
    return (len(timed) - 1) / (timed[-1] - timed[0])


def federated(address: str, index: int, count: int, steps: int, folder: Path) -> dict[str, float]:
    """With a server, as it says, until about `steps` local steps are with it."""
    moments, done = [time.monotonic()], [0]

    def hear(kind: str, **data: Any) -> None:
        if kind == "trained":
            moments.append(time.monotonic())
            done.append(done[-1] + data["steps"])
        elif kind == "pushed" and done[-1] + (done[-1] - done[-2]) / 2 >= steps:  # as near as it gets
            agent.stop()

    def shard(config: Any) -> Shard:
        return shard_of(config, index, count)

    name = f"device-{index}"
    with GrpcTransport(address, name) as transport:
        settings = ClientTable(device="cpu")
        agent = Agent(
            load_app(APP),
            transport,
            name,
            shard,
            folder / name,
            settings,
            threads=1,
            seed=index,
            on_event=hear,
        )
        summary = agent.run()
    assert summary.rejected == 0, summary
    first = next((i for i, value in enumerate(done) if value >= WARM_UP), 1)
    return _rate(moments[first:], done[first:], summary.answered)


def _rate(moments: list[float], steps: list[int], exchanges: int) -> dict[str, float]:
    took_s = moments[-1] - moments[0]
    return {
        "steps": steps[-1],
        "steps_per_s": (steps[-1] - steps[0]) / took_s,
        "gap": steps[-1] / exchanges if exchanges else 0.0,
    }


def main(mode: str, address: str, index: str, count: str, steps: str, folder: str, steps_alone: str) -> None:
    """Train, and tell."""
    import torch

    torch.set_num_threads(1)
    if mode == ELASTIC_FOREGROUND:
        setattr(elastic, LiveTraining.__name__, ForegroundTraining)
    place, rates = (int(index), int(count)), []
    if int(steps_alone):
        rates.append(alone(*place, int(steps_alone)))
    found = federated(address, *place, int(steps), Path(folder))
    if rates:
        rates.append(alone(*place, int(steps_alone)))
        found["alone_per_s"] = statistics.fmean(rates)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
