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
        types("anabranch simulate --set run.workload=synthetic", fills=SMALLER, says="2000 updates"),
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

WALKS = (LARGE, LIKE_YOURS, PAUSED, ARRIVING)
