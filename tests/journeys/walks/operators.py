"""An operator's year, on a guarded loopback: join, look, rotate, back up, restore; and a bad night."""

from signal import SIGINT

from walking import End, Wait, Walk, Write, also, also_starts, types

RUN = """
[run]
name = "guarded"
workload = "synthetic"
[identity]
tls = "always"
[strategy]
name = "fedbuff"
buffer_size = 2
[client]
steps = 10
"""
SERVER = "anabranch server run.toml --model model"
ALICE = "--identity alice"


def _device(folder: str, token: str = "") -> str:
    joins = f" --token {{{token}}} --ca-sha256 {{ca}}" if token else ""
    return f"anabranch client synthetic --state-dir {folder}{joins} --step-time 0.01"


OLD, NEW, OTHER = _device("old", "token"), _device("new", "second"), _device("other", "third")

BEGUN = (
    Write("run.toml", RUN),
    also("anabranch init synthetic --out model"),
    also("anabranch admin ca init", keeps={"ca": r"ca-sha256: (\w+)"}),
)

YEAR = Walk(
    "an operator's year",
    needs="server",
    steps=(
        *BEGUN,
        also("anabranch admin ca show", says="{ca}"),
        also_starts(SERVER, until="devices join on"),
        # Join.
        also("anabranch admin enrol device-1", keeps={"token": r"--token (\S+)"}),
        also_starts(OLD, until="pushed"),
        also("anabranch admin operator alice --out alice"),
        # Look.
        also("anabranch admin members", says="device-1"),
        also(f"anabranch health {ALICE}", says="serving"),
        also(f"anabranch admin status {ALICE}", says="of 1 client online"),
        also(f"anabranch admin clients {ALICE}", says="device-1"),
        also(f"anabranch admin versions {ALICE}", says="sha256"),
        also(f"anabranch evaluate synthetic {ALICE} --once", says="accuracy"),
        also(f"anabranch admin pause {ALICE}", says="paused"),
        also_starts(f"anabranch admin watch {ALICE}", until=""),
        also(f"anabranch admin resume {ALICE}", says="resumed"),
        Wait(f"anabranch admin watch {ALICE}", says="device-1"),
        End(f"anabranch admin watch {ALICE}", by=SIGINT, ends=130),
        also(f"anabranch admin quarantine nobody --why unknown {ALICE}", says="in quarantine"),
        also(f"anabranch admin release nobody {ALICE}", says="out of quarantine"),
        also("anabranch admin status --identity old/identity", ends=51, says="not for devices"),
        # Rotate: the name in a new folder, with a new key; the former one is out.
        also("anabranch admin enrol device-1", keeps={"second": r"--token (\S+)"}),
        also_starts(NEW, until="pushed"),
        End(OLD, ends=50),
        End(NEW, by=SIGINT),
        # Back up, go on, restore what is older than what a device has seen.
        also(f"anabranch admin rollback --to 1 --everyone {ALICE}", says="version"),
        also(f"anabranch admin export good.safetensors {ALICE}"),
        End(SERVER, by=SIGINT, says="drained"),
        also("cp -a anabranch-data backup"),
        also_starts(SERVER, until="devices join on"),
        also("anabranch client synthetic --state-dir new --tasks-max 8", says="8 updates"),
        also("anabranch client synthetic --state-dir new --tasks-max 1"),  # it has seen what that made
        End(SERVER, by=SIGINT, says="drained"),
        also("rm -r anabranch-data && mv backup anabranch-data"),
        also_starts(SERVER, until="devices join on"),
        also("anabranch client synthetic --state-dir new", ends=52, says="this device has seen version"),
        End(SERVER, by=SIGINT, says="drained"),
        also("anabranch admin attest-restore"),
        also_starts(SERVER, until="devices join on"),
        also("anabranch client synthetic --state-dir new --tasks-max 2", says="2 updates"),
        # The authority's folder from a backup: the server says what it would forget.
        also("anabranch admin ca copy identity-backup"),
        also("anabranch admin revoke device-1"),
        also("anabranch client synthetic --state-dir new", ends=50, says="revoked"),
        End(SERVER, by=SIGINT, says="drained"),
        also("rm -r anabranch-identity && mv identity-backup anabranch-identity"),
        also(SERVER, ends=2, says="ca restored"),
        also("anabranch admin ca restored"),
        also("anabranch admin revoke device-1"),
        also_starts(SERVER, until="devices join on"),
        also("anabranch admin enrol device-2", keeps={"third": r"--token (\S+)"}),
        also_starts(OTHER, until="pushed"),
        End(OTHER, by=SIGINT),
        also("anabranch client synthetic --state-dir new", ends=50, says="revoked"),
        End(SERVER, by=SIGINT, says="drained"),
        also("anabranch verify anabranch-data --ca-sha256 {ca}", says="sound"),
    ),
)

PLAIN = """
[run]
workload = "synthetic"
[strategy]
name = "fedbuff"
buffer_size = 1
[client]
steps = 10
"""

WRONG = Walk(
    "three in the morning",
    page="docs/when-something-is-wrong.md",
    needs="server",
    fills={"BACKUP": "saved"},
    steps=(
        Write("run.toml", PLAIN),
        also("anabranch init synthetic --out model"),
        also("anabranch admin ca init"),
        also_starts(SERVER, until="serving"),
        also("anabranch client synthetic --id device-1 --tasks-max 3", says="3 updates answered"),
        types("anabranch health", says="serving"),
        types("anabranch admin status", says="version 3"),
        types("anabranch admin clients", says="device-1"),
        types("anabranch admin quarantine device-1", says="in quarantine"),
        types("anabranch admin versions", says="sha256"),
        types("anabranch admin rollback", says="without 2 updates"),
        types("anabranch admin enrol device-1", says="--token"),
        types("anabranch admin revoke device-1", says="revoked"),
        types("anabranch admin backup", says="sound"),
        End(SERVER, by=SIGINT, says="drained"),
        types("anabranch verify", says="sound"),
        types("mv anabranch-data"),
        types("anabranch admin restore", says="start its server again"),
        also_starts(SERVER, name="again", until="serving"),
        also("anabranch admin status", says="version 4"),
        End("again", by=SIGINT, says="drained"),
        also("rm anabranch-data/anabranch.db"),
        types("anabranch admin rebuild", says="is whole, version 4"),
        also_starts(SERVER, name="anew", until="serving"),
        also("anabranch admin status", says="version 4"),
        End("anew", by=SIGINT, says="drained"),
    ),
)

LEAKED = Walk(
    "a key that leaked",
    needs="server",
    steps=(
        *BEGUN,
        also_starts(SERVER, until="devices join on"),
        also("anabranch admin enrol device-1", keeps={"token": r"--token (\S+)"}),
        also(f"{OLD} --tasks-max 3", says="3 updates"),
        End(SERVER, by=SIGINT, says="drained"),
        # Another authority; the run goes on, and so does the device in its folder.
        also("anabranch admin ca init --folder another", keeps={"another": r"ca-sha256: (\w+)"}),
        also_starts(f"{SERVER} --set identity.folder=another", name="anew", until="devices join on"),
        also("anabranch admin enrol device-1 --folder another", keeps={"second": r"--token (\S+)"}),
        also(
            "anabranch client synthetic --state-dir old --token {second} --ca-sha256 {another} --tasks-max 2",
            says="2 updates",
        ),
        End("anew", by=SIGINT, says="drained"),
        also("anabranch verify anabranch-data --ca-sha256 {another}", ends=31, says="is not proved"),
        also(
            "anabranch verify anabranch-data --ca-sha256 {ca} --ca-sha256 {another}",
            says=r"5 updates \(5 signed\), replayed to the same digest",
        ),
        also("anabranch verify anabranch-data", says=r"5 updates, replayed from event \d+ on \(0 signed\)"),
    ),
)

WALKS = (YEAR, WRONG, LEAKED)
