"""A simulated run to which no update can come says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import anabranch as ab

SAID = "no update has come for "


def warned(caplog: pytest.LogCaptureFixture, **settings: Any) -> tuple[int, list[str]]:
    """How many updates came, and what was said of none. Devices are there for half of each minute."""
    away = {"fleet.availability": 0.5, "fleet.availability_period_s": 60.0, "client.steps": 2}
    budget = {"run.virtual_s_max": 10_000.0, "run.evaluate_every_versions": 0}
    run = ab.simulate(
        "synthetic",
        strategy="fedasync",
        fleet=ab.Fleet(clients=3),
        until=ab.Until(updates=20),
        settings={**away, **budget, **settings},
    )
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith(SAID)]
    return run.result.updates_applied, said


def test_updates_that_take_longer_than_devices_stay_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """4 kB by 500 bits a second, in half a minute: it went on for ever without a word."""
    applied, said = warned(caplog, **{"fleet.up_mbps": 0.0005})
    assert (applied, len(said)) == (0, 2), "after an hour, and two"
    assert "devices vanished " in said[0]
    assert "raise fleet.availability_period_s, fleet.up_mbps or server.lease_s" in said[0]


def test_where_updates_come_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert warned(caplog, **{"fleet.up_mbps": 0.01}) == (20, [])


def test_of_tasks_of_hours_some_are_lost_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    slow = {"fleet.availability": 1.0, "fleet.step_time_s": 10_000.0, "run.virtual_s_max": 400_000.0}
    applied, said = warned(caplog, **slow, **{"fleet.dropout": 0.3})
    assert applied > 10
    assert not said


@pytest.mark.parametrize("seed", [0, 1])
def test_nights_in_which_nobody_is_there_are_no_standstill(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Phones of the shipped day, with tasks of an hour, of which some are lost as the phones go."""
    ab.simulate(
        "synthetic",
        strategy="fedasync",
        fleet=ab.Fleet(clients=24),
        until=ab.Until(updates=150),
        settings={
            "fleet.trace": str(Path(__file__).parents[2] / "examples/day.csv"),
            "fleet.step_time_s": 1800.0,
            "fleet.dropout": 0.1,
            "client.steps": 2,
            "run.seed": seed,
            "run.evaluate_every_versions": 0,
        },
    )
    assert not [r for r in caplog.records if r.getMessage().startswith(SAID)]
