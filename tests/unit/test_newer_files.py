"""Files that a newer release has written are named as such, and stay: they are not damaged."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machines import Bench

from anabranch.client.history import FILE as HISTORY
from anabranch.client.history import SeenHead, SeenHistory
from anabranch.core.errors import ConfigError, DataError, StoreCorrupt, StoreNewer
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.snapshot import APART, Snapshot, restore, take_snapshot
from anabranch.identity.authority import Authority
from anabranch.identity.register import RegisterPoint
from anabranch.reports.folders import CHECKPOINT
from anabranch.server.backup import BackupRecord, read_backup
from anabranch.server.job_folder import NOTE, JobNote, note_of
from anabranch.server.manifest import keep_manifest, kept_manifest, write_manifest
from anabranch.server.restored import BACKUP
from anabranch.server.seen_register import FILE as REGISTER
from anabranch.server.seen_register import check_register
from anabranch.server.store.base import Mark, RunInfo
from anabranch.server.store.mark import FILE as MARK
from anabranch.server.store.mark import SLOT_BYTES, MarkFile
from anabranch.server.store.run_note import FILE as RUN
from anabranch.server.store.run_note import noted_run
from anabranch.server.store.snapshots import SnapshotFiles
from anabranch.simulation.run import RunProgress, simulate
from anabranch.testing.federation import config

HEAD = SeenHead(3, "ab", "cd", "ef", "01")
PLAIN = RunInfo("r-1", "run", {}, [["w", [2], "float32"]], "ab" * 32, 1.0)
GROUPED = replace(PLAIN, layout={"tensors": PLAIN.layout, "groups": []})


def read_history(folder: Path) -> object:
    return SeenHistory(None, folder)  # type: ignore[arg-type]


def as_json(data: object) -> bytes:
    return json.dumps(data).encode()


def with_digest(data: dict[str, Any]) -> bytes:
    """As the note of a run has its own."""
    text = json.dumps(data).encode()
    return as_json({**data, "sha256": hashlib.sha256(text).hexdigest()})


def slots(data: dict[str, Any]) -> bytes:
    """As the file of the acknowledged has them, by keys in their order."""
    text = json.dumps(data).encode()
    return (text + b"\n" + hashlib.sha256(text).hexdigest().encode() + b"\n").ljust(SLOT_BYTES) * 2


FILES: list[tuple[str, Any, Callable[[Any], bytes], Callable[[Path], object]]] = [
    (HISTORY, {"r-1": asdict(HEAD)}, as_json, read_history),
    (BACKUP, asdict(BackupRecord("r-1", 1, 2, 3.0, 4, True)), as_json, read_backup),
    (RUN, asdict(PLAIN), with_digest, noted_run),
    (RUN, asdict(GROUPED), with_digest, noted_run),
    (NOTE, asdict(JobNote(1.0)), as_json, note_of),
    (MARK, asdict(Mark("r-1", 4, "ab")), slots, lambda folder: MarkFile(folder).read()),
]


@pytest.mark.parametrize(
    ("name", "known", "to_bytes", "read"),
    FILES,
)
def test_what_is_not_known_here_is_of_a_newer_release(
    name: str, known: Any, to_bytes: Any, read: Any, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(to_bytes(known))
    read(tmp_path)
    nested = name == HISTORY
    file.write_bytes(to_bytes({"r-1": {**known["r-1"], "tree": "ab"}} if nested else {**known, "tree": "ab"}))
    newer = file.read_bytes()
    with pytest.raises(StoreNewer, match=rf"{name}.* unknown fields: tree: a newer release"):
        read(tmp_path)
    assert file.read_bytes() == newer
    file.write_bytes(b"{")
    with pytest.raises((ConfigError, DataError, StoreCorrupt), match=r"damaged|cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize("newer", [{"changes": 3, "marked": 2, "mark": "ab"}, [3, 2, "ab", "cd"]])
def test_a_register_that_says_more_is_no_reason_to_forget_it(newer: Any, tmp_path: Path) -> None:
    with Authority.create(tmp_path / "ca") as authority:
        (tmp_path / REGISTER).write_text(json.dumps({authority.sha256: newer}))
        with pytest.raises(StoreNewer, match=r"register\.json says more .*upgrade anabranch"):
            check_register(tmp_path, authority, RegisterPoint())
    assert json.loads((tmp_path / REGISTER).read_text()) == {authority.sha256: newer}


def test_a_snapshot_of_a_newer_release_is_not_passed_over() -> None:
    bench = Bench()
    engine, found = bench.engine, take_snapshot(bench.engine)
    restore(found, engine.spec, engine.strategy, engine.settings)
    found.meta["tides"] = 1
    with pytest.raises(StoreNewer, match=r"snapshot of version 0: .*tides: a newer release"):
        restore(found, engine.spec, engine.strategy, engine.settings)


def test_a_checkpoint_of_a_newer_release_is_not_removed(tmp_path: Path) -> None:
    run = config(strategy={"name": "fedasync"}, run={"updates_max": 6})

    def broken_off(progress: RunProgress) -> None:
        if progress.updates >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(run, tmp_path, progress=broken_off, checkpoint_s=0.001)
    with sqlite3.connect(tmp_path / CHECKPOINT) as file:
        ((origin,),) = file.execute("SELECT value FROM facts WHERE name = 'origin'")
        newer = json.dumps({**json.loads(origin), "tides": 1})
        file.execute("UPDATE facts SET value = ? WHERE name = 'origin'", (newer,))
    file.close()
    kept = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(StoreNewer, match=r"tides: a newer release"):
        simulate(run, tmp_path, resume=True)
    assert (tmp_path / CHECKPOINT).read_bytes() == kept


def test_a_register_of_a_newer_format_is_named_as_that(tmp_path: Path) -> None:
    Authority.create(tmp_path / "ca").close()
    with sqlite3.connect(tmp_path / "ca" / "register.db") as file:
        file.execute("PRAGMA user_version = 3")
    file.close()
    with pytest.raises(StoreNewer, match=r"register\.db is of format 3: a newer release"):
        Authority.open(tmp_path / "ca")


def test_a_manifest_of_a_newer_format_is_not_replaced(tmp_path: Path) -> None:
    """A server keeps its own beside its data, and writes it anew where it cannot be read."""
    manifest = write_manifest(tmp_path / "model", "test", {"w": np.zeros((2, 2), np.float32)})
    kept = kept_manifest(tmp_path)
    keep_manifest(kept, manifest)
    file = kept / "manifest.json"
    newer = json.dumps({**json.loads(file.read_text()), "format": 2, "tides": 1})
    file.write_text(newer)
    with pytest.raises(StoreNewer, match=r"manifest\.json is of format 2: a newer release"):
        keep_manifest(kept, manifest)
    assert file.read_text() == newer


def test_a_snapshot_file_of_a_newer_format_is_no_damage(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path, DEFAULT_LIMITS)
    files.prepare()
    sha256 = files.write(Snapshot({"format": APART + 1, "version": 1}, {"vector": np.ones(3, np.float32)}))
    with pytest.raises(StoreNewer, match=rf"is of format {APART + 1}: a newer release"):
        files.read(sha256)
    assert files.path(sha256).exists()
