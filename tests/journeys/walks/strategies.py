"""docs/strategies.md: every strategy that has a command of its own, on a virtual clock."""

from walking import Walk, types

CHOOSING = Walk(
    "choosing a strategy",
    page="docs/strategies.md",
    steps=(
        types("anabranch simulate synthetic --strategy fedavg", says="48 updates"),
        types("anabranch simulate synthetic --strategy delayed_nesterov", says="48 updates"),
        types("anabranch simulate synthetic --strategy fadas", says="48 updates"),
        types("anabranch simulate synthetic --strategy ca2fl", says="48 updates"),
        types("anabranch simulate synthetic --strategy aced", says="48 updates"),
        types("anabranch simulate synthetic --strategy fedcompass", says="48 updates"),
        types("anabranch simulate synthetic --strategy port", says="48 updates"),
        types("anabranch simulate synthetic --strategy fedasmu", says="48 updates"),
        types("anabranch simulate synthetic --strategy fedfa", says="48 updates"),
        types("anabranch simulate synthetic --strategy annealed", says="48 updates"),
        types("anabranch simulate synthetic --updates 48", says="48 updates"),
        types("anabranch simulate synthetic --strategy phased", says="60 updates"),
    ),
)

WALKS = (CHOOSING,)
