"""The file beside the log that says how far it had come."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anabranch.core.errors import StoreCorrupt
from anabranch.server.store.base import DiskFailed, Mark
from anabranch.server.store.mark import FILE, SLOT_BYTES, SLOTS, MarkFile


def mark(seq: int) -> Mark:
    return Mark("run-1", seq, f"{seq:064x}")


def written(folder: Path, *seqs: int) -> Path:
    """The file, after these were written, by two processes in turns."""
    for seq in seqs:
        marks = MarkFile(folder)
        marks.read()
        marks.write(mark(seq))
        marks.close()
    return folder / FILE


def calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """What is asked of the system from now on, in order."""
    done: list[str] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            done.append(name)
            return real(*given)

        return call

    for name in names:
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    return done


def test_the_newest_mark_is_read(tmp_path: Path) -> None:
    assert MarkFile(tmp_path).read() is None
    marks = MarkFile(tmp_path)
    for seq in (3, 4, 9, 10, 11):
        marks.write(mark(seq))
        assert MarkFile(tmp_path).read() == mark(seq)
    marks.close()
    path = written(tmp_path, 12, 20)
    assert MarkFile(tmp_path).read() == mark(20)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == SLOTS * SLOT_BYTES  # nothing is ever added to it


@pytest.mark.parametrize("kept", [80, 90, 110, 150])
def test_a_write_that_is_cut_off_leaves_what_was_acknowledged_before(kept: int, tmp_path: Path) -> None:
    path = written(tmp_path, 5, 6)
    before = path.read_bytes()
    after = written(tmp_path, 7).read_bytes()
    (slot,) = [n for n in range(SLOTS) if _slot(before, n) != _slot(after, n)]
    torn = _slot(after, slot)[:kept] + _slot(before, slot)[kept:]
    path.write_bytes(before[: slot * SLOT_BYTES] + torn + before[(slot + 1) * SLOT_BYTES :])
    assert torn not in (_slot(before, slot), _slot(after, slot))
    assert MarkFile(tmp_path).read() == mark(6)
    written(tmp_path, 8)  # the spoiled slot is the next to be written
    assert MarkFile(tmp_path).read() == mark(8)
    assert _slot(path.read_bytes(), 1 - slot) == _slot(before, 1 - slot)


def test_what_waits_for_its_flush_leaves_what_was_flushed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may spoil the slot that is written, however often that was."""
    done = calls(monkeypatch, "pwrite", "fdatasync", "fsync")
    monkeypatch.setattr("anabranch.server.store.mark.FLUSHED_S", 3600.0)
    path = written(tmp_path, 1)
    marks, kept = MarkFile(tmp_path), 0
    assert marks.read() == mark(1)
    marks.write(mark(2))
    for flushed in (2, 5):
        (kept,) = [n for n in range(SLOTS) if _slot(path.read_bytes(), n) == _slot_of(flushed)]
        done.clear()
        for seq in range(flushed + 1, flushed + 4):
            marks.write(mark(seq), flushed=False)
            assert MarkFile(tmp_path).read() == mark(seq)
            assert _slot(path.read_bytes(), kept) == _slot_of(flushed)
        assert set(done) == {"pwrite"}
        done.clear()
        for _ in range(2):
            marks.settle()
        assert done == ["fdatasync"]
    monkeypatch.setattr("anabranch.server.store.mark.FLUSHED_S", 0.0)
    marks.write(mark(9))
    done.clear()
    marks.write(mark(10), flushed=False)
    assert done == ["pwrite", "fdatasync"], "it was time"


def test_a_process_that_begins_flushes_what_the_one_before_it_may_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 1)
    done = calls(monkeypatch, "pwrite", "fsync")
    written(tmp_path, 2)
    assert done == ["fsync", "pwrite"]


@pytest.mark.parametrize("length", [0, 1, SLOT_BYTES, SLOTS * SLOT_BYTES - 1, SLOTS * SLOT_BYTES + 1])
def test_a_file_of_another_length_is_damaged(length: int, tmp_path: Path) -> None:
    path = written(tmp_path, 5)
    path.write_bytes(path.read_bytes().ljust(length)[:length])
    with pytest.raises(StoreCorrupt, match="attest-restore"):
        MarkFile(tmp_path).read()


def test_a_disk_with_room_for_a_block_of_it_alone_has_no_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes what it has room for, without a word; half a mark would be a damaged one for ever."""
    real, room = os.pwrite, [SLOT_BYTES]

    def pwrite(descriptor: int, data: bytes, at: int) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[: room.pop()], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        marks = MarkFile(tmp_path)
        with pytest.raises(DiskFailed, match="no space left"):
            marks.write(mark(1))
        marks.close()
    assert MarkFile(tmp_path).read() is None
    written(tmp_path, 2)
    assert MarkFile(tmp_path).read() == mark(2)


def test_a_disk_that_does_not_read_it_now_has_not_lost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told to forget what it says."""

    def failed(descriptor: int, size: int, at: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    written(tmp_path, 5)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", failed)
        with pytest.raises(DiskFailed, match=r"reading .*acknowledged.*restart to recover"):
            MarkFile(tmp_path).read()
    assert MarkFile(tmp_path).read() == mark(5)


def test_a_file_without_a_whole_slot_is_damaged(tmp_path: Path) -> None:
    path = written(tmp_path, 5, 6)
    data = bytearray(path.read_bytes())
    for slot in range(SLOTS):
        data[slot * SLOT_BYTES + 20] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreCorrupt, match="is damaged"):
        MarkFile(tmp_path).read()


def _slot_of(seq: int) -> bytes:
    """By its form: JSON with its keys in order, its digest, spaces."""
    text = json.dumps({"head": f"{seq:064x}", "run_id": "run-1", "seq": seq})
    return f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n".encode().ljust(SLOT_BYTES)


def _slot(data: bytes, number: int) -> bytes:
    return data[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]
