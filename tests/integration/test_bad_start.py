"""A server that must not start, or must not go on: a full disk, a port in use, data of another kind."""

from __future__ import annotations

import asyncio
import errno
import gc
import shutil
import socket
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from left import FREED
from refusals import refusal_of
from wire import CALL_S, Served, server_config

from anabranch.api.jobs import read_job
from anabranch.core.errors import (
    ConfigError,
    ManifestMismatch,
    PortInUse,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreNewer,
    outcome_of,
)
from anabranch.core.limits import DEFAULT_LIMITS, MIB
from anabranch.identity.addresses import host_and_port
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.server.app import ServerInfo, serve
from anabranch.server.backup import back_up
from anabranch.server.hosting import HostInfo, serve_jobs
from anabranch.server.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from anabranch.server.ports import why_not_served
from anabranch.server.restored import attest
from anabranch.server.store import quota
from anabranch.server.store.base import DiskFailed
from anabranch.server.store.factory import open_store
from anabranch.server.store.segments import Segments
from anabranch.server.store.sql import SqlStore
from anabranch.server.uploads import Upload
from anabranch.server.verify import verify


def test_a_disk_that_is_full_at_the_start(tmp_path: Path, manifest: Manifest) -> None:
    full = replace(DEFAULT_LIMITS, free_disk_bytes_min=shutil.disk_usage(tmp_path).total)
    with pytest.raises(StoreFull), Served(server_config(tmp_path / "data"), manifest, full):
        pass


def test_a_disk_that_fills_while_serving(tmp_path: Path, manifest: Manifest) -> None:
    store = open_store("", tmp_path / "data")
    assert isinstance(store, SqlStore)
    full = replace(DEFAULT_LIMITS, free_disk_bytes_min=shutil.disk_usage(tmp_path).total)
    with Served(server_config(tmp_path / "data"), manifest, store=store) as served:
        device = served.device()
        task = device.task()
        store._limits = full
        for _ in range(2):
            refused = refusal_of(lambda: device.answer(task, update_id="update-1"))
            assert refused.kind == ("RESOURCE_EXHAUSTED", "StoreFull")
        assert not served.model().any()
        status = served.operator().GetStatus(operators.GetStatusRequest(), timeout=CALL_S)
        assert "under the watermark" in status.disk_full
        store._limits = DEFAULT_LIMITS
        assert device.answer(task, update_id="update-1").decision.verdict == "published"
        assert (served.model() == 1.0).all()
        assert served.operator().GetStatus(operators.GetStatusRequest(), timeout=CALL_S).disk_full == ""
        assert served.close() == 0
    assert verify(tmp_path / "data").problems == ()


def test_room_that_was_made_is_told_though_no_device_comes(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alert went on for as long as nobody sent an update that was as large."""
    for name in ("EVERY_S", "SHARE"):
        monkeypatch.setattr(quota, name, 0)
    config = server_config(tmp_path / "data", server={"disk_bytes_max": 16 * MIB})
    with Served(config, manifest) as served:
        device = served.device()
        task = device.task()
        (tmp_path / "data/full").write_bytes(bytes(16 * MIB))
        with pytest.raises(grpc.RpcError):
            device.answer(task, update_id="update-1")
        status = operators.GetStatusRequest()
        told = served.operator().GetStatus(status, timeout=CALL_S).disk_full
        assert "over server.disk_bytes_max" in told
        (tmp_path / "data/full").unlink()
        assert served.operator().GetStatus(status, timeout=CALL_S).disk_full == ""
        assert device.answer(task, update_id="update-1").decision.verdict == "published"


def test_an_upload_that_finds_no_room_is_told_to_operators(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never comes to the log; and the asks that go on are no sign of room for it."""

    async def full(*_: object) -> None:
        raise StoreFull("spooling an upload: no space left")

    with Served(server_config(tmp_path / "data"), manifest) as served:

        def lack() -> str:
            request = operators.GetStatusRequest()
            return str(served.operator().GetStatus(request, timeout=CALL_S).disk_full)

        device = served.device()
        task = device.task()
        with monkeypatch.context() as patch:
            patch.setattr(Upload, "add", full)
            with pytest.raises(grpc.RpcError):
                device.answer(task, update_id="update-1")
        served.device("device-2").task()
        assert "spooling an upload" in lack()
        device.answer(task, update_id="update-1")
        assert lack() == ""


@pytest.mark.parametrize("which", ["address", "admin_address"])
def test_a_port_in_use(which: str, tmp_path: Path, manifest: Manifest) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = server_config(tmp_path / "data", server={which: address})
        words = rf"^server\.{which}: {address} .*: Address already in use$"
        with pytest.raises(PortInUse, match=words), Served(config, manifest):
            pass
    gc.collect()
    assert not FREED.taken(), "gRPC has what it takes to free a server"


@pytest.mark.parametrize("has_jobs", [False, True], ids=["run", "jobs"])
def test_a_start_that_cannot_be_told_leaves_no_port_open(
    has_jobs: bool, tmp_path: Path, manifest: Manifest
) -> None:
    """As where its line goes to a disk that is full."""
    told: list[ServerInfo | HostInfo] = []

    def tell(info: ServerInfo | HostInfo) -> None:
        told.append(info)
        raise OSError(errno.ENOSPC, "no room for the line")

    config = server_config(tmp_path / "data")
    jobs = partial(serve_jobs, tmp_path / "jobs", config, partial(read_job, config))
    begun = jobs(ready=tell) if has_jobs else serve(config, manifest, ready=tell)
    with ThreadPoolExecutor() as pool, pytest.raises(OSError, match="no room for the line"):
        pool.submit(asyncio.run, begun).result(CALL_S)
    gc.collect()
    assert not FREED.taken(), "gRPC has what it takes to free a server"
    assert [why_not_served(address) for address in (told[0].address, told[0].admin_address)] == ["", ""]


def test_an_address_that_is_not_this_machines() -> None:
    """Taken, and somebody else's, are two things to mend."""
    assert why_not_served("192.0.2.1:7070") == "Cannot assign requested address"
    assert why_not_served("127.0.0.1:0") == ""
    with pytest.raises(ConfigError, match=r"in brackets, as \[::1\]:7070"):
        host_and_port("::1:9000")
    assert host_and_port("[::1]:9000") == ("::1", 9000)


def test_another_server_on_the_same_data(served: Served) -> None:
    with pytest.raises(StoreLocked), Served(served.config, served.manifest):
        pass


def test_a_database_of_a_newer_revision(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data")
    with Served(config, manifest) as served:
        served.close()
    with sqlite3.connect(tmp_path / "data" / "anabranch.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    database.close()
    with pytest.raises(StoreNewer), Served(config, manifest):
        pass


@pytest.mark.parametrize("how", ["gone", "empty"])
def test_a_database_that_is_lost_beside_its_log(
    how: str, tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No command says that there is no run, nor names one that would then; the file can be put back."""
    monkeypatch.setattr("anabranch.server.writer.FOLLOWED_S", 3600.0)
    config, data = server_config(tmp_path / "data"), tmp_path / "data"
    with Served(server_config(tmp_path / "alive"), manifest) as served:
        served.device().work()
        shutil.copytree(tmp_path / "alive", data)  # as a kill leaves it
    assert (data / "anabranch.db-wal").stat().st_size > 0
    whole = {path: path.read_bytes() for path in data.rglob("*") if path.is_file() and path.name != "lock"}
    (data / "anabranch.db").unlink()
    if how == "empty":
        (data / "anabranch.db").touch()
    for use in (
        lambda: Served(config, manifest).__enter__(),
        lambda: verify(data),
        lambda: attest(data, "", None),
        lambda: back_up(data, tmp_path / "backup"),
    ):
        with pytest.raises(StoreError, match=r"anabranch\.db is missing or empty.*admin restore") as said:
            use()
        assert outcome_of(said.value).exit_code == 38, "a service manager does not start it again"
        assert "attest-restore" not in str(said.value)
        assert "admin rebuild" in str(said.value)
    assert not (tmp_path / "backup").exists()
    for path, data_before in whole.items():
        if path.name != "anabranch.db":
            assert path.read_bytes() == data_before, path
    (data / "anabranch.db").write_bytes(whole[data / "anabranch.db"])
    with Served(config, manifest) as served:
        assert served.info is not None
        assert served.info.version == 1


def test_the_folder_of_a_run_in_postgresql_is_told_to_name_that(
    tmp_path: Path, manifest: Manifest, postgresql_url: str
) -> None:
    """Who forgets `--database` is sent to no log, of which there is none."""
    config = server_config(tmp_path / "data", server={"database": postgresql_url})
    with Served(config, manifest) as served:
        served.device().work()
    with pytest.raises(
        StoreError, match=r"name a run in PostgreSQL by server\.database \(--database\)"
    ) as said:
        verify(tmp_path / "data")
    assert "rebuild" not in str(said.value)
    assert verify(tmp_path / "data", postgresql_url).version == 1


def test_a_log_of_others_is_no_log_of_a_run(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "data" / "log").mkdir(parents=True)
    (tmp_path / "data" / "log" / "server.log").write_text("a service's own")
    with Served(server_config(tmp_path / "data"), manifest) as served:
        served.device().work()


def test_data_whose_run_is_in_another_database(tmp_path: Path, manifest: Manifest) -> None:
    """Only the mark lies there, as of PostgreSQL's: the other database is to be named."""
    config = server_config(tmp_path / "data")
    with Served(config, manifest) as served:
        served.device().work()
        served.close()
    shutil.rmtree(tmp_path / "data" / "log")
    (tmp_path / "data" / "anabranch.db").unlink()
    with (
        pytest.raises(StoreError, match=r"acknowledged is of a run.*server\.database"),
        Served(config, manifest),
    ):
        pass


def test_a_file_where_the_log_was(tmp_path: Path, manifest: Manifest) -> None:
    """It is refused before anybody is served, by the name of what lies there."""
    config, log = server_config(tmp_path / "data"), tmp_path / "data" / "log"
    with Served(config, manifest) as served:
        served.device().work()
        served.close()
    shutil.rmtree(log)
    log.touch()
    with pytest.raises(StoreError, match=rf"Not a directory: '{log}'") as said, Served(config, manifest):
        pass
    assert outcome_of(said.value).exit_code == 37


def test_what_stops_the_writer_of_a_start_is_what_the_start_says(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Served(server_config(tmp_path / "data"), manifest) as served:
        served.device().work()
        served.close()

    def lost(*_: object) -> None:
        raise DiskFailed("writing the log: the disk is gone")

    monkeypatch.setattr(Segments, "append", lost)
    changed = server_config(tmp_path / "data", server={"lease_s": 77.0})  # an event of the start itself
    with pytest.raises(DiskFailed, match=r"^writing the log: the disk is gone"), Served(changed, manifest):
        pass


def test_another_model_or_other_settings(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data")
    with Served(config, manifest) as served:
        served.device().work()
        served.close()
    other = write_manifest(tmp_path / "other", "test", {"w": np.zeros(3, np.float32)})
    with pytest.raises(ManifestMismatch), Served(config, other):
        pass
    changed = server_config(tmp_path / "data", strategy={"buffer_size": 3})
    with pytest.raises(ConfigError, match="buffer_size"), Served(changed, manifest):
        pass


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"privacy": {"clip": 1.0, "noise": 1.0}, "robust": {"rule": "median"}}, "looks at single updates"),
        ({"secagg": {"mode": "keeper", "keepers": ["k"], "clip": 1.0}}, r"secagg\.mode"),
        ({"submodel": {"name": "ist", "parts": 2}}, r"submodel\.name is 'ist', but no units"),
    ],
    ids=["privacy", "masked sums", "sub-models"],
)
def test_settings_that_do_not_go_together_are_said_before_the_run_is_entered(
    tables: Any, words: str, tmp_path: Path, manifest: Manifest
) -> None:
    wrong = server_config(tmp_path / "data", **tables)
    with pytest.raises(ConfigError, match=words), Served(wrong, manifest):
        pass
    with Served(server_config(tmp_path / "data"), manifest) as served:
        served.device().work()


def test_an_address_that_others_reach(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data", server={"address": "0.0.0.0:0"})
    with pytest.raises(ConfigError, match="insecure"), Served(config, manifest):
        pass


@pytest.mark.parametrize("damage", ["absent", "cut", "other weights", "other format", "not JSON"])
def test_a_damaged_manifest(damage: str, tmp_path: Path, manifest: Manifest) -> None:
    folder = tmp_path / "model"
    assert read_manifest(folder).initial_sha256 == manifest.initial_sha256
    head, weights = folder / MANIFEST, folder / "initial.safetensors"
    match damage:
        case "absent":
            head.unlink()
        case "cut":
            weights.write_bytes(weights.read_bytes()[:1000])
        case "other weights":
            data = bytearray(weights.read_bytes())
            data[-2] ^= 1
            weights.write_bytes(data)
        case "other format":
            head.write_text(head.read_text().replace('"format": 1', '"format": 0'))
        case "not JSON":
            head.write_text("{")
    with pytest.raises(ConfigError, match="anabranch init"):
        read_manifest(folder)
