"""docs/trackers.md: a run that is told of as it goes on, and once more."""

from walking import Walk, also, types

TOLD = Walk(
    "trackers",
    page="docs/trackers.md",
    needs="server",
    fills={"RUN": "{run}"},
    steps=(
        types("anabranch simulate synthetic", says="40 updates", keeps={"run": r"(runs/[\w.-]+)"}),
        also("cat {run}/metrics.jsonl", says='"accuracy"'),
        also(
            "anabranch simulate synthetic --updates 4 --set 'run.trackers=[\"wandb\"]'",
            ends=2,
            says=r'wandb is not installed.*pip install "anabranch\[wandb\]"',
        ),
        types("anabranch report RUN --tracker jsonl"),
    ),
)

WALKS = (TOLD,)
