"""README.md: from a clone to a demo."""

from walking import Left, Walk, types

DEMO = Walk(
    "the demo",
    page="README.md",
    copies=("examples", "Makefile"),
    steps=(
        Left("git clone", "the walk begins in a copy of the tree"),
        Left("make test", "this is what it runs"),
        # The environment stands for the one that `make` sets up.
        types("make demo", fills={"make": "make -o setup VENV={environment}"}, says="report: "),
    ),
)

WALKS = (DEMO,)
