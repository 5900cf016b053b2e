"""Does momentum at the server pay, with rounds and without? Every optimiser, equally tuned, on paired seeds.

    python -m benchmarks.study_outer [--quick | --render]

Eight unequal devices with unequal data learn the synthetic problem (1,002 parameters, numpy alone). Each
method has the same grid of learning rates, of devices and server, on seeds that the comparison does not
use, judged by its accuracy at the end; then it runs on the paired seeds. All take the same number of
updates of the same number of steps. Writes `docs/studies/outer.md` and `.json`; `--quick` the same of
less, into /tmp.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from typing import Any

from benchmarks.equal_updates import Method, Study

NAME, UPDATES = "outer", 400
RATES = (0.05, 0.15)  # of devices
SERVER_RATES = (0.4, 1.0, 2.5, 6.0)  # momentum of 0.9 goes ten times as far
K = 8

Tables = Mapping[str, Mapping[str, Any]]
BASE: Tables = {
    "run": {
        "name": f"study-{NAME}",
        "workload": "synthetic",
        "updates_max": UPDATES,
        "evaluate_every_s": 20.0,
        "evaluate_every_versions": 0,
        "keep_payloads": False,
    },
    "fleet": {
        "clients": 8,
        "split": "dirichlet",
        "dirichlet_alpha": 0.3,
        "speed_ratio": 4.0,
        "step_time_s": 0.1,
    },
    "client": {"steps": 20, "batch_size": 16},
}


def _outer(name: str, **more: float) -> dict[str, Any]:
    return {"name": name, **more}


def _buffer(size: int, outer: str, lr: float) -> dict[str, Any]:
    return {"name": "fedbuff", "buffer_size": size, "outer": _outer(outer, lr=lr)}


def _rounds(outer: str, lr: float) -> dict[str, Any]:
    every = {"clients_per_round": K, "over_selection": 1.0, "deadline_s": 0.0}
    return {"name": "fedavg", **every, "outer": _outer(outer, lr=lr)}


# What each is, and its strategy at a rate of the server. One update by itself moves the model by 1/K of it.
KINDS: dict[str, Any] = {
    "rounds, no momentum (FedAvg)": lambda lr: _rounds("sgd", lr),
    "rounds, Nesterov (DiLoCo)": lambda lr: _rounds("nesterov", lr),
    "rounds, Adam at a tenth of the rate": lambda lr: _rounds("adam", lr / 10),
    f"buffer of {K // 2}, no momentum (FedBuff)": lambda lr: _buffer(K // 2, "sgd", lr),
    f"buffer of {K // 2}, Nesterov": lambda lr: _buffer(K // 2, "nesterov", lr),
    "each update, no momentum": lambda lr: _buffer(1, "sgd", lr / K),
    "each update, Nesterov": lambda lr: _buffer(1, "nesterov", lr / K),
    "each update, delayed Nesterov": lambda lr: {
        "name": "delayed_nesterov", "buffer_size": K, "server_lr": lr, "momentum": 0.9,
    },
}  # fmt: skip


def methods() -> list[Method]:
    """Every kind with its grid: two rates of devices, four of the server."""
    found = []
    for kind, strategy in KINDS.items():
        grid = {
            f"devices {rate:g}, server {lr:g}": {"client": {"learning_rate": rate}, "strategy": strategy(lr)}
            for rate, lr in itertools.product(RATES, SERVER_RATES)
        }
        found.append(Method(kind, grid))
    return found


STUDY = Study(
    name=NAME,
    title="momentum at the server, with rounds and without",
    command="python -m benchmarks.study_outer",
    about=f"""Eight devices, the slowest four times slower than the fastest, Dirichlet 0.3, on the synthetic
problem (1,002 parameters). Updates are of 20 steps each, whatever the method. Momentum is 0.9 wherever there
is any. Rates of single updates are divided by {K}, as delayed Nesterov divides its own.""",
    base=BASE,
    methods=methods(),
)


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer updates, points and seeds; into /tmp")
    parser.add_argument("--render", action="store_true", help="write the page again of what was measured")
    STUDY.main(parser.parse_args())


if __name__ == "__main__":
    main()
