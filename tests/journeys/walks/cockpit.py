"""docs/cockpit.md: runs in a browser, finished and live. What the browser gets is tested in tests/cockpit."""

from signal import SIGINT

from walking import End, Walk, Write, also, starts, types

RUN = """
[run]
name = "shown"
workload = "synthetic"
[client]
steps = 10
"""
LINK = r"http://127.0.0.1:{}/login\?token="
SIMULATED, LIVE = "anabranch ui runs/synthetic-fedbuff-seed0", "anabranch server run.toml"
MANY, BESIDE = "anabranch ui runs ", "anabranch ui --admin"

FINISHED = Walk(
    "the cockpit of runs",
    page="docs/cockpit.md",
    steps=(
        types("anabranch simulate synthetic"),
        starts(SIMULATED, until=LINK.format(7080)),
        End(SIMULATED, by=SIGINT),
        starts(MANY, until=LINK.format(7082)),
        End(MANY, by=SIGINT),
    ),
)
SERVED = Walk(
    "the cockpit of a server",
    page="docs/cockpit.md",
    steps=(
        Write("run.toml", RUN),
        also("anabranch init synthetic --out model"),
        starts(LIVE, until=LINK.format(7080)),
        also("anabranch client synthetic --tasks-max 3", says="3 updates answered"),
        starts(BESIDE, until=LINK.format(7081)),
        End(BESIDE, by=SIGINT),
        End(LIVE, by=SIGINT, says="drained"),
    ),
)

WALKS = (FINISHED, SERVED)
