"""A thread that runs only while somebody waits for it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from anabranch.simulation.baton import Baton, ThreadEnded

WAIT_S, SILENT_S = 600.0, 0.01


def baton(work: Callable[[Callable[[], None]], None]) -> Baton:
    return Baton(work, lambda: None, WAIT_S)


def counting(name: str, told: list[str]) -> Baton:
    def work(hand_back: Callable[[], None]) -> None:
        for n in range(3):
            told.append(f"{name}{n}")
            hand_back()

    return baton(work)


def test_only_who_has_the_baton_goes_on() -> None:
    told: list[str] = []
    a, b = counting("a", told), counting("b", told)
    for one in (a, a, b, a, b):
        told.append("world")
        one.go_on()
    assert told == ["world", "a0", "world", "a1", "world", "b0", "world", "a2", "world", "b1"]
    for one in (a, b):
        one.end()
        assert not one._thread.is_alive()


def test_each_draws_from_generators_of_its_own() -> None:
    def drawing(seed: int, drawn: list[tuple[float, float]]) -> Baton:
        def work(hand_back: Callable[[], None]) -> None:
            random.seed(seed)
            np.random.seed(seed)
            for _ in range(3):
                drawn.append((random.random(), np.random.random()))
                hand_back()

        return baton(work)

    def drawn_by(seeds: list[int], order: list[int]) -> list[list[tuple[float, float]]]:
        drawn: list[list[tuple[float, float]]] = [[] for _ in seeds]
        batons = [drawing(seed, one) for seed, one in zip(seeds, drawn, strict=True)]
        for which in order:
            batons[which].go_on()
        for one in batons:
            one.end()
        return drawn

    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    together = drawn_by([1, 2], [0, 1, 0, 1, 1, 0])
    assert together == [*drawn_by([1], [0, 0, 0]), *drawn_by([2], [0, 0, 0])]
    assert together[0] != together[1]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]


def test_what_the_work_raises_comes_out_where_it_was_waited_for() -> None:
    def work(hand_back: Callable[[], None]) -> None:
        hand_back()
        raise ZeroDivisionError("in the thread")

    one = baton(work)
    one.go_on()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="in the thread"):
            one.go_on()
    one.end()


def test_work_ends_where_it_waits_and_cleans_up() -> None:
    left: list[str] = []

    def work(hand_back: Callable[[], None]) -> None:
        try:
            while True:
                hand_back()
        except ThreadEnded:
            left.append("cleaned up")
            raise

    one = baton(work)
    one.go_on()
    one.end()
    assert left == ["cleaned up"]
    one.end()  # harmless


def test_what_never_began_has_nothing_to_end() -> None:
    one = baton(lambda _: pytest.fail("it was not to begin"))
    one.end()


def test_silence_is_warned_of_once() -> None:
    warned: list[int] = []

    def work(hand_back: Callable[[], None]) -> None:
        while not warned:
            pass
        threading.Event().wait(5 * SILENT_S)
        hand_back()

    one = Baton(work, lambda: warned.append(1), SILENT_S)
    one.go_on()
    one.end()
    assert warned == [1]
