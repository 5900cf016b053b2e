"""What do models that grow save, and what do they lose? ProgFed against the whole model, at equal rounds.

    python -m benchmarks.study_growing [--quick | --render]

Ten devices learn the digits in rounds of five, 40 rounds long, the convolutional network of
`examples/growing.py` in four stages or whole from the start; the data are dealt evenly, or by a Dirichlet
distribution. Each method has the same grid of learning rates, on seeds that the comparison does not use,
judged by its accuracy at the end; then it runs on the paired seeds. Writes `docs/studies/growing.md` and
`.json`; `--quick` the same of less, into /tmp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.equal_updates import Method, Study

NAME, ROUNDS, PER_ROUND = "growing", 40, 5
RATES = (0.1, 0.3)
WHOLE, GROWN = "whole", "growing"
EVEN, SKEWED = "even data", "Dirichlet 0.3"
SPLITS: Mapping[str, Mapping[str, Any]] = {
    EVEN: {"split": "iid"},
    SKEWED: {"split": "dirichlet", "dirichlet_alpha": 0.3},
}

Tables = Mapping[str, Mapping[str, Any]]
BASE: Tables = {
    "run": {
        "name": f"study-{NAME}",
        "workload": f"{Path(__file__).parents[1] / 'examples' / 'growing.py'}:Growing",
        "updates_max": ROUNDS * PER_ROUND,
        "evaluate_every_versions": 1,
        "target_accuracy": 0.9,
        "keep_payloads": False,
    },
    "fleet": {"clients": 10, "submodel_step": "operations"},
    "strategy": {"name": "fedavg", "clients_per_round": PER_ROUND, "over_selection": 1.0},
    "client": {"epochs": 2, "batch_size": 20},
    "submodel": {"grow_at": [0.125, 0.25, 0.375], "warm_up_versions": 1},
}


def _method(model: str, split: str) -> Method:
    fixed: dict[str, Mapping[str, Any]] = {
        "fleet": SPLITS[split],
        "submodel": {"name": "progressive" if model == GROWN else "none"},
    }
    grid = {f"rate {rate:g}": fixed | {"client": {"learning_rate": rate}} for rate in RATES}
    return Method(f"{model}, {split}", grid, f"{WHOLE}, {split}")


STUDY = Study(
    name=NAME,
    title="models that grow",
    command="python -m benchmarks.study_growing",
    about=f"""Ten devices on the digits, FedAvg in {ROUNDS} rounds of {PER_ROUND}, two epochs in batches of
20: [ProgFed](../submodels.md#growing-models) with the network of `examples/growing.py` (34,312 numbers with
all heads), which grows after 5, 10 and 15 rounds and warms up for one, against the same network whole from
the start. Everything travels raw. Whole models carry the three heads of earlier stages, which nobody trains:
2.4 % of their bytes. A step of an early stage takes its share of operations.""",
    base=BASE,
    methods=[_method(model, split) for split in SPLITS for model in (WHOLE, GROWN)],
    counts_bytes=True,
    tuning_seeds=(101,),
)

if __name__ == "__main__":
    STUDY.main(__doc__)
