"""docs/privacy.md: a private run and its replay; a keeper; a run with masked sums, live and simulated."""

from signal import SIGINT

from pages import ROOT
from walking import End, Left, Walk, Write, also, also_starts, starts, types

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

_, _, BEHIND = (ROOT / PAGE).read_text(encoding="utf-8").partition("`masked.toml`:\n\n```toml\n")
MASKED = BEHIND.partition("```")[0]
_, _, AFTER = (ROOT / PAGE).read_text(encoding="utf-8").partition("`sums.toml`:\n\n```toml\n")
SUMS = AFTER.partition("```")[0]
SUMMED = Walk(
    "a simulation with masked sums",
    page=PAGE,
    steps=(
        Write("sums.toml", SUMS),
        types(
            "anabranch simulate sums.toml",
            says="masked: 2 keepers took the masks off sums of 8 updates or more",
        ),
        types("anabranch replay runs/sums", says="replayed 24 versions, digests equal"),
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
        types("anabranch keeper health", says="serving"),
        End(KEEPER, by=SIGINT, says="stopped"),
        also("anabranch keeper health", ends=24, says="does not serve"),
        Left("docker ", "docker/test.sh types it"),
        Left("anabranch simulate examples/dp_sgd.py", "tests/libraries/test_opacus.py types it"),
    ),
)

TOLD = {"TOKEN": "{token}", "HEX": "{ca}", "NAME": "{keeper}"}
SERVER, CLIENT = "anabranch server masked.toml", "anabranch client synthetic"
MASKING = Walk(
    "a run with masked sums",
    page=PAGE,
    steps=(
        also("anabranch admin ca init", keeps={"ca": r"ca-sha256: (\w+)"}),
        also("anabranch admin operator alice"),
        also(
            "anabranch keeper init --ca anabranch-identity/ca.pem --cohort-min 4",
            keeps={"keeper": r"keeper: ([0-9a-f]{64})"},
        ),
        also_starts("anabranch keeper serve --listen 127.0.0.1:7075", until="on 127.0.0.1:7075"),
        Write("masked.toml", MASKED),
        also("sed -i s/NAME/{keeper}/ masked.toml"),
        types("anabranch init synthetic"),
        starts(SERVER, until="devices join on"),
        types("anabranch admin enrol device-0", keeps={"token": r"--token (\S+)"}),
        starts(CLIENT, until="pushed", fills=TOLD),
        *(
            step
            for i in (1, 2, 3)
            for step in (
                also(f"anabranch admin enrol device-{i}", keeps={f"token{i}": r"--token (\S+)"}),
                also_starts(
                    f"anabranch client synthetic --token {{token{i}}} --ca-sha256 {{ca}} --keeper {{keeper}} "
                    f"--state-dir of-{i}",
                    until="pushed",
                    name=f"device-{i}",
                ),
            )
        ),
        *(End(name, says="ended at version 3") for name in (CLIENT, "device-1", "device-2", "device-3")),
        types("anabranch admin status --identity alice", says="masked sums: 0 updates gathered, 0 sums wait"),
        types("anabranch admin secagg drop 7", ends=2, says="no sum 7 waits"),
        End(SERVER, by=SIGINT, says="drained"),
        End("anabranch keeper serve --listen 127.0.0.1:7075", by=SIGINT, says="stopped"),
        also("anabranch verify anabranch-data --ca-sha256 {ca}", says="sound"),
    ),
)

WALKS = (SIMULATED, SUMMED, KEPT, MASKING)
