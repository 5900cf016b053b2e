"""docs/federation.md: a federation of one's own, a command a step, and the lines for Flower apps."""

from signal import SIGINT

from walking import End, Walk, also_starts, starts, types

from walks.flower import LISTENS, SUPERLINK

SERVER = "anabranch server examples/wine.toml"
DEVICE = "anabranch client examples/wine.py:App"
EVALUATOR = "anabranch evaluate examples/wine.py:App"

FEDERATION = Walk(
    "a federation of your own",
    page="docs/federation.md",
    copies=("examples",),
    steps=(
        types("anabranch check", says=""),
        types("anabranch simulate examples/wine.py:App --strategy", says="accuracy"),
        types("anabranch simulate examples/wine.toml", says="target 90.00 % after"),
        types("anabranch init", says="anabranch server"),
        starts(SERVER, until="serving"),
        starts(EVALUATOR, until="version 0"),
        types("anabranch admin status", says="running"),
        starts(DEVICE, until="pushed"),
        End(DEVICE),
        End(EVALUATOR),
        End(SERVER, by=SIGINT, says="drained"),
        types("anabranch admin ca init", says="ca-sha256"),
        types("anabranch search", says="found: kept"),
        types("anabranch compare", says="fedbuff"),
        types("anabranch replay", fills={"RUN": "$(ls -d runs/wine-*fedbuff*)"}, says="digests equal"),
        types("anabranch verify", fills={"DATA_DIR": "anabranch-data"}, says="sound"),
    ),
)

FLOWER = Walk(
    "from a Flower app",
    page="docs/federation.md",
    at="examples",
    copies=("examples",),
    fills={"my-app": "flower-quickstart-numpy", "run.updates_max=200": "run.updates_max=20"},
    leaves="ray|flower|flwr",
    steps=(
        types("anabranch simulate --flower my-app", says="20 updates"),
        also_starts(SUPERLINK, until=LISTENS),
        types("anabranch flower pack my-app", says="Successfully started run"),
        End(SUPERLINK, by=SIGINT),
    ),
)

WALKS = (FEDERATION, FLOWER)
