"""Does momentum at the server pay, with rounds and without? Every optimiser, equally tuned, on paired seeds.

    python -m benchmarks.study_outer [--quick | --render]

Eight unequal devices learn the digits, their data by a Dirichlet distribution. Each method is given the
same grid of learning rates, of devices and of the server, on seeds that the comparison does not use; where
the best is at an edge of either there is a point beyond it. Then it runs on the paired seeds. All take the
same number of updates of the same number of steps. Writes `docs/studies/outer.md` and `.json`; `--quick` the
same of less, into /tmp.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.equal_updates import FACTOR, Method, Study
from benchmarks.studies import Tables

BASE: Tables = {
    "run": {
        "name": "study-outer",
        "workload": "digits",
        "updates_max": 200,
        "evaluate_every_s": 10.0,
        "evaluate_every_versions": 0,
        "keep_payloads": False,
    },
    "fleet": {
        "clients": 8,
        "split": "dirichlet",
        "dirichlet_alpha": 0.3,
        "speed_ratio": 4.0,
        "step_time_s": 0.1,
        "executor": "serial",
    },
    "client": {"steps": 20, "batch_size": 20},
}
RATES = (0.1, 0.2)  # of devices
SERVER_RATES = (0.5, 1.0)  # of a rule that goes as far as the mean of K updates does
EXTENSIONS_MAX = 16  # points that a grid gets beside those that it begins with
K = 8
MOMENTUM = 0.9

Rates = tuple[float, float]  # of devices, of the server


@dataclass(frozen=True)
class Tuned(Method):
    """A method with two learning rates; `strategy`: its table at a rate of the server.

    `far`: how much farther its rule goes than the mean of the updates: its grid's rates are divided by that.
    """

    strategy: Callable[[float], dict[str, Any]] = field(default=lambda _: {})
    far: float = 1.0
    few: bool = False

    @property
    def first(self) -> Mapping[str, Tables]:
        """Every rate of devices with every one of the server; of the quick form one point."""
        pairs = itertools.product(RATES, [rate / self.far for rate in SERVER_RATES])
        return dict(map(self._at, list(pairs)[-1:] if self.few else pairs))

    def beyond(self, scores: Mapping[str, float]) -> Mapping[str, Tables]:
        """A point beyond each edge at which the best one lies: of either rate, lower and higher."""
        tried = {_rates(said): score for said, score in scores.items()}
        if len(tried) >= len(self.first) + EXTENSIONS_MAX:
            return {}
        best = max(tried, key=lambda rates: tried[rates])
        wanted = [
            neighbour
            for axis, factor in itertools.product((0, 1), (1 / FACTOR, FACTOR))
            if not _is_tried(neighbour := _moved(best, axis, factor), tried)
        ]
        return dict(map(self._at, wanted))

    def quick(self) -> Method:
        """One point, and none beyond it."""
        return replace(self, few=True)

    def _at(self, rates: Rates) -> tuple[str, Tables]:
        device, server = rates
        tables = {"client": {"learning_rate": device}, "strategy": self.strategy(server)}
        return f"devices {device:g}, server {server:g}", tables


def _moved(rates: Rates, axis: int, factor: float) -> Rates:
    device, server = rates
    return (device * factor, server) if axis == 0 else (device, server * factor)


def _rates(said: str) -> Rates:
    """Of what is said of a point."""
    device, server = said.removeprefix("devices ").split(", server ")
    return float(device), float(server)


def _is_tried(rates: Rates, tried: Mapping[Rates, float]) -> bool:
    return any(all(abs(a / b - 1) < 1e-3 for a, b in zip(rates, other, strict=True)) for other in tried)


def _outer(name: str, lr: float) -> dict[str, Any]:
    return {"name": name, "lr": lr, **({} if name == "sgd" else {"momentum": MOMENTUM})}


def _buffer(size: int, outer: str) -> Callable[[float], dict[str, Any]]:
    return lambda lr: {"name": "fedbuff", "buffer_size": size, "outer": _outer(outer, lr)}


def _rounds(outer: str) -> Callable[[float], dict[str, Any]]:
    every = {"clients_per_round": K, "over_selection": 1.0, "deadline_s": 0.0}
    return lambda lr: {"name": "fedavg", **every, "outer": _outer(outer, lr)}


def _delayed(lr: float) -> dict[str, Any]:
    return {"name": "delayed_nesterov", "buffer_size": K, "server_lr": lr, "momentum": MOMENTUM}


# Momentum of 0.9 goes ten times as far in the end, a single update by itself K times; Adam's steps are as
# long as its rate, in each coordinate.
FAR, PLAIN = 1 / (1 - MOMENTUM), "no momentum"
METHODS = [
    Tuned(f"rounds, {PLAIN} (FedAvg)", {}, rates=RATES, strategy=_rounds("sgd")),
    Tuned("rounds, Nesterov (DiLoCo)", {}, strategy=_rounds("nesterov"), far=FAR / 2),
    Tuned("rounds, Adam", {}, strategy=_rounds("adam"), far=50.0),
    Tuned(f"buffer of {K // 2}, {PLAIN} (FedBuff)", {}, strategy=_buffer(K // 2, "sgd")),
    Tuned(f"buffer of {K // 2}, Nesterov", {}, strategy=_buffer(K // 2, "nesterov"), far=FAR),
    Tuned(f"each update, {PLAIN}", {}, strategy=_buffer(1, "sgd"), far=K / 2),
    Tuned("each update, Nesterov", {}, strategy=_buffer(1, "nesterov"), far=K * FAR / 2),
    Tuned("each update, delayed Nesterov", {}, strategy=_delayed, far=FAR / 4),
]

STUDY = Study(
    name="outer",
    title="momentum at the server, with rounds and without",
    command="python -m benchmarks.study_outer",
    about=f"""Eight devices on the digits (Dirichlet 0.3), the slowest four times slower than the fastest.
Updates are of 20 steps each, raw, whatever the method; a round is of all eight. Momentum is {MOMENTUM}
wherever there is any. *Delayed Nesterov* (arXiv 2401.09135) adds each update at once, and turns its momentum
once in {K} of them; *rounds, Nesterov* is [DiLoCo](../strategies.md#diloco) (arXiv 2311.08105).""",
    base=BASE,
    methods=METHODS,
    extensions_max=EXTENSIONS_MAX,
)

if __name__ == "__main__":
    STUDY.main(__doc__)
