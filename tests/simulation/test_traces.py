"""Runs of fleets that a trace says something of, of days, and of a server's line that devices share."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from anabranch.core import events as ev
from anabranch.core.config.tables import Config, FleetTable
from anabranch.core.engine.ledger import TRAIN_S
from anabranch.core.errors import ConfigError, DataError
from anabranch.core.model.params import digest
from anabranch.simulation.clock import VirtualClock
from anabranch.simulation.presence import DevicePresence
from anabranch.simulation.run import Simulation, open_simulation, simulate
from anabranch.testing.federation import config
from anabranch.workloads.traces import DeviceMoment, DeviceTrace, read_trace

LATENCY_S = 0.05
MODEL_BYTES = 4_008  # of the synthetic App

TRACE = """device,time_s,state,up_mbps,down_mbps,step_time_s
early,0,,,0.05,0.1
early,20,off,,,
early,25,on,0.01,,
early,40,again,,,
late,0,off,,,0.3
late,10,on,,,
late,13,,0.002,0.01,
late,30,off,,,
late,45,again,,,
always,0,,0.02,0.02,0.2
"""


def settings(tmp_path: Path | None = None, **tables: Any) -> Config:
    base: dict[str, dict[str, Any]] = {"run": {"updates_max": 60}, "fleet": {"clients": 5}}
    if tmp_path is not None:
        (tmp_path / "trace.csv").write_text(TRACE)
        base["fleet"] |= {"trace": str(tmp_path / "trace.csv"), "speed": "traced"}
    return config(**{name: {**base.get(name, {}), **tables.get(name, {})} for name in {*base, *tables}})


def events_of(given: Config) -> tuple[list[ev.Event], Simulation, str]:
    found: list[ev.Event] = []
    with open_simulation(given) as simulation:
        simulation.world.observers.append(lambda event, _: found.append(event))
        simulation.run()
        return found, simulation, digest(simulation.engine.vector)


def test_devices_speak_when_their_trace_says_that_they_are_there(tmp_path: Path) -> None:
    found, _, _ = events_of(settings(tmp_path))
    trace = read_trace(str(tmp_path / "trace.csv"))
    asked: Counter[str] = Counter()
    for event in found:
        if isinstance(event, ev.TaskAsked):
            device = trace.of(int(event.ask.client_id.removeprefix("device-")))
            for moment_s in (event.now - LATENCY_S, event.now):
                assert device.moments[device.at(moment_s)[1]].on, (event.ask.client_id, moment_s)
            asked[event.ask.client_id] += 1
    assert len(asked) == 5, "each has asked: devices 3 and 4 are the first two again"
    first = min(e.now for e in found if isinstance(e, ev.Enrolled) and e.client_id == "device-0001")
    assert first == pytest.approx(10.0 + LATENCY_S)


def test_a_step_takes_what_the_trace_says(tmp_path: Path) -> None:
    found, _, _ = events_of(settings(tmp_path))
    for event in found:
        if isinstance(event, ev.UpdateArrived):
            number = int(event.update.client_id.removeprefix("device-"))
            step_s = (0.1, 0.3, 0.2)[number % 3]
            assert event.update.metrics[TRAIN_S] == pytest.approx(3 * step_s)


def test_bytes_take_what_the_link_takes_then(tmp_path: Path) -> None:
    """The one device that is always there, alone: all of its first task, by hand."""
    (tmp_path / "one.csv").write_text(
        "device,time_s,up_mbps,down_mbps,step_time_s\n"
        "a,0,,0.032064,1\na,1.2,0.008016,0.016032,\na,8,0.032064,,\n"
    )
    fleet = {"clients": 1, "trace": str(tmp_path / "one.csv"), "speed": "traced"}
    found, _, _ = events_of(settings(fleet=fleet))
    bits = 8 * MODEL_BYTES
    begins = 5 * LATENCY_S  # enrolled and heard, asked and heard, and the server has the wish for the model
    assert bits == 32_064  # so one second at first, of which .95 until the link is half as fast
    fetched = 1.2 + (bits - (1.2 - begins) * 32_064) / 16_032 + LATENCY_S
    trained = fetched + 3.0
    uploaded_by_8 = (8.0 - trained) * 8_016
    arrived = 8.0 + (bits - uploaded_by_8) / 32_064 + LATENCY_S
    (update,) = [e for e in found if isinstance(e, ev.UpdateArrived)][:1]
    assert update.now == pytest.approx(arrived)


def test_devices_share_the_servers_line() -> None:
    """Four that are alike, whose own links have no limit: each has a quarter."""
    fleet = {"clients": 4, "speed_ratio": 1.0, "server_in_mbps": 0.064128, "server_out_mbps": 0.016032}
    found, _, _ = events_of(settings(fleet=fleet))
    fetched = 5 * LATENCY_S + 4 * 32_064 / 16_032 + LATENCY_S
    arrived = fetched + 3 * 0.1 + 4 * 32_064 / 64_128 + LATENCY_S
    updates = [e for e in found if isinstance(e, ev.UpdateArrived)][:4]
    assert [e.now for e in updates] == pytest.approx([arrived] * 4)


def test_no_more_comes_in_than_the_line_takes() -> None:
    """Of a busy server with devices of all kinds, over the whole run."""
    fleet = {
        "clients": 12,
        "server_in_mbps": 0.05,
        "up_mbps": 0.02,
        "availability": 0.8,
        "availability_period_s": 30.0,
    }
    found, simulation, _ = events_of(settings(fleet=fleet, run={"updates_max": 150}))
    arrivals = [e.now for e in found if isinstance(e, ev.UpdateArrived)]
    took_s = arrivals[-1] - arrivals[0]
    carried = 8 * MODEL_BYTES * (len(arrivals) - 1)
    # The last one may have begun before the first one ended, and all that were under way with it.
    assert carried <= 50_000 * took_s + 12 * 8 * MODEL_BYTES
    assert carried >= 0.5 * 50_000 * took_s, "the line is what holds them up"
    assert simulation.engine.counters.applied == 150


FAULTS = {"loss": 0.05, "delay": 0.2, "device_crash_every_s": 40.0, "server_crash_every_s": 60.0}
PUSHES: list[dict[str, Any]] = [
    {"client": {"push": "task"}},
    {"client": {"push": "overlap"}, "server": {"tasks_per_client": 2}},
    {"client": {"push": "elastic", "push_steps": 3}, "run": {"updates_max": 20}},
    {"faults": FAULTS},
    {
        "faults": {**FAULTS, "device_copy_every_s": 100.0},
        "client": {"push": "overlap"},
        "server": {"tasks_per_client": 2},
    },
]


@pytest.mark.parametrize("tables", PUSHES)
def test_one_seed_has_one_history_with_all_of_it(tmp_path: Path, tables: dict[str, Any]) -> None:
    shared = {"server_in_mbps": 0.05, "server_out_mbps": 0.05, "dropout": 0.1}
    given = settings(tmp_path, **{**tables, "fleet": shared})
    first, second = simulate(given), simulate(given)
    assert first.to_json()["journal_sha256"] == second.to_json()["journal_sha256"]
    assert first.updates_applied == given.run.updates_max


def test_a_line_that_is_shared_costs_time(tmp_path: Path) -> None:
    own_s, shared_s = (
        simulate(settings(tmp_path, fleet={"dropout": 0.1, **line})).virtual_s
        for line in ({}, {"server_in_mbps": 0.05, "server_out_mbps": 0.05})
    )
    assert own_s is not None
    assert shared_s is not None
    assert own_s < shared_s


def test_a_run_without_any_of_it_is_what_it_was(tmp_path: Path) -> None:
    """A trace that says nothing new, and a line so wide that nobody meets another, change no time."""
    plain = simulate(settings(run={"updates_max": 30}))
    (tmp_path / "silent.csv").write_text("device,time_s,state\na,0,on\nb,0,on\n")
    silent = simulate(settings(run={"updates_max": 30}, fleet={"trace": str(tmp_path / "silent.csv")}))
    assert (silent.model_sha256, silent.virtual_s) == (plain.model_sha256, plain.virtual_s)
    wide = simulate(settings(run={"updates_max": 30}, fleet={"server_in_mbps": 1e12}))
    assert wide.virtual_s == pytest.approx(plain.virtual_s)
    assert wide.updates_applied == plain.updates_applied


@pytest.mark.parametrize("ends", [{"virtual_s_max": 1000.0}, {"virtual_s_max": 0.0}])
def test_a_run_that_nobody_comes_back_to_does_not_say_that_its_time_is_up(
    tmp_path: Path, ends: dict[str, float]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("device,time_s,state\na,0,on\na,30,off\nb,0,on\nb,30,off\n")
    left = simulate(settings(run={"updates_max": 10**6, **ends}, fleet={"trace": str(trace)}))
    assert left.why == "nothing more can happen: no device is at work, and none will be"
    assert left.status == "finished"
    assert left.updates_applied > 0
    assert left.virtual_s is not None
    assert left.virtual_s < 1000.0
    soon = simulate(settings(run={"updates_max": 10**6, "virtual_s_max": 20.0}, fleet={"trace": str(trace)}))
    assert (soon.why, soon.virtual_s) == ("the virtual time is up", 20.0)


def test_a_trace_that_is_gone_or_says_no_step_time_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.csv cannot be read"):
        simulate(settings(fleet={"trace": str(tmp_path / "nowhere.csv")}))
    (tmp_path / "untimed.csv").write_text("device,time_s,state\na,0,on\n")
    with pytest.raises(DataError, match="device a of the trace has no step_time_s"):
        simulate(settings(fleet={"trace": str(tmp_path / "untimed.csv"), "speed": "traced"}))


@pytest.mark.parametrize(
    ("fleet", "says"),
    [
        ({"speed": "traced"}, r"fleet\.speed = 'traced' needs fleet\.trace"),
        ({"trace": "a.csv", "availability": 0.5}, r"fleet\.availability is 0\.5, and fleet\.trace says"),
        ({"availability_swing": 0.5}, r"at its peak 1\.5 of the devices.*Lower it to 0"),
        ({"availability": 0.8, "availability_swing": 0.5}, r"Lower it to 0\.25"),
        ({"availability_swing": 1.5, "availability": 0.1}, r"fleet\.availability_swing must be from 0 to 1"),
        ({"availability_zones": 0.5}, r"fleet\.availability_zones needs fleet\.availability_swing"),
        ({"availability_peak_s": 5.0}, r"fleet\.availability_peak_s needs fleet\.availability_swing"),
        ({"availability_day_s": 0.0}, r"fleet\.availability_day_s must be greater than 0"),
        ({"server_in_mbps": -1.0}, r"fleet\.server_in_mbps must not be negative"),
    ],
)
def test_bad_settings_are_named(fleet: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settings(fleet=fleet)


class Lamp(DevicePresence):
    """A device that is nothing but there or not."""

    def __init__(self, clock: VirtualClock, fleet: FleetTable, draw: float) -> None:
        super().__init__(clock, fleet, math.inf)
        self._drawn, self._since = draw, 0.0
        self.there: list[tuple[float, float]] = []

    def _come(self) -> None:
        self._since = self._clock.now

    def _vanish(self) -> None:
        self.there.append((self._since, self._clock.now))

    def _meet(self, moment: DeviceMoment) -> None:
        raise AssertionError("it has no trace")

    @property
    def _trace(self) -> DeviceTrace | None:
        return None

    def _draw(self, purpose: str, number: int) -> float:
        return self._drawn if purpose == "availability" else (self._drawn * 7.0) % 1.0 if number == 0 else 0.0

    def in_hour(self, hour: int) -> float:
        start = hour * 3600.0
        return sum(max(0.0, min(b, start + 3600.0) - max(a, start)) for a, b in self.there) / 3600.0


@pytest.mark.parametrize("zones", [0.0, 1.0])
def test_a_day_has_its_hours(zones: float) -> None:
    """The mean over many devices is a (1 + s cos), or a alone where their days lie all round the clock."""
    fleet = FleetTable(
        availability=0.5,
        availability_swing=0.8,
        availability_peak_s=2 * 3600.0,
        availability_zones=zones,
        availability_period_s=600.0,
    )
    clock = VirtualClock()
    lamps = [Lamp(clock, fleet, (i + 0.5) / 200) for i in range(200)]
    for lamp in lamps:
        lamp.begin()
    clock.run(until_s=25 * 3600.0)
    for hour in range(1, 24):
        swing = 0.0 if zones else 0.8 * math.cos(2 * math.pi * (hour + 0.5 - 2.0) / 24.0)
        there = sum(lamp.in_hour(hour) for lamp in lamps) / len(lamps)
        assert there == pytest.approx(0.5 * (1.0 + swing), abs=0.02), hour
