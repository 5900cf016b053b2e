"""docs/simulator.md: Ray on one machine, and a million devices."""

from walking import Left, Walk, types

LARGE = Walk(
    "large fleets",
    page="docs/simulator.md",
    copies=("examples",),
    leaves="ray",
    steps=(
        types("anabranch simulate examples/wine.toml --executor ray --workers 2", says="accuracy"),
        Left("anabranch simulate examples/wine.toml --ray-address", "no cluster is here"),
        types("anabranch simulate --set run.workload=synthetic", says="20,000 updates"),
    ),
)

WALKS = (LARGE,)
