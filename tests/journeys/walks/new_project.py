"""docs/new.md: a folder that `anabranch new` makes, from its first run to a federation."""

from signal import SIGINT

from walking import End, Walk, also, starts, types

SERVER = "cd mine && anabranch server"
DEVICE = "cd mine && anabranch client"

FOLDER = Walk(
    "a folder to begin with",
    page="docs/new.md",
    steps=(
        types("anabranch new mine", says="anabranch simulate run.toml"),
        also("anabranch new mine", ends=2, says="is there and not empty"),
        types("cd mine && anabranch simulate", says="accuracy"),
        types("cd mine && python -m pytest", says="3 passed"),
        types("cd mine && anabranch init", says="anabranch server"),
        starts(SERVER, until="serving"),
        starts(DEVICE, until="pushed"),
        End(DEVICE),
        End(SERVER, by=SIGINT, says="drained"),
    ),
)

WALKS = (FOLDER,)
