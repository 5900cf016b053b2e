"""docs/moving.md: a script of NVFlare's kind and a study of APPFL's, brought along."""

from signal import SIGINT

from peoples_ports import STUDY, written
from walking import End, Walk, Write, starts, types

SERVER = "anabranch server --strategy fedavg --clients 2"
SITES = [f"python hospital.py 127.0.0.1:7070 {index}" for index in range(2)]

MOVING = Walk(
    "from another framework",
    page="docs/moving.md",
    steps=(
        *(Write(name, text) for name, text in written().items()),
        types("anabranch init hospital.py:make_model", says="anabranch server"),
        starts(SERVER, until="serving"),
        starts(SITES[0], until="site-0: round"),
        starts(SITES[1], until="site-1: round"),
        End(SITES[0], says="site-0: round 3"),
        End(SITES[1], says="site-1: round 3"),
        End(SERVER, by=SIGINT, says="4 versions of 8 updates"),
        types(f"anabranch simulate {STUDY}", says="40 updates"),
    ),
)

WALKS = (MOVING,)
