"""A server whose store fails, seen by the transport of a device: nothing of a result is lost by it."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from wire import Served, chunks, requests, server_config

from anabranch.client.channel import error_of
from anabranch.client.outbox import UpdateEntry
from anabranch.client.transfer import update_header
from anabranch.client.transport import GrpcTransport
from anabranch.core.errors import StoreCorrupt, StoreUnreachable, Unavailable
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.model.updates import Ask, Capability, Task
from anabranch.server import chronicle
from anabranch.server.manifest import Manifest
from anabranch.server.outage import RETRY_S
from anabranch.server.store import blobs as blobs_module
from anabranch.server.store.blobs import BlobStore
from anabranch.server.writer import Writer

ANSWER_S = 60.0
TOLD = "^the server's store cannot do it now; its log says why$"
Broken = Callable[[], None]


@pytest.fixture
def served(tmp_path: Path, manifest: Manifest) -> Iterator[Served]:
    # What is larger is a file from its first byte on; those who come again do so at once here.
    limits = replace(DEFAULT_LIMITS, inline_bytes_max=1000, early_calls_at_once=1000)
    server = Served(server_config(tmp_path / "data"), manifest, limits).__enter__()
    yield server
    server.close()


@pytest.fixture(params=["calls", "stream"])
def transport(request: pytest.FixtureRequest, served: Served) -> Iterator[GrpcTransport]:
    """A device's, by either door."""
    assert served.info is not None
    with GrpcTransport(served.info.address, "device-1", connection=request.param) as made:
        yield made


def half_sent(transport: GrpcTransport) -> UpdateEntry:
    """A result of which half is on the server's disk."""
    spec = transport.enrol(Capability(codecs=())).spec
    task = transport.ask(Ask("device-1", "task-1"), spec)
    assert isinstance(task, Task)
    data = np.ones(spec.size, np.float32).tobytes()
    entry = UpdateEntry(
        "update-1", task.task_id, spec.layout_hash, task.base_version, 1, 1, "raw", data, spec.size
    )
    sent = requests(update_header(entry, "device-1"), chunks(data[: len(data) // 2]))
    with pytest.raises(grpc.RpcError, match="bytes declared"):
        transport._stub.PushUpdate(sent, timeout=ANSWER_S)
    assert transport.query_upload("update-1").received_bytes == len(data) // 2
    return entry


def no_folder(folder: Path, name: str = "spool") -> Broken:
    """A folder in the data is none any more; returns what makes it one."""
    broken, aside = folder / name, folder / "aside"
    broken.rename(aside)
    broken.write_text("")

    def mend() -> None:
        broken.unlink()
        aside.rename(broken)

    return mend


@pytest.mark.parametrize("tries", [1, 3])
def test_half_a_result_is_sent_to_its_end_after_an_outage(
    transport: GrpcTransport, tries: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where an upload stands is asked before each try, and behind one that was cut."""
    entry = half_sent(transport)
    mend = no_folder(tmp_path / "data")
    for _ in range(tries):
        with pytest.raises(Unavailable, match=TOLD):
            transport.push(entry)
    mend()
    assert transport.push(entry).decision.verdict == "published"
    said = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 1, said
    assert "devices are told to come again, and keep their updates: " in said[0]
    assert "Not a directory" in said[0]


def test_a_model_that_cannot_be_written_or_read_is_told_once_and_made_later(
    transport: GrpcTransport, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = transport.enrol(Capability(codecs=())).spec
    first = Ask("device-1", "task-1")
    mend = no_folder(tmp_path / "data", "models")
    for _ in range(2):
        with pytest.raises(Unavailable, match=TOLD):
            transport.ask(first, spec)
    mend()
    assert isinstance(transport.ask(first, spec), Task)
    mend = no_folder(tmp_path / "data", "models")
    with pytest.raises(Unavailable, match=TOLD):
        transport.fetch(spec.layout_hash)
    mend()
    assert transport.fetch(spec.layout_hash).version == 0
    (said,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert "devices are told to come again, and keep their updates: " in said
    assert "which devices fetch, cannot be used: Not a directory" in said


def test_a_database_that_lets_nobody_in_is_no_end_of_a_result(
    transport: GrpcTransport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And hears of no database's address."""
    entry = half_sent(transport)
    with monkeypatch.context() as patch:
        patch.setattr(BlobStore, "received", unreachable)
        patch.setattr(BlobStore, "adopt", unreachable)
        with pytest.raises(Unavailable, match=TOLD):
            transport.push(entry)
    assert "postgresql://db/run cannot be reached" in caplog.text
    assert transport.push(entry).decision.verdict == "published"


def unreachable(*_: object) -> None:
    raise StoreUnreachable("postgresql://db/run cannot be reached: FATAL: sorry, too many clients already")


@pytest.mark.parametrize("when", ["queried", "adopted"])
def test_a_flush_that_fails_ends_the_server(
    when: str, transport: GrpcTransport, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one of the same file would say that all is well."""
    entry = half_sent(transport)
    if when == "adopted":
        monkeypatch.setattr(blobs_module, "sync_file", failed)
        with monkeypatch.context() as patch:
            patch.setattr(BlobStore, "received", BlobStore.spooled_bytes)
            with pytest.raises(Unavailable):
                transport.push(entry)
    else:
        monkeypatch.setattr(os, "fsync", failed)  # that of the log is another
        with pytest.raises(Unavailable):
            transport.query_upload("update-1")
    assert "what is on the disk is unknown" in str(served.failure())


def test_a_disk_that_hangs_is_told_while_it_does(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever would say that no update comes waits for the disk as well."""
    hangs, told, flush = threading.Event(), threading.Event(), os.fdatasync

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if hangs.is_set() and "the log has taken nothing for" in record.getMessage():
                told.set()

    def flushed(descriptor: int) -> None:
        hangs.set()
        told.wait(ANSWER_S)
        flush(descriptor)

    monkeypatch.setattr(chronicle, "HANG_S", 0.5)
    handler = Heard()
    chronicle.log.addHandler(handler)
    try:
        with Served(server_config(tmp_path / "data"), manifest) as server:
            monkeypatch.setattr(os, "fdatasync", flushed)
            with suppress(grpc.RpcError):  # it may hang for longer than a call waits
                server.device()
            assert told.is_set()
    finally:
        chronicle.log.removeHandler(handler)


def failed(path: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def test_an_ask_and_a_fetch_come_again_as_well(
    transport: GrpcTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device takes a refusal of its ask by another name for its end."""

    async def damaged(*_: object) -> str:
        raise StoreCorrupt("a row of model_versions cannot be read")

    spec = transport.enrol(Capability(codecs=())).spec
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "head_of", damaged)
        with pytest.raises(Unavailable, match=TOLD):
            transport.ask(Ask("device-1", "task-1"), spec)
        with pytest.raises(Unavailable, match=TOLD):
            transport.fetch(spec.layout_hash)
    assert isinstance(transport.ask(Ask("device-1", "task-1"), spec), Task)


def test_a_line_is_of_all_devices(served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = [served.device(f"device-{number}") for number in range(3)]
    tasks = [device.task() for device in found]
    data = np.ones(found[0].spec.size, np.float32).tobytes()
    no_folder(tmp_path / "data")
    for _ in range(3):
        for device, task in zip(found, tasks, strict=True):
            with pytest.raises(grpc.RpcError) as refused:
                device.send(task, data, f"update-of-{device.client_id}")
            assert error_of(refused.value, "here").retry_after_s == RETRY_S
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
