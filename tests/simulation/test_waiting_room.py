"""Refused devices that sleep until they are called: nobody forgotten, nobody first, idle for free."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from fleets import Ones, config, events

from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.engine.engine import Engine
from anabranch.core.errors import ConfigError
from anabranch.core.model.updates import Ask, Capability, Reason
from anabranch.reports.result import Result
from anabranch.simulation.checkers import Checker
from anabranch.simulation.run import called_when_free, open_simulation, simulate

ROUGH = {"dropout": 0.3, "availability": 0.6, "availability_period_s": 20.0}


def sleepy(strategy: str = "fedbuff", **tables: Any) -> Config:
    tables["fleet"] = {"clients": 12, "waiting": "called", **tables.get("fleet", {})}
    tables["server"] = {"concurrency": 3, **tables.get("server", {})}
    return config(strategy, **tables)


def checked(settings: Config, version_within_s: float = 0.0) -> tuple[Result, Engine]:
    with open_simulation(settings, app=Ones()) as simulation:
        checker = Checker(simulation.engine, version_within_s=version_within_s)
        simulation.world.observers.append(checker.observe)
        simulation.run()
        return simulation.result(0.0), simulation.engine


def events_of(clients: int, waiting: str = "called") -> int:
    """Of a run in which three devices train, and so long that these never finish."""
    fleet = {"clients": clients, "waiting": waiting, "step_time_s": 100.0}
    with open_simulation(sleepy(fleet=fleet, run={"virtual_s_max": 60.0}), app=Ones()) as simulation:
        simulation.run()
        return simulation.clock.events


@pytest.mark.parametrize("strategy", ["fedasync", "fedavg", "fedbuff", "teasq"])
@pytest.mark.parametrize("seed", range(2))
def test_invariants_hold_where_devices_come_and_go(strategy: str, seed: int) -> None:
    lease = {"lease_s": 4.0, "lease_min_s": 2.0}
    run = {"seed": seed, "virtual_s_max": 120.0}
    settings = sleepy(strategy, run=run, fleet={**ROUGH, "step_time_s": 1.0}, server=lease)
    result, engine = checked(settings)
    assert result.updates_applied > 3
    assert engine.counters.leases_lost > 0


@pytest.mark.parametrize("strategy", ["fedasync", "fedbuff"])
def test_a_place_goes_to_whoever_has_waited_longest(strategy: str, tmp_path: Path) -> None:
    settings = sleepy(strategy, fleet={"speed_ratio": 1.0})
    simulate(settings, tmp_path, app=Ones())
    order = [e["client"] for e in events(tmp_path, "granted")]
    assert len(order) > 100
    assert all(len(set(order[at : at + 12])) == 12 for at in range(len(order) - 12))


def test_places_do_not_stay_empty_for_longer_than_a_message_takes_both_ways() -> None:
    with open_simulation(sleepy(fleet={"latency_s": 0.01}), app=Ones()) as simulation:
        simulation.run()
        engine = simulation.engine
        task_s = 0.6  # 2 steps, of 0.1 s to 0.5 s each
        assert engine.counters.granted > 0.8 * 3 * simulation.clock.now / task_s


def test_rounds_call_their_cohort_and_nobody_else() -> None:
    settings = sleepy(
        "fedavg", fleet={"clients": 40}, server={"concurrency": 0}, run={"virtual_s_max": 100.0}
    )
    result, engine = checked(settings, version_within_s=25.0)
    assert result.versions > 30
    assert len(result.clients) > 30, "the cohorts are drawn of the whole fleet"
    assert engine.counters.granted < 4.5 * result.versions


def test_who_has_had_its_task_of_a_round_is_not_looked_at_with_each_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a round of n devices that would be n / 2 looks for each update: the square of n for a round."""
    looks, look = [], Engine.refusal

    def counted(*given: Any) -> Any:
        looks.append(given)
        return look(*given)

    monkeypatch.setattr(Engine, "refusal", counted)
    tables: dict[str, dict[str, Any]] = {
        "run": {"workload": "synthetic", "updates_max": 400},
        "fleet": {"clients": 40, "waiting": "called"},
        "strategy": {"name": "fedavg", "clients_per_round": 40, "over_selection": 1.0},
    }
    result, engine = checked(merge([("test", tables)]))
    assert result.versions == 10
    assert len(looks) < 4 * engine.counters.granted, "asked and refused, called, asked and granted"


def test_a_sleeping_device_costs_no_events() -> None:
    few, more = events_of(10), events_of(40)
    assert more - few == 30 * 3, "each enrols, hears of it and asks once"
    assert events_of(40, "ask") > more + 1000


def test_nobody_is_called_to_a_run_that_is_over() -> None:
    """Every sleeper would ask once more, and be told so: of a million that costs a gigabyte, for nothing."""
    settings = sleepy(fleet={"clients": 40}, run={"virtual_s_max": 0.0, "updates_max": 30})
    with open_simulation(settings, app=Ones()) as simulation:
        simulation.run()
        assert simulation.world.room is not None
        assert simulation.engine.finished
        assert len(simulation.world.room) >= 40 - 3 - 3, "all but those at work and those on their way"


def test_the_same_seed_gives_the_same_run() -> None:
    settings = sleepy(fleet=ROUGH)
    first, again = simulate(settings, app=Ones()), simulate(settings, app=Ones())
    assert (first.model_sha256, first.journal_sha256) == (again.model_sha256, again.journal_sha256)


class Sleeper:
    """Remembers that it was called."""

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.calls = 0

    def called(self) -> None:
        self.calls += 1


def test_the_place_of_a_called_device_is_kept_and_passed_on_when_it_goes() -> None:
    with open_simulation(sleepy(server={"concurrency": 1}), app=Ones()) as simulation:
        world, room = simulation.world, simulation.world.room
        assert room is not None
        sleepers = [Sleeper(name) for name in "abcd"]
        for sleeper in sleepers:
            world.enrol(sleeper.client_id, Capability(64))
        task, _ = world.ask(Ask("a", "1"))  # type: ignore[misc]
        for sleeper in sleepers[1:3]:
            refused = world.ask(Ask(sleeper.client_id, f"{sleeper.client_id}1"))
            assert not isinstance(refused, tuple)
            assert world.waits(refused, sleeper)
        world._handle(ev.TaskDropped(simulation.clock.now, "a", task.task_id, "test"))
        assert [s.calls for s in sleepers] == [0, 1, 0, 0]
        refused = world.ask(Ask("d", "d1"))
        assert not isinstance(refused, tuple)
        assert refused.reason is Reason.AT_CAPACITY, "the free place is b's, who is on its way"
        world.gone("b")
        assert [s.calls for s in sleepers] == [0, 1, 1, 0]
        assert isinstance(world.ask(Ask("c", "c2")), tuple)
        assert len(room) == 0


def test_what_only_time_helps_against_is_asked_again() -> None:
    settings = sleepy(robust={"tasks_per_minute": 2.0}, server={"concurrency": 0}, fleet={"clients": 2})
    result, _ = checked(settings)
    assert 4 <= result.updates_applied <= 8


def test_large_fleets_are_called_and_faults_need_devices_that_ask() -> None:
    assert not called_when_free(config(fleet={"clients": 10_000}))
    assert called_when_free(config(fleet={"clients": 10_001}))
    assert not called_when_free(config(fleet={"clients": 10_001}, faults={"loss": 0.1}))
    with pytest.raises(ConfigError, match=r"fleet\.waiting = 'called' is for runs without \[faults\]"):
        called_when_free(config(fleet={"waiting": "called"}, faults={"loss": 0.1}))


def test_a_device_of_a_large_fleet_is_small_even_when_all_of_them_ask() -> None:
    """What 500 devices more take to enrol and to have their first ask on its way, beside themselves."""
    small, large = allocated_at(0.1, 500), allocated_at(0.1, 1_000)
    assert (large - small) / 500 < 700, "closures for each message would make it twice as much"


def allocated_at(now_s: float, devices: int) -> int:
    """Bytes of Python's that a fleet takes then."""
    with open_simulation(sleepy(fleet={"clients": devices}), app=Ones()) as simulation:
        tracemalloc.start()
        try:
            simulation.begin_devices()
            simulation.clock.run(now_s)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
