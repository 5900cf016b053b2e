"""The outbox survives a crash at any moment, and never gives back what was not put in."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from contents import named, package
from hypothesis import given
from hypothesis import strategies as st
from power import disk

from anabranch.client.disk import DeviceDisk
from anabranch.client.outbox import Outbox, OutboxBounds, UpdateEntry
from anabranch.core import content
from anabranch.core.errors import (
    ConfigError,
    InvalidUpdate,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreNewer,
    TooLarge,
)
from anabranch.protos.v1.model_pb2 import SubmodelMap


def entry(update_id: str = "u-1", payload: bytes = b"\x00\n12345", **changes: object) -> UpdateEntry:
    """An entry whose payload has a newline in it."""
    fields: dict[str, object] = {
        "update_id": update_id,
        "task_id": "t-1",
        "manifest_sha256": "ab" * 32,
        "base_version": 7,
        "examples": 30,
        "local_steps": 4,
        "codec": "raw",
        "payload": payload,
        "values": 4,
        "metrics": {"loss": 0.1},
    }
    return UpdateEntry(**(fields | changes))  # type: ignore[arg-type]


def whole(of: UpdateEntry) -> bytes:
    """The bytes of an entry's file."""
    return b"".join(bytes(part) for part in of.to_bytes())


def test_what_was_put_in_is_there_after_a_power_cut(tmp_path: Path) -> None:
    """Its name too: a file that its folder on the disk does not have cannot be found."""
    with disk(tmp_path) as ground:
        box = Outbox(ground.folder / "box")
        box.put(entry())
        box.put(entry(update_id="u-2"))
        ground.cut()
        ground.unmount()
        ground.mount()
        assert sorted(Outbox(ground.folder / "box").pending()) == ["u-1", "u-2"]


def test_what_was_put_in_comes_out_again_in_another_process(tmp_path: Path) -> None:
    submodel = SubmodelMap(starts=[0, 7, 9], lengths=[3, 1, 1])
    Outbox(tmp_path).put(entry(submodel=submodel))
    found = Outbox(tmp_path).load("u-1")
    assert whole(found) == whole(entry(submodel=submodel))
    assert found.submodel is not None
    assert found.submodel == submodel
    assert (found.base_version, found.examples, dict(found.metrics)) == (7, 30, {"loss": 0.1})


def test_an_update_keeps_the_kind_of_digest_that_it_was_first_named_by(tmp_path: Path) -> None:
    package()
    box = Outbox(tmp_path)
    for update_id, algorithm in (("u-1", "blake3"), ("u-2", "sha256")):
        box.put(entry(update_id, algorithm=algorithm))
        found = Outbox(tmp_path).load(update_id)
        assert found.digest == named(bytes(found.payload), algorithm)
        assert whole(found) == whole(entry(update_id, algorithm=algorithm))
    path = tmp_path / "u-1.update"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(StoreCorrupt, match="payload is damaged"):
        box.load("u-1")


@pytest.mark.parametrize("newer", [{"format": 3}, {"compressed_by": "zstd-9"}])
def test_results_of_a_newer_release_stay_where_they_are(newer: dict[str, Any], tmp_path: Path) -> None:
    """A device that is put back to an older program cannot send them, and may not throw them away."""
    box = Outbox(tmp_path)
    box.put(entry("u-1"))
    box.put(entry("u-2"))
    path = tmp_path / "u-1.update"
    _, line, payload = path.read_bytes().split(b"\n", 2)
    line = json.dumps({**json.loads(line), **newer}).encode()
    path.write_bytes(hashlib.sha256(line).hexdigest().encode() + b"\n" + line + b"\n" + payload)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StoreNewer, match=r"outbox entry u-1: the header .*upgrade anabranch"):
        Outbox(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept


def test_a_result_that_is_renamed_is_so_on_the_disk_and_drops_no_other(tmp_path: Path) -> None:
    package()
    made = [entry(update_id, algorithm="blake3") for update_id in ("u-1", "u-2")]
    bounds = OutboxBounds(entries_max=2)
    for one in made:
        Outbox(tmp_path / "outbox").put(one)
    renamed = DeviceDisk(tmp_path, bounds).renamed(made[0])
    again = DeviceDisk(tmp_path, bounds)
    assert again.waiting() == ["u-1", "u-2"]
    assert renamed.digest == again.load("u-1").digest == named(bytes(made[0].payload), "sha256")
    assert again.load("u-2").algorithm == "blake3"


def test_a_device_that_has_lost_the_package_stops_and_keeps_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package()
    Outbox(tmp_path).put(entry(algorithm="blake3"))
    with monkeypatch.context() as without:
        without.setattr(content, "blake3", None)
        with pytest.raises(ConfigError, match=r'pip install "anabranch\[blake3\]"'):
            Outbox(tmp_path)
    assert Outbox(tmp_path).pending() == ["u-1"]


def test_a_removed_entry_is_gone_and_may_be_removed_again(tmp_path: Path) -> None:
    box = Outbox(tmp_path)
    box.put(entry())
    box.remove("u-1")
    box.remove("u-1")
    assert box.pending() == []
    with pytest.raises(StoreCorrupt, match="there is none"):
        box.load("u-1")


def test_the_oldest_comes_first(tmp_path: Path) -> None:
    box = Outbox(tmp_path)
    for age, update_id in enumerate(["u-9", "u-1", "u-5"]):
        box.put(entry(update_id))
        os.utime(tmp_path / f"{update_id}.update", ns=(-age, -age))  # the clock is set back, and again
    assert box.pending() == ["u-9", "u-1", "u-5"]
    again = Outbox(tmp_path)
    assert again.pending() == ["u-9", "u-1", "u-5"]
    again.remove("u-9")
    again.put(entry("u-0"))
    assert Outbox(tmp_path).pending() == ["u-1", "u-5", "u-0"]


def test_an_entry_that_is_put_in_anew_goes_to_the_end(tmp_path: Path) -> None:
    box = Outbox(tmp_path)
    for update_id in ("u-1", "u-2"):
        box.put(entry(update_id))
    box.put(entry("u-1", b"more"))
    assert box.pending() == ["u-1", "u-2"], "it was never removed"
    box.remove("u-1")
    box.put(entry("u-1"))
    assert box.pending() == ["u-2", "u-1"]
    assert Outbox(tmp_path).pending() == ["u-2", "u-1"]


def test_entries_of_older_releases_come_first_by_their_time(tmp_path: Path) -> None:
    Outbox(tmp_path).put(entry("u-3"))
    for age, update_id in enumerate(["u-2", "u-1"], start=1):
        path = tmp_path / f"{update_id}.update"
        _, line, payload = whole(entry(update_id)).split(b"\n", 2)
        line = line.replace(b',"number":0', b"")
        path.write_bytes(b"\n".join((hashlib.sha256(line).hexdigest().encode(), line, payload)))
        os.utime(path, ns=(age, age))
    box = Outbox(tmp_path)
    assert box.pending() == ["u-2", "u-1", "u-3"]
    box.put(entry("u-4"))
    assert box.pending() == ["u-2", "u-1", "u-3", "u-4"]


# --- crashes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1, 64, 65, 100, -8, -1])
def test_a_torn_entry_is_dropped_with_a_word_in_the_log(
    kept: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Outbox(tmp_path).put(entry("u-1"))
    Outbox(tmp_path).put(entry("u-2"))
    file = tmp_path / "u-1.update"
    file.write_bytes(file.read_bytes()[:kept])
    with caplog.at_level(logging.WARNING):
        assert Outbox(tmp_path).pending() == ["u-2"]
    assert "u-1" in caplog.text
    assert not file.exists()


def test_a_crash_while_writing_leaves_no_entry(tmp_path: Path) -> None:
    data = whole(entry("u-2"))
    for length in range(0, len(data), 17):
        (tmp_path / "u-2.tmp").write_bytes(data[:length])
        assert Outbox(tmp_path).pending() == []
    assert list(tmp_path.iterdir()) == []


@given(at=st.integers(0, len(whole(entry())) - 1), flip=st.integers(1, 255))
def test_a_changed_byte_is_noticed(at: int, flip: int) -> None:
    data = bytearray(whole(entry()))
    data[at] ^= flip
    with pytest.raises(StoreCorrupt):
        UpdateEntry.from_bytes(bytes(data))


def test_an_entry_that_the_disk_does_not_read_is_named_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "u-1.update"
    path.mkdir()  # what a read says of it comes without a name
    with pytest.raises(StoreError, match=r"u-1\.update cannot be used: Is a directory"):
        Outbox(tmp_path)
    assert path.exists()


def test_an_entry_under_another_name_is_not_taken(tmp_path: Path) -> None:
    box = Outbox(tmp_path)
    box.put(entry("u-1"))
    (tmp_path / "u-1.update").rename(tmp_path / "u-2.update")
    assert Outbox(tmp_path).pending() == []


def test_a_name_may_not_leave_the_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidUpdate, match="update_id"):
        Outbox(tmp_path).put(entry("../u-1"))


# --- bounds --------------------------------------------------------------------------------------


def test_what_is_put_in_without_room_costs_no_other(tmp_path: Path) -> None:
    size = len(whole(entry("u-0")))
    for folder, bounds in (("a", OutboxBounds(entries_max=2)), ("b", OutboxBounds(bytes_max=2 * size + 1))):
        for n in range(3):
            Outbox(tmp_path / folder, bounds).put(entry(f"u-{n}"))
        assert Outbox(tmp_path / folder, bounds).pending() == ["u-0", "u-1", "u-2"]


def test_what_can_never_fit_is_refused_and_costs_nothing(tmp_path: Path) -> None:
    box = Outbox(tmp_path, OutboxBounds(bytes_max=1000))
    box.put(entry("u-1"))
    with pytest.raises(TooLarge, match="cap of 1000"):
        box.put(entry("u-2", bytes(1000)))
    assert box.pending() == ["u-1"]


def test_a_full_disk_is_said_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    box = Outbox(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFull, match="no space left"):
        box.put(entry())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    box = Outbox(tmp_path / "box")
    (tmp_path / "box").rmdir()
    with pytest.raises(StoreError, match="u-1"):
        box.put(entry())


def test_the_least_outbox_holds_one_result_of_just_its_size(tmp_path: Path) -> None:
    one = entry("u-1")
    size = sum(map(len, one.to_bytes(number=1)))
    box = Outbox(tmp_path, OutboxBounds(entries_max=1, bytes_max=size))
    assert box.has_room(one)
    box.put(one)
    assert box.pending() == ["u-1"]
    assert OutboxBounds(entries_max=1, bytes_max=1).bytes_max == 1


def test_who_can_wait_asks_for_room_first(tmp_path: Path) -> None:
    size = len(whole(entry("u-1")))
    for folder, bounds in (("a", OutboxBounds(entries_max=2)), ("b", OutboxBounds(bytes_max=2 * size + 1))):
        box = Outbox(tmp_path / folder, bounds)
        assert box.has_room(entry("u-1"))
        box.put(entry("u-1"))
        box.put(entry("u-2"))
        assert not box.has_room(entry("u-3"))
        box.remove("u-1")
        assert box.has_room(entry("u-3"))
    with pytest.raises(TooLarge):
        Outbox(tmp_path / "c", OutboxBounds(bytes_max=size - 1)).has_room(entry("u-1"))


@pytest.mark.parametrize("bound", ["entries_max", "bytes_max"])
def test_an_outbox_that_can_hold_nothing_is_refused(bound: str) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        OutboxBounds(**{bound: 0})
