"""docs/deploying.md: a guarded federation in five commands, and a standby."""

from signal import SIGCONT, SIGINT, SIGKILL, SIGSTOP

from walking import End, Left, Send, Wait, Walk, Write, also, also_starts, starts, types

DOCKER = "docker/test.sh types it"
RUN = """
[run]
name = "digits"
workload = "digits"
[strategy]
name = "fedbuff"
buffer_size = 2
"""
PAPERS = "--admin 127.0.0.1:7071 --identity alice"
OF_A_WARD = {"ward-3": f"ward-3 {PAPERS}"}
REACHED = {"run.toml": "run.toml --admin-address 0.0.0.0:7071"}
GUARDED_SERVER = "anabranch server run.toml --model model --address"
GUARDED_DEVICE = "anabranch client digits --server HOST:7070 --token"

FIVE_COMMANDS = Walk(
    "five commands",
    page="docs/deploying.md",
    fills={"HOST": "127.0.0.1", "TOKEN": "{token}", "HEX": "{ca}", "APP": "digits"},
    steps=(
        Write("run.toml", RUN),
        Left("docker ", DOCKER),
        Left("helm ", "tests/integration/test_chart.py renders it; no cluster is here"),
        Left("kubectl ", "no cluster is here"),
        Left("HARDENED=", DOCKER),
        Left("anabranch evaluate digits --server 127.0.0.1:7070 --once", DOCKER),
        types("anabranch init digits", says="anabranch server"),
        types("anabranch admin ca init", keeps={"ca": r"ca-sha256: (\w+)"}),
        starts(
            GUARDED_SERVER,
            until="devices join on",
            fills=REACHED,
        ),
        types("anabranch admin enrol device-1", keeps={"token": r"--token (\S+)"}),
        starts(GUARDED_DEVICE, until="pushed"),
        also("anabranch admin operator alice --out alice"),
        also("anabranch admin members", says="device-1"),
        also(f"anabranch admin status {PAPERS}", says="of 1 client online"),
        also("anabranch evaluate digits --server 127.0.0.1:7070 --identity alice --once", says="accuracy"),
        also("anabranch health 127.0.0.1:7070 --identity alice", says="serving"),
        types("anabranch admin enrol ward", says="40 tokens"),
        types("anabranch admin invitations", says="ward-39"),
        types("anabranch admin tag", fills=OF_A_WARD, says="device-1: ward-3"),
        types("anabranch admin clients --tag", fills=OF_A_WARD, says="device-1"),
        types("anabranch admin quarantine --tag", fills=OF_A_WARD, says="device-1 is in quarantine"),
        types("anabranch admin release --tag", fills=OF_A_WARD, says="out of quarantine"),
        types("anabranch admin backup", says="sound"),
        types("anabranch admin revoke device-1"),
        End(GUARDED_DEVICE, ends=50, says="revoked"),
        End(GUARDED_SERVER, by=SIGINT, says="drained"),
        also("anabranch verify anabranch-data --ca-sha256 {ca}", says="sound"),
        types("anabranch admin restore", says="start its server again"),
        also("anabranch verify restored --ca-sha256 {ca}", says="sound"),
    ),
)

STANDBY = "anabranch server run.toml --model model --database"
DEVICE = "anabranch client digits --server a:7070,b:7070"
ON = {"postgresql://USER:PASSWORD@HOST/NAME": "'{database}'"}
ON_B = ON | {"--standby": "--standby --address 127.0.0.2:7070 --admin-address 127.0.0.2:7071 --data-dir b"}

FAILOVER = Walk(
    "a standby",
    page="docs/deploying.md",
    database=True,
    fills={"a:7070,b:7070": "127.0.0.1:7070,127.0.0.2:7070", "0/3": "0/1"},
    steps=(
        Write("run.toml", RUN),
        types("anabranch init digits"),
        starts(STANDBY, name="a", fills=ON, until="serving"),
        starts(STANDBY, name="b", fills=ON_B, until="standing by"),
        starts(DEVICE, until="pushed"),
        End("a", by=SIGKILL, ends=128 + SIGKILL),
        Wait("b", says="serving"),
        starts(STANDBY, name="a again", fills=ON, until="standing by"),
        Send("b", SIGSTOP),
        Wait("a again", says="serving"),
        Send("b", SIGCONT),
        End("b", ends=35, says="leads this run now"),
        End(DEVICE, by=SIGINT),
        End("a again", by=SIGINT, says="drained"),
        also("anabranch verify anabranch-data --database '{database}'", says="sound"),
        also("anabranch report anabranch-data --database '{database}' --out report"),
    ),
)

SHORT = """
[run]
workload = "synthetic"
updates_max = 4
[strategy]
name = "fedbuff"
buffer_size = 2
"""
FILE = "anabranch server run.toml --model model"
ON_FLAG = "anabranch server run.toml --model model --updates"
CLIENT = "anabranch client synthetic --id device-0"
ENDED = "4 updates answered"

GOES_ON = Walk(
    "a run goes on",
    page="docs/deploying.md",
    steps=(
        Write("run.toml", SHORT),
        also("anabranch init synthetic --out model"),
        also_starts(FILE, until="serving"),
        also(CLIENT, says=ENDED),
        Wait(FILE, says="the run ended after 4 updates, its budget"),
        # Larger by an operator's word.
        types(
            "anabranch admin set",
            fills={
                "run.updates_max=2000": "run.updates_max=8",
                "robust.tasks_per_minute=2": "robust.flaws_max=3",
            },
            says="goes on: start its devices again",
        ),
        Wait(FILE, says="the run had ended, and goes on"),
        also(CLIENT, says=ENDED),
        also(
            "anabranch admin set run.updates_max=6", says="it does not go on: the run ended after 8 updates"
        ),
        also("anabranch admin set run.updates_max=8"),
        also(
            "anabranch admin set run.seed=3", ends=2, says="run.seed cannot be changed in a run: every draw"
        ),
        also("anabranch admin set run.update_max=9", ends=2, says="did you mean 'run.updates_max'"),
        also(
            "anabranch admin status", says=r"run.updates_max = 8 \(was 6\), set by somebody on this machine"
        ),
        End(FILE, by=SIGINT, says="drained"),
        # Its file says what it said before; then it says otherwise.
        also_starts(FILE, name="again", until="serving"),
        also("anabranch admin status", says="ended after 8 updates"),
        End("again", by=SIGINT, says="drained"),
        starts(ON_FLAG, name="larger", fills={"2000": "12"}, until="serving"),
        also(
            "anabranch admin status",
            says=r"run.updates_max = 12 \(was 8\), set by .* start \(--updates\)",
        ),
        also(CLIENT, says=ENDED),
        End("larger", by=SIGINT, says="the run ended after 12 updates, its budget"),
        also(f"{FILE} --set run.seed=3", ends=2, says="run.seed is 3, but this run was started with 0"),
        also("anabranch verify anabranch-data", says="sound"),
        also("anabranch report anabranch-data --out report", says="12"),
        also("anabranch replay report", says="replayed 6 versions, digests equal"),
    ),
)

WALKS = (FIVE_COMMANDS, FAILOVER, GOES_ON)
