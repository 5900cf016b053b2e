"""Where strategies meet: a workload, how its data lie, what bounds the devices, who leaves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.arena.regression import SCORE
from benchmarks.studies import Tables

DEVICES = 100
EVALUATIONS = 40  # of a run
LEAVERS = 0.3  # of the devices, each at a random moment

# A workload's own settings, and the Mbit/s by which a whole model takes about as long as its training.
WORKLOADS: dict[str, tuple[Tables, float]] = {
    "digits": ({"client": {"steps": 10, "batch_size": 10}}, 0.05),
    "fashion-mnist": (
        {"client": {"steps": 10, "batch_size": 20}, "fleet": {"examples_per_client": 200}},
        1.0,
    ),
    "text": (
        {
            "run": {"workload": "benchmarks.arena.text:Text"},
            "client": {"steps": 10, "batch_size": 10},
        },
        0.07,
    ),
    "regression": (
        {
            "run": {"workload": "benchmarks.arena.regression:Regression", "metric": SCORE, "mode": "max"},
            "client": {"steps": 10, "batch_size": 10},
        },
        0.01,
    ),
}
SPLITS: dict[str, Mapping[str, Any]] = {
    "iid": {"split": "iid"},
    "dirichlet-0.3": {"split": "dirichlet", "dirichlet_alpha": 0.3},
    "dirichlet-0.1": {"split": "dirichlet", "dirichlet_alpha": 0.1},
    "speed-shards": {"split": "speed-shards", "shards_per_client": 2},
    "speed-shards-20": {
        "split": "speed-shards", "shards_per_client": 2, "speed_ratio": 20.0, "step_time_s": 0.025,
    },
}  # fmt: skip
LINKS = ("compute", "link")
LINKS_SAID = {"compute": "fast links", "link": "narrow links"}
FAULTS = ("steady", "leavers")
FAULTS_SAID = {"steady": "nobody leaves", "leavers": "a third leaves"}


@dataclass(frozen=True, order=True)
class Cell:
    """One of them. `links`: what a task takes its time for. `faults`: whether devices leave."""

    workload: str
    split: str
    links: str
    faults: str

    @property
    def name(self) -> str:
        """As it is asked for."""
        return f"{self.workload}/{self.split}/{self.links}/{self.faults}"

    @property
    def tables(self) -> tuple[Tables, ...]:
        """Configuration, layer by layer. The slowest device's step takes 0.5 s in all of them."""
        own, mbps = WORKLOADS[self.workload]
        narrow = {"up_mbps": mbps, "down_mbps": 5 * mbps} if self.links == "link" else {}
        gone = {"leavers": LEAVERS} if self.faults == "leavers" else {}
        base: Tables = {
            "run": {
                "name": "arena",
                "workload": self.workload,
                "evaluate_every_versions": 0,
                "keep_payloads": False,
            },
            "fleet": {
                "clients": DEVICES,
                "speed": "levels",
                "speed_ratio": 5.0,
                "step_time_s": 0.1,
                "waiting": "called",
            },
        }
        return base, own, {"fleet": {**SPLITS[self.split], **narrow, **gone}}


CELLS = [Cell(*each) for each in itertools.product(WORKLOADS, SPLITS, LINKS, FAULTS)]
