"""What do fragments save, and what do they cost? Streaming DiLoCo's claim, at equal local steps.

    python -m benchmarks.study_streaming [--quick | --render]

Eight devices learn the digits by a perceptron of five layers, their data by a Dirichlet distribution, over
slow links. They send whole models after each task, or train on and exchange the whole model or a quarter of
it at a time, raw or in four bits. Writes `docs/studies/streaming.md` and `.json`; `--quick` the same of less,
into /tmp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.equal_updates import Method, Study
from benchmarks.studies import Tables

PARTS, STEPS = 4, 20  # of a model; between two exchanges of all of it
BASE: Tables = {
    "run": {
        "name": "study-streaming",
        "workload": f"{Path(__file__).with_name('deep_digits.py')}:DeepDigits",
        "updates_max": 240,
        "evaluate_every_versions": 20,
        "target_accuracy": 0.8,
        "keep_payloads": False,
    },
    "fleet": {
        "clients": 8,
        "split": "dirichlet",
        "dirichlet_alpha": 0.3,
        "speed_ratio": 2.0,
        "up_mbps": 0.5,
        "down_mbps": 5.0,
    },
    "strategy": {"name": "fedasync", "alpha": 0.5, "staleness": {"name": "constant"}},
    "client": {"batch_size": 20},
}
RATES = (0.1, 0.2)
BLENDED = {"push": "elastic", "push_when": "interval", "merge": "blend", "merge_weight": 0.5}
FRAGMENTS: dict[str, Any] = {
    "client": {**BLENDED, "push_steps": STEPS // PARTS},
    "submodel": {"name": "fragments", "parts": PARTS},
}
WHOLE = "whole model, after each task"
BACKGROUND: Tables = {"client": {**BLENDED, "push_steps": STEPS}}


def _coded(codec: str, **more: Any) -> Tables:
    return {**FRAGMENTS, "uplink": {"codec": f"{codec}|zstd"}, **more}


LOGGED = _coded("int4(256)", downlink={"codec": "log(2)"})

STUDY = Study(
    name="streaming",
    title="fragments of a model in turn",
    command="python -m benchmarks.study_streaming",
    about=f"""Eight devices on the digits (Dirichlet 0.3), a perceptron of five layers (17,290 numbers),
links of 0.5 Mbit/s up and 5 down, FedAsync (0.5). Each device takes {STEPS} steps for each whole model that
it sends: after a task; in the background while it trains on; or in {PARTS} fragments, one every
{STEPS // PARTS} steps ([Streaming DiLoCo](../background-push.md), arXiv 2501.18512; the device mixes half of
what comes into its own), raw, or in codes of four bits. An update of a fragment is about a quarter of one,
and there are four times as many: local steps are equal. On the way down models are raw, and whole ones, but
for the delta log, `log(2)`.""",
    base=BASE,
    methods=[
        Method(WHOLE, {"": {"client": {"steps": STEPS}}}, rates=RATES),
        Method("whole model, in the background", {"": BACKGROUND}, rates=RATES),
        Method("fragments", {"": FRAGMENTS}, rates=RATES, parts=PARTS),
        Method("fragments, int4", {"": _coded("int4(256)")}, rates=RATES, parts=PARTS),
        Method("fragments, int4, delta log", {"": LOGGED}, rates=RATES, parts=PARTS),
        Method("fragments, e3m0", {"": _coded("e3m0(256)")}, rates=RATES, parts=PARTS),
    ],
    counts_bytes=True,
    counts_messages=True,
    counts_time=True,
)

if __name__ == "__main__":
    STUDY.main(__doc__)
