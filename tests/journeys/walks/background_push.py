"""docs/background-push.md: both ways of pushing, tried."""

import json
from signal import SIGINT

from walking import End, Look, Walk, Walker, starts, types

SERVER = "anabranch server --model model --set"
ELASTIC_SERVER = "anabranch server --model model --data-dir elastic-data"
DEVICES = ("anabranch client synthetic --id a", "anabranch client synthetic --id b")


def overlap_is_sooner(walker: Walker) -> None:
    """In virtual time, to the same number of updates."""
    task, overlap = (
        json.loads((walker.folder / "runs" / name / "result.json").read_text())
        for name in ("task", "overlap")
    )
    assert task["updates_applied"] == overlap["updates_applied"] == 200
    assert overlap["history"][-1]["time_s"] < task["history"][-1]["time_s"]


TRIED = Walk(
    "background push",
    page="docs/background-push.md",
    needs="server",
    steps=(
        types("anabranch init synthetic", says="anabranch server"),
        starts(SERVER, until="serving"),
        *(starts(device, until="pushed") for device in DEVICES),
        *(End(device) for device in DEVICES),
        End(SERVER, by=SIGINT, says="drained"),
        starts(ELASTIC_SERVER, until="serving"),
        *(starts(device, until="pushed") for device in DEVICES),
        *(End(device) for device in DEVICES),
        End(ELASTIC_SERVER, by=SIGINT, says="drained"),
        types("anabranch simulate synthetic --strategy fedasync --updates 100 --out runs/shadow"),
        types("anabranch simulate synthetic --strategy fedasync --updates 100 --out runs/selsync"),
        types("anabranch simulate synthetic --updates 200 --set fleet.up_mbps=0.05 --out runs/task"),
        types("anabranch simulate synthetic --updates 200 --set fleet.up_mbps=0.05 --out runs/overlap"),
        Look(overlap_is_sooner),
        types("anabranch compare"),
    ),
)

WALKS = (TRIED,)
