"""What callers of the writer get: turns in the queue, looks at run and store, rollbacks, a last snapshot."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from desks import LIMITS, Desk, settings

from anabranch.core import events as ev
from anabranch.core.clock import EventClock
from anabranch.core.effects import Decided, RolledBackTo
from anabranch.core.errors import ConfigError, Overloaded, StoreError, Unavailable
from anabranch.core.journal import from_record
from anabranch.core.model.updates import Ask, Capability
from anabranch.server.books import Call
from anabranch.server.lanes import Lanes
from anabranch.server.store.memory import MemoryStore
from anabranch.server.writer import Writer

WAIT_S = 600.0


class Held(MemoryStore):
    """Commits wait until they may; `sizes`: events of each."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.sizes: list[int] = []
        self.at_work, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.error: Exception | None = None

    def append(self, entries: Any, *more: Any, **options: Any) -> Any:
        if entries:
            self.sizes.append(len(entries))
            self.at_work.set()
            assert self.go.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return super().append(entries, *more, **options)


def clock_at(now: float) -> EventClock:
    """One that stands still."""
    return EventClock(now, wall=lambda: now, monotonic=lambda: 0.0)


def run(desk: Desk, work: Callable[[Writer], Awaitable[None]], **limits: Any) -> None:
    """Do some work with a writer over a desk's store, and close it."""

    async def inside() -> None:
        caps = replace(LIMITS, commit_wait_s=0.0, **limits)
        place = (desk.store, desk.models, clock_at(desk.now + 5.0), desk.found.history, desk.books.seq)
        writer = Writer(desk.found.engine, *place, limits=caps)
        if desk.books.refold is not None:
            writer.fold_by(desk.books.refold)
        writer.start()
        try:
            await work(writer)
        finally:
            await writer.close()

    asyncio.run(asyncio.wait_for(inside(), WAIT_S))


def enrolled(number: int) -> ev.Enrolled:
    return ev.Enrolled(1e12 + number, f"c{number}", Capability())


def test_a_full_queue_takes_no_more_but_what_follows_up(tmp_path: Path) -> None:
    store = Held()

    async def work(writer: Writer) -> None:
        store.go.clear()
        first = asyncio.create_task(writer.submit(enrolled(0)))
        assert await asyncio.to_thread(store.at_work.wait, WAIT_S)
        waiting: list[asyncio.Task[Any]] = [asyncio.create_task(writer.submit(enrolled(1)))]
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(writer.submit_both(enrolled(2), None, enrolled(3))))
        await asyncio.sleep(0)
        for call in (writer.submit(enrolled(4)), writer.look(lambda engine: engine.version)):
            with pytest.raises(Overloaded, match="3 events are waiting, the queue is full"):
                await call
        store.go.set()
        await asyncio.gather(first, *waiting)
        assert (await writer.submit(enrolled(4))).seq == 5
        assert writer.seq == 5

    run(Desk(store, tmp_path, settings()), work, queue_events_max=2)


def test_an_operator_goes_ahead_of_a_queue_that_devices_have_filled(tmp_path: Path) -> None:
    store = Held()

    async def work(writer: Writer) -> None:
        store.go.clear()
        calls = [asyncio.create_task(writer.submit(enrolled(0)))]
        assert await asyncio.to_thread(store.at_work.wait, WAIT_S)
        for n in (1, 2):
            calls.append(asyncio.create_task(writer.submit(enrolled(n))))
            await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 events are waiting"):
            await writer.submit(enrolled(3))
        calls.append(asyncio.create_task(writer.submit(ev.Paused(1e12 + 9), ahead=True)))
        await asyncio.sleep(0)
        look = asyncio.create_task(writer.look(lambda engine: engine.paused, ahead=True))
        await asyncio.sleep(0)
        for call in (writer.submit(enrolled(3), ahead=True), writer.look(lambda _: None, ahead=True)):
            with pytest.raises(
                Overloaded, match="2 events are waiting"
            ):  # as many have their lane as the others
                await call
        store.go.set()
        answers = await asyncio.gather(*calls)
        assert [answer.seq for answer in answers] == [1, 3, 4, 2]
        assert await look
        logged = await writer.look_store(lambda books: [record["now"] for _, record in books.records()])
        # What has passed another event is no later than that is: the log's times never go back.
        assert logged == [1e12, 1e12 + 1, 1e12 + 1, 1e12 + 2]

    run(Desk(store, tmp_path, settings()), work, queue_events_max=2, commit_events_max=1)


def test_an_operator_who_passes_nobody_keeps_the_time(tmp_path: Path) -> None:
    store = Held()

    async def work(writer: Writer) -> None:
        store.go.clear()
        first = asyncio.create_task(writer.submit(enrolled(5)))
        assert await asyncio.to_thread(store.at_work.wait, WAIT_S)
        looks = asyncio.create_task(writer.look(lambda engine: engine.version))  # has no time
        await asyncio.sleep(0)
        order = asyncio.create_task(writer.submit(ev.Paused(1e12 + 9), ahead=True))
        await asyncio.sleep(0)
        store.go.set()
        await asyncio.gather(first, looks, order)
        logged = await writer.look_store(lambda books: [record["now"] for _, record in books.records()])
        assert logged == [1e12 + 5, 1e12 + 9]

    run(Desk(store, tmp_path, settings()), work)


def test_an_operator_who_passes_a_look_and_an_event_is_no_later_than_the_event() -> None:
    lanes = Lanes()
    event, order = Call(enrolled(5)), Call(ev.Paused(1e12 + 9), ahead=True)
    waiting = [Call(None, look=lambda engine: engine.version), event, Call(enrolled(3))]
    for call in (*waiting, None, order):
        lanes.put_nowait(call)
    assert (lanes.qsize(), lanes.ahead, lanes.empty()) == (5, 1, False)
    assert [lanes.get_nowait() for _ in range(5)] == [order, *waiting, None]
    assert lanes.empty()
    assert order.event is not None
    assert order.event.now == 1e12 + 5


def test_a_commit_has_so_many_events_at_most(tmp_path: Path) -> None:
    store = Held()

    async def work(writer: Writer) -> None:
        answers = await asyncio.gather(*(writer.submit(enrolled(n)) for n in range(5)))
        assert [answer.seq for answer in answers] == [1, 2, 3, 4, 5]
        assert store.sizes == [2, 2, 1]

    run(Desk(store, tmp_path, settings()), work, commit_events_max=2)


def test_a_rollback_is_folded_in_turns_and_logged_when_it_is_done(tmp_path: Path) -> None:
    store = Held()
    desk = Desk(store, tmp_path, settings())
    desk.work(60)  # more events than are folded at once
    desk.books.project()

    async def work(writer: Writer) -> None:
        with pytest.raises(ConfigError, match="name a client"):
            await writer.roll_back(ev.RolledBack(desk.now, 0, 0, ()))
        answer = await writer.roll_back(ev.RolledBack(desk.now, 3, 0, ("c1",)))
        assert isinstance(answer.effects[-1], RolledBackTo)
        assert answer.seq == writer.seq == desk.books.seq + 1
        found = await writer.look_store(lambda books: list(books.records(writer.seq - 1)))
        assert (found[0][1]["kind"], found[0][1]["now"]) == ("rolled_back", desk.now + 5.0)

    run(desk, work)


def test_a_versions_head_is_found_in_memory_and_in_the_store(tmp_path: Path) -> None:
    desk = Desk(MemoryStore(LIMITS), tmp_path, settings())
    desk.work(6)
    desk.books.project()

    async def work(writer: Writer) -> None:
        heads = {v: writer.history.head_of(v) for v in range(4)}
        assert None not in heads.values()
        writer.history._heads.clear()  # what was long ago is not at hand
        assert {v: await writer.head_of(v) for v in range(4)} == heads
        assert await writer.head_of(4) is None
        writer.history._heads[3] = "at hand"
        assert await writer.head_of(3) == "at hand"

    run(desk, work)


def test_a_question_to_the_store_sees_all_that_the_log_implies(tmp_path: Path) -> None:
    desk = Desk(MemoryStore(LIMITS), tmp_path, settings())
    desk.work(1)

    async def work(writer: Writer) -> None:
        await writer.submit(enrolled(7))
        await writer.submit(ev.TaskAsked(1e12, Ask("c7", "t")))
        assert [r["kind"] for _, r in await writer.look_store(lambda s: list(s.records()))][-1] == "asked"

    run(desk, work)


def test_a_resent_update_has_its_old_verdict(tmp_path: Path) -> None:
    desk = Desk(MemoryStore(LIMITS), tmp_path, settings())
    desk.work(1)
    ((_, pushed),) = [(seq, r) for seq, r in desk.store.records() if r["kind"] == "update"]
    assert pushed["update_id"] == "u-t0"

    async def work(writer: Writer) -> None:
        (decided,) = (await writer.submit(desk_update(desk))).effects
        assert isinstance(decided, Decided)
        assert (decided.duplicate, writer.seq) == (True, desk.books.seq)

    run(desk, work)


def test_two_processes_of_one_device_are_named(tmp_path: Path) -> None:
    desk = Desk(MemoryStore(LIMITS), tmp_path, settings())
    desk.enrol("a")

    async def work(writer: Writer) -> None:
        assert await writer.look(lambda _: writer.run_twice) == []
        for second, session in enumerate(("one", "two", "one")):
            ask = Ask("a", f"t{second}", session=session)
            await writer.submit(ev.TaskAsked(writer.now() + second, ask))
        assert await writer.look(lambda _: writer.run_twice) == ["a"]

    run(desk, work)


def test_the_last_snapshot_is_of_all_that_was_logged_unless_the_writer_has_failed(tmp_path: Path) -> None:
    store = Held()

    async def work(writer: Writer) -> None:
        await writer.submit(enrolled(0))
        assert not writer.stopped.is_set()

    run(Desk(store, tmp_path / "one", settings()), work)
    assert [kept.seq for kept in store.books.snapshots] == [1]
    store = Held()

    async def failing(writer: Writer) -> None:
        store.error = StoreError("the disk is gone")
        with pytest.raises(Unavailable, match=r"has stopped; its log says why$"):
            await writer.submit(enrolled(0))
        assert writer.stopped.is_set()
        assert writer.failure is store.error
        writer.give_up(ValueError("something else"))
        assert writer.failure is store.error, "the first is the reason"

    run(Desk(store, tmp_path / "two", settings()), failing)
    assert store.books.snapshots == []


def test_a_writer_is_closed_while_a_commit_fails(tmp_path: Path) -> None:
    """As a server does that learns in the middle of a commit that another one leads by now."""
    store = Held()

    async def closing(writer: Writer) -> None:
        store.go.clear()
        calls = [asyncio.create_task(writer.submit(enrolled(0)))]
        assert await asyncio.to_thread(store.at_work.wait, WAIT_S)
        calls += [asyncio.create_task(writer.submit(enrolled(n))) for n in (1, 2)]
        await asyncio.sleep(0)
        store.error = StoreError("cut off")
        writer.give_up(StoreError("another server leads"))
        closed = asyncio.create_task(writer.close())
        await asyncio.sleep(0)  # the end of the queue is in it, behind what waits
        store.go.set()
        await asyncio.wait_for(closed, WAIT_S)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(answer) for answer in answers] == ["the server has stopped; its log says why"] * 3

    run(Desk(store, tmp_path, settings()), closing)
    assert store.books.snapshots == []


def desk_update(desk: Desk) -> ev.UpdateArrived:
    """The update of task t0, as it came."""
    record = next(r for _, r in desk.store.records() if r["kind"] == "update")
    spec = desk.books.engine.spec
    event = from_record(record, spec, lambda payload, _: np.zeros(spec.size, np.float32))
    assert isinstance(event, ev.UpdateArrived)
    return event
