"""Every way to end: each exit code, met as somebody meets it."""

from signal import SIGHUP, SIGINT

from walking import End, Walk, Write, also, also_starts

from walks.apps import MY_APP

SERVER = "anabranch server --model model --set run.updates_max=4"
DAMAGE = """
import sqlite3, sys
with sqlite3.connect("anabranch-data/anabranch.db") as database:
    database.execute(sys.argv[1])
"""
NOBODY = "postgresql://postgres@127.0.0.1:1/none"
WAITING = f"anabranch server --model model --database {NOBODY}"
SIMULATION = "anabranch simulate synthetic --updates 100000000 --out long"
FULL = "anabranch server --model model --data-dir small/data"

ENDS = Walk(
    "how commands end",
    steps=(
        Write("my_app.py", MY_APP),
        Write("damage.py", DAMAGE),
        also("anabranch simulate none.toml", ends=2, says="none.toml does not exist"),
        also("anabranch init nonsense", ends=3, says="nonsense"),
        also("anabranch report nowhere", ends=5, says="nowhere"),
        also("anabranch client synthetic --id 'a b'", ends=2, says="--id must be"),
        also("anabranch config show --set uplink.codec=nonsense", ends=2, says="uplink.codec = 'nonsense'"),
        also("anabranch health", ends=24, says="127.0.0.1:7070"),
        also("anabranch init synthetic --out model"),
        also_starts(SERVER, until="serving"),
        also("anabranch client my_app.py:App --state-dir other", ends=11, says="another model"),
        also("anabranch admin export none.safetensors --version 99", ends=21, says="not held|not published"),
        also("anabranch server --model model --data-dir second", ends=34, says="Address already in use"),
        also("anabranch server --model model", ends=33, says="in use by process"),
        also("anabranch client synthetic", says="4 updates"),
        End(SERVER, by=SIGINT, says="drained"),
        also(f"anabranch verify anabranch-data --database {NOBODY}", ends=36, says="cannot be reached"),
        also_starts(WAITING, until="waiting for the database"),
        End(WAITING, by=SIGINT),
        also("touch file && anabranch server --model model --data-dir file", ends=37, says="file"),
        also("anabranch simulate synthetic --updates 4 --out run"),
        also_starts(SIMULATION, until="virtual time"),
        End(SIMULATION, by=SIGHUP, ends=129, says="interrupted"),  # its terminal is closed
        also("anabranch replay long", says="digests equal"),
        also('sed -i \'s/"model_sha256": "..../"model_sha256": "0000/\' run/result.json'),
        also("anabranch replay run", ends=40, says="result.json says otherwise"),
        also("echo none > run/result.json && anabranch report run", ends=4, says="result.json"),
        also("cp -a anabranch-data sound"),
        also("python damage.py \"UPDATE updates SET sha256 = '00'\""),
        also("anabranch verify anabranch-data", ends=31, says="problems"),
        also("rm -r anabranch-data && cp -a sound anabranch-data"),
        also('python damage.py "DELETE FROM events WHERE seq > 3"'),
        also("anabranch server --model model", ends=38, says="restore a backup"),
        also("rm -r anabranch-data && mv sound anabranch-data"),
        also("python damage.py \"UPDATE alembic_version SET version_num = '9999'\""),
        also("anabranch server --model model", ends=32, says="upgrade anabranch"),
    ),
)

SMALL_DISK = Walk(
    "a small disk",
    needs="server",
    mounts=True,
    steps=(
        also("anabranch init synthetic --out model"),
        also("mkdir small && mount -t tmpfs -o size=1m tmpfs small"),
        also(FULL, ends=30, says="no space|free"),
    ),
)

WALKS = (ENDS, SMALL_DISK)
