"""Do rounds first and asynchrony after pay? Sync-Switch's claim, at equal updates.

    python -m benchmarks.study_phases [--quick | --render]

A hundred devices learn the digits, their data by a Dirichlet distribution, step times five to one and a
quarter of the devices four times slower still. Writes `docs/studies/phases.md` and `.json`; `--quick` the
same of less, into /tmp.
"""

from __future__ import annotations

from typing import Any

from benchmarks.equal_updates import Method, Study
from benchmarks.studies import Tables

DEVICES, PER_ROUND, BUFFER = 100, 20, 10
# Step times from .1 to .5 s in so many levels; every fourth device takes so much longer.
SPREAD, SLOWER = 20, 4.0
STEPS_S = [
    round(0.1 * (1 + 4 * (i % SPREAD) / (SPREAD - 1)) * (SLOWER if i // SPREAD % 4 == 3 else 1.0), 4)
    for i in range(4 * SPREAD)
]
ROUNDS: dict[str, Any] = {"name": "fedavg", "clients_per_round": PER_ROUND, "over_selection": 1.0}
BUFFERED: dict[str, Any] = {"name": "fedbuff", "buffer_size": BUFFER}

BASE: Tables = {
    "run": {
        "name": "study-phases",
        "workload": "digits",
        "updates_max": 2000,
        "evaluate_every_versions": 5,
        "target_accuracy": 0.85,
        "keep_payloads": False,
    },
    "fleet": {
        "clients": DEVICES,
        "split": "dirichlet",
        "dirichlet_alpha": 0.3,
        "speed": "measured",
        "step_times_s": STEPS_S,
    },
    "client": {"steps": 5, "batch_size": 10},
}
RATES = (0.1, 0.2, 0.4)


def _phased(share: float, exclude: float = 0.0) -> dict[str, Any]:
    first = _phase(ROUNDS) | {"until_updates": share, "exclude_slowest": exclude}
    return {"name": "phased", "phases": [first, _phase(BUFFERED)]}


def _phase(strategy: dict[str, Any]) -> dict[str, Any]:
    return {"strategy": strategy["name"], **{key: said for key, said in strategy.items() if key != "name"}}


def _method(name: str, strategy: dict[str, Any]) -> Method:
    return Method(name, {"": {"strategy": strategy}}, rates=RATES)


STUDY = Study(
    name="phases",
    title="rounds first, asynchronous after",
    command="python -m benchmarks.study_phases",
    about=f"""{DEVICES} devices on the digits (Dirichlet 0.3), five steps a task; step times from 0.1 to 0.5
s, and a quarter of the devices four times slower. FedAvg in rounds of {PER_ROUND}, FedBuff with buffers of
{BUFFER}, and [one after the other](../strategies.md#phases) (Sync-Switch, arXiv 2104.08364): rounds for the
first 5 or 25 % of the updates, also without the slowest quarter (its elastic policy). Everything travels
raw. Updates are equal, time is not: that is what a change of phase is for.""",
    base=BASE,
    methods=[
        _method("fedbuff", BUFFERED),
        _method("fedavg", ROUNDS),
        _method("5 % rounds, then fedbuff", _phased(0.05)),
        _method("25 % rounds, then fedbuff", _phased(0.25)),
        _method("25 % rounds of the faster, then fedbuff", _phased(0.25, 0.25)),
    ],
    counts_time=True,
)

if __name__ == "__main__":
    STUDY.main(__doc__)
