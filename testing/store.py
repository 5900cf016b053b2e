"""What a store promises (server/store/base.py), and a short history to put in one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from anabranch.core import events as ev
from anabranch.core.config.extras import how_to_install
from anabranch.core.content import ALGORITHMS, SHA256, content_digest, usable
from anabranch.core.effects import Decided, Effect, Granted, Published
from anabranch.core.errors import InvalidUpdate, ManifestMismatch, StoreCorrupt, StoreError
from anabranch.core.journal import Record, line, to_record
from anabranch.core.model.arrays import Array
from anabranch.core.model.updates import (
    Ask,
    Capability,
    Decision,
    LocalPlan,
    Reason,
    Receipt,
    Task,
    Update,
    Verdict,
)
from anabranch.core.retention import ALL, Keep
from anabranch.core.snapshot import FORMAT, Snapshot
from anabranch.server.store.base import ChainLink, Entry, Mark, Projection, RunInfo, Store

INFO = RunInfo("run-1", "prüfung ✓", {"run": {"seed": 3}}, [["w", [4], "float32"]], "ab" * 32, 17.5)

History = tuple[list[Entry], list[Projection]]


def enrolled(client: str = "c1", now: float = 1.0) -> Entry:
    return Entry(to_record(ev.Enrolled(now, client, Capability(examples=7))))


def asked(task: str, client: str = "c1") -> Entry:
    return Entry(to_record(ev.TaskAsked(2.0, Ask(client, task))))


def update(
    number: int,
    data: bytes = b"",
    task: str = "",
    flaw: str = "",
    now: float = 3.0,
    algorithm: str = SHA256,
) -> Entry:
    data = data or f"payload {number}".encode()
    payload = ev.Payload(content_digest(data, algorithm), len(data))
    made = Update(f"u{number}", task or f"t{number}", "c1", 0, 5, np.empty(0, np.float32))
    return Entry(to_record(ev.UpdateArrived(now, made, payload, flaw)), data)


def mask_sum(number: int, data: bytes) -> Entry:
    payload = ev.Payload(hashlib.sha256(data).hexdigest(), len(data), "ring(32,20)")
    event = ev.MaskSumArrived(3.0, number, "north", payload, np.frombuffer(data, np.uint32))
    return Entry(to_record(event), data)


def reference(entry: Entry) -> ev.Payload:
    return ev.Payload(**entry.record["payload"])


def task(task_id: str, client: str = "c1") -> Task:
    return Task(task_id, client, 0, 2.0, 62.0, 60.0, 1, LocalPlan())


def decided(number: int, decision: Decision, version: int = 1, task_id: str = "") -> Decided:
    named = "c1", reference(update(number)).sha256
    return Decided("c1", Receipt(f"u{number}", task_id or f"t{number}", version, decision, *named), 5)


def published(version: int, *numbers: int) -> Published:
    return Published(version, np.zeros(4, np.float32), tuple(f"u{n}" for n in numbers))


def upload(store: Store, data: bytes, update_id: str, algorithm: str = SHA256) -> str:
    digest, half = content_digest(data, algorithm), len(data) // 2
    store.blobs.write(update_id, 0, data[:half], algorithm)
    store.blobs.write(update_id, half, data[half:], algorithm)
    assert bytes(store.blobs.seal(update_id, digest)) == data
    store.blobs.adopt(update_id, digest)
    store.blobs.cool(digest)  # which loses nothing
    return digest


def snapshot(version: int) -> Snapshot:
    arrays: dict[str, Array] = {
        "vector": np.arange(4, dtype=np.float32) + version,
        "history/0": np.arange(6, dtype=np.float64).reshape(2, 3)[:, ::2],
        "strategy/scale": np.asarray(2.5),
        "strategy/none": np.empty(0, np.int64),
    }
    return Snapshot({"format": FORMAT, "version": version, "clients": ["ü", "c1"], "x": 0.1 + 0.2}, arrays)


GOOD = Decision(Verdict.HELD, 2, 0.1 + 0.2)
NOW_GOOD = Decision(Verdict.PUBLISHED, 0, 1.0)
BAD = Decision(Verdict.REJECTED, 9, None, Reason.STALE, "staleness 9 is over the bound of 4 · ✗")


def logged(store: Store) -> list[tuple[int, Record]]:
    return list(store.records())


def numbered(records: Sequence[Entry], first: int = 1) -> list[tuple[int, Record]]:
    return list(enumerate((json.loads(line(e.record)) for e in records), first))


def project(seq: int, *effects: Effect, **digests: str) -> Projection:
    return Projection(seq, 10.0 + seq, effects, {int(v[1:]): d for v, d in digests.items()})


def a_history() -> History:
    """Two updates in version 1, one rejected, one held, one in version 2, and one not yet decided."""
    entries = [asked("t1"), update(1), update(2), update(3), update(4), update(5), update(6)]
    return entries, [
        project(1, Granted(task("t1"))),
        project(2, decided(1, GOOD, 0)),
        project(3, decided(2, NOW_GOOD, 1), published(1, 1, 2), v1="aa" * 32),
        project(4, decided(3, BAD, 1)),
        project(5, decided(4, GOOD, 1)),
        project(6, decided(5, NOW_GOOD, 2), published(2, 4, 5)),
    ]


def link(version: int) -> ChainLink:
    return ChainLink(f"{version:064x}", f"{100 + version:064x}")


def publish(store: Store, versions: Iterable[int], keep: Keep = ALL) -> None:
    """Versions, each of an event of its own number, with its link and a snapshot."""
    for version in versions:
        store.append([update(version)])
        came = project(version, decided(version, NOW_GOOD, version), published(version, version))
        store.append([], [replace(came, links={version: link(version)})])
        store.save_snapshot(snapshot(version), version, float(version), keep)


def trimmed(store: Store) -> list[int]:
    """The events that are left, once what need not be kept was dropped, a little at a time."""
    left = [seq for seq, _ in store.records()]
    while dropped := store.trim(1):
        before, left = left, [seq for seq, _ in store.records()]
        assert left == before[dropped:], "the oldest go first, and as many as it says"
    return left


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


class StoreConformance:
    """Write the fixture `reopen`: a function that opens your store of one place, again after it was closed.

    Payloads of at most 64 bytes are small.
    """

    @pytest.fixture
    def reopen(self) -> Callable[[], Store]:
        raise NotImplementedError("write the fixture `reopen`: a function that opens your store, not started")

    @pytest.fixture
    def store(self, reopen: Callable[[], Store]) -> Iterator[Store]:
        opened = reopen()
        opened.start(INFO)
        yield opened
        opened.close()

    @pytest.fixture
    def a_history(self) -> History:
        return a_history()

    def test_all_is_there_after_closing_and_opening_again(self, reopen: Callable[[], Store]) -> None:
        store = reopen()
        store.start(INFO)
        entries = [enrolled(), asked("t1"), update(1)]
        store.append(entries)
        store.close()
        store.close()  # harmless
        again = reopen()
        assert again.info() == INFO
        assert again.start(replace(INFO, run_id="run-2", created_at=99.0)) == INFO
        assert logged(again) == numbered(entries)
        assert again.append([update(1), update(2)]) == [None, 4]
        again.close()

    def test_what_append_and_acknowledge_have_returned_for_is_read_by_others_at_once(
        self, reopen: Callable[[], Store]
    ) -> None:
        """Nobody has closed it, as after a kill; `anabranch verify` reads so beside a server at work."""
        store, mark = reopen(), Mark(INFO.run_id, 3, f"{3:064x}")
        store.start(INFO)
        entries = [enrolled(), asked("t1"), update(1)]
        store.append(entries)
        store.acknowledge(mark)
        reader = reopen()
        assert reader.info() == INFO
        assert logged(reader) == numbered(entries), "a kill now would lose what append has returned for"
        assert bytes(reader.payload(reference(update(1)))) == b"payload 1"
        assert reader.mark() == mark, "a kill now would lose the mark, and nobody would notice"
        reader.close()
        store.close()

    def test_who_leads_goes_on(self, store: Store) -> None:
        assert store.lease_s >= 0
        store.renew()
        assert store.append([asked("t1")]) == [1]

    def test_how_far_the_log_was_acknowledged_is_remembered(self, reopen: Callable[[], Store]) -> None:
        """Without it a log that ends too early, as in a copy of before, is not noticed."""
        store = reopen()
        store.start(INFO)
        store.append([enrolled(), asked("t1")])
        for seq in (1, 2):
            store.acknowledge(Mark(INFO.run_id, seq, f"{seq:064x}"))
        store.close()
        again = reopen()
        again.start(INFO)
        assert again.mark() == Mark(INFO.run_id, 2, f"{2:064x}")
        again.disown()
        assert again.mark() is None
        again.close()

    def test_another_model_is_refused(self, reopen: Callable[[], Store]) -> None:
        first = reopen()
        first.start(INFO)
        first.close()
        store = reopen()
        with pytest.raises(ManifestMismatch, match="other tensors or units"):
            store.start(replace(INFO, layout=[["w", [5], "float32"]]))
        with pytest.raises(ManifestMismatch, match="other first weights"):
            store.start(replace(INFO, initial_sha256="cd" * 32))
        store.start(INFO)
        store.close()

    def test_events_come_back_as_they_went_in(self, store: Store) -> None:
        entries = [enrolled("ü✓\U0001f680"), asked("t1"), update(1), update(2, flaw="NaN\0 in tensor 'w'")]
        assert store.append(entries) == [1, 2, 3, 4]
        assert logged(store) == numbered(entries)
        assert store.append([enrolled("c2")]) == [5]
        assert [seq for seq, _ in store.records()] == [1, 2, 3, 4, 5]

    def test_more_events_than_a_page_come_in_order_while_others_are_written(self, store: Store) -> None:
        for _ in range(3):
            store.append([asked(f"t{i}") for i in range(400)])
        records = store.records()
        first = next(records)
        store.append([asked("late")])
        assert [first[0], *(seq for seq, _ in records)] == list(range(1, 1202))

    def test_an_empty_batch_is_nothing(self, store: Store) -> None:
        assert store.append([]) == []
        assert store.append((), ()) == []
        assert logged(store) == []

    def test_an_update_counts_once(self, store: Store) -> None:
        assert store.append([update(1), update(1, b"other bytes")]) == [1, None]
        assert store.append([update(1), update(2), asked("t3"), update(2)]) == [None, 2, 3, None]
        assert [(seq, r["kind"]) for seq, r in store.records()] == [
            (1, "update"),
            (2, "update"),
            (3, "asked"),
        ]
        assert bytes(store.payload(reference(update(1)))) == b"payload 1"
        assert store.problems() == []

    def test_small_payloads_are_kept_inline_and_large_ones_as_blobs(self, store: Store) -> None:
        large = bytes(range(256)) * 40
        upload(store, large, "u2")
        entries = [update(1), replace(update(2, large), inline=None), update(3, b"\0")]
        store.append(entries)
        for entry, data in zip(entries, (b"payload 1", large, b"\0"), strict=True):
            assert bytes(store.payload(reference(entry))) == data
        assert store.problems() == []

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_payloads_have_the_digest_that_they_came_with(
        self, reopen: Callable[[], Store], algorithm: str
    ) -> None:
        if not usable(algorithm):
            pytest.skip(f"{algorithm} is not installed: {how_to_install(algorithm)}")
        store, large = reopen(), bytes(range(256)) * 40
        store.start(INFO)
        digest = upload(store, large, "u2", algorithm)
        small, middle = (update(n, b"%d" % n * n, algorithm=algorithm) for n in (1, 100_000))
        store.append([small, replace(update(2, large, algorithm=algorithm), inline=None), middle])
        store.blobs.write("u3", 0, large, algorithm)
        with pytest.raises(InvalidUpdate, match="send them again"):
            store.blobs.seal("u3", content_digest(large[1:], algorithm))
        store.close()
        again = reopen()
        again.start(INFO)
        assert bytes(again.payload(ev.Payload(digest, len(large)))) == large
        for entry in (small, middle):
            assert bytes(again.payload(reference(entry))) == entry.inline
        assert again.problems() == []
        again.close()

    def test_a_large_update_needs_its_blob(self, store: Store) -> None:
        with pytest.raises(StoreError, match="adopt it first"):
            store.append([asked("t1"), replace(update(1), inline=None)])
        assert logged(store) == []
        # What was found to be flawed is recorded, its bytes are not needed.
        assert store.append([replace(update(1, flaw="truncated"), inline=None)]) == [1]
        assert store.problems() == []

    def test_a_keepers_answer_is_kept_with_its_numbers(self, store: Store) -> None:
        small, large = mask_sum(1, b"1234"), mask_sum(2, bytes(range(256)) * 1024)
        assert store.append([enrolled(), small, update(1), large]) == [1, 2, 3, 4]
        for entry in (small, large):
            assert bytes(store.payload(reference(entry))) == entry.inline
        assert [record for _, record in store.records(1)][::2] == [small.record, large.record]
        assert store.problems() == []

    def test_an_unknown_payload_is_an_error(self, store: Store) -> None:
        with pytest.raises(StoreCorrupt):
            store.payload(ev.Payload("0" * 64, 1))

    def test_projections_are_read_back(self, store: Store, a_history: History) -> None:
        entries, projections = a_history
        store.append(entries)
        assert store.receipt("u1") is None
        store.append([], projections)
        for number, decision, version in ((1, GOOD, 0), (2, NOW_GOOD, 1), (3, BAD, 1), (5, NOW_GOOD, 2)):
            named = "c1", reference(update(number)).sha256
            assert store.receipt(f"u{number}") == Receipt(
                f"u{number}", f"t{number}", version, decision, *named
            )
        assert store.receipt("u6") is None
        assert store.receipt("never seen") is None
        one, two = store.versions()
        assert (one.version, one.sha256, one.updates, one.published_at) == (1, "aa" * 32, 2, 13.0)
        assert (two.version, two.sha256, two.updates, two.snapshot) == (2, None, 2, False)
        assert store.versions(after=1) == [two]
        assert store.versions(limit=1) == [one]
        assert store.problems() == []

    def test_projections_may_be_written_again(self, store: Store, a_history: History) -> None:
        entries, projections = a_history
        store.append(entries)
        store.append([], projections)
        before = (store.versions(), [store.receipt(f"u{i}") for i in range(1, 7)])
        store.append([update(7)], [*projections, project(7, decided(6, NOW_GOOD, 3), published(3, 6))])
        store.append([], projections[2:4])
        assert (store.versions()[:2], [store.receipt(f"u{i}") for i in range(1, 6)]) == (
            before[0],
            before[1][:5],
        )
        assert store.problems() == []

    def test_a_digest_may_come_late_and_then_stays(self, store: Store, a_history: History) -> None:
        entries, projections = a_history
        store.append(entries, ())
        store.append([], [*projections, project(7, v2="bb" * 32), project(7, v1="cc" * 32)])
        assert [v.sha256 for v in store.versions()] == ["aa" * 32, "bb" * 32]

    def test_a_duplicate_changes_nothing(self, store: Store) -> None:
        store.append([update(1)])
        store.append([], [project(1, decided(1, GOOD))])
        store.append([], [project(1, replace(decided(1, BAD), duplicate=True))])
        receipt = store.receipt("u1")
        assert receipt is not None
        assert receipt.decision == GOOD

    def test_numbers_and_text_that_no_column_holds_are_no_obstacle(self, store: Store) -> None:
        entry = update(1)
        entry.record["base_version"] = entry.record["examples"] = (1 << 64) - 1
        store.append([entry, Entry(to_record(ev.TaskDropped(1.0, "c1", "t1", "why\0\ud800")))])
        bad = replace(BAD, staleness=1 << 64, detail="a\0b\ud800")
        store.append([], [project(1, decided(1, bad))])
        assert logged(store)[0][1]["base_version"] == (1 << 64) - 1
        receipt = store.receipt("u1")
        assert receipt is not None
        assert receipt.decision.reason is Reason.STALE

    def test_metrics_are_kept_by_version(self, store: Store, a_history: History) -> None:
        store.append(a_history[0])
        store.append([], a_history[1])
        store.add_metrics(1, {"accuracy": 0.25, "loss": 2.0}, 20.0)
        store.add_metrics(1, {"accuracy": 0.5, "loss": float("nan")}, 21.0)
        store.add_metrics(7, {"accuracy": 1.0}, 22.0)  # of a version that is not projected yet
        store.add_metrics(2, {}, 23.0)
        assert [dict(v.metrics) for v in store.versions()] == [{"accuracy": 0.5, "loss": 2.0}, {}]

    def test_tags_of_clients_are_kept(self, store: Store) -> None:
        store.tag(["c2", "c1"], ["eu", "a"], [])
        store.tag(["c2", "c3"], ["eu", "b"], ["a"])
        store.tag([], ["eu"], ["eu"])
        assert store.tags() == {"c1": ("a", "eu"), "c2": ("b", "eu"), "c3": ("b", "eu")}
        store.tag(["c3"], [], ["b", "eu", "other"])
        assert list(store.tags()) == ["c1", "c2"]

    def test_a_snapshot_comes_back_with_what_is_after_it(self, store: Store) -> None:
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

    def test_one_that_is_written_stays_until_it_is_named(self, store: Store) -> None:
        """What no snapshot needs goes meanwhile, in the writer's thread."""
        publish(store, range(1, 9))
        written = store.write_snapshot(snapshot(9))
        store.retain(Keep(versions=1))
        store.save_snapshot(snapshot(9), 8, 9.0, written=written)
        found = store.load().snapshot
        assert found is not None
        assert same(found, snapshot(9))
        assert store.problems() == []

    def test_a_snapshot_is_a_copy(self, store: Store) -> None:
        mine = snapshot(0)
        store.save_snapshot(mine, 0, 5.0)
        mine.arrays["vector"][:] = -1
        found = store.load().snapshot
        assert found is not None
        assert same(found, snapshot(0))

    def test_versions_say_which_have_a_snapshot(self, store: Store, a_history: History) -> None:
        store.append(a_history[0])
        store.append([], a_history[1])
        store.save_snapshot(snapshot(1), 3, 5.0)
        assert [v.snapshot for v in store.versions()] == [True, False]

    def test_links_are_those_up_to_the_first_version_without_one(self, store: Store) -> None:
        store.append([update(1), update(2)])
        store.append([], [project(1, published(1, 1)), project(2, published(2, 2))])  # of an older release
        publish(store, (3, 4, 5))
        assert store.links(2, 10) == [link(v).link for v in (3, 4, 5)]
        assert (store.links(2, 2), store.links(4, 10)) == ([link(3).link, link(4).link], [link(5).link])
        assert (store.links(0, 10), store.links(5, 10), store.links(99, 10)) == ([], [], [])
        assert [(row.link, row.head) for row in store.versions(1, 2)] == [
            (None, None),
            (link(3).link, link(3).head),
        ]

    def test_what_need_not_be_kept_is_dropped_and_all_else_stays(self, reopen: Callable[[], Store]) -> None:
        store, keep = reopen(), Keep(versions=2)
        store.start(INFO)
        publish(store, range(1, 9), keep)
        store.add_metrics(1, {"loss": 2.0}, 20.0)
        left = trimmed(store)
        assert left == list(range(left[0], 9))
        assert 4 <= left[0] <= 7, "two versions at least, and no more than twice as many"
        store.close()
        again = reopen()
        again.start(INFO)
        begin, newest = again.first(), again.load()
        assert begin.snapshot is not None
        assert same(begin.snapshot, snapshot(begin.applied_through_seq))
        assert 6 >= begin.applied_through_seq >= left[0] - 1, "nothing that it begins with is dropped"
        assert [seq for seq, _ in begin.tail] == list(range(begin.applied_through_seq + 1, 9))
        assert newest.snapshot is not None
        assert same(newest.snapshot, snapshot(8))
        assert again.links(0, 10) == [link(v).link for v in range(1, 9)], "of those that are dropped as well"
        assert again.metrics(1) == {"loss": 2.0}
        assert [row.version for row in again.versions()][-2:] == [7, 8]
        assert (again.append([asked("t9")]), again.problems()) == ([9], [])
        again.close()

    def test_a_log_is_kept_whole_until_somebody_says_otherwise(self, store: Store) -> None:
        publish(store, range(1, 9))
        assert trimmed(store) == list(range(1, 9))
        assert store.first().snapshot is None
        store.retain(Keep(versions=1))
        left = trimmed(store)
        assert (left[0] > 1, left[-1]) == (True, 8)
        assert 7 >= store.first().applied_through_seq >= left[0] - 1
        assert store.problems() == []
