"""The writer's books, one batch after the other, over a store in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from desks import LIMITS, Desk, settings
from own_parts import forgotten

from anabranch.core import events as ev
from anabranch.core.effects import Decided
from anabranch.core.errors import DataError, LogLost, StoreCorrupt, StoreError, StoreFull, UnknownVersion
from anabranch.core.limits import Limits
from anabranch.core.model.updates import Ask, Capability
from anabranch.core.snapshot import state_digest
from anabranch.server.books import TRIMMED_AGAIN_S, TRIMMED_AT_ONCE, Call
from anabranch.server.store.base import DiskFailed
from anabranch.server.store.memory import MemoryStore
from anabranch.server.verify import verify


class Store(MemoryStore):
    """Notes what it is asked to drop and what is acknowledged; `fails` is raised by the call of that name."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.fails: dict[str, Exception] = {}
        self.trimmed: list[int] = []
        self.left = 0
        self.acknowledged: list[int] = []

    def append(self, *args: Any, **options: Any) -> Any:
        self._may("append")
        return super().append(*args, **options)

    def trim(self, count: int) -> int:
        self.trimmed.append(count)
        self._may("trim")
        return self.left

    def acknowledge(self, mark: Any) -> None:
        self.acknowledged.append(mark.seq)
        super().acknowledge(mark)

    def _may(self, name: str) -> None:
        if name in self.fails:
            raise self.fails[name]


@pytest.fixture
def store() -> Store:
    return Store()


def desk_of(store: Store, folder: Path, limits: Limits = LIMITS, **server: Any) -> Desk:
    desk = Desk(store, folder, settings(server=server), limits)
    store.acknowledged.clear()
    return desk


class Answers(Store):
    """A store of somebody's own that takes all and says something else."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def append(self, *args: Any, **options: Any) -> Any:
        super().append(*args, **options)
        return self.answer


@pytest.mark.parametrize(("answer", "said"), [(None, "not None"), ([], "not a list"), ([1, 2], "not a list")])
def test_a_store_that_does_not_say_what_it_has_taken_ends_the_server(
    answer: Any, said: str, tmp_path: Path
) -> None:
    desk = desk_of(Answers(answer), tmp_path)
    with pytest.raises(DiskFailed, match=f"append must give a list of 1 sequence numbers.*{said}"):
        desk.books.commit([Call(ev.Enrolled(1.0, "a", Capability(examples=1)))])


class Begins(Store):
    def start(self, info: Any) -> Any:
        super().start(info)


def test_a_store_whose_start_gives_no_run_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="start must give the RunInfo that is stored, not None"):
        desk_of(Begins(), tmp_path)


def test_a_log_that_ends_before_its_mark_is_refused_whatever_store_it_is_of(tmp_path: Path) -> None:
    """One of somebody's own may have kept the mark and lost the log, and look at neither."""
    store = Store()
    desk = desk_of(store, tmp_path)
    desk.books.commit([Call(ev.Enrolled(float(n), f"d{n}", Capability(examples=1))) for n in (1, 2)])
    mark, info = store.mark(), store.info()
    assert mark is not None
    assert info is not None
    lost = Store()
    lost.start(info)
    lost.acknowledge(mark)
    with pytest.raises(LogLost, match="ends at event 0, but was acknowledged up to event 2: 2 events are"):
        desk_of(lost, tmp_path)


class Placed(Store):
    """One place for all of them."""

    name = "placed"
    place: ClassVar[Store]

    @classmethod
    def of(cls, *_: Any) -> Store:
        return cls.place


def test_verify_tells_of_a_log_that_ends_before_its_mark(tmp_path: Path) -> None:
    Placed.place = Placed()
    desk = desk_of(Placed.place, tmp_path)
    desk.books.commit([Call(ev.Enrolled(float(n), f"d{n}", Capability(examples=1))) for n in (1, 2)])
    with forgotten():
        assert verify(tmp_path, f"{__name__}:Placed").problems == ()
        Placed.place.books.lines.pop()
        (told,) = verify(tmp_path, f"{__name__}:Placed").problems
    assert "ends at event 1, but was acknowledged up to event 2" in told


def look(desk: Desk, question: Callable[[Any], Any]) -> Call:
    """A look by itself."""
    call = Call(None, look=question)
    desk.books.commit([call])
    return call


def refused(error: Exception) -> Callable[[Any], Any]:
    def question(_: Any) -> Any:
        raise error

    return question


def test_a_batch_is_logged_at_once_and_acknowledged_after_it(store: Store, tmp_path: Path) -> None:
    desk = desk_of(store, tmp_path)
    calls = [Call(ev.Enrolled(1.0, name, Capability())) for name in ("a", "b", "a")]
    question = Call(None, look=lambda engine: sorted(engine.ledger.clients))
    desk.books.commit([question, *calls])
    assert question.value == ["a", "b"], "who looks sees what came with the look"
    assert [call.seq for call in calls] == [1, 2, 3], "each is settled before any of the batch is applied"
    assert store.acknowledged == [3]
    assert store.books.mark == desk.books.history.mark(3)
    look(desk, lambda engine: engine.version)
    desk.tell(ev.Enrolled(2.0, "a", Capability()))
    assert store.acknowledged == [3], "what changes nothing is no event"
    desk.drop()


def test_an_update_that_comes_twice_in_a_batch_counts_once_and_both_are_answered(
    store: Store, tmp_path: Path
) -> None:
    desk = desk_of(store, tmp_path)
    desk.enrol("a")
    event, data = desk.answer(desk.ask("a", "t0"), 1.0)
    first, second = Call(event, data), Call(event, data)
    desk.books.commit([first, second])
    (told,), (again,) = first.effects, second.effects
    assert isinstance(told, Decided)
    assert isinstance(again, Decided)
    assert (told.duplicate, again.duplicate, again.receipt) == (False, True, told.receipt)
    assert (first.seq, second.seq, desk.books.seq) == (3, None, 3)
    assert (desk.books.engine.counters.applied, desk.books.run.duplicates) == (1, 1)
    assert [record["kind"] for _, record in store.records()] == ["enrolled", "asked", "update"]
    desk.drop()


def test_an_update_that_the_engine_has_forgotten_is_answered_from_the_store_whose_rows_may_wait(
    store: Store, tmp_path: Path
) -> None:
    desk = desk_of(store, tmp_path, replace(LIMITS, receipts_max=1))
    for client in "ab":
        desk.enrol(client)
    (event, data), (other, others) = (desk.answer(desk.ask(c, f"t-{c}"), 1.0) for c in "ab")
    first, second, third = Call(event, data), Call(other, others), Call(event, data)
    desk.books.commit([first, second, third])
    assert list(desk.books.engine.ledger.receipts) == ["u-t-b"]
    (again,) = third.effects
    assert isinstance(again, Decided)
    assert again.duplicate
    assert again.receipt.update_id == "u-t-a"
    assert (desk.books.engine.counters.applied, desk.books.seq) == (2, second.seq)
    desk.drop()


def given_to(store: Store) -> list[int]:
    """The events of which the store is given what came of them, from now on."""
    given: list[int] = []
    append = store.append

    def noting(entries: Any, projections: Any = ()) -> Any:
        given.extend(projection.seq for projection in projections)
        return append(entries, projections)

    store.append = noting  # type: ignore[method-assign]
    return given


def test_what_comes_of_an_event_is_given_to_the_store_once(store: Store, tmp_path: Path) -> None:
    desk = desk_of(store, tmp_path)
    given = given_to(store)
    desk.work(3)
    desk.books.project()
    desk.books.project()
    assert given == list(range(1, desk.books.seq + 1))
    desk.drop()


def test_a_snapshot_is_written_once_all_that_it_covers_has_its_rows(store: Store, tmp_path: Path) -> None:
    """Nobody would write them after a restart from it."""
    desk = desk_of(store, tmp_path)
    given, seen, save = given_to(store), [], store.save_snapshot

    def noting(*args: Any, **options: Any) -> Any:
        seen.append(list(given))
        return save(*args, **options)

    store.save_snapshot = noting  # type: ignore[method-assign]
    desk.work(1)
    desk.books.save(desk.now)
    assert seen == [list(range(1, desk.books.seq + 1))]
    desk.drop()


def test_what_a_look_raises_is_for_who_looked(store: Store, tmp_path: Path) -> None:
    desk = desk_of(store, tmp_path)
    error, event = DataError("no such client"), Call(ev.Enrolled(1.0, "a", Capability()))
    call = Call(None, look=refused(error))
    desk.books.commit([call, event])
    assert (call.error, event.error, event.seq) == (error, None, 1)
    with pytest.raises(DiskFailed):
        look(desk, refused(DiskFailed("the disk is gone")))
    with pytest.raises(ZeroDivisionError):
        look(desk, lambda _: 1 // 0)
    desk.drop()


def test_a_full_disk_costs_a_batch_its_answers_and_nothing_else(store: Store, tmp_path: Path) -> None:
    desk = desk_of(store, tmp_path)
    desk.enrol("a")
    before, full = desk.digest, StoreFull("no room")
    store.fails["append"] = full
    calls = [Call(ev.Enrolled(9.0, name, Capability())) for name in "bc"]
    known = Call(ev.Enrolled(9.0, "a", Capability()))
    desk.books.commit([*calls, known])
    assert [call.error for call in (*calls, known)] == [full, full, None]
    assert (desk.digest, desk.books.seq, store.acknowledged) == (before, 1, [1])
    store.fails.clear()
    desk.enrol("b")
    assert desk.books.seq == 2
    desk.drop()


def test_the_log_is_dropped_piece_by_piece_and_a_full_disk_is_given_time(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = desk_of(store, tmp_path, keep="versions:1")
    desk.enrol("a")
    desk.enrol("a again")
    assert store.trimmed == [TRIMMED_AT_ONCE], "a server before it may have been killed as it dropped"
    store.trimmed.clear()
    desk.books.save(desk.tick())
    store.left = 5
    desk.enrol("b")
    desk.enrol("c")
    assert store.trimmed == [TRIMMED_AT_ONCE] * 2, "there was more to drop"
    store.left = 0
    desk.enrol("d")
    desk.enrol("e")
    assert len(store.trimmed) == 3, "there was no more"
    desk.books.save(desk.tick())
    for number, error in enumerate((StoreFull("no room"), StoreCorrupt("a torn archive")), 1):
        store.fails["trim"] = error
        desk.books._trims_at = 0.0
        desk.enrol(f"f{number}")
        desk.enrol(f"g{number}")
        assert len(store.trimmed) == 3 + number, "it is not tried again at once"
        assert f"nothing was dropped of the log: {error}" in caplog.text
    store.fails.clear()
    desk.books._trims_at -= TRIMMED_AGAIN_S
    desk.enrol("h")
    assert len(store.trimmed) == 6
    desk.books.save(desk.tick())
    store.fails["append"] = StoreFull("over its bound")
    desk.books.commit([Call(ev.Enrolled(desk.tick(), "i", Capability()))])
    assert len(store.trimmed) == 7, "what is refused waits for just that"
    store.fails.clear()
    desk.drop()


def test_what_cannot_be_dropped_is_said_ever_more_seldom(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full archive may stay so for a night, and is looked at every ten seconds."""
    desk = desk_of(store, tmp_path, keep="versions:1")
    store.fails["trim"] = StoreFull("no room")
    said = []
    for number in range(1, 18):
        desk.books._trims, desk.books._trims_at = True, 0.0
        desk.enrol(f"a{number}")
        if "nothing was dropped" in caplog.text:
            said.append(number)
        caplog.clear()
    assert said == [1, 2, 4, 8, 16]
    desk.drop()


def test_a_log_that_is_kept_whole_is_not_dropped(store: Store, tmp_path: Path) -> None:
    desk = desk_of(store, tmp_path)
    desk.enrol("a")
    desk.books.save(desk.tick())
    desk.enrol("b")
    assert store.trimmed == []
    desk.drop()


def test_a_snapshot_is_written_when_there_is_anything_new(store: Store, tmp_path: Path) -> None:
    desk = desk_of(store, tmp_path)
    desk.books.flush(1.0)
    assert store.books.snapshots == []
    desk.enrol("a")
    for _ in range(2):
        desk.books.flush(2.0)
        assert [kept.seq for kept in store.books.snapshots] == [1]
    desk.drop()


def test_a_rollback_leaves_a_snapshot_and_its_own_time(store: Store, tmp_path: Path) -> None:
    desk = desk_of(store, tmp_path)
    desk.work(8)
    order = ev.RolledBack(desk.tick(), 1, 0, ("c1",))
    folding = desk.books.begin_rollback(order)
    call = Call(replace(order, now=desk.tick()), folding=folding)
    desk.books.commit([call])
    assert call.error is None
    record = list(store.records())[-1][1]
    assert (record["kind"], record["now"], record["without"]) == ("rolled_back", desk.now, ["c1"])
    (seq,) = [seq for seq, r in store.records() if r["kind"] == "update"][1:2]  # of two updates each
    assert record["to_seq"] == seq
    assert store.books.snapshots[-1].seq == call.seq == desk.books.seq
    before = desk.digest
    desk.drop()
    again = desk_of(store, tmp_path)
    assert (again.digest, again.found.seq) == (before, desk.books.seq)
    again.drop()


def test_a_rollback_is_no_earlier_than_what_is_logged_before_it(store: Store, tmp_path: Path) -> None:
    """It comes last of its batch, also where an operator's call went ahead of others that wait."""
    desk = desk_of(store, tmp_path)
    desk.work(8)
    order = ev.RolledBack(desk.tick(), 1, 0, ("c1",))
    call = Call(order, folding=desk.books.begin_rollback(order))
    desk.books.commit([call, Call(ev.Enrolled(desk.tick(), "new", Capability()))])
    assert call.error is None
    logged = [(record["kind"], record["now"]) for _, record in store.records()][-2:]
    assert logged == [("enrolled", desk.now), ("rolled_back", desk.now)]
    desk.drop()


def test_a_rollback_that_cannot_be_folded_is_not_logged(store: Store, tmp_path: Path) -> None:
    desk = desk_of(store, tmp_path)
    desk.work(8)
    order = ev.RolledBack(desk.tick(), 0, 0, ("c1",))
    folding = desk.books.begin_rollback(order)
    before, seq, kept = desk.digest, desk.books.seq, dict(store.blobs.payloads)
    store.blobs.payloads.clear()
    call, other = Call(order, folding=folding), Call(ev.Enrolled(desk.tick(), "new", Capability()))
    desk.books.commit([call])
    assert isinstance(call.error, StoreCorrupt)
    assert (desk.digest, desk.books.seq) == (before, seq)
    store.blobs.payloads.update(kept)
    desk.books.commit([other])
    assert other.error is None
    desk.drop()


def test_versions_that_there_are_can_be_gone_back_to(store: Store, tmp_path: Path) -> None:
    desk = desk_of(store, tmp_path)
    desk.work(6)
    updates = [seq for seq, record in store.records() if record["kind"] == "update"]
    for version in range(4):
        order = ev.RolledBack(desk.now, version, 0, ("c1",))
        event = desk.books.begin_rollback(order).finish(desk.books.seq + 1, order.now)
        assert event.to_seq == (updates[2 * version - 1] if version else 0)
    with pytest.raises(UnknownVersion, match="version 4 is not published: the newest is 3"):
        desk.books.begin_rollback(ev.RolledBack(desk.now, 4, 0, ("c1",)))
    desk.drop()


def test_a_tasks_model_is_made_and_what_no_task_needs_goes(store: Store, tmp_path: Path) -> None:
    desk = desk_of(store, tmp_path)
    desk.enrol("slow")
    desk.ask("slow", "slow")
    desk.work(12)
    held = {wanted.version for wanted in desk.models._files}
    assert desk.books.engine.version == 6
    assert {0, 5} <= held, "version 0 is the base of a task"
    assert 1 not in held
    assert [desk.models.published_at(v) > 0 for v in (1, 6)] == [False, True]
    desk.drop()


def test_a_small_models_digest_is_on_record_with_its_version(store: Store, tmp_path: Path) -> None:
    desk = desk_of(store, tmp_path)
    desk.work(2)
    desk.books.project()
    (row,) = store.versions(0, 9)
    assert row.version == 1
    assert row.sha256 == hashlib.sha256(desk.books.engine.vector.astype("<f4").tobytes()).hexdigest()
    desk.drop()


def test_two_processes_of_one_device_are_told_of_in_the_log(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = desk_of(store, tmp_path)
    desk.enrol("a")
    for task_id, session in (("t1", "one"), ("t2", "two"), ("t3", "one")):
        desk.tell(ev.TaskAsked(desk.tick(), Ask("a", task_id, session=session)))
    assert [
        r.getMessage().partition(" ")[0] for r in caplog.records if "two processes" in r.getMessage()
    ] == ["a"]
    assert desk.books.line.sessions.news == []
    desk.drop()


def test_a_tick_is_due_when_the_next_lease_ends(store: Store, tmp_path: Path) -> None:
    desk = desk_of(store, tmp_path)
    desk.enrol("a")
    assert desk.books.commit([]).deadline is None
    task = desk.ask("a", "t")
    assert desk.books.commit([]).deadline == task.expires_at
    before = state_digest(desk.books.engine)
    desk.books.commit([Call(None)])
    assert state_digest(desk.books.engine) == before
    desk.drop()
