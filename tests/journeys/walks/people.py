"""Kinds of people, each with an App and data of their own, and no page in front of them but `--help`."""

from signal import SIGINT, SIGKILL

from walking import End, Look, Walk, Walker, Write, also, also_starts

from walks.apps import ENDLESS, MY_APP, TORCH_APP

SERVER = "anabranch server --set run.updates_max=40"
DEVICES = [
    f"anabranch client my_app.py:App --id device-{i} --state-dir device-{i} --shard {i}/2 --step-time 0.1"
    for i in range(2)
]


def learned(walker: Walker) -> None:
    """The exported weights are those of a model that has learned, in a file that others can read."""
    from safetensors.numpy import load_file

    weights = load_file(walker.folder / "trained.safetensors")
    assert {name: array.shape for name, array in weights.items()} == {"0.weight": (2, 3), "0.bias": (3,)}
    assert abs(weights["0.weight"]).max() > 0.1


NEWCOMER = Walk(
    "a newcomer with numpy",
    needs="server",
    steps=(
        Write("my_app.py", MY_APP),
        also("anabranch --version", says="anabranch "),
        also("anabranch --help", says="simulate"),
        also("anabranch simulate my_app.py:App --updates 40 --out runs/mine", says="accuracy"),
        also("anabranch report runs/mine", says="report.html"),
        also("anabranch init my_app.py:App", says="anabranch server"),
        also_starts(SERVER, until="serving"),
        *(also_starts(device, until="pushed") for device in DEVICES),
        End(DEVICES[1], by=SIGKILL, ends=128 + SIGKILL),
        also_starts(DEVICES[1], until="pushed|the run ended"),
        *(End(device) for device in DEVICES),
        also("anabranch health", says="serving"),
        also("anabranch admin export trained.safetensors"),
        End(SERVER, by=SIGINT, says="drained"),
        Look(learned),
        also("anabranch report anabranch-data", says="40 updates"),
    ),
)

TORCH = Walk(
    "a newcomer with torch",
    steps=(
        Write("net.py", TORCH_APP),
        also(
            "anabranch simulate net.py:App --strategy fedasync --updates 30 --out runs/mine", says="accuracy"
        ),
        also("anabranch init net.py:App --out net"),
        also_starts("anabranch server --model net --set run.updates_max=20", until="serving"),
        also("anabranch client net.py:App --tasks-max 3", says="3 updates"),
        also("anabranch client net.py:App", says="17 updates"),  # started again, BatchNorm and all
        also("anabranch admin export net.safetensors"),
        End("anabranch server --model net --set run.updates_max=20", by=SIGINT),
        also(
            "python -c 'import net, safetensors.torch as s; "
            'net.App().model().load_state_dict(s.load_file("net.safetensors"))\''
        ),
    ),
)

SEEDS = Walk(
    "a researcher",
    needs="server",
    steps=(
        Write("my_app.py", MY_APP),
        Write("run.toml", ENDLESS + "[fleet]\nclients = 4\n"),
        *(
            also(
                f"anabranch simulate run.toml --strategy {strategy} --set run.updates_max=30"
                f" --set run.seed={seed} --out runs/{strategy}-{seed}"
            )
            for strategy in ("fedbuff", "fedasync")
            for seed in (1, 2, 3)
        ),
        also(
            "anabranch compare runs/* --out compare.html",
            says="fedasync",
        ),
        also("anabranch replay runs/fedasync-2", says="digests equal"),
        also(
            "anabranch simulate run.toml --strategy fedbuff --set run.updates_max=30 --set run.seed=1"
            " --out again --json",
            keeps={"digest": r'"model_sha256": "(\w+)"'},
        ),
        also("grep -q {digest} runs/fedbuff-1/result.json"),
        also("anabranch config show run.toml --set run.seed=7", says="--set"),
        also("anabranch search run.toml --updates 6 --loss-max 0.5 --out searched", says="found: kept"),
        also("anabranch config show searched/found.toml", says="found.toml"),
    ),
)

DEMO = Walk(
    "somebody who looks on",
    steps=(
        also(
            "anabranch demo --workload digits --clients 3 --set run.updates_max=30 --out demo", says="report"
        ),
    ),
)

UPGRADE_SERVER = "anabranch server run.toml --model model"
UPGRADE = Walk(
    "an upgrade",
    needs="server",
    at="previous",
    copies=("tests/journeys/previous.tar.gz",),
    steps=(
        also("anabranch verify anabranch-data", says="sound"),
        also("anabranch replay run", says="digests equal"),
        also("anabranch report run", says="report.html"),
        also("anabranch compare run", says="fedbuff"),
        also("anabranch admin members", says="certificate"),
        also_starts(UPGRADE_SERVER, until="serving upgraded"),
        # What was in the outbox goes first; then the run goes on to its end.
        also("anabranch client synthetic --id device-1 --state-dir device", says="stopped(.|\n)*updates"),
        also("anabranch admin status --json", says='"updates_applied": 24'),
        End(UPGRADE_SERVER, by=SIGINT, says="drained"),
        also("anabranch verify anabranch-data", says="Version 12, 24 updates"),
        also("anabranch admin enrol device-2", says="--token"),
    ),
)

WALKS = (NEWCOMER, TORCH, SEEDS, DEMO, UPGRADE)
