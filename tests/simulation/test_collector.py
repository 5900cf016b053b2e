"""What Python's search for circles looks through while a large fleet is simulated."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator

import pytest
from fleets import Ones, config

from anabranch.core.config.tables import Config
from anabranch.simulation.collector import passed_over
from anabranch.simulation.run import open_simulation

pytestmark = pytest.mark.slow

CLIENTS = 40


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    """What the suite has frozen is frozen again in the end, without what the test has left in circles."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class Circle:
    """An object that only the search finds."""

    def __init__(self) -> None:
        self.itself = self


def fleet(waiting: str, waiting_max: int = CLIENTS - 1) -> Config:
    devices = {"clients": CLIENTS, "waiting": waiting}
    return config(fleet=devices, run={"updates_max": 5}, limits={"waiting_max": waiting_max})


def frozen_in(settings: Config) -> set[int]:
    """How many objects are passed over, after each twentieth event: to count millions takes its time."""
    seen: set[int] = set()
    numbers = itertools.count()
    with open_simulation(settings, app=Ones()) as simulation:
        simulation.world.observers.append(
            lambda *_: seen.add(gc.get_freeze_count()) if next(numbers) % 20 == 0 else None
        )
        simulation.run()
    assert next(numbers) > 60
    return seen


def test_a_fleet_of_rows_is_passed_over_as_long_as_it_runs() -> None:
    assert min(frozen_in(fleet("called"))) > CLIENTS
    assert gc.get_freeze_count() == 0


def test_other_fleets_are_searched_as_ever() -> None:
    assert frozen_in(fleet("ask")) == {0}


def test_a_small_fleet_does_not_pay_for_a_search_of_all_there_is() -> None:
    """That takes 0.1 s beside torch, as 300 tasks do."""
    assert frozen_in(fleet("called", waiting_max=CLIENTS)) == {0}


def test_a_run_that_fails_leaves_nothing_frozen() -> None:
    def fail(*_: object) -> None:
        raise ValueError("no")

    with open_simulation(fleet("called"), app=Ones()) as simulation:
        simulation.world.observers.append(fail)
        with pytest.raises(ValueError, match="no"):
            simulation.run()
        assert gc.get_freeze_count() == 0


def test_what_is_left_in_circles_meanwhile_goes_as_soon_as_ever() -> None:
    before = gc.get_threshold()
    with passed_over():
        assert gc.get_threshold() == before
        old = weakref.ref(Circle())
        gc.collect(0)
        made = Circle()
        seen = weakref.ref(made)
        gc.collect(1)  # by now it is among the old ones
        del made
        gc.collect(1)
        assert seen() is not None
        gc.collect()
        assert (old(), seen()) == (None, None)


def until_python_has_searched_all() -> list[Circle]:
    """Objects that stay, as many as it takes."""
    ended: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            ended.append(info["generation"])

    held: list[Circle] = []
    gc.callbacks.append(note)
    while 2 not in ended:
        assert len(held) < 5_000_000
        held.append(Circle())
    gc.callbacks.remove(note)
    return held


def test_what_has_lived_through_a_search_that_python_began_is_passed_over_until_the_end() -> None:
    with passed_over():
        before, made = gc.get_freeze_count(), Circle()
        seen, held = weakref.ref(made), until_python_has_searched_all()
        assert gc.get_freeze_count() > before + len(held) / 2
        del made
        gc.collect()
        assert seen() is not None
    gc.collect()
    assert seen() is None


def test_a_search_that_an_app_asks_for_is_as_ever() -> None:
    with passed_over():
        before, made = gc.get_freeze_count(), Circle()
        seen = weakref.ref(made)
        gc.collect()
        assert gc.get_freeze_count() == before
        del made
        gc.collect()
        assert seen() is None


def test_what_is_in_circles_before_goes_first() -> None:
    left = weakref.ref(Circle())
    with passed_over():
        assert left() is None
