"""A real PostgreSQL for the tests that need one: one cluster a session, one database a test."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

INSTALL = "PostgreSQL is needed for this test: pip install pgserver, or apt-get install postgresql"
START_S = 60


@pytest.fixture(scope="session")
def postgresql_cluster() -> Iterator[Path]:
    """The folder of the socket of a running cluster, whose superuser `postgres` has no password."""
    programs = _programs()
    folder = Path(tempfile.mkdtemp(prefix="anabranch-pg-"))  # short: a socket's path has 107 bytes at most
    who = _unprivileged()
    if who is not None:
        os.chown(folder, who, -1)
    try:
        initdb = [programs / "initdb", "-D", folder / "data", "-U", "postgres", "-E", "UTF8", "--locale=C"]
        made = subprocess.run(
            [*initdb, "--auth=trust", "--no-sync"], user=who, cwd=folder, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr
        # No fsync: these tests kill the store, never the database.
        settings = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}", "-c", "fsync=off"]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [programs / "postgres", "-D", folder / "data", *settings],
                user=who,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,
            )
        try:
            ready = [programs / "pg_ctl", "-D", folder / "data", "-t", str(START_S), "-w", "status"]
            _wait(server, ready, folder)
            yield folder
        finally:
            server.send_signal(signal.SIGINT)  # disconnect everybody, then stop
            server.wait(START_S)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def postgresql_url(postgresql_cluster: Path) -> Iterator[str]:
    """The address of a new, empty database."""
    import psycopg

    name = f"test_{uuid.uuid4().hex}"
    host = f"host={postgresql_cluster} user=postgres"
    with psycopg.connect(f"{host} dbname=postgres", autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
        yield f"postgresql://postgres@/{name}?host={postgresql_cluster}"
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
