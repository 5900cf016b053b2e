"""docs/simulator.md: Ray on one machine, and ten thousand devices where the page has a million."""

import re
from signal import SIGINT

from pages import ROOT
from walking import End, Left, Walk, Write, also, starts, types

# A million devices take minutes of a core that nobody else uses, which no walk can count on.
SMALLER = {
    "fleet.clients=1000000": "fleet.clients=10000",
    "server.concurrency=10000": "server.concurrency=100",
    "run.updates_max=20000": "run.updates_max=2000",
}

PAGE = "docs/simulator.md"


def _code(about: str) -> str:
    """The page's program in which this stands."""
    blocks: list[str] = re.findall(
        r"```python\n(.*?)```", (ROOT / PAGE).read_text(encoding="utf-8"), re.DOTALL
    )
    return next(block for block in blocks if about in block)


# Files in the forms that FedScale and MobiPerf publish, which do not come with this project.
PUBLISHED = """
import json, pickle

capacity = {432802: {"computation": 1.62, "communication": 5648.1}}
times = {"active": [0, 50000], "inactive": [43200, 80000], "finish_time": 86400}
behaviour = {3834: {"duration": 73200, "model": "CPH1801", **times}}
for name, data in (("client_device_capacity", capacity), ("client_behave_trace", behaviour)):
    with open(name, "wb") as file:
        pickle.dump(data, file)
for name in ("mobiperf_tcp_down.json", "mobiperf_tcp_up.json"):
    with open(name, "w") as file:
        json.dump([{"tcp_speed_results": [4121, 4753.5]}, {"tcp_speed_results": [812.0]}], file)
"""

LONG = "anabranch simulate examples/wine.toml --out runs/long"

PAUSED = Walk(
    "a run that is paused",
    page=PAGE,
    copies=("examples",),
    steps=(
        starts(LONG, until="getting 10 devices ready"),
        End(LONG, by=SIGINT, ends=130),
        also(f"{LONG} --resume", says="accuracy"),
        also(f"{LONG} --resume", says="accuracy"),
    ),
)

LIKE_YOURS = Walk(
    "a fleet like yours",
    page=PAGE,
    copies=("examples",),
    steps=(
        types("anabranch simulate examples/wine.toml --out runs/known", says="accuracy"),
        types("anabranch calibrate runs/known --foretell --load-code", says="mean staleness"),
        Write("strategies.py", _code("ab.calibrate")),
        also("python strategies.py", says="fedasync"),
    ),
)

LARGE = Walk(
    "large fleets",
    page=PAGE,
    copies=("examples",),
    leaves="ray",
    steps=(
        types("anabranch simulate examples/wine.toml --executor ray --workers 2", says="accuracy"),
        Left("anabranch simulate examples/wine.toml --ray-address", "no cluster is here"),
        types("anabranch simulate --set run.workload=synthetic", fills=SMALLER, says="2,000 updates"),
    ),
)

ARRIVING = Walk(
    "data that arrive",
    page=PAGE,
    steps=(
        types("anabranch simulate digits --updates 400 --set fleet.arrival=stream", says="400 updates"),
        types("anabranch simulate digits --updates 500", says="500 updates"),
    ),
)

TRACED = Walk(
    "days and traces",
    page=PAGE,
    copies=("examples",),
    steps=(
        types("anabranch simulate examples/wine.toml --set fleet.availability=0.4", says="400 updates"),
        types("anabranch trace examples/day.csv", says="24 devices"),
        types("anabranch simulate examples/wine.toml --set fleet.trace", says="200 updates"),
        Write("published.py", PUBLISHED),
        also("python published.py"),
        types("anabranch trace fleet.csv --fedscale-capacity", says="1 device,"),
        types("anabranch trace links.csv --mobiperf-down", says="2 devices"),
        also(
            "anabranch simulate examples/wine.toml --set fleet.trace=links.csv --out runs/linked",
            says="accuracy",
        ),
        types("anabranch simulate examples/wine.toml --set fleet.server_in_mbps=0.05", says="200 updates"),
        types(
            "anabranch simulate examples/wine.toml --out runs/energy",
            says=r"energy: [\d.]+ k?J.*; [\d.]+ k?J a device, [\d.]+ k?J in the worst tenth",
        ),
    ),
)

WALKS = (LARGE, LIKE_YOURS, PAUSED, ARRIVING, TRACED)
