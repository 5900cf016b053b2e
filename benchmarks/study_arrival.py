"""Are data that arrive worse than all of them at once? Drift of classes, mild and strong, equally tuned.

    python -m benchmarks.study_arrival [--quick | --render]

Eight devices learn the digits. Their examples are there from the start, or come one after the other and have
all come after four fifths of the run: in no order, or class after class, all kept or only the newest. What is
measured is the last fifth, on all classes. Writes `docs/studies/arrival.md` and `.json`; `--quick` the same
of less, into /tmp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.equal_updates import Method, Study
from benchmarks.studies import Tables

BASE: Tables = {
    "run": {
        "name": "study-arrival",
        "workload": "digits",
        "updates_max": 240,
        "evaluate_every_versions": 2,
        "keep_payloads": False,
    },
    "fleet": {"clients": 8, "speed_ratio": 2.0, "step_time_s": 0.1, "executor": "serial"},
    "strategy": {"name": "fedbuff", "buffer_size": 4},
    "client": {"steps": 10, "batch_size": 20},
}
RATES = (0.1, 0.2, 0.4)
STREAM = {"arrival": "stream", "arrival_rate": 3.8}
CLASSES = {**STREAM, "arrival_drift": "classes"}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "all at once": {},
    "one after the other": STREAM,
    "class after class, all kept": CLASSES,
    "class after class, the newest 60 kept": {**CLASSES, "arrival_window": 60},
    "class after class, the newest 20 kept": {**CLASSES, "arrival_window": 20},
}

STUDY = Study(
    name="arrival",
    title="data that arrive",
    command="python -m benchmarks.study_arrival",
    about="""Eight devices on the digits, step times two to one, 162 examples each, FedBuff with
buffers of four. A device gets 3.8 examples a second, so that the last one comes after about 43 of 53
seconds; *class after class* in an order of the device's own, blurred over a tenth of them
([data that arrive](../simulator.md#data-that-arrive)). The claim looked at is that of streaming pre-training
(arXiv 2104.12081): in sequence nearly as good as all at once where the data change little, worse where they
change much. There it is of self-supervised pre-training; here examples have labels.""",
    base=BASE,
    methods=[Method(way, {"": {"fleet": fleet}}, rates=RATES) for way, fleet in WAYS.items()],
)

if __name__ == "__main__":
    STUDY.main(__doc__)
