"""A password in every setting that may hold one; then nothing that the product writes or answers has it."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
from commands import anabranch, answer, serving

from anabranch.core.config.secrets import MASK, SECRET, masked, masked_text
from anabranch.core.config.tables import TABLES, Config, merge
from anabranch.core.errors import OUTCOMES, ConfigError, StoreError, StoreUnreachable, outcome_of
from anabranch.protos.v1 import devices_pb2, operators_pb2
from anabranch.server.export import export_run

CANARY = "tweet-tweet-4711"
RUN = """
[run]
workload = "synthetic"
updates_max = 4
[fleet]
clients = 2
examples_per_client = 40
[strategy]
name = "fedbuff"
buffer_size = 1
"""
SECRETS = [(t, f.name) for t, table in TABLES.items() for f in fields(table) if f.metadata == SECRET]
SOUNDS_SECRET = re.compile(r"pass|secret|token|key|credential|database|dsn|url|address|path")
# Settings that sound as if they held a secret, and cannot: `host:port`, which is checked.
NO_SECRET = {"server.address", "server.admin_address", "server.metrics_address", "identity.join_address"}
HOMES = {"server.database": "postgresql://user:{}@127.0.0.1/runs"}  # what other settings cannot be


def planted(**other: str) -> dict[str, str]:
    """A value with the canary for each secret setting, by `table.key`; `other` by key alone."""
    paths = {f"{table}.{key}": key for table, key in SECRETS}
    form = "scheme://user:{}@10.1.1.1/place"
    return {path: other.get(key, HOMES.get(path, form).format(CANARY)) for path, key in paths.items()}


def environment(values: Mapping[str, str]) -> dict[str, str]:
    """The settings as environment variables."""
    return {f"ANABRANCH_{path.replace('.', '_').upper()}": value for path, value in values.items() if value}


# --- the settings themselves --------------------------------------------------------------------------


def test_what_sounds_like_a_secret_is_declared_as_one() -> None:
    sounding = {
        f"{t}.{f.name}"
        for t, table in TABLES.items()
        for f in fields(table)
        if f.type in ("str", str) and SOUNDS_SECRET.search(f.name)
    }
    assert sounding - NO_SECRET == {f"{table}.{key}" for table, key in SECRETS}


def test_a_configuration_shows_no_secret() -> None:
    layers: dict[str, dict[str, Any]] = {}
    for path, value in planted().items():
        table, _, key = path.partition(".")
        layers.setdefault(table, {})[key] = value
    config = merge([("test", layers)])
    assert CANARY not in json.dumps(config.to_json())
    assert CANARY not in repr(config)
    assert config.secrets() == planted()
    assert Config.from_json(config.to_json()).to_json() == config.to_json()
    assert merge([]).secrets() == {}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("", ""),
        ("memory", "memory"),
        ("/data/digits", "/data/digits"),
        ("C:\\data\\a@b", "C:\\data\\a@b"),
        ("127.0.0.1:6379", "127.0.0.1:6379"),
        ("ray://head:10001", "ray://head:10001"),
        ("postgresql://postgres@/runs?host=/tmp/x", "postgresql://postgres@/runs?host=/tmp/x"),
        ("postgresql://h1:1,h2:2/runs", "postgresql://h1:1,h2:2/runs"),
        (f"postgresql://user:{CANARY}@host:5432/runs", "postgresql://user:***@host:5432/runs"),
        (f"postgresql://user:a@b/c#{CANARY} d@host/runs", "postgresql://user:***@host/runs"),
        (f"postgresql://:{CANARY}@host/runs", "postgresql://:***@host/runs"),
        (f"postgresql://user:{CANARY}", "postgresql://user:***"),
        (
            f"postgresql://user@host/runs?password={CANARY}&x=1",
            "postgresql://user@host/runs?password=***&x=1",
        ),
        (f"host=h password={CANARY} dbname=x", "host=h password=*** dbname=x"),
        (f"user:{CANARY}@host", "user:***@host"),
    ],
)
def test_only_the_password_is_masked(value: str, shown: str) -> None:
    assert masked(value) == masked(shown) == shown
    if "://" in value and " " not in value:  # else nobody can tell where it ends
        assert CANARY not in masked_text(f"it failed: {value!r}, sorry")


# --- all that is written and answered -----------------------------------------------------------------


def found_in(folder: Path) -> list[str]:
    """The files that have the canary: databases, their logs, journals, reports, all of them."""
    return [str(p) for p in folder.rglob("*") if p.is_file() and CANARY.encode() in p.read_bytes()]


def check_said(*said: subprocess.CompletedProcess[str]) -> None:
    """Neither stdout nor stderr has it."""
    for done in said:
        assert CANARY not in done.stdout + done.stderr, done.args


def answers(address: str, service: Any) -> Iterator[str]:
    """What a server answers to each call of a service, of an empty request: an answer, or an error."""
    with grpc.insecure_channel(address) as channel:
        for method in service.methods:
            request = method.input_type._concrete_class
            path = f"/{service.full_name}/{method.name}"
            sides = ("stream" if method.client_streaming else "unary") + (
                "_stream" if method.server_streaming else "_unary"
            )
            call = getattr(channel, sides)(
                path, request.SerializeToString, method.output_type._concrete_class.FromString
            )
            asked = request(after_seq=1) if method.name == "Watch" else request()
            try:
                answer = call(iter([asked]) if method.client_streaming else asked, timeout=20)
                yield str(next(iter(answer)) if method.server_streaming else answer)
            except grpc.RpcError as error:
                yield f"{error} {error.details()} {error.trailing_metadata()}"


def walk(folder: Path, monkeypatch: pytest.MonkeyPatch, database: str = "") -> None:
    """Use the product with a canary in every secret; `database` has one, or is empty: SQLite."""
    for name, value in environment(planted(database=database)).items():
        monkeypatch.setenv(name, value)
    (folder / "run.toml").write_text(RUN)
    said = [
        anabranch(folder, "init", "synthetic", "--out", "model", "--json"),
        anabranch(folder, "config", "show", "run.toml"),
        anabranch(folder, "config", "show", "run.toml", "--json"),
        anabranch(folder, "simulate", "run.toml", "--out", "run"),
        anabranch(folder, "replay", "run"),
    ]
    ports = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0", "--data-dir", "data")
    with serving(folder, "run.toml", "--model", "model", *ports) as served:
        device = ("client", "synthetic", "--server", served["address"], "--id", "device-1")
        said.append(anabranch(folder, *device))
        admin = ("--admin", served["admin_address"])
        look = ("evaluate", "synthetic", "--server", served["address"], "--once", *admin)
        said.append(anabranch(folder, *look))
        said.append(anabranch(folder, "admin", "status", *admin, "--json"))
        for address, service in [
            (served["admin_address"], operators_pb2.DESCRIPTOR.services_by_name["Operators"]),
            (served["address"], devices_pb2.DESCRIPTOR.services_by_name["Devices"]),
        ]:
            answered = list(answers(address, service))
            assert len(answered) == len(service.methods)
            assert not [text for text in answered if CANARY in text]
        assert found_in(folder) == []  # the log that SQLite writes ahead is there as well
    assert answer(said[-1])["config"]["run"]["data_path"] == f"scheme://user:{MASK}@10.1.1.1/place"
    flags = ("--database", database) if database else ()
    said.append(anabranch(folder, "verify", "data", *flags))
    said.append(anabranch(folder, "report", "data", "--out", "report", *flags))
    assert {done.returncode for done in said} == {0}, [done.stderr for done in said]
    assert json.loads((folder / "report" / "result.json").read_text())["updates_applied"] == 4
    check_said(*said)
    assert found_in(folder) == []


def test_sqlite_reports_logs_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk(tmp_path, monkeypatch)


def test_postgresql_reports_logs_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgresql_url: str
) -> None:
    walk(tmp_path, monkeypatch, postgresql_url.replace("postgres@", f"postgres:{CANARY}@"))
    with psycopg.connect(postgresql_url) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        rows = [connection.execute(f'SELECT t::text FROM "{t}" t'.encode()).fetchall() for (t,) in tables]
    assert sum(map(len, rows)) > 10
    assert CANARY not in str(rows)


# --- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("database", "error"),
    [
        (f"postgresql://user:{CANARY}@127.0.0.1:1/runs", StoreUnreachable),
        (f"postgresql://user:{CANARY}@127.0.0.1:1/runs?connect_timeout=x", StoreError),
        (f"postgresql://user@127.0.0.1:1/runs?password={CANARY}", StoreUnreachable),
        (f"postgresql://user:{CANARY}@127.0.0.1:1", ConfigError),
        (f"postgresql://user:{CANARY}", ConfigError),
        (f"mysql://user:{CANARY}@127.0.0.1/runs", ConfigError),
        (f"host=127.0.0.1 password={CANARY}", ConfigError),
        (f"postgresql://user:{MASK}@127.0.0.1/runs", ConfigError),
        (f'["postgresql://user:{CANARY}@127.0.0.1/runs"]', ConfigError),
    ],
)
def test_an_address_that_does_not_work_is_not_repeated(
    database: str, error: type[Exception], tmp_path: Path
) -> None:
    done = anabranch(tmp_path, "verify", ".", "--database", database)
    served = anabranch(tmp_path, "config", "show", "--set", f"server.database={database}", "--json")
    wrong = anabranch(tmp_path, "config", "show", "--set", f"server,database={database}", "--json")
    check_said(done, served, wrong)
    if database.startswith("["):
        assert served.returncode == OUTCOMES[ConfigError].exit_code
    else:
        assert done.returncode == outcome_of(error("")).exit_code, done.stderr
        assert "Traceback" not in done.stderr


# --- runs of before -----------------------------------------------------------------------------------


def test_a_run_that_was_stored_with_its_password_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    answer(anabranch(tmp_path, "init", "synthetic", "--out", "model", "--json"))
    ports = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0", "--data-dir", "data")
    start = ("run.toml", "--model", "model", *ports)
    with serving(tmp_path, *start) as first:
        pass
    with sqlite3.connect(tmp_path / "data" / "anabranch.db") as old:
        ((text,),) = old.execute("SELECT config FROM runs").fetchall()
        config = json.loads(text)
        config["run"]["data_path"] = planted()["run.data_path"]
        old.execute("UPDATE runs SET config = ?", (json.dumps(config),))
    old.close()
    (
        tmp_path / "data" / "acknowledged"
    ).unlink()  # as old as that: there was none, and its digest is of this row
    monkeypatch.setenv("ANABRANCH_RUN_DATA_PATH", "scheme://user:changed@10.1.1.1/place")
    with serving(tmp_path, *start) as again:
        assert again["run_id"] == first["run_id"]
        status = anabranch(tmp_path, "admin", "status", "--admin", again["admin_address"], "--json")
        assert answer(status)["config"]["run"]["data_path"] == f"scheme://user:{MASK}@10.1.1.1/place"
        device = ("client", "synthetic", "--server", again["address"], "--id", "device-1", "--json")
        check_said(status, anabranch(tmp_path, *device))
    export_run(tmp_path / "data", "", tmp_path / "exported")
    assert found_in(tmp_path / "exported") == []
    shutil.rmtree(tmp_path / "data")
    assert found_in(tmp_path) == []
