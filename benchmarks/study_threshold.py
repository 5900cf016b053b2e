"""Does a threshold that is found anew rarely lose anything against the largest of each update? DCT's claim.

    python -m benchmarks.study_threshold [--quick | --render]

Twenty devices learn the digits, their data by a Dirichlet distribution, with error feedback: the largest 1
or 5 % of every update (`topk`), or what is beyond a threshold that was found some tasks ago (`threshold`).
What the choice costs a device `python -m benchmarks.codecs` measures. Writes `docs/studies/threshold.md` and
`.json`; `--quick` the same of less, into /tmp.
"""

from __future__ import annotations

from benchmarks.equal_updates import Method, Study
from benchmarks.studies import Tables

BASE: Tables = {
    "run": {
        "name": "study-threshold",
        "workload": "digits",
        "updates_max": 1000,
        "evaluate_every_versions": 5,
        "target_accuracy": 0.85,
        "keep_payloads": False,
    },
    "fleet": {"clients": 20, "split": "dirichlet", "dirichlet_alpha": 0.3},
    "strategy": {"name": "fedbuff", "buffer_size": 5},
    "client": {"steps": 10, "batch_size": 10},
}
RATES = (0.1, 0.2, 0.4)
KEPT, TASKS = (0.01, 0.05), (5, 25)


def _method(choice: str, kept: float) -> Method:
    chain = f"ef(0.9)|{choice}|int8|gaps|zstd"
    against = f"topk({KEPT[0]:g})" if kept == KEPT[0] else f"topk({KEPT[1]:g})"
    return Method(choice, {"": {"uplink": {"codec": chain}}}, against, rates=RATES)


STUDY = Study(
    name="threshold",
    title="a threshold that is found anew rarely",
    command="python -m benchmarks.study_threshold",
    about="""Twenty devices on the digits (Dirichlet 0.3), FedBuff with buffers of five, ten steps a task;
updates go as `ef(0.9)|...|int8|gaps|zstd`. `topk(r)` keeps the fraction r of each update; `threshold(r,n)`
what is beyond a threshold that keeps r of the update at which it was found, and finds it anew after n tasks
of the device (DCT's rule, arXiv 2010.08899, [compression](../compression.md)). Each threshold is held against
the `topk` of its fraction; kB an update say whether bytes were equal.""",
    base=BASE,
    methods=[
        *(_method(f"topk({kept:g})", kept) for kept in KEPT),
        *(_method(f"threshold({kept:g},{tasks})", kept) for kept in KEPT for tasks in TASKS),
    ],
    counts_bytes=True,
    counts_messages=True,
)

if __name__ == "__main__":
    STUDY.main(__doc__)
