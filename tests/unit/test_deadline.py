"""A deadline that is moved: when it is due, for whom, and what it leaves to others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing

import pytest

from anabranch.server.deadline import Deadline

SOON_S, WAIT_S = 0.01, 60.0


def run(work: Callable[[Deadline, Callable[[], float]], Awaitable[None]]) -> None:
    async def within() -> None:
        with closing(Deadline()) as deadline:
            await asyncio.wait_for(work(deadline, asyncio.get_running_loop().time), WAIT_S)

    asyncio.run(within())


async def for_ever() -> None:
    await asyncio.Event().wait()


async def moved(deadline: Deadline, when: float) -> None:
    deadline.move(when)
    await for_ever()


async def failing() -> None:
    try:
        await for_ever()
    except asyncio.CancelledError:
        raise ValueError("mine") from None


def test_what_lasts_longer_is_ended() -> None:
    async def work(deadline: Deadline, now: Callable[[], float]) -> None:
        began = now()
        with pytest.raises(TimeoutError), deadline.until(now() + SOON_S):
            await for_ever()
        assert now() - began >= SOON_S
        assert deadline.expired

    run(work)


def test_one_that_was_moved_on_is_due_then_and_no_sooner() -> None:
    async def work(deadline: Deadline, now: Callable[[], float]) -> None:
        until = now() + 5 * SOON_S
        with pytest.raises(TimeoutError), deadline.until(now() + SOON_S):
            await moved(deadline, until)
        assert now() >= until

    run(work)


def test_one_that_was_moved_forward_is_due_at_once() -> None:
    async def work(deadline: Deadline, now: Callable[[], float]) -> None:
        with pytest.raises(TimeoutError), deadline.until(now() + 10 * WAIT_S):
            await moved(deadline, now())

    run(work)


def test_who_is_outside_is_left_alone_and_may_come_again() -> None:
    async def work(deadline: Deadline, now: Callable[[], float]) -> None:
        with deadline.until(now() + SOON_S):
            pass
        await asyncio.sleep(3 * SOON_S)
        with deadline.until(now() + 10 * WAIT_S):
            await asyncio.sleep(3 * SOON_S)
        with pytest.raises(TimeoutError), deadline.until(now() + SOON_S):
            await for_ever()
        with deadline.until(now() + 10 * WAIT_S):
            assert not deadline.expired

    run(work)


def test_a_move_from_outside_ends_nothing() -> None:
    async def work(deadline: Deadline, now: Callable[[], float]) -> None:
        deadline.move(now())
        await asyncio.sleep(SOON_S)
        with deadline.until(now() + 10 * WAIT_S):
            await asyncio.sleep(SOON_S)

    run(work)


def test_a_cancellation_by_others_stays_one() -> None:
    async def work(deadline: Deadline, now: Callable[[], float]) -> None:
        async def inside() -> None:
            with deadline.until(now()):
                asyncio.get_running_loop().call_later(SOON_S, task.cancel)
                try:
                    await for_ever()
                finally:
                    await asyncio.sleep(3 * SOON_S)  # both have come by then

        task = asyncio.create_task(inside())
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work)


def test_an_error_inside_stays_what_it_is() -> None:
    async def work(deadline: Deadline, now: Callable[[], float]) -> None:
        with pytest.raises(ValueError, match="mine"), deadline.until(now()):
            await failing()
        await asyncio.sleep(0)  # nothing is left of the cancellation

    run(work)
