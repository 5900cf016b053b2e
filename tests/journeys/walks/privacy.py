"""docs/privacy.md: a private run and its replay."""

from pages import ROOT
from walking import Walk, Write, types

PAGE = "docs/privacy.md"
PRIVATE = (ROOT / PAGE).read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]

SIMULATED = Walk(
    "a private run",
    page=PAGE,
    steps=(
        Write("private.toml", PRIVATE),
        types("anabranch simulate private.toml", says="private: epsilon 8 (8 so far) at delta 1e-06"),
        types("anabranch replay runs/private", says="replayed 24 versions, digests equal"),
    ),
)

WALKS = (SIMULATED,)
