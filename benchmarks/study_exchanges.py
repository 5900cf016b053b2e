"""When shall a device exchange, and what does it save to train on meanwhile? SelSync and ShadowSync measured.

    python -m benchmarks.study_exchanges [--quick | --render]

Eight devices learn the digits, split evenly or by a Dirichlet distribution. They exchange after every task,
in the background, or train on and exchange now and then: after so many steps, or when their gradient has
changed by so much (SelSync's rule). The numbers of steps are such that all have about as many between two
exchanges; an update is the whole model, so that equal updates are equal bytes. Writes
`docs/studies/exchanges.md` and `.json`; `--quick` the same of less, into /tmp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.equal_updates import Method, Study
from benchmarks.studies import Tables

BASE: Tables = {
    "run": {
        "name": "study-exchanges",
        "workload": "digits",
        "updates_max": 400,
        "evaluate_every_versions": 10,
        "target_accuracy": 0.88,
        "keep_payloads": False,
    },
    "fleet": {"clients": 8, "speed_ratio": 2.0, "up_mbps": 0.2, "down_mbps": 1.0},
    "strategy": {"name": "fedasync", "alpha": 0.5},
    "server": {"tasks_per_client": 2},
    "client": {"batch_size": 20},
}
RATES = (0.05, 0.1, 0.2)
SPLITS: Mapping[str, Mapping[str, Any]] = {
    "even data": {"split": "iid"},
    "Dirichlet 0.3": {"split": "dirichlet", "dirichlet_alpha": 0.3},
}
ELASTIC = {"push": "elastic", "push_steps_max": 200}
FEW, MANY = 5, 20  # steps between two exchanges
# A change of .1 is found about every 5 steps, one of .3 every 20: the page has the times that show it.
CHANGES = {FEW: 0.1, MANY: 0.3}


def _changed(steps: int) -> dict[str, Any]:
    return {**ELASTIC, "push_when": "change", "push_change": CHANGES[steps], "push_steps": 2}


WAYS: Mapping[str, tuple[dict[str, Any], int]] = {
    **{f"every {n} steps": ({**ELASTIC, "push_when": "interval", "push_steps": n}, n) for n in (FEW, MANY)},
    **{f"at a change of {CHANGES[n]:g}": (_changed(n), n) for n in (FEW, MANY)},
    f"tasks of {MANY} steps": ({"steps": MANY}, MANY),
    f"tasks of {MANY} steps, sent in the background": ({"steps": MANY, "push": "overlap"}, MANY),
}


def _method(way: str, split: str) -> Method:
    client, steps = WAYS[way]
    tables: Tables = {"fleet": SPLITS[split], "client": client}
    return Method(f"{way}, {split}", {"": tables}, f"every {steps} steps, {split}", rates=RATES)


STUDY = Study(
    name="exchanges",
    title="when devices exchange",
    command="python -m benchmarks.study_exchanges",
    about="""Eight devices on the digits, step times two to one, links of 0.2 Mbit/s up and 1 down;
FedAsync (0.5). An update is the whole model, raw: equal updates are equal bytes. *Every n steps*:
devices train on; their difference to the server is exchanged in the background
([ShadowSync](../background-push.md), arXiv 2003.03477). *At a change*: the same, when the smoothed norm of
the gradient has changed by so much (SelSync, arXiv 2307.07950). *Tasks*: train, send, ask, as ever; *in the
background*: the next task is trained while the result of the last is sent. Each is held against the exchange
after as many steps, on the same data.""",
    base=BASE,
    methods=[_method(way, split) for split in SPLITS for way in WAYS],
    counts_time=True,
)

if __name__ == "__main__":
    STUDY.main(__doc__)
