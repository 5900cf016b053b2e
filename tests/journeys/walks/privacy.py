"""docs/privacy.md: a private run and its replay; a keeper."""

from signal import SIGINT

from pages import ROOT
from walking import End, Walk, Write, also, starts, types

PAGE = "docs/privacy.md"
PRIVATE = (ROOT / PAGE).read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]

SIMULATED = Walk(
    "a private run",
    page=PAGE,
    steps=(
        Write("private.toml", PRIVATE),
        types("anabranch simulate private.toml", says=r"private: epsilon 8 \(8 so far\) at delta 1e-06"),
        types("anabranch replay runs/private", says="replayed 24 versions, digests equal"),
    ),
)

KEEPER = "anabranch keeper serve --listen 0.0.0.0:7075"
KEPT = Walk(
    "a keeper",
    page=PAGE,
    steps=(
        also("anabranch admin ca init"),
        also("cp anabranch-identity/ca.pem ca.pem"),
        types("anabranch keeper init --ca ca.pem", keeps={"keeper": r"keeper: ([0-9a-f]{64})"}),
        also("anabranch keeper init --ca ca.pem", ends=2, says="has a keeper already"),
        types("anabranch keeper show", says="keeper: {keeper}"),
        starts(KEEPER, until="on 0.0.0.0:7075"),
        End(KEEPER, by=SIGINT, says="stopped"),
    ),
)

WALKS = (SIMULATED, KEPT)
