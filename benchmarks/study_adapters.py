"""Which half of an adapter shall be trained where updates come late? LoRA, FFA-LoRA, RoLoRA, equally tuned.

    python -m benchmarks.study_adapters [--quick | --render]

Sixteen devices of unequal speed adapt a network that was trained on turned digits to upright ones, their
data by a Dirichlet distribution: both halves of each adapter, B alone, or the halves in turns; as updates
come, and in rounds. Writes `docs/studies/adapters.md` and `.json`; `--quick` the same of less, into /tmp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.equal_updates import Method, Study
from benchmarks.studies import Tables

BASE: Tables = {
    "run": {
        "name": "study-adapters",
        "updates_max": 480,
        "evaluate_every_versions": 5,
        "target_accuracy": 0.8,
        "keep_payloads": False,
    },
    "fleet": {
        "clients": 16,
        "split": "dirichlet",
        "dirichlet_alpha": 0.3,
        "speed_ratio": 5.0,
        "executor": "serial",
    },
    "client": {"steps": 5, "batch_size": 20},
}
RATES = (0.02, 0.04, 0.08)
# The App, and who deals the halves.
HALVES = {"both halves": ("Both", "none"), "B alone": ("Narrow", "none"), "in turns": ("Both", "alternate")}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "as updates come": {"name": "fedbuff", "buffer_size": 4},
    "in rounds": {"name": "fedavg", "clients_per_round": 4, "over_selection": 1.0},
}


def _method(halves: str, way: str) -> Method:
    name, planner = HALVES[halves]
    app = f"{Path(__file__).with_name('adapted_digits.py')}:{name}"
    tables: Tables = {"run": {"workload": app}, "strategy": WAYS[way], "submodel": {"name": planner}}
    return Method(f"{halves}, {way}", {"": tables}, f"{next(iter(HALVES))}, {way}", rates=RATES)


STUDY = Study(
    name="adapters",
    title="which half of an adapter",
    command="python -m benchmarks.study_adapters",
    about="""Sixteen devices, the slowest five times slower than the fastest, adapt a perceptron of 64-64-10
that was trained on turned digits to upright ones (Dirichlet 0.3), by adapters of rank 4 at both layers: 808
numbers, raw. FedBuff with buffers of four, and FedAvg in rounds of four. *Both halves* is LoRA (arXiv
2106.09685), *B alone* FFA-LoRA (arXiv 2403.12313), *in turns* RoLoRA (arXiv 2502.01755): see
[adapters](../adapters.md). Each is held against both halves in the same way.""",
    base=BASE,
    methods=[_method(halves, way) for way in WAYS for halves in HALVES],
    counts_bytes=True,
    counts_messages=True,
)

if __name__ == "__main__":
    STUDY.main(__doc__)
