"""Devices before their first task are rows: the run is the one in which each is a device from the start."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from fleets import Ones, config

from anabranch.core.config.tables import Config
from anabranch.core.device.session import Session, first_task_id
from anabranch.core.effects import AskTask
from anabranch.core.events import Started
from anabranch.reports.journal_files import JOURNAL
from anabranch.simulation.newcomers import come_as_rows
from anabranch.simulation.run import open_simulation

CLIENTS = 40
# Nobody is this likely to leave, but whoever may leave is a device from the start.
MAY_LEAVE = {"leavers": 1e-300}
TIED = {"speed": "measured", "step_times_s": [0.1, 0.2, 0.3, 0.7], "latencies_s": [0.05, 0.1, 0.15, 0.0]}
SHORT_LEASES = {"lease_s": 4.0, "lease_min_s": 2.0}


def fleet_of(strategy: str, tables: dict[str, Any], **fleet: Any) -> Config:
    fleet = {"clients": CLIENTS, "waiting": "called", **tables.get("fleet", {}), **fleet}
    server = {"concurrency": 5, **tables.get("server", {})}
    run = {"virtual_s_max": 15.0, "evaluate_every_versions": 5, **tables.get("run", {})}
    return config(strategy, fleet=fleet, server=server, run=run)


def told(settings: Config, folder: Path) -> tuple[list[dict[str, Any]], int, int, int]:
    """The journal after its configuration, the clock's events, and how many devices there were."""
    with open_simulation(settings, folder, app=Ones()) as simulation:
        simulation.run()
        counts = simulation.clock.events, simulation.engine.counters.applied, len(simulation.devices)
    lines = (folder / JOURNAL).read_text().splitlines()[1:]
    return [json.loads(line) for line in lines], *counts


@pytest.mark.parametrize("strategy", ["fedasync", "fedavg", "fedbuff", "teasq"])
@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"fleet": TIED},  # messages of several devices come at the very same moment
        {"fleet": {"dropout": 0.3, "availability_period_s": 20.0}, "server": SHORT_LEASES},
        {"run": {"initial": "built"}},
    ],
    ids=["plain", "tied", "dropout", "built"],
)
def test_the_run_is_that_of_devices_from_the_start(
    strategy: str, tables: dict[str, Any], tmp_path: Path
) -> None:
    rows = told(fleet_of(strategy, tables), tmp_path / "rows")
    objects = told(fleet_of(strategy, tables, **MAY_LEAVE), tmp_path / "objects")
    assert rows[:3] == objects[:3]
    assert rows[2] >= 5
    assert objects[3] == CLIENTS


@pytest.mark.parametrize("strategy", ["fedavg", "fedbuff"])
def test_who_hears_of_refused_asks_hears_the_same(strategy: str) -> None:
    def heard(settings: Config) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        with open_simulation(settings, app=Ones()) as simulation:
            clock = simulation.clock
            simulation.world.refused.append(
                lambda r: found.append((clock.now, r.ask.client_id, r.reason, r.detail, r.retry_after_s))
            )
            simulation.run()
        return found

    rows, objects = heard(fleet_of(strategy, {})), heard(fleet_of(strategy, {}, **MAY_LEAVE))
    assert len(rows) >= CLIENTS - 5
    assert rows == objects


def test_a_server_that_may_be_down_turns_nobody_away_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_simulation(config(faults={"loss": 0.1}), app=Ones()) as simulation:
        monkeypatch.setattr(simulation.world, "turns_away", lambda _: True)
        assert not simulation.server.turns_away(simulation.devices[0])


def test_who_never_gets_a_task_is_never_a_device(tmp_path: Path) -> None:
    slow = {"fleet": {"step_time_s": 100.0}}
    assert told(fleet_of("fedbuff", slow), tmp_path)[3] == 5


def test_a_place_for_everybody_makes_all_of_them_devices(tmp_path: Path) -> None:
    everybody = {"server": {"concurrency": 0}, "run": {"virtual_s_max": 3.0}}
    rows = told(fleet_of("fedbuff", everybody), tmp_path / "rows")
    assert rows == told(fleet_of("fedbuff", everybody, **MAY_LEAVE), tmp_path / "objects")


@pytest.mark.parametrize(
    "tables",
    [
        {"fleet": MAY_LEAVE},
        {"fleet": {"availability": 0.5}},
        {"fleet": {"arrival": "stream", "arrival_rate": 1.0}},
        {"client": {"push": "elastic"}},
        {"client": {"push": "overlap"}, "server": {"tasks_per_client": 2}},
        {"faults": {"loss": 0.1}},
    ],
)
def test_whoever_may_come_and_go_is_a_device_from_the_start(tables: dict[str, Any]) -> None:
    assert come_as_rows(config())
    assert not come_as_rows(config(**tables))


def test_a_newcomer_asks_as_its_session_would() -> None:
    (asked,) = Session("device-0007", 3).handle(Started(0.0))
    assert asked == AskTask(first_task_id(3, "device-0007"))


def test_an_idle_device_of_a_large_fleet_is_small() -> None:
    """All that a fleet takes, from its set-up to when its devices sleep."""
    assert (allocated(500) - allocated(250)) / 250 < 600, "as devices each took 1,000"


def allocated(devices: int) -> int:
    """Bytes of Python's, at the most, of a fleet that has asked and sleeps."""
    settings = fleet_of("fedbuff", {"fleet": {"step_time_s": 100.0}}, clients=devices)
    tracemalloc.start()
    try:
        with open_simulation(settings, app=Ones()) as simulation:
            simulation.begin_devices()
            simulation.clock.run(1.0)
            return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
