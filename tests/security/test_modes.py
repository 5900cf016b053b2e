"""Whatever is kept is its owner's alone, also in a folder that was there before, open to all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from agents import Federation as Devices
from guarded import Federation, federation
from wire import Served, chunks, requests, server_config

from anabranch.client.outbox import Outbox, UpdateEntry
from anabranch.client.records import Record, write_record
from anabranch.client.state import HELD, MEMORY, device_id, locked
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.identity.authority import Authority
from anabranch.server.manifest import write_manifest


@pytest.fixture(autouse=True)
def generous() -> Iterator[None]:
    """What most machines give to whatever does not ask for less."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def loose(folder: Path) -> list[str]:
    """What others may read or enter, of all that is there."""
    found = {path: path.lstat().st_mode for path in (folder, *folder.rglob("*"))}
    assert len(found) > 1
    wanted = {path: 0o700 if stat.S_ISDIR(mode) else 0o600 for path, mode in found.items()}
    return sorted(
        f"{path} {stat.S_IMODE(mode):o}" for path, mode in found.items() if stat.S_IMODE(mode) != wanted[path]
    )


def open_to_all(folder: Path) -> None:
    """As an older release, a copy or a backup may have left it."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_servers_data(tmp_path: Path) -> None:
    """Rows, packs, blobs, snapshots, models, the register of what it has seen, and an upload under way."""
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    manifest = write_manifest(tmp_path / "model", "test", {"w": np.zeros(100_000, np.float32)})
    config = server_config(data, server={"snapshot_every_versions": 1})
    small, large = (replace(DEFAULT_LIMITS, inline_bytes_max=n) for n in (1000, 1 << 20))
    for limits in (large, small):  # the second time over what the first has left, open to all
        with Served(config, manifest, limits) as served:
            device = served.device()
            device.work()
            task, values = device.task(), bytes(400_000)
            header = device.header(task, values)
            with pytest.raises(grpc.RpcError, match="bytes declared"):
                device.stub.PushUpdate(requests(header, chunks(values[:-1])), timeout=600)
            assert loose(data) == []  # SQLite's own files are there, too
            assert (data / "anabranch.db-wal").exists()
        assert loose(data) == []
        kinds = {path.suffix for path in data.rglob("*") if path.is_file()}
        assert {".db", ".log", ".safetensors", ".bin"} <= kinds
        open_to_all(data)
    assert {".part"} <= kinds
    assert any((data / "blobs").rglob("*"))


def test_the_papers(tmp_path: Path) -> None:
    Authority.create(tmp_path / "ca").close()
    with federation(tmp_path / "first") as made:
        check_papers(made)
    for folder in (tmp_path / "first").iterdir():
        open_to_all(folder)
    Authority.open(made.authority.folder).close()
    assert loose(made.authority.folder) == []


def check_papers(made: Federation) -> None:
    """Of the authority, of a device, of an operator."""
    wallet, operator = made.joined("device-1"), made.operator()
    made.device(wallet).enrol()
    for folder in (made.authority.folder, wallet.folder, operator.folder, made.data_dir):
        assert loose(folder) == [], folder


def test_a_devices_folder(tmp_path: Path) -> None:
    """The held model, the lock, and a result that waits for the server."""
    devices, folder = Devices(tmp_path), tmp_path / "a"
    folder.mkdir(mode=0o755)
    for _ in range(2):
        devices.agent(tasks_max=1).run()
        Outbox(folder / "outbox").put(UpdateEntry("u", "t", "", 0, 1, 1, "raw", b"values", 1))
        write_record(folder / MEMORY / "u.safetensors", Record({"w": np.zeros(9)}, {}), durable=True)
        assert loose(folder) == []
        assert {path.name for path in folder.iterdir()} >= {"outbox", "lock", HELD, MEMORY}
        open_to_all(folder)
    with locked(folder):
        assert loose(folder) == []


def test_a_devices_folder_that_was_not_there(tmp_path: Path) -> None:
    device_id(tmp_path / "named")
    with locked(tmp_path / "nameless"):
        for name in ("named", "nameless"):
            assert loose(tmp_path / name) == []
