"""How often a simulation looks through all objects for circles."""

from __future__ import annotations

import gc

import pytest
from fleets import Ones, config

from anabranch.simulation.collector import RARER
from anabranch.simulation.run import open_simulation


def test_all_objects_are_looked_through_more_rarely_while_it_runs() -> None:
    before, seen = gc.get_threshold(), []
    with open_simulation(config(run={"updates_max": 5}), app=Ones()) as simulation:
        simulation.world.observers.append(lambda *_: seen.append(gc.get_threshold()))
        simulation.run()
        assert gc.get_threshold() == before
    assert set(seen) == {(*before[:2], RARER * before[2])}


def test_a_run_that_fails_leaves_it_as_it_was() -> None:
    before = gc.get_threshold()

    def fail(*_: object) -> None:
        raise ValueError("no")

    with open_simulation(config(run={"updates_max": 5}), app=Ones()) as simulation:
        simulation.world.observers.append(fail)
        with pytest.raises(ValueError, match="no"):
            simulation.run()
        assert gc.get_threshold() == before
