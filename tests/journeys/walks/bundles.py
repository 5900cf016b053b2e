"""docs/bundles.md: code is signed, offered and run on a device that knows no App, job after job."""

from signal import SIGINT

from walking import End, Wait, Walk, Write, also, also_starts, starts, types

RUN = """
[run]
updates_max = 4
[strategy]
name = "fedbuff"
buffer_size = 2
[client]
steps = 5
"""
SERVER = "anabranch server --jobs jobs"
DEVICE = "anabranch client --jobs --id ward-1"
ONE_RUN = "anabranch server run.toml"
OTHER_DEVICE = "anabranch client --jobs --id ward-3 --signer {signer}"
ADD = "anabranch admin jobs add {} run.toml --model model --bundle {} --folder jobs"

BUNDLES = Walk(
    "bundles of Apps",
    page="docs/bundles.md",
    fills={"SIGNER": "{signer}"},
    steps=(
        Write("run.toml", RUN),
        types("anabranch bundle key", keeps={"signer": r"signer: ([0-9a-f]{64})"}),
        also("anabranch bundle key --out signer.key", ends=2, says="is there already"),
        types("anabranch new wards"),
        types("anabranch bundle make", says="scikit-learn"),
        types("anabranch bundle show", says="signer: {signer}"),
        also("anabranch bundle key --out other.key", keeps={"other": r"signer: ([0-9a-f]{64})"}),
        also("anabranch bundle show wards.bundle --signer {other}", ends=51, says="is not allowed here"),
        also("anabranch bundle make wards/app.py:App --key other.key --out other.bundle"),
        types("anabranch init", says="model"),
        types("anabranch admin jobs add wards", says="a job for every device"),
        starts(SERVER, until="job wards: running"),
        also("anabranch client --jobs --id ward-2", ends=2, says="--signer HEX"),
        starts(DEVICE, until="job wards: its bundle app is signed by"),
        Wait(SERVER, says="job wards: ended"),
        also(ADD.format("foreign", "other.bundle"), says="a job for every device"),
        Wait(DEVICE, says="job foreign is left alone for now: .* is not allowed here"),
        types("anabranch admin jobs add next", says="a job for every device"),
        Wait(DEVICE, says=r"job next \(.*\) begins"),
        Wait(SERVER, says="job next: ended"),
        also("anabranch bundle make wards/app.py:App --key signer.key --out newer.bundle"),
        also(ADD.format("newer", "newer.bundle"), says="a job for every device"),
        Wait(SERVER, says="job newer: ended"),
        also(ADD.format("old", "wards.bundle"), says="a job for every device"),
        Wait(DEVICE, says="job old is left alone for now: .* an older one is not run again"),
        End(DEVICE, by=SIGINT, says="stopped"),
        End(SERVER, by=SIGINT, says="drained"),
        starts(ONE_RUN, until="serving"),
        also_starts(OTHER_DEVICE, until="its bundle app is signed by"),
        Wait(ONE_RUN, says="the run ended"),
        End(OTHER_DEVICE, by=SIGINT, says="stopped"),
        End(ONE_RUN, by=SIGINT, says="drained"),
    ),
)

WALKS = (BUNDLES,)
