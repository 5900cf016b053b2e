"""docs/simulator.md: Ray on one machine, and ten thousand devices where the page has a million."""

from signal import SIGINT

from walking import End, Left, Walk, also, starts, types

# A million devices take minutes of a core that nobody else uses, which no walk can count on.
SMALLER = {
    "fleet.clients=1000000": "fleet.clients=10000",
    "server.concurrency=10000": "server.concurrency=100",
    "run.updates_max=20000": "run.updates_max=2000",
}

LONG = "anabranch simulate examples/wine.toml --out runs/long"

PAUSED = Walk(
    "a run that is paused",
    page="docs/simulator.md",
    copies=("examples",),
    steps=(
        starts(LONG, until="getting 10 devices ready"),
        End(LONG, by=SIGINT, ends=130),
        also(f"{LONG} --resume", says="accuracy"),
        also(f"{LONG} --resume", says="accuracy"),
    ),
)

LARGE = Walk(
    "large fleets",
    page="docs/simulator.md",
    copies=("examples",),
    leaves="ray",
    steps=(
        types("anabranch simulate examples/wine.toml --executor ray --workers 2", says="accuracy"),
        Left("anabranch simulate examples/wine.toml --ray-address", "no cluster is here"),
        types("anabranch simulate --set run.workload=synthetic", fills=SMALLER, says="2000 updates"),
    ),
)

WALKS = (LARGE, PAUSED)
