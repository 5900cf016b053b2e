"""docs/deploying.md: a guarded federation in five commands, and a standby."""

from signal import SIGCONT, SIGINT, SIGKILL, SIGSTOP

from walking import End, Left, Send, Wait, Walk, Write, also, starts, types

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
        also(f"anabranch admin status {PAPERS}", says="1 clients"),
        also("anabranch evaluate digits --server 127.0.0.1:7070 --identity alice --once", says="accuracy"),
        also("anabranch health 127.0.0.1:7070 --identity alice", says="serving"),
        types("anabranch admin revoke device-1"),
        End(GUARDED_DEVICE, ends=50, says="revoked"),
        End(GUARDED_SERVER, by=SIGINT, says="drained"),
        also("anabranch verify anabranch-data --ca-sha256 {ca}", says="sound"),
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
        End("a", by=SIGKILL, ends=-SIGKILL),
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

WALKS = (FIVE_COMMANDS, FAILOVER)
