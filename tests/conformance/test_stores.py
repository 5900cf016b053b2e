"""Every store passes this suite: memory, SQLite, PostgreSQL."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from stores import (
    BAD,
    GOOD,
    INFO,
    NOW_GOOD,
    Backend,
    History,
    asked,
    decided,
    enrolled,
    logged,
    numbered,
    project,
    published,
    reference,
    snapshot,
    update,
    upload,
)

from anabranch.core import events as ev
from anabranch.core.errors import ManifestMismatch, StoreCorrupt, StoreError
from anabranch.core.journal import to_record
from anabranch.core.model.updates import (
    Reason,
    Receipt,
)
from anabranch.core.snapshot import Snapshot
from anabranch.server.store.base import Entry, Store

# --- the log ---------------------------------------------------------------------------------


def test_events_come_back_as_they_went_in(store: Store) -> None:
    entries = [enrolled("ü✓\U0001f680"), asked("t1"), update(1), update(2, flaw="NaN\0 in tensor 'w'")]
    assert store.append(entries) == [1, 2, 3, 4]
    assert logged(store) == numbered(entries)
    assert store.append([enrolled("c2")]) == [5]
    assert [seq for seq, _ in store.records()] == [1, 2, 3, 4, 5]


def test_more_events_than_a_page_come_in_order_while_others_are_written(store: Store) -> None:
    for _ in range(3):
        store.append([asked(f"t{i}") for i in range(400)])
    records = store.records()
    first = next(records)
    store.append([asked("late")])
    assert [first[0], *(seq for seq, _ in records)] == list(range(1, 1202))


def test_an_empty_batch_is_nothing(store: Store) -> None:
    assert store.append([]) == []
    assert store.append((), ()) == []
    assert logged(store) == []


def test_an_update_counts_once(store: Store) -> None:
    assert store.append([update(1), update(1, b"other bytes")]) == [1, None]
    assert store.append([update(1), update(2), asked("t3"), update(2)]) == [None, 2, 3, None]
    assert [(seq, r["kind"]) for seq, r in store.records()] == [(1, "update"), (2, "update"), (3, "asked")]
    assert bytes(store.payload(reference(update(1)))) == b"payload 1"
    assert store.problems() == []


def test_all_is_there_after_closing_and_opening_again(backend: Backend) -> None:
    store = backend.start()
    entries = [enrolled(), asked("t1"), update(1)]
    store.append(entries)
    store.close()
    store.close()  # harmless
    again = backend.open()
    assert again.start(replace(INFO, run_id="run-2", created_at=99.0)) == INFO
    assert logged(again) == numbered(entries)
    assert again.append([update(1), update(2)]) == [None, 4]
    again.close()


def test_before_start_a_store_only_reads(backend: Backend) -> None:
    first = backend.start()
    first.append([update(1)])
    first.close()
    reader = backend.open()
    assert reader.info() == INFO
    assert len(logged(reader)) == 1
    assert reader.problems() == []
    with pytest.raises(StoreError, match="start"):
        reader.append([update(2)])
    reader.close()


def test_there_is_no_run_in_a_new_store(backend: Backend) -> None:
    store = backend.open()
    assert store.info() is None
    store.close()
    assert not backend.folder.exists()  # looking leaves no traces


def test_another_model_is_refused(backend: Backend) -> None:
    backend.start().close()
    store = backend.open()
    with pytest.raises(ManifestMismatch, match="other tensors or units"):
        store.start(replace(INFO, layout=[["w", [5], "float32"]]))
    with pytest.raises(ManifestMismatch, match="other first weights"):
        store.start(replace(INFO, initial_sha256="cd" * 32))
    store.start(INFO)
    store.close()


# --- payloads --------------------------------------------------------------------------------


def test_small_payloads_are_kept_inline_and_large_ones_as_blobs(store: Store) -> None:
    large = bytes(range(256)) * 40
    upload(store, large, "u2")
    entries = [update(1), replace(update(2, large), inline=None), update(3, b"\0")]
    store.append(entries)
    for entry, data in zip(entries, (b"payload 1", large, b"\0"), strict=True):
        assert bytes(store.payload(reference(entry))) == data
    assert store.problems() == []


def test_a_large_update_needs_its_blob(store: Store) -> None:
    with pytest.raises(StoreError, match="adopt it first"):
        store.append([asked("t1"), replace(update(1), inline=None)])
    assert logged(store) == []
    # What was found to be flawed is recorded, its bytes are not needed.
    assert store.append([replace(update(1, flaw="truncated"), inline=None)]) == [1]
    assert store.problems() == []


@pytest.mark.parametrize("missing", [False, True])
def test_a_damaged_blob_is_found(backend: Backend, missing: bool) -> None:
    store = backend.start()
    sha256 = upload(store, b"x" * 1000, "u1")
    entry = replace(update(1, b"x" * 1000), inline=None)
    store.append([entry])
    backend.damage("blobs")
    if missing and backend.memory is None:
        backend.lose(sha256)
    with pytest.raises(StoreCorrupt, match=sha256):
        store.payload(reference(entry))
    (problem,) = store.problems()
    assert "u1" in problem
    store.close()


def test_an_unknown_payload_is_an_error(store: Store) -> None:
    with pytest.raises(StoreCorrupt):
        store.payload(ev.Payload("0" * 64, 1))


def test_a_damaged_inline_payload_is_found(on_disk: Backend) -> None:
    store = on_disk.start()
    store.append([update(1)])
    store.close()
    on_disk.execute("UPDATE updates SET payload = :data", data=b"payload x")
    store = on_disk.open()
    with pytest.raises(StoreCorrupt):
        store.payload(reference(update(1)))
    assert len(store.problems()) == 1
    store.close()


# --- projections -----------------------------------------------------------------------------


def test_projections_are_read_back(store: Store, a_history: History) -> None:
    entries, projections = a_history
    store.append(entries)
    assert store.receipt("u1") is None
    store.append([], projections)
    for number, decision, version in ((1, GOOD, 0), (2, NOW_GOOD, 1), (3, BAD, 1), (5, NOW_GOOD, 2)):
        named = "c1", reference(update(number)).sha256
        assert store.receipt(f"u{number}") == Receipt(f"u{number}", f"t{number}", version, decision, *named)
    assert store.receipt("u6") is None
    assert store.receipt("never seen") is None
    one, two = store.versions()
    assert (one.version, one.sha256, one.updates, one.published_at) == (1, "aa" * 32, 2, 13.0)
    assert (two.version, two.sha256, two.updates, two.snapshot) == (2, None, 2, False)
    assert store.versions(after=1) == [two]
    assert store.versions(limit=1) == [one]
    assert store.problems() == []


def test_projections_may_be_written_again(store: Store, a_history: History) -> None:
    entries, projections = a_history
    store.append(entries)
    store.append([], projections)
    before = (store.versions(), [store.receipt(f"u{i}") for i in range(1, 7)])
    store.append([update(7)], [*projections, project(7, decided(6, NOW_GOOD, 3), published(3, 6))])
    store.append([], projections[2:4])
    assert (store.versions()[:2], [store.receipt(f"u{i}") for i in range(1, 6)]) == (before[0], before[1][:5])
    assert store.problems() == []


def test_a_digest_may_come_late_and_then_stays(store: Store, a_history: History) -> None:
    entries, projections = a_history
    store.append(entries, ())
    store.append([], [*projections, project(7, v2="bb" * 32), project(7, v1="cc" * 32)])
    assert [v.sha256 for v in store.versions()] == ["aa" * 32, "bb" * 32]


def test_a_duplicate_changes_nothing(store: Store) -> None:
    store.append([update(1)])
    store.append([], [project(1, decided(1, GOOD))])
    store.append([], [project(1, replace(decided(1, BAD), duplicate=True))])
    receipt = store.receipt("u1")
    assert receipt is not None
    assert receipt.decision == GOOD


def test_numbers_and_text_that_no_column_holds_are_no_obstacle(store: Store) -> None:
    entry = update(1)
    entry.record["base_version"] = entry.record["examples"] = (1 << 64) - 1
    store.append([entry, Entry(to_record(ev.TaskDropped(1.0, "c1", "t1", "why\0\ud800")))])
    bad = replace(BAD, staleness=1 << 64, detail="a\0b\ud800")
    store.append([], [project(1, decided(1, bad))])
    assert logged(store)[0][1]["base_version"] == (1 << 64) - 1
    receipt = store.receipt("u1")
    assert receipt is not None
    assert receipt.decision.reason is Reason.STALE


def test_metrics_are_kept_by_version(store: Store, a_history: History) -> None:
    store.append(a_history[0])
    store.append([], a_history[1])
    store.add_metrics(1, {"accuracy": 0.25, "loss": 2.0}, 20.0)
    store.add_metrics(1, {"accuracy": 0.5, "loss": float("nan")}, 21.0)
    store.add_metrics(7, {"accuracy": 1.0}, 22.0)  # of a version that is not projected yet
    store.add_metrics(2, {}, 23.0)
    assert [dict(v.metrics) for v in store.versions()] == [{"accuracy": 0.5, "loss": 2.0}, {}]


# --- snapshots -------------------------------------------------------------------------------


def same(one: Snapshot, other: Snapshot) -> bool:
    names = set(one.arrays) == set(other.arrays)
    return (
        one.meta == other.meta
        and names
        and all(
            a.dtype == other.arrays[n].dtype and np.array_equal(a, other.arrays[n])
            for n, a in one.arrays.items()
        )
    )


def test_a_snapshot_comes_back_with_what_is_after_it(store: Store) -> None:
    entries = [asked(f"t{i}") for i in range(5)]
    store.append(entries)
    assert store.load().snapshot is None
    assert list(store.load().tail) == numbered(entries)
    store.save_snapshot(snapshot(0), 3, 5.0)
    found = store.load()
    assert found.snapshot is not None
    assert same(found.snapshot, snapshot(0))
    assert all(array.flags.writeable for array in found.snapshot.arrays.values())
    assert found.applied_through_seq == 3
    assert list(found.tail) == numbered(entries[3:], 4)


def test_a_snapshot_is_a_copy(store: Store) -> None:
    mine = snapshot(0)
    store.save_snapshot(mine, 0, 5.0)
    mine.arrays["vector"][:] = -1
    found = store.load().snapshot
    assert found is not None
    assert same(found, snapshot(0))


def test_the_newest_three_are_kept_and_bad_ones_passed_over(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    store = backend.start()
    store.append([asked(f"t{i}") for i in range(9)])
    for version in range(5):
        store.save_snapshot(snapshot(version), version + 1, 5.0)
        store.save_snapshot(snapshot(version), version + 1, 6.0)  # the same again is no other
    if backend.memory is None:
        assert len(backend.snapshots()) == 3
    assert store.problems() == []
    for seq in (5, 4, 3, 0):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            found = store.load()
        assert found.applied_through_seq == seq
        assert [s for s, _ in found.tail] == list(range(seq + 1, 10))
        assert len(caplog.records) == len(store.problems()) == (5 - seq if seq else 3)
        if seq:
            _damage_snapshot(backend, seq - 1)
    store.close()


def _damage_snapshot(backend: Backend, version: int) -> None:
    """Flip a byte of one version's snapshot."""
    wanted = snapshot(version).arrays["vector"].tobytes()
    if backend.memory is not None:
        (kept,) = [k for k in backend.memory.books.snapshots if wanted in k.data]
        kept.data = kept.data.replace(wanted, wanted[:-1] + b"!")
        return
    if backend.kind == "postgresql":
        hexed = wanted.hex()
        flipped = f"replace(encode(data, 'hex'), '{hexed}', '{hexed[:-2]}21')"
        backend.behind(
            f"UPDATE chunks SET data = decode({flipped}, 'hex')"
            f" WHERE position('\\x{hexed}'::bytea in data) > 0"
        )
        return
    (path,) = [p for p in backend.folder.glob("snapshots/*") if wanted in p.read_bytes()]
    path.write_bytes(path.read_bytes().replace(wanted, wanted[:-1] + b"!"))


def test_a_snapshot_file_that_is_gone_is_passed_over(on_disk: Backend) -> None:
    store = on_disk.start()
    store.append([asked("t1"), asked("t2")])
    store.save_snapshot(snapshot(1), 1, 5.0)
    store.save_snapshot(snapshot(2), 2, 6.0)
    on_disk.lose(on_disk.snapshots()[-1])
    assert store.load().applied_through_seq == 1
    store.close()


def test_versions_say_which_have_a_snapshot(store: Store, a_history: History) -> None:
    store.append(a_history[0])
    store.append([], a_history[1])
    store.save_snapshot(snapshot(1), 3, 5.0)
    assert [v.snapshot for v in store.versions()] == [True, False]
