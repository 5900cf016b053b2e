"""Long parts of updates, made before their turn: the same bits, and asks that pass in the meantime."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from desks import LIMITS, Desk, settings
from machines import Bench

from anabranch.core import events as ev
from anabranch.core.clock import EventClock
from anabranch.core.effects import Decided, Effect, Granted
from anabranch.core.engine.beforehand import Beforehand, LongPart
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.strategy import Context, Step, published
from anabranch.core.errors import Overloaded, StoreError, Unavailable
from anabranch.core.model.params import Vector, add_scaled
from anabranch.core.model.updates import Ask, Capability, Update, Verdict
from anabranch.core.snapshot import state_digest
from anabranch.server.books import Answer, Call
from anabranch.server.long_parts import LongParts
from anabranch.server.store.memory import MemoryStore
from anabranch.server.writer import Writer
from anabranch.strategies.fedbuff import FedBuff

WAIT_S = 600.0
KINDS: dict[str, dict[str, Any]] = {
    "fedavg": {"clients_per_round": 3, "over_selection": 4.0},
    "fedbuff": {"buffer_size": 3, "momentum": 0.5},
    "fadas": {"buffer_size": 3},
    "teasq": {"cache_size": 3},
    "teasq_drop": {"cache_size": 3},
    "phased": {"phases": [{"strategy": "fedavg", "until_versions": 1}, {"strategy": "fedbuff"}]},
}


def bench(strategy: str, rule: str, **more: Any) -> Bench:
    b = Bench(strategy, **KINDS[strategy], robust={"rule": rule}, **more)
    b.enrol(*"abcdefghijkl")
    return b


def worked(strategy: str, rule: str, **more: Any) -> Bench:
    """Some versions, and one update more."""
    b = bench(strategy, rule, **more)
    for i in range(31):
        b.work("abcdefghijkl"[i % 12], f"t{i}", (1 + i, -i, 0.5, 100 * (i % 5)), now=float(i))
    assert b.engine.version >= 2
    return b


# --- the engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize(("rule", "clip"), [("median", 0.0), ("centred_clipping", 0.0), ("multi_krum", 1.5)])
def test_what_is_made_beforehand_gives_the_same_bits(strategy: str, rule: str, clip: float) -> None:
    whole, again = worked(strategy, rule, clip=clip), bench(strategy, rule, clip=clip)
    versions, parts = 0, 0
    for event in whole.log[len(again.log) :]:
        if not isinstance(event, ev.UpdateArrived):
            again.do(event)
            continue
        before = state_digest(again.engine)
        part = again.engine.long_part(event)
        made = None if part is None else Beforehand(part, part.make())
        assert state_digest(again.engine) == before
        again.engine.handle(event, made)
        parts += made is not None
        versions += made is not None and again.engine.version == part.version + 1  # type: ignore[union-attr]
    assert parts == versions == whole.engine.version
    assert state_digest(again.engine) == state_digest(whole.engine)


def filled() -> tuple[Bench, ev.UpdateArrived, LongPart]:
    """A buffer that lacks one update, and that."""
    b = bench("fedbuff", "median")
    for name in "abc":
        b.ask(name, name)
    b.push("a", "a", (1, 1, 1, 1))
    b.push("b", "b", (3, 3, 3, 3))
    update = Update("u", "c", "c", 0, 1, np.full(4, 2, np.float32))
    event = ev.UpdateArrived(2.0, update, ev.Payload("00" * 32, 16))
    part = b.engine.long_part(event)
    assert part is not None
    return b, event, part


def other(part: LongPart) -> Beforehand:
    """Something else was made of it: whether it is used shows."""
    made = part.make()
    return Beforehand(part, replace(made, direction=made.direction + 5))


def test_it_is_used_where_only_asks_came_between() -> None:
    b, event, part = filled()
    b.ask("d", "d")
    b.engine.handle(event, other(part))
    assert b.engine.vector.tolist() == [7] * 4


def test_it_is_made_again_where_an_update_came_between() -> None:
    b, event, part = filled()
    b.ask("d", "d")
    b.push("d", "d", (2, 2, 2, 2))  # which makes the version
    b.engine.handle(event, other(part))
    assert (b.engine.version, b.engine.vector.tolist()) == (1, [2] * 4)


def test_nothing_is_made_of_what_will_be_refused_or_makes_no_version() -> None:
    b, event, _ = filled()
    for changed in (
        replace(event, flaw="not finite"),
        replace(event, update=replace(event.update, task_id="nobody's")),
        replace(event, update=replace(event.update, update_id="update-of-a")),
    ):
        assert b.engine.long_part(changed) is None
    b.engine.handle(event)
    b.ask("d", "d")
    first = replace(event, update=replace(event.update, update_id="v", task_id="d", client_id="d"))
    assert b.engine.long_part(first) is None, "the buffer is empty again"


class Never(Executor):
    """Does nothing of it."""

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        return Future()


@pytest.mark.parametrize("strategy", ["fedavg", "fedbuff", "teasq"])
def test_updates_go_together_up_to_the_one_that_takes_long(strategy: str) -> None:
    b = bench(strategy, "median")
    parts, calls = LongParts(b.engine), []
    parts.executor = Never()
    for name in "abcde":
        b.ask(name, name)
        update = Update(f"u{name}", name, name, 0, 1, np.full(4, 2, np.float32))
        calls.append(Call(ev.UpdateArrived(2.0, update, ev.Payload("00" * 32, 16))))
    first = Call(ev.Ticked(1.0))
    assert parts.turn([first, *calls]) == ([first, *calls[:2]], calls[2:])
    for call in calls[:2]:
        assert call.event is not None
        b.engine.handle(call.event)
    assert parts.turn(calls[2:]) == ([], calls[2:])
    b = bench(strategy, "none")
    parts = LongParts(b.engine)
    parts.executor = Never()
    assert parts.turn(calls) == (calls, []), "a mean is ready with its last update"


class Slow(Executor):
    """Is done with it when it is told so."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self.work: Callable[[], Any] = lambda: None

    def submit(self, *given: Any, **_: Any) -> Future[Any]:
        work, *arguments = given
        self.work = lambda: work(*arguments)
        return self.future

    def finish(self) -> None:
        self.future.set_result(self.work())


def parts_of(b: Bench) -> tuple[LongParts, Slow]:
    parts = LongParts(b.engine)
    parts.executor = slow = Slow()
    return parts, slow


def call_of(b: Bench, name: str, now: float) -> Call:
    """A device's update of its task."""
    base = b.engine.ledger.tasks[name].base_version
    update = Update(f"u{name}", name, name, base, 1, np.full(4, 2, np.float32))
    return Call(ev.UpdateArrived(now, update, ev.Payload("00" * 32, 16)))


def test_what_was_passed_happens_no_earlier_than_what_has_passed_it() -> None:
    b, event, _ = filled()
    parts, slow = parts_of(b)
    update, ask = Call(event), Call(ev.TaskAsked(5.0, Ask("d", "d")))
    assert parts.turn([update, ask]) == ([ask], [update])
    slow.finish()
    assert parts.turn([update]) == ([update], [])
    assert update.event is not None
    assert update.event.now == 5.0
    assert parts.of(update) is not None


def test_a_part_of_what_could_not_be_logged_is_forgotten() -> None:
    b, event, _ = filled()
    parts, slow = parts_of(b)
    update = Call(event)
    parts.turn([update])
    slow.finish()
    parts.turn([update])
    parts.forget()
    assert parts.of(update) is None


def test_a_tick_passes_unless_it_ends_the_lease_of_an_update_that_waits() -> None:
    b, event, _ = filled()
    b.ask("d", "d", now=10.0)
    b.ask("e", "e", now=20.0)
    parts, _ = parts_of(b)
    first, later = Call(event), call_of(b, "d", 3.0)
    end = b.engine.ledger.tasks["c"].expires_at
    early, late = Call(ev.Ticked(end - 1.0)), Call(ev.Ticked(end + 10.0))
    assert parts.turn([first, early]) == ([early], [first])
    assert parts.turn([first, late, later]) == ([], [first, later, late]), "both came in time"


def test_a_tick_whose_timer_is_due_waits() -> None:
    b = Bench("fedbuff", buffer_size=2, flush_s=5.0, robust={"rule": "median"})
    b.enrol("a", "b")
    for name in "ab":
        b.ask(name, name)
    b.push("a", "a", now=1.0)
    parts, _ = parts_of(b)
    update, tick = call_of(b, "b", 2.0), Call(ev.Ticked(7.0))
    assert parts.turn([update, tick]) == ([], [update, tick])


def test_asks_wait_in_rounds_whose_members_they_change() -> None:
    b = bench("fedavg", "median")
    for name in "abc":
        b.ask(name, name)
    b.push("a", "a")
    b.push("b", "b")
    parts, _ = parts_of(b)
    update, ask = call_of(b, "c", 2.0), Call(ev.TaskAsked(5.0, Ask("d", "d")))
    assert parts.turn([update, ask]) == ([], [update, ask])


class Older:
    """A strategy of before there were long parts, and before a step could say that it does not publish."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def __getattr__(self, name: str) -> Any:
        if name in ("long_in", "long_part", "may_publish"):
            raise AttributeError(name)
        return getattr(self._strategy, name)


def test_a_strategy_that_knows_nothing_of_long_parts_has_none() -> None:
    b, event, _ = filled()
    older: Any = Older(b.engine.strategy)
    b.engine.strategy = older
    parts, _ = parts_of(b)
    assert b.engine.long_part(event) is None
    assert parts.turn([Call(event)])[1] == []


def test_a_strategy_that_says_nothing_of_its_next_step_may_publish_with_it() -> None:
    b = Bench("fedbuff", buffer_size=2)
    b.enrol("a")
    b.ask("a", "a")
    loan, older = b.engine.lend(), Older(b.engine.strategy)
    b.engine.strategy = cast("Any", older)
    b.push("a", "a")
    assert b.engine.vector is not loan.vector, "it might have written there"


class Early(FedBuff):
    """Of others: it is full before `lacking`, of which it knows nothing, says so."""

    def full(self, state: Any, context: Context) -> bool:
        return bool(state.count >= 2)


class AtOnce(FedBuff):
    """Of others: it has no use for a buffer."""

    def fold(self, state: Any, vector: Vector, update: Update, weight: float, context: Context) -> Step:
        add_scaled(vector, 1.0, update.delta)
        return Step(state, vector)


class InItsStep(FedBuff):
    """Of others: each update counts a half at once, and is gathered as well."""

    def step(self, state: Any, vector: Vector, update: Update, context: Context) -> Step:
        add_scaled(vector, 0.5, update.delta)
        step = super().step(state, vector, update, context)
        return replace(step, vector=vector, decision=published(context.staleness, 0.5))


@pytest.mark.parametrize(
    ("of_others", "versions", "value"), [(Early, 2, 2), (AtOnce, 4, 4), (InItsStep, 4, 2)]
)
def test_a_buffer_that_others_have_changed_publishes_when_it_likes(
    of_others: type[FedBuff], versions: int, value: float
) -> None:
    b = Bench(start=np.zeros(4, np.float32))
    b.engine.strategy = of_others(buffer_size=10, server_lr=1.0)
    b.enrol("a")
    loan = b.engine.lend()
    for task in "tuvw":
        b.work("a", task)
    assert (b.engine.version, b.engine.vector[0]) == (versions, value)
    assert not loan.vector.any(), "who reads it meanwhile has it as it was"


def test_without_a_thread_for_it_a_part_is_made_in_its_turn() -> None:
    b, event, _ = filled()
    parts = LongParts(b.engine)
    parts.executor = pool = ThreadPoolExecutor(1)
    pool.shutdown()  # it raises as where no thread can be started
    update = Call(event)
    assert parts.turn([update]) == ([update], [])
    assert parts.of(update) is None


# --- the writer ----------------------------------------------------------------------------------


class Failing(MemoryStore):
    """Takes no more when it is told so."""

    error: Exception | None = None

    def append(self, *args: Any, **options: Any) -> Any:
        if self.error is not None:
            raise self.error
        return super().append(*args, **options)


class Busy:
    """A writer whose thread for long parts is kept busy until `go` is set."""

    def __init__(self, desk: Desk, writer: Writer) -> None:
        self.desk, self.writer, self.go = desk, writer, threading.Event()
        writer._long_parts.submit(self.go.wait, WAIT_S)

    def update(self, number: int, value: float = 1.0) -> asyncio.Task[Answer]:
        """Of a device's first task."""
        delta = np.full(8, value, np.float32)
        update = Update(f"u{number}", f"t{number}", f"c{number}", 0, 1, delta)
        payload = ev.Payload(hashlib.sha256(delta.tobytes()).hexdigest(), delta.nbytes)
        event = ev.UpdateArrived(self.writer.now(), update, payload)
        return asyncio.create_task(self.writer.submit(event, delta.tobytes()))

    def ask(self, client: str, task_id: str) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.writer.submit(ev.TaskAsked(self.writer.now(), Ask(client, task_id))))

    async def filling(self) -> asyncio.Task[Answer]:
        """The update that fills the buffer waits."""
        await self.update(0)
        task = self.update(1, 3.0)
        while not self.writer._waiting:  # noqa: ASYNC110 - its thread is at it
            await asyncio.sleep(0)
        return task


def run(store: MemoryStore, folder: Path, work: Callable[[Busy], Awaitable[None]], **limits: Any) -> Desk:
    """Do some work with a writer, whose clock goes on at each look; what it left is recovered."""
    config = settings(robust={"rule": "median"})
    desk = Desk(store, folder, config)
    for n in range(4):
        desk.enrol(f"c{n}")
        desk.ask(f"c{n}", f"t{n}")
    desk.books.project()
    seconds = iter(range(1_000_000))

    async def inside() -> None:
        clock = EventClock(desk.now + 100.0, wall=lambda: 0.0, monotonic=lambda: float(next(seconds)))
        place = (desk.store, desk.models, clock, desk.found.history, desk.books.seq)
        writer = Writer(desk.found.engine, *place, limits=replace(LIMITS, commit_wait_s=0.0, **limits))
        busy = Busy(desk, writer)
        writer.start()
        try:
            await work(busy)
        finally:
            closing = asyncio.create_task(writer.close())
            await asyncio.sleep(0)
            busy.go.set()
            await closing

    asyncio.run(asyncio.wait_for(inside(), WAIT_S))
    return desk


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.server.long_parts.VALUES_MIN", 1)
    monkeypatch.setattr("anabranch.server.writer.FOLLOWED_S", 3600.0)  # rows count for the queue as well


def of(kind: type[Any], effects: Any) -> Any:
    (found,) = (effect for effect in effects if isinstance(effect, kind))
    return found


def test_asks_heartbeats_and_looks_pass_and_all_else_waits(tmp_path: Path) -> None:
    store = MemoryStore(LIMITS)

    async def work(busy: Busy) -> None:
        writer = busy.writer
        slow = await busy.filling()
        behind = [
            busy.ask("c1", "t1-next"),  # its own
            busy.update(2),
            asyncio.create_task(writer.submit(ev.Quarantined(writer.now(), "c3", "odd"))),
        ]
        passed = await busy.ask("c0", "t0-next")
        await writer.submit(ev.Enrolled(writer.now(), "c9", Capability()))
        beat = await writer.submit(ev.LeaseRenewed(writer.now(), "c0", "t0-next", 0.5))
        assert of(Granted, passed.effects).task.base_version == 0
        assert await writer.look(lambda engine: engine.version) == 0
        assert not any(task.done() for task in (slow, *behind))
        busy.go.set()
        decided, own, third, ordered = await asyncio.gather(slow, *behind)
        assert of(Decided, decided.effects).receipt.decision.verdict is Verdict.PUBLISHED
        assert of(Granted, own.effects).task.base_version == 1
        assert of(Decided, third.effects).receipt.decision.verdict is Verdict.HELD
        seqs = [answer.seq for answer in (passed, beat, decided, own, third, ordered)]
        assert seqs == sorted(seqs, key=lambda seq: seq or 0)
        assert beat.seq is not None
        assert decided.seq == beat.seq + 1

    desk = run(store, tmp_path, work)
    digest, records = desk.digest, list(store.records(0))
    times = [record["now"] for _, record, *_ in records]
    assert times == sorted(times)
    again = Desk(store, tmp_path, settings(robust={"rule": "median"}))
    assert again.digest == digest
    assert again.books.engine.vector.tolist() == [2.0] * 8


def test_what_waits_is_answered_before_the_writer_closes(tmp_path: Path) -> None:
    told: list[asyncio.Task[Answer]] = []

    async def work(busy: Busy) -> None:
        told.extend((await busy.filling(), busy.update(2)))
        await asyncio.sleep(0)

    desk = run(MemoryStore(LIMITS), tmp_path, work)
    slow, behind = (task.result().effects for task in told)
    assert of(Decided, slow).receipt.decision.verdict is Verdict.PUBLISHED
    assert of(Decided, behind).receipt.decision.verdict is Verdict.HELD
    assert desk.books.engine.version == 1


def test_who_waits_hears_that_the_writer_has_stopped(tmp_path: Path) -> None:
    store = Failing(LIMITS)

    async def work(busy: Busy) -> None:
        slow = await busy.filling()
        store.error = StoreError("the disk is gone")
        with pytest.raises(Unavailable):
            await busy.ask("c0", "t0-next")
        with pytest.raises(Unavailable):
            await slow
        await busy.writer.close()  # although its thread is not done
        assert not busy.go.is_set()

    run(store, tmp_path, work)


def test_who_waits_counts_for_the_queue(tmp_path: Path) -> None:
    async def work(busy: Busy) -> None:
        slow, writer = await busy.filling(), busy.writer
        assert writer._tick is not None, "leases end meanwhile"
        behind = busy.update(2)
        await busy.ask("c0", "t0-next")  # then the queue is empty, and two wait
        assert writer.queue_size == 2
        third = busy.update(3)
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="3 events are waiting"):
            await writer.look(lambda engine: engine.version)
        busy.go.set()
        await asyncio.gather(slow, behind, third)
        assert writer.queue_size == 0
        # A batch without an event may be in its thread by now: a long part that is made begins one.
        kept = [call for call in list(writer._books.answered) if isinstance(call.event, ev.UpdateArrived)]
        assert kept == [], "which would hold the values of the last updates"

    run(MemoryStore(LIMITS), tmp_path, work, queue_events_max=3)


def test_a_part_that_fails_fails_in_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for it, say: nothing hangs, and a restart finds a log without the update or with it."""
    told: list[Effect] = []

    async def work(busy: Busy) -> None:
        slow = await busy.filling()
        engine: Engine = busy.desk.found.engine
        monkeypatch.setattr(engine, "handle", lambda *_: (_ for _ in ()).throw(MemoryError()))
        busy.go.set()
        with pytest.raises(Unavailable):
            told.extend((await slow).effects)

    run(MemoryStore(LIMITS), tmp_path, work)
    assert told == []
