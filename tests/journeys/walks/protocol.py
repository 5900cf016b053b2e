"""docs/protocol.md: a client in another hand, and the test vector."""

from signal import SIGINT

from walking import End, Walk, also, also_starts, starts, types

SERVED = (
    "anabranch server --model served --set run.updates_max=4 --set strategy.name=fedasync --data-dir first"
)
REPLAYED = "anabranch server examples/foreign.toml"

FOREIGN = Walk(
    "a client in another hand",
    page="docs/protocol.md",
    needs="server-and-protoc",
    copies=("protos", "examples"),
    steps=(
        types("mkdir generated"),
        types("python -m grpc_tools.protoc"),
        also("anabranch init examples/foreign_model.py:App --out served"),
        also_starts(SERVED, until="serving"),
        types("PYTHONPATH=generated python examples/foreign_client.py"),
        also("anabranch admin status --json", says='"updates_applied": 4'),
        End(SERVED, by=SIGINT, says="drained"),
        types("anabranch init examples/foreign_model.py:App"),
        starts(REPLAYED, until="serving"),
        types("PYTHONPATH=generated python examples/foreign_replay.py"),
        End(REPLAYED, by=SIGINT, says="drained"),
    ),
)

WALKS = (FOREIGN,)
