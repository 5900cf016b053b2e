"""Turns of calls: one of a kind and a client at a time, and nobody waits for another's."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from anabranch.core.errors import Overloaded
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.server.calls import HELD_S_MAX, Calls


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


def test_who_asks_before_it_may_has_its_answer_late_and_only_once() -> None:
    clock = [100.0]
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def run() -> None:
        calls = Calls(now=lambda: clock[0], sleep=sleep)
        calls.told("AskTask", "a", 30.0)
        await calls.hold("AskTask", "b")
        await calls.hold("Heartbeat", "a")
        await calls.hold("AskTask", "a")
        await calls.hold("AskTask", "a")
        calls.told("AskTask", "a", 0.25)
        await calls.hold("AskTask", "a")
        calls.told("AskTask", "a", 30.0)
        clock[0] += 30.0
        await calls.hold("AskTask", "a")

    asyncio.run(run())
    assert slept == [HELD_S_MAX, 0.25]


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
        for end in caller.ends.values():
            end.set()
        await asyncio.gather(*tasks)
        assert (caller.calls._turns, caller.calls._waiting) == ({}, 0)

    asyncio.run(run())
