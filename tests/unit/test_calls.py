"""Turns of calls: one of a kind and a client at a time, and nobody waits for another's."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from anabranch.core.errors import InvalidUpdate, Overloaded
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.identity.certificates import Kind, Peer
from anabranch.protos.v1.devices_pb2 import AskTaskRequest
from anabranch.server import calls, gate
from anabranch.server.calls import EARLY_PER_MINUTE, HELD_S_MAX, USELESS_S, WAIT_S_MIN, Calls, in_turn


class Caller:
    """Calls that last until they are told to end; `order` has them as their turn came and went."""

    def __init__(self, rpcs_max: int = 100) -> None:
        self.calls = Calls(replace(DEFAULT_LIMITS, rpcs_max=rpcs_max))
        self.order: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    def call(self, name: str, who: str = "a", kind: str = "AskTask") -> asyncio.Task[None]:
        """Begin a call."""
        self.ends[name] = asyncio.Event()
        return asyncio.create_task(self._call(name, who, kind))

    async def _call(self, name: str, who: str, kind: str) -> None:
        async with self.calls.turn(kind, who):
            self.order.append(name)
            await self.ends[name].wait()
            self.order.append(f"{name} ends")

    @in_turn
    async def ask(self, request: AskTaskRequest, caller: gate.Caller) -> str:
        """A call as of a servicer, which answers by its task's name."""
        self.order.append(request.task_id)
        await self.ends["all"].wait()
        return request.task_id

    async def settle(self) -> None:
        """Let everybody come as far as possible."""
        for _ in range(20):
            await asyncio.sleep(0)


def test_calls_of_a_client_wait_for_each_other_and_nobody_for_another() -> None:
    async def run() -> None:
        caller = Caller()
        tasks = [caller.call(name) for name in ("1", "2", "3")]
        tasks += [caller.call("of b", who="b"), caller.call("a beat", kind="Heartbeat")]
        await caller.settle()
        assert caller.order == ["1", "of b", "a beat"]
        for name in ("1", "2", "3", "of b", "a beat"):
            caller.ends[name].set()
        await asyncio.gather(*tasks)
        mine = [name for name in caller.order if name[0].isdigit()]
        assert mine == ["1", "1 ends", "2", "2 ends", "3", "3 ends"]
        assert not caller.calls._turns

    asyncio.run(run())


def test_a_call_waits_for_those_of_its_own_device_whatever_name_it_says() -> None:
    nobodys: Any = None
    ward = gate.Caller(Peer(Kind.DEVICE, "ward", "1", 0.0, 9.0, nobodys))

    async def run() -> None:
        caller, nameless = Caller(), gate.Caller()
        end = caller.ends["all"] = asyncio.Event()
        said = [("1", "a", nameless), ("2", "a", nameless), ("of b", "b", nameless)]
        said += [("the ward's", "a", ward), ("another of it", "b", ward)]
        tasks = [
            asyncio.ensure_future(caller.ask(AskTaskRequest(client_id=client_id, task_id=task_id), by))
            for task_id, client_id, by in said
        ]
        await caller.settle()
        assert caller.order == ["1", "of b", "the ward's"]
        end.set()
        assert await asyncio.gather(*tasks) == [task_id for task_id, _, _ in said]
        assert not caller.calls._turns

    asyncio.run(run())


def test_calls_are_counted_by_kind_and_by_device_or_by_where_they_come_from() -> None:
    calls = Calls(replace(DEFAULT_LIMITS, calls_per_minute=2.0), now=lambda: 100.0)
    for port in (1, 2):
        calls.take("GetLinks", "", gate.Caller(address=f"ipv4:10.0.0.1:{port}"))
    with pytest.raises(Overloaded, match=r"'10\.0\.0\.1' calls GetLinks too often") as raised:
        calls.take("GetLinks", "", gate.Caller(address="ipv4:10.0.0.1:3"))
    assert raised.value.retry_after_s == (30.0, 60.0)
    calls.take("GetLinks", "", gate.Caller(address="ipv4:10.0.0.2:3"))
    calls.take("GetLinks", "a", gate.Caller(address="ipv4:10.0.0.1:3"))
    calls.take("FetchModel", "", gate.Caller(address="ipv4:10.0.0.1:3"))
    often = Calls(replace(DEFAULT_LIMITS, calls_per_minute=600.0), now=lambda: 100.0)
    for _ in range(600):
        often.take("GetLinks", "a", gate.Caller())
    with pytest.raises(Overloaded) as raised:
        often.take("GetLinks", "a", gate.Caller())
    assert raised.value.retry_after_s == (WAIT_S_MIN, 2 * WAIT_S_MIN), "not at once"


class Clock:
    """Stands still; `slept` are the waits of who is held."""

    def __init__(self, free: int = 0) -> None:
        self.now, self.slept = 100.0, list[float]()
        limits = replace(DEFAULT_LIMITS, early_calls_at_once=free)
        self.calls = Calls(limits, now=lambda: self.now, sleep=self.sleep)

    async def sleep(self, seconds: float) -> None:
        """Note it, and be back at once."""
        self.slept.append(seconds)

    def hold(self, *calls: tuple[str, str]) -> list[float]:
        """For how long each of these is held that is."""
        self.slept = []

        async def run() -> None:
            for call, who in calls:
                await self.calls.hold(call, who)

        asyncio.run(run())
        return self.slept


def test_who_asks_before_it_may_has_its_answer_late_and_only_once() -> None:
    clock = Clock()
    clock.calls.told("AskTask", "a", 30.0)
    assert clock.hold(("AskTask", "b"), ("Heartbeat", "a")) == []
    assert clock.hold(("AskTask", "a"), ("AskTask", "a")) == [HELD_S_MAX]
    clock.calls.told("AskTask", "a", 0.25)
    assert clock.hold(("AskTask", "a")) == [0.25]
    clock.calls.told("AskTask", "a", 30.0)
    clock.now += 30.0
    assert clock.hold(("AskTask", "a")) == []


def test_of_all_that_came_only_the_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CALLERS_KEPT", 3)
    clock = Clock()
    for who in ("a", "b", "c", "a", "d"):  # of the four b is the one that came longest ago
        clock.calls.told("AskTask", who, 0.5)
    assert clock.hold(("AskTask", "b")) == []
    assert clock.hold(*(("AskTask", who) for who in "acd")) == [0.5] * 3


def test_a_few_early_calls_are_free_and_forgiven_with_time() -> None:
    clock = Clock(free=3)

    def early(count: int, who: str = "a") -> int:
        held = 0
        for _ in range(count):
            clock.calls.told("AskTask", who, 5.0)
            held += len(clock.hold(("AskTask", who)))
        return held

    assert early(10) == 7
    assert early(3, "b") == 0
    clock.now += 60.0 / EARLY_PER_MINUTE
    assert early(3) == 2
    clock.now += 1e6
    assert early(4) == 1


def test_the_call_after_one_of_no_use_is_early() -> None:
    clock, window = Clock(), Overloaded("wait", (0.75, 1.5))
    errors = {"window": window, "flaw": InvalidUpdate("odd"), "cut": asyncio.CancelledError()}
    for who, error in errors.items():
        with pytest.raises(type(error)), clock.calls.heeding("PushUpdate", who):
            raise error
    with clock.calls.heeding("PushUpdate", "of use"):
        pass
    assert clock.hold(*(("PushUpdate", who) for who in [*errors, "of use"])) == [0.75, USELESS_S, USELESS_S]


def test_whoever_hangs_up_gives_the_turn_to_the_next() -> None:
    async def run() -> None:
        caller = Caller()
        tasks = [caller.call(name) for name in ("1", "2", "3")]
        await caller.settle()
        tasks[1].cancel()  # while it waits
        tasks[0].cancel()  # in its turn
        await caller.settle()
        assert caller.order == ["1", "3"]
        caller.ends["3"].set()
        await tasks[2]
        assert (caller.calls._turns, caller.calls._waiting) == ({}, 0)

    asyncio.run(run())


def test_those_that_wait_are_bounded_and_a_first_call_is_never_refused() -> None:
    async def run() -> None:
        caller = Caller(rpcs_max=4)
        tasks = [caller.call(name) for name in ("1", "2", "3")]
        await caller.settle()
        with pytest.raises(Overloaded, match="'a' has 3 calls of AskTask under way") as raised:
            await caller.call("4")
        assert raised.value.retry_after_s is not None
        tasks.append(caller.call("of b", who="b"))
        await caller.settle()
        assert caller.order == ["1", "of b"]
        with pytest.raises(Overloaded, match="'a' has 3 calls"):  # whoever came at once meanwhile
            await caller.call("5")
        for end in caller.ends.values():
            end.set()
        await asyncio.gather(*tasks)
        assert (caller.calls._turns, caller.calls._waiting) == ({}, 0)

    asyncio.run(run())
