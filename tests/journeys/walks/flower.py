"""docs/flower.md: both ways, as the five minutes go."""

from signal import SIGINT, SIGKILL

from walking import End, Left, Walk, starts, types

SERVER = "anabranch server --flower"
DEVICES = [f"anabranch client --flower flower-quickstart-numpy --shard {index}/2" for index in range(2)]
EVALUATOR = "anabranch evaluate --flower"

# What the apps need is installed here, and their SuperLink has no index of packages to fetch it from.
RUN = {"flwr run": "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 flwr run"}

BOTH_WAYS = Walk(
    "Flower, both ways",
    page="docs/flower.md",
    at="examples",
    copies=("examples",),
    fills=RUN,
    leaves="ray|flower|flwr",
    steps=(
        Left("cd examples", "every terminal is opened there"),
        types("anabranch simulate --flower", says="80 updates"),
        types("anabranch replay runs/simulated", says="digests equal"),
        starts(SERVER, until="serving"),
        starts(DEVICES[0], until="pushed"),
        starts(DEVICES[1], until="pushed"),
        starts(EVALUATOR, until="accuracy"),
        End(DEVICES[1], by=SIGKILL, ends=-SIGKILL),
        End(SERVER, by=SIGKILL, ends=-SIGKILL),
        starts(SERVER, until="serving"),
        starts(DEVICES[1], until="pushed|the run ended"),
        End(DEVICES[0]),
        End(DEVICES[1]),
        End(EVALUATOR, says=r"accuracy 9\d"),
        End(SERVER, by=SIGINT, says="drained"),
        types("anabranch flower pack flower-quickstart-numpy --out watched", says="flwr run watched"),
        types("flwr run watched"),
        types("anabranch flower pack flower-quickstart-numpy --out asynchronous"),
        types("flwr run asynchronous"),
        types("anabranch replay runs/superlink", says="digests equal"),
        types("anabranch compare", says="page: compare.html"),
        types("anabranch flower pack flower-quickstart-numpy --out compressed"),
        types("flwr run compressed"),
    ),
)

WALKS = (BOTH_WAYS,)
