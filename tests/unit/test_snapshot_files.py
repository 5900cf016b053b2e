"""Files of snapshots: what they name on a shelf, and which of them a start need not look through."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from anabranch.core.engine.shelf import ROW
from anabranch.core.errors import StoreCorrupt
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.snapshot import FORMAT, Snapshot
from anabranch.server.store.base import DiskFailed
from anabranch.server.store.snapshots import META, SnapshotFiles, named_by

ROW_OF = {ROW: "ab" * 32, "size": 3}


def files_in(folder: Path) -> SnapshotFiles:
    found = SnapshotFiles(folder, DEFAULT_LIMITS)
    found.prepare()
    return found


def snapshot(state: Any) -> Snapshot:
    return Snapshot({"format": FORMAT, "version": 1, "state": state}, {"vector": np.ones(3, np.float32)})


def named_in(plain: Any) -> set[str]:
    """The oracle: the value of each key `ROW` of any table, wherever that is."""
    if isinstance(plain, dict):
        return {plain[ROW]} if ROW in plain else set().union(*map(named_in, plain.values()))
    return set().union(*map(named_in, plain)) if isinstance(plain, list) else set()


def spoil(path: Path) -> None:
    """Write over the JSON of a snapshot; its header stays."""
    data = path.read_bytes()
    at = data.index(b'{"format"')
    path.write_bytes(data[:at] + b"?" * 8 + data[at + 8 :])


def test_a_disk_that_fails_is_told_by_what_it_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails again where what was half written is removed."""
    files = files_in(tmp_path)

    def failing(number: int) -> Callable[..., None]:
        def fail(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.EIO))
        patch.setattr(Path, "unlink", failing(errno.EROFS))
        with pytest.raises(DiskFailed, match=r"writing a snapshot: .*Input/output error"):
            files.write(snapshot({}))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.EIO))
        with pytest.raises(DiskFailed):
            files.write(snapshot({}))
    assert len(list(files.folder.iterdir())) == 1, "that which could not be removed"


TEXTS = st.sampled_from(["", ROW, f'"{ROW}"', f'\\"{ROW}', "$", "a"])
NAMES = TEXTS.filter(lambda text: text != ROW)
STATES = st.recursive(
    st.none() | st.integers() | TEXTS | st.just(ROW_OF),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(state=STATES)
def test_the_names_of_any_snapshot_are_those_in_its_json(tmp_path: Path, state: Any) -> None:
    files = files_in(tmp_path)
    taken = snapshot(state)
    sha256 = files.write(taken)
    assert files.names(sha256) == named_by(files.read(sha256)) == named_by(taken) == named_in(taken.meta)


def test_the_json_of_a_snapshot_that_names_nothing_is_not_looked_at(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    sha256 = files.write(snapshot({"a": 1}))
    spoil(files.path(sha256))
    assert files.names(sha256) == set()
    with pytest.raises(StoreCorrupt, match="SHA-256"):  # whoever goes on from it sees
        files.read(sha256)


def test_nor_is_it_once_it_was_read(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    read = files.read(files.write(snapshot({"a": 1})))
    assert named_by(replace(read, meta={"state": ROW_OF})) == set()  # by the note alone


def test_one_that_names_something_has_to_be_whole(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    sha256 = files.write(snapshot([ROW_OF]))
    spoil(files.path(sha256))
    with pytest.raises(StoreCorrupt, match="cannot be read"):
        files.names(sha256)


@pytest.mark.parametrize("state", [{"a": 1}, [ROW_OF]])
def test_files_without_a_note_are_looked_through(tmp_path: Path, state: Any) -> None:
    """Of releases of before there was one."""
    files = files_in(tmp_path)
    path = files.path(files.write(snapshot(state)))
    save_file(load_file(path), path)  # the library's own function has no notes
    assert files.names(path.stem) == named_in(state)
    spoil(path)
    with pytest.raises(StoreCorrupt, match="cannot be read"):
        files.names(path.stem)


def test_the_library_reads_the_file(tmp_path: Path) -> None:
    """So do releases of before there was a note."""
    files = files_in(tmp_path)
    found = load_file(files.path(files.write(snapshot({"a": 1}))))
    assert sorted(found) == [META, "vector"]
    assert json.loads(found[META].tobytes())["state"] == {"a": 1}
