"""docs/app.md: the App that stands there, through its whole life."""

import re
from signal import SIGINT

from pages import ROOT
from walking import End, Walk, Write, also, also_starts, starts, types

PAGE = "docs/app.md"
SERVER = "anabranch server --set run.updates_max=8 --set strategy.buffer_size=2"
DEVICE = "anabranch client mine.py:Mine"
EVALUATOR = "anabranch evaluate mine.py:Mine"


def _first_code() -> str:
    """The page's App, as a reader copies it."""
    found = re.search(r"```python\n(.*?)```", (ROOT / PAGE).read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found[1]


LIFE = Walk(
    "an App of one's own",
    page=PAGE,
    steps=(
        Write("mine.py", _first_code()),
        types("anabranch check"),
        types("anabranch simulate mine.py:Mine", says="accuracy"),
        types("anabranch init mine.py:Mine", says="anabranch server"),
        also_starts(SERVER, until="serving"),
        starts(EVALUATOR, until="accuracy"),
        starts(DEVICE, until="pushed"),
        End(DEVICE),
        End(EVALUATOR),
        also("anabranch admin export mine.safetensors"),
        End(SERVER, by=SIGINT, says="drained"),
    ),
)

WALKS = (LIFE,)
