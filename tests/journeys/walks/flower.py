"""docs/flower.md: both ways, as the five minutes go."""

from signal import SIGINT, SIGKILL

from walking import End, Left, Walk, also_starts, starts, types

SERVER = "anabranch server --flower"
DEVICES = [f"anabranch client --flower flower-quickstart-numpy --id device-{index}" for index in range(2)]
EVALUATOR = "anabranch evaluate --flower"

# The one that `flwr run` would start if none listened, but it gives it 15 seconds, on however busy a machine.
# What the apps need is installed here, and there is no index of packages to fetch it from.
SUPERLINK = (
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1"
    " flower-superlink --insecure --simulation --host 127.0.0.1 --port 39091"
)
LISTENS = "Application startup complete"

BOTH_WAYS = Walk(
    "Flower, both ways",
    page="docs/flower.md",
    at="examples",
    copies=("examples",),
    leaves="ray|flower|flwr",
    steps=(
        Left("cd examples", "every terminal is opened there"),
        types("anabranch simulate --flower", says="80 updates"),
        types("anabranch replay runs/simulated", says="digests equal"),
        starts(SERVER, until="serving"),
        starts(DEVICES[0], until="pushed"),
        starts(DEVICES[1], until="pushed"),
        starts(EVALUATOR, until="accuracy"),
        End(DEVICES[1], by=SIGKILL, ends=128 + SIGKILL),
        End(SERVER, by=SIGKILL, ends=128 + SIGKILL),
        starts(SERVER, until="serving"),
        starts(DEVICES[1], until="pushed|the run ended"),
        End(DEVICES[0]),
        End(DEVICES[1]),
        End(EVALUATOR, says=r"accuracy 9\d"),
        End(SERVER, by=SIGINT, says="drained"),
        also_starts(SUPERLINK, until=LISTENS),
        types("anabranch flower pack flower-quickstart-numpy --out watched", says="flwr run watched"),
        types("flwr run watched"),
        types("anabranch flower pack flower-quickstart-numpy --out asynchronous"),
        types("flwr run asynchronous"),
        types("anabranch replay runs/superlink", says="digests equal"),
        types("anabranch compare", says="page: compare.html"),
        types("anabranch flower pack flower-quickstart-numpy --out compressed"),
        types("flwr run compressed"),
        End(SUPERLINK, by=SIGINT),
    ),
)

WALKS = (BOTH_WAYS,)
