"""docs/strategies.md: every strategy that has a command of its own, on a virtual clock."""

from signal import SIGINT

from walking import End, Walk, also, also_starts, types

SCHEDULED = """anabranch server --model model --set 'strategy.scheduler={name="fedluck"}'"""

CHOOSING = Walk(
    "choosing a strategy",
    page="docs/strategies.md",
    steps=(
        types("anabranch simulate synthetic --strategy fedavg", says="48 updates"),
        types("anabranch simulate synthetic --strategy delayed_nesterov", says="48 updates"),
        types("anabranch simulate synthetic --strategy fadas", says="48 updates"),
        types("anabranch simulate synthetic --strategy ca2fl", says="48 updates"),
        types("anabranch simulate synthetic --strategy aced", says="48 updates"),
        *(
            types(
                f'anabranch simulate synthetic --set \'strategy.scheduler={{name="{name}"', says="48 updates"
            )
            for name in ("fedluck", "equal_time", "capped")
        ),
        also("anabranch init synthetic --out model"),
        also_starts(SCHEDULED, until="serving"),
        also("anabranch client synthetic --id device-0 --tasks-max 6", says="6 tasks done"),
        End(SCHEDULED, by=SIGINT, says="drained"),
        also("anabranch verify anabranch-data", says="sound"),
        types("anabranch simulate synthetic --strategy fedcompass", says="48 updates"),
        types("anabranch simulate synthetic --strategy port", says="48 updates"),
        types("anabranch simulate synthetic --strategy fedasmu", says="48 updates"),
        types("anabranch simulate synthetic --strategy fedfa", says="48 updates"),
        types("anabranch simulate synthetic --strategy annealed", says="48 updates"),
        types("anabranch simulate synthetic --strategy waves", says="48 updates"),
        types("anabranch simulate synthetic --updates 48", says="48 updates"),
        types("anabranch simulate synthetic --strategy phased", says="60 updates"),
    ),
)

WALKS = (CHOOSING,)
