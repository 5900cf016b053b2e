"""docs/robust.md: an attack, as the operator meets it."""

from signal import SIGINT, SIGTERM

from walking import End, Step, Wait, Walk, Write, also, also_starts, starts, types

from walks.apps import DIVERGING, ENDLESS, MY_APP

DEVICES = ("device-1", "device-17", "device-23")
DEVICE = "anabranch client my_app.py:App --id {0} --state-dir {0} --shard {1}/3 --step-time 0.05"
OLD_SERVER = "anabranch server run.toml --model model"


def _device(index: int) -> str:
    return DEVICE.format(DEVICES[index], index)


def _federation() -> tuple[Step, ...]:
    """A server, an evaluator and three devices, until the model has some versions."""
    return (
        Write("my_app.py", MY_APP),
        Write("run.toml", ENDLESS),
        also("anabranch init my_app.py:App --out model"),
        also_starts(OLD_SERVER, until="serving"),
        also_starts("anabranch evaluate my_app.py:App --admin 127.0.0.1:7071", until="accuracy"),
        *(also_starts(_device(index), until="pushed") for index in range(3)),
        Wait("anabranch evaluate my_app.py:App --admin 127.0.0.1:7071", says="version [3-9]:|version ..+:"),
    )


ATTACK = Walk(
    "an attack",
    page="docs/robust.md",
    needs="server",
    fills={"118": "2"},
    steps=(
        *_federation(),
        types("anabranch admin pause", says="paused"),
        types("anabranch admin clients", says="device-17"),
        types("anabranch admin versions", says="accuracy"),
        types("anabranch admin rollback --to 118 --without"),
        types("anabranch admin rollback --to 118 --everyone"),
        types("anabranch admin status", says=r"in quarantine: device-17"),
        types("anabranch admin export after.safetensors", says="after.safetensors"),
        starts("anabranch admin watch", until=""),
        types("anabranch admin resume", says="resumed"),
        Wait("anabranch admin watch", says="device-1 "),
        types("anabranch admin release device-23", says="out of quarantine"),
        End("anabranch admin watch", by=SIGTERM, ends=143),
        also('anabranch admin quarantine device-17 --why "under inspection"', says="in quarantine"),
        types("anabranch admin export good.safetensors"),
        *(End(_device(index), by=SIGINT) for index in range(3)),
        End("anabranch evaluate my_app.py:App --admin 127.0.0.1:7071", by=SIGINT),
        End(OLD_SERVER, by=SIGINT, says="drained"),
        types("anabranch init my_app.py:App --weights good.safetensors"),
        starts("anabranch server --model good-model", until="serving"),
        also("anabranch client my_app.py:App --state-dir next --tasks-max 3", says="3 updates"),
        also("anabranch admin status --json", says='"updates_applied": 3'),
        End("anabranch server --model good-model", by=SIGINT, says="drained"),
    ),
)

DIVERGENCE = Walk(
    "a divergence",
    page="docs/robust.md",
    needs="server",
    steps=(
        Write("my_app.py", MY_APP),
        Write("diverging.toml", DIVERGING),
        types("anabranch simulate diverging.toml", ends=41),
    ),
)

WALKS = (ATTACK, DIVERGENCE)
