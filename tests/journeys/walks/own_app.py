"""docs/app.md: the App that stands there, through its whole life."""

import re
from signal import SIGINT

from pages import ROOT
from walking import End, Walk, Write, also, also_starts, starts, types

PAGE = "docs/app.md"
SERVER = "anabranch server --set run.updates_max=8 --set strategy.buffer_size=2"
DEVICE = "anabranch client mine.py:Mine"
EVALUATOR = "anabranch evaluate mine.py:Mine"


def _code(name: str) -> str:
    """The page's program with this class, as a reader copies it."""
    blocks: list[str] = re.findall(
        r"```python\n(.*?)```", (ROOT / PAGE).read_text(encoding="utf-8"), re.DOTALL
    )
    return next(block for block in blocks if f"class {name}(" in block)


LIFE = Walk(
    "an App of one's own",
    page=PAGE,
    steps=(
        Write("mine.py", _code("Mine")),
        Write("sensor.py", "from mine import Mine\n\n" + _code("Sensor")),
        types("anabranch check"),
        types("anabranch simulate mine.py:Mine", says="accuracy"),
        types("anabranch init mine.py:Mine", says="anabranch server"),
        also_starts(SERVER, until="serving"),
        starts(EVALUATOR, until="accuracy"),
        starts(DEVICE, until="pushed"),
        End(DEVICE),
        also(
            "anabranch client sensor.py:Sensor --id sensor --tasks-max 2",
            says="none of this device's examples",
        ),
        End(EVALUATOR),
        also("anabranch admin export mine.safetensors"),
        End(SERVER, by=SIGINT, says="drained"),
    ),
)

WALKS = (LIFE,)
