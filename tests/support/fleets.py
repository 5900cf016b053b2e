"""Builders for tests of the simulator: configurations in one line, and an App that costs nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.core.config.tables import Config, merge
from anabranch.core.model.updates import LocalPlan
from anabranch.core.snapshot import state_digest
from anabranch.reports.result import Result
from anabranch.simulation.checkers import Checker
from anabranch.simulation.run import open_simulation
from anabranch.workloads.app import App, Examples, Shard

EXAMPLES = 64  # two steps of the default batch size


def config(strategy: str = "fedbuff", **tables: Mapping[str, Any]) -> Config:
    """A small fleet on the synthetic problem: 25 virtual seconds, unless the tables say otherwise."""
    base: dict[str, dict[str, Any]] = {
        "run": {"workload": "synthetic", "virtual_s_max": 25.0, "evaluate_every_versions": 0},
        "fleet": {"clients": 6, "examples_per_client": 64},
        "strategy": {"name": strategy, **({"buffer_size": 3} if strategy == "fedbuff" else {})},
    }
    if strategy in ("fedavg", "fedprox"):
        base["strategy"] |= {"clients_per_round": 3, "deadline_s": 20.0}
    if strategy == "teasq_drop":
        base["strategy"] |= {"concurrency_fraction": 1.0, "cache_size": 3}
    return merge([("base", base), ("test", tables)])


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """The recorded events of these kinds."""
    with (folder / "events.jsonl").open(encoding="utf-8") as file:
        return [e for line in file if (e := json.loads(line))["kind"] in kinds]


def recorded(settings: Config, out: Path) -> tuple[Result, str]:
    """What `simulate` does, with every invariant looked at; and the digest of the state at the end."""
    with open_simulation(settings, out) as simulation:
        simulation.world.observers.append(Checker(simulation.engine).observe)
        simulation.run()
        result = simulation.result(0.0)
        simulation.leave(result, out)
        return result, state_digest(simulation.engine)


class Ones(App):
    """`size` float32 zeros to which every task adds one; every device has the same number of examples."""

    name = "ones"

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.size = size

    def model(self) -> dict[str, Any]:
        return {"w": np.zeros(self.size, np.float32)}

    def data(self, shard: Shard) -> Examples:
        return Examples(np.zeros((EXAMPLES, 1), np.float32), np.zeros(EXAMPLES, np.int64))

    def train(
        self, model: dict[str, Any], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        model["w"] += 1.0
        return {"loss": float("nan")}

    def evaluate(self, model: dict[str, Any], examples: Examples) -> dict[str, float]:
        return {"accuracy": 0.5, "loss": float(model["w"].mean())}


class Broken(Ones):
    """Training fails."""

    def train(
        self, model: dict[str, Any], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        raise ZeroDivisionError("by design")


class Deadly(Ones):
    """Training kills its own process: once for each of its seeds modulo 2 of which `folder` has no file.

    Without a folder it is harmless; `always` kills every time.
    """

    def __init__(self, folder: str = "", always: bool = False) -> None:
        super().__init__()
        self.folder, self.always = folder, always

    def train(
        self, model: dict[str, Any], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        if self.always or (self.folder and self._is_first(seed % 2)):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(model, examples, plan, seed)

    def _is_first(self, kind: int) -> bool:
        try:
            (Path(self.folder) / str(kind)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Diverging(Ones):
    """Training ends in values that are not finite."""

    def train(
        self, model: dict[str, Any], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        model["w"][1] = np.inf
        return {}
