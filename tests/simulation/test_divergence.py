"""Updates that nobody can use: a run that makes no others ends, one that has others goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleets import Diverging, config, events

from anabranch.core.effects import Barred
from anabranch.reports.result import Result
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import ProgressReporter, RunProgress, open_simulation, simulate

ENDLESS = {"virtual_s_max": 0.0, "updates_max": 40}
WHY = "the last 100 updates were all rejected ("


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"client": {"push": "overlap"}, "server": {"tasks_per_client": 2}},
        {"faults": {"loss": 0.1, "device_crash_every_s": 200.0}},
        {"fleet": {"clients": 6, "dropout": 0.3, "availability": 0.7, "availability_period_s": 15.0}},
    ],
    ids=["task", "overlap", "faults", "rough"],
)
def test_a_run_of_which_nothing_comes_ends_and_says_why(tables: dict[str, Any]) -> None:
    settings = config(run=ENDLESS, **tables)
    result = simulate(settings, app=Diverging())
    assert result.given_up.startswith(WHY + "delta has 1 values that are not finite, the first in tensor 'w'")
    assert result.given_up.endswith("): learning rate too large, or NaN in the data?")
    assert (result.versions, result.updates_applied) == (0, 0)
    assert result.updates_rejected >= 100


def test_it_ends_where_the_codec_cannot_carry_the_values(tmp_path: Path) -> None:
    """There is nothing that the device could send: it gives the task back, and says why."""
    settings = config(run=ENDLESS, uplink={"codec": "int8"})
    result = simulate(settings, tmp_path, app=Diverging(size=40))
    assert result.given_up.startswith(WHY)
    assert "not finite" in result.given_up
    assert result.updates_rejected == 0
    (end,) = events(tmp_path, "finished")
    assert end["why"] == result.given_up
    assert replay_run(tmp_path, app=Diverging(size=40)).matches


@pytest.mark.parametrize("clients", [1, 30])
def test_it_ends_however_many_devices_there_are(clients: int) -> None:
    result = simulate(config(run=ENDLESS, fleet={"clients": clients}), app=Diverging())
    assert result.given_up.startswith(WHY)


def test_rounds_of_which_nothing_comes_end_too() -> None:
    result = simulate(config("fedavg", run=ENDLESS), app=Diverging())
    assert result.given_up.startswith(WHY)


@pytest.mark.parametrize("keep_payloads", [False, True])
def test_the_end_replays(keep_payloads: bool, tmp_path: Path) -> None:
    settings = config(run=ENDLESS | {"keep_payloads": keep_payloads})
    simulate(settings, tmp_path, app=Diverging())
    outcome = replay_run(tmp_path, app=Diverging())
    assert outcome.matches
    assert Result.read(tmp_path).given_up


def test_devices_back_off_from_rejections() -> None:
    with open_simulation(config(run=ENDLESS), app=Diverging()) as simulation:
        simulation.run()
        took_s = simulation.clock.now
    # Six devices without a pause would be through in a few seconds of training each.
    assert took_s > 20.0


def test_one_device_without_numbers_does_not_end_the_run_of_the_others() -> None:
    settings = config(run=ENDLESS, fleet={"attackers": 1 / 6, "attack": "nan"})
    barred: list[str] = []
    with open_simulation(settings) as simulation:
        simulation.world.observers.append(
            lambda _, effects: barred.extend(e.client_id for e in effects if isinstance(e, Barred))
        )
        simulation.run()
        result, engine = simulation.result(0.0), simulation.engine
    assert (result.given_up, result.updates_applied) == ("", 40)
    assert result.updates_rejected <= settings.robust.flaws_max
    assert set(barred) == set(engine.guard.quarantined)


def test_without_a_bound_it_goes_on_to_the_end_of_its_time() -> None:
    result = simulate(config(run={"rejections_max": 0}, robust={"flaws_max": 0}), app=Diverging())
    assert result.given_up == ""
    assert result.virtual_s == pytest.approx(25.0, abs=5.0)


# --- progress ----------------------------------------------------------------------------------


def test_progress_comes_by_real_time_before_anything_is_measured() -> None:
    """Every reading of the clock is a quarter of a second later than the one before."""
    seen: list[RunProgress] = []
    readings = iter(range(10**9))
    settings = config(run=ENDLESS)  # evaluated at the end alone
    with open_simulation(settings, app=Diverging()) as simulation:
        world = simulation.world
        teller = ProgressReporter(
            seen.append, simulation.clock, world.versions, lambda: 0, now=lambda: next(readings) / 4
        )
        simulation.clock.beside = teller.beside
        simulation.run()
        events_of_clock = simulation.clock.events
    assert {(p.accuracy, p.evaluated) for p in seen} == {(None, False)}
    assert len(seen) >= events_of_clock / 5, "at every fifth event, a second and a quarter"
    assert [p.rejected for p in seen] == sorted(p.rejected for p in seen)
    assert seen[-1].rejected > 90
