"""The single writer under failures, and how it gathers: its queue, thread and books on a store in memory."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from desks import LIMITS, Desk, settings

from anabranch.core import events as ev
from anabranch.core.effects import Decided, Granted
from anabranch.core.errors import IdTaken, StoreError, StoreFull, Unavailable
from anabranch.core.limits import RETRY_FULL_DISK_S
from anabranch.core.model.updates import Ask, Capability
from anabranch.server.saving import Every
from anabranch.server.store.memory import MemoryStore
from anabranch.server.writer import Writer

WAIT_S = 600.0


class Forward:
    """A clock that is a day ahead of a desk's: every lease has ended."""

    def __init__(self, desk: Desk) -> None:
        self._after = desk.now + 86_400.0 - time.monotonic()

    def now(self) -> float:
        return self._after + time.monotonic()


class Watched(MemoryStore):
    """Tells of every commit: how many events, and when; `before` may raise."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.sizes: list[int] = []
        self.times: list[float] = []
        self.before: Callable[[], None] = lambda: None

    def append(self, entries: Sequence[Any], *more: Any, **options: Any) -> Any:
        self.sizes.append(len(entries))
        self.times.append(time.monotonic())
        self.before()
        return super().append(entries, *more, **options)


def writer_of(
    desk: Desk,
    every: Every | None = None,
    company_s: float = WAIT_S,
    batch_max: int = LIMITS.commit_events_max,
) -> Writer:
    found = desk.found
    clock: Any = Forward(desk)
    limits = replace(LIMITS, commit_wait_s=company_s, commit_events_max=batch_max)
    seq = desk.books.seq
    made = Writer(
        found.engine, desk.store, desk.models, clock, found.history, seq, every=every, limits=limits
    )
    made.start()
    return made


def enrolled(number: int) -> ev.Enrolled:
    return ev.Enrolled(1e12 + number, f"c{number}", Capability())


@pytest.fixture
def no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine they would come meanwhile, as one more call of a batch."""
    monkeypatch.setattr("anabranch.server.writer.FOLLOWED_S", 3600.0)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (StoreError("the disk is gone"), "the disk is gone"),
        (CancelledError(), "was cancelled"),
        (StopIteration(), "StopIteration"),
    ],
    ids=["store", "cancelled", "stop"],
)
def test_all_that_waits_for_a_writer_that_fails_is_told_so(
    tmp_path: Path, error: Exception, why: str
) -> None:
    store, at_work, go = Watched(), threading.Event(), threading.Event()
    desk = Desk(store, tmp_path, settings())

    def fail() -> None:
        at_work.set()
        assert go.wait(WAIT_S)
        raise error

    async def run() -> list[Any]:
        writer, store.before = writer_of(desk), fail
        first = asyncio.create_task(writer.submit(enrolled(0)))
        assert await asyncio.to_thread(at_work.wait, WAIT_S)
        waiting = [asyncio.create_task(writer.submit(enrolled(n))) for n in range(1, 4)]
        looking = asyncio.create_task(writer.look(lambda engine: engine.version))
        await asyncio.sleep(0)
        go.set()
        calls = [first, *waiting, looking]
        told = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), WAIT_S)
        with pytest.raises(Unavailable, match=r"^the server has stopped; its log says why$"):
            await writer.submit(enrolled(9))
        assert why in str(writer.failure), "as the log says"
        await writer.close()
        return told

    told = asyncio.run(run())
    assert [type(answer) for answer in told] == [Unavailable] * 5
    assert store.sizes == [1], "nothing is tried after it"


def test_a_full_disk_is_given_time(tmp_path: Path) -> None:
    """A lease that is over makes an event at once; the disk that has no room for it is not asked at once."""
    store, enough = Watched(), threading.Event()
    desk = Desk(store, tmp_path, settings())
    desk.enrol("a")
    desk.ask("a", "t")
    tried: list[float] = []

    def full() -> None:
        if len(store.times) >= 4:
            enough.set()
        raise StoreFull("no room")

    async def run() -> None:
        store.times.clear()
        store.before = full
        writer = writer_of(desk)
        assert await asyncio.to_thread(enough.wait, WAIT_S)
        tried.extend(store.times[1:4])  # the first is of the start itself
        store.before = lambda: None
        await writer.close()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    pauses = [later - sooner for sooner, later in pairwise(tried)]
    assert min(pauses) > 0.9 * RETRY_FULL_DISK_S


def test_rows_that_find_no_room_are_tried_again_though_nothing_comes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.server.writer.FOLLOWED_S", 0.01)
    store, tried = Watched(), threading.Event()
    desk = Desk(store, tmp_path, settings())

    def full() -> None:
        if store.sizes[-1] == 0:
            if store.sizes[-3:] == [0, 0, 0]:
                tried.set()
            raise StoreFull("no room")

    async def run() -> None:
        store.before = full
        writer = writer_of(desk)
        await writer.submit(enrolled(0))
        assert await asyncio.to_thread(tried.wait, WAIT_S)
        store.before = lambda: None
        await writer.close()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_a_return_that_meets_a_full_disk_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the clock the lease is long over, but nobody could renew it: it begins anew, however late."""
    store, enough, room = Watched(), threading.Event(), threading.Event()
    desk = Desk(store, tmp_path, settings())
    desk.enrol("a")
    task = desk.ask("a", "t")

    def full() -> None:
        if len(store.times) >= 3:
            enough.set()
        if not room.is_set():
            raise StoreFull("no room")

    async def run() -> None:
        store.times.clear()
        store.before = full
        writer = writer_of(desk)
        assert await asyncio.to_thread(enough.wait, WAIT_S)
        room.set()
        while desk.books.engine.ledger.tasks["t"].expires_at == task.expires_at:
            await writer.look(lambda _: None)
            await asyncio.sleep(0)
        await writer.close()

    with caplog.at_level("INFO", "anabranch.server.writer"):
        asyncio.run(asyncio.wait_for(run(), WAIT_S))
    kinds = [record["kind"] for _, record in store.records()]
    assert kinds[-1] == "returned"
    assert "ticked" not in kinds
    assert desk.books.engine.ledger.live == 1
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said
    assert "until the disk takes the server's return" in said[0]
    assert "begin anew" in said[1]


def test_what_is_refused_for_want_of_room_is_told_and_that_there_is_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, room = Watched(), threading.Event()
    desk = Desk(store, tmp_path, settings())

    def full() -> None:
        if not room.is_set():
            raise StoreFull("no room")

    async def run() -> list[str]:
        store.before = full
        writer = writer_of(desk)
        shown = [writer.room.lack]
        for number in range(3):
            with pytest.raises(StoreFull):
                await writer.submit(enrolled(number))
            shown.append(writer.room.lack)
        await writer.look(lambda _: None)
        shown.append(writer.room.lack)
        room.set()
        for number in range(2):
            await writer.submit(enrolled(number))
            shown.append(writer.room.lack)
        await writer.close()
        return shown

    with caplog.at_level("INFO", "anabranch.server.room"):
        shown = asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert [text.partition(" (")[0] for text in shown] == ["", *["no room"] * 4, "", ""]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


@pytest.mark.usefixtures("no_rows")
def test_a_batch_waits_for_its_company(tmp_path: Path) -> None:
    """Who was answered together asks together: a second batch of two waits for the third."""
    store = Watched()
    desk = Desk(store, tmp_path, settings())

    async def run() -> None:
        writer = writer_of(desk)
        await asyncio.gather(*(writer.submit(enrolled(n)) for n in range(3)))
        two = [asyncio.create_task(writer.submit(enrolled(n))) for n in (3, 4)]
        for _ in range(100):  # the writer has every chance to begin without the third
            await asyncio.sleep(0.001)
        await asyncio.gather(*two, writer.submit(enrolled(5)))
        await writer.close()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert [size for size in store.sizes if size][-2:] == [3, 3]


@pytest.mark.usefixtures("no_rows")
def test_a_batch_waits_for_those_who_were_answered_while_its_first_waited(tmp_path: Path) -> None:
    """Else a fleet stays in two halves, of which one waits while the other is committed."""
    store, at_work, go = Watched(), threading.Event(), threading.Event()
    desk = Desk(store, tmp_path, settings())

    def once_told() -> None:
        at_work.set()
        assert go.wait(WAIT_S)

    async def run() -> None:
        writer, store.before = writer_of(desk), once_told
        first = asyncio.create_task(writer.submit(enrolled(0)))
        assert await asyncio.to_thread(at_work.wait, WAIT_S)
        meanwhile = asyncio.create_task(writer.submit(enrolled(1)))
        await asyncio.sleep(0)
        go.set()
        await first
        await asyncio.gather(meanwhile, writer.submit(enrolled(2)))
        await writer.close()

    asyncio.run(run())
    assert [size for size in store.sizes if size] == [1, 2], "the second commit is of both"


def test_a_batch_of_enough_bytes_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the loop and the writer's thread wait for each other in turns, where updates are large."""
    store = Watched()
    desk = Desk(store, tmp_path, settings())
    for n in range(2):
        desk.enrol(f"c{n}")
    answers = [desk.answer(desk.ask(f"c{n}", f"t{n}"), 1.0) for n in range(2)]
    monkeypatch.setattr("anabranch.server.writer.ENOUGH_BYTES", sum(len(data) for _, data in answers))

    async def run() -> None:
        writer = writer_of(desk)
        await asyncio.gather(*(writer.submit(enrolled(n)) for n in (3, 4, 5)))
        await asyncio.gather(*(writer.submit(event, data) for event, data in answers))
        await writer.close()

    asyncio.run(asyncio.wait_for(run(), WAIT_S / 2))
    assert [size for size in store.sizes if size][-2:] == [3, 2], "nobody has come for the third's place"


def test_two_events_are_logged_with_nothing_in_between_and_both_answered(tmp_path: Path) -> None:
    store = Watched()
    desk = Desk(store, tmp_path, settings())

    async def run() -> list[Any]:
        writer = writer_of(desk, company_s=0.0)
        both = asyncio.create_task(writer.submit_both(enrolled(0), None, enrolled(1)))
        third = asyncio.create_task(writer.submit(enrolled(2)))
        answers = [*await both, await third]

        def full() -> None:
            raise StoreFull("no room")

        store.before = full
        unheard: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        with pytest.raises(StoreFull, match="no room"):
            await writer.submit_both(enrolled(3), None, enrolled(4))
        gc.collect()
        assert unheard == [], "the error of the second is not one that nobody has heard of"
        store.before = lambda: None
        answers += await writer.submit_both(enrolled(5), None, enrolled(6))
        await writer.close()
        return answers

    answers = asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert [answer.seq for answer in answers] == [1, 2, 3, 4, 5]
    assert [record["client_id"] for _, record in store.records()] == ["c0", "c1", "c2", "c5", "c6"]


def test_an_ask_behind_an_update_that_finds_no_room_leaves_its_task_open(tmp_path: Path) -> None:
    """Even where the ask is in a batch of its own, for which there is room again."""
    store = Watched()
    desk = Desk(store, tmp_path, settings())
    desk.enrol("a")
    update, data = desk.answer(desk.ask("a", "t1"), 1.0)
    ask = ev.TaskAsked(update.now, Ask("a", "t2"))

    def full_once() -> None:
        store.before = lambda: None
        raise StoreFull("no room")

    async def run() -> tuple[Any, Any]:
        writer = writer_of(desk, company_s=0.0, batch_max=1)
        await writer.look(lambda _: None)  # the server's return comes first
        store.before = full_once
        with pytest.raises(StoreFull, match="no room"):
            await writer.submit_both(update, data, ask)
        await writer.look(lambda _: None)  # what was behind the update has had its turn
        open_tasks = await writer.look(lambda engine: list(engine.ledger.tasks))
        assert open_tasks == ["t1"], "the device tries again, and may"
        answers = await writer.submit_both(update, data, ask)
        await writer.close()
        return answers

    decided, asked = asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert [type(effect) for effect in decided.effects] == [Decided]
    assert [effect.task.task_id for effect in asked.effects if isinstance(effect, Granted)] == ["t2"]
    kinds = [record["kind"] for _, record in store.records()]
    assert kinds == ["enrolled", "asked", "returned", "update", "asked"]


def test_an_ask_behind_an_update_whose_id_is_taken_leaves_its_task_open(tmp_path: Path) -> None:
    store = Watched()
    desk = Desk(store, tmp_path, settings())
    for client in ("a", "b"):
        desk.enrol(client)
    desk.push(desk.ask("b", "t0"), 1.0, "u")
    update, data = desk.answer(desk.ask("a", "t1"), 1.0, "u")

    async def run() -> list[str]:
        writer = writer_of(desk, company_s=0.0)
        with pytest.raises(IdTaken):
            await writer.submit_both(update, data, ev.TaskAsked(update.now, Ask("a", "t2")))
        open_tasks = await writer.look(lambda engine: list(engine.ledger.tasks))
        await writer.close()
        return open_tasks

    assert asyncio.run(asyncio.wait_for(run(), WAIT_S)) == ["t1"], "as docs/protocol.md has it"


def test_a_listener_hears_of_what_is_in_the_log_and_of_nothing_else(tmp_path: Path) -> None:
    store = Watched()
    desk = Desk(store, tmp_path, settings())
    heard: list[tuple[int, float, int]] = []

    async def run() -> None:
        writer = writer_of(desk)
        await writer.submit(enrolled(0))  # before anybody listens
        writer.listener = lambda seq, now, effects: heard.append((seq, now, len(effects)))
        await writer.submit(enrolled(1))
        await writer.look(lambda engine: engine.version)
        (granted,) = (await writer.submit(ev.TaskAsked(1e12 + 2, Ask("c1", "t")))).effects
        assert isinstance(granted, Granted)

        def full() -> None:
            raise StoreFull("no room")

        store.before = full
        with pytest.raises(StoreFull):
            await writer.submit(enrolled(3))
        store.before = lambda: None
        await writer.close()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert heard == [(2, 1e12 + 1, 0), (3, 1e12 + 2, 1)]


def test_a_writer_that_was_closed_takes_no_more(tmp_path: Path) -> None:
    desk = Desk(Watched(), tmp_path, settings())

    async def run() -> None:
        writer = writer_of(desk)
        waiting = asyncio.create_task(writer.submit(enrolled(0)))
        await asyncio.sleep(0)
        closing = asyncio.create_task(writer.close())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="going down"):
            await writer.submit(enrolled(1))
        assert (await waiting).seq == 1, "what was in the queue is answered"
        await closing
        with pytest.raises(Unavailable, match="going down"):
            await writer.look(lambda engine: engine.version)

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_a_snapshot_is_named_once_it_is_written_though_nothing_else_comes_in(tmp_path: Path) -> None:
    named = threading.Event()

    class Naming(Watched):
        def save_snapshot(self, *given: Any, **options: Any) -> Any:
            kept = super().save_snapshot(*given, **options)
            named.set()
            return kept

    desk = Desk(Naming(), tmp_path, settings())

    async def run() -> None:
        writer = writer_of(desk, Every(events=1))
        await writer.submit(enrolled(0))
        assert await asyncio.to_thread(named.wait, WAIT_S)
        assert (await writer.submit(enrolled(1))).seq == 2, "and the writer goes on"
        await writer.close()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
