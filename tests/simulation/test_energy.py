"""What a simulated fleet spends, against sums by hand."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fleets import config, events, recorded
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import ConfigError, DataError
from anabranch.reports.energy import DeviceEnergy, EnergyMeter
from anabranch.reports.result import Result
from anabranch.simulation.run import open_simulation, simulate
from anabranch.workloads.traces import read_trace, write_trace

WATTS = {"a": DeviceEnergy(2.0, 0.5, 0.25), "b": DeviceEnergy(10.0, 0.0, 0.0)}


def meter() -> EnergyMeter:
    return EnergyMeter(WATTS.__getitem__)


def test_a_life_by_hand() -> None:
    m, first, second = meter(), object(), object()
    m.begin(1.0, first, "a")
    m.received("a", 8)  # 2 J
    assert m.total_j(4.0) == pytest.approx(2 + 6)
    m.begin(4.0, second, "b")
    m.begin(4.5, second, "b")  # it trains already
    m.end(6.0, first)  # 10 J
    m.sent("a", 4)  # 2 J
    m.end(6.0, first)  # it has ended
    assert m.total_j(7.0) == pytest.approx(2 + 10 + 2 + 30)
    found = m.summary(7.0, 3.5)
    assert (found.train_j, found.up_j, found.down_j, found.total_j) == pytest.approx((40, 2, 2, 44))
    assert (found.devices, found.device_median_j, found.device_worst_tenth_j) == pytest.approx((2, 22, 30))
    assert found.to_target_j == 3.5
    assert m.devices_j(7.0) == pytest.approx({"a": 14, "b": 30})


def test_nothing_spent_is_nothing() -> None:
    found = meter().summary(5.0, None)
    assert (found.total_j, found.devices, found.device_median_j, found.to_target_j) == (0.0, 0, 0.0, None)


SPANS = st.lists(
    st.tuples(st.sampled_from("ab"), st.floats(0, 50), st.floats(0, 50)), min_size=1, max_size=30
)


@given(spans=SPANS, until=st.floats(100.0, 200.0))
def test_what_is_counted_on_the_way_is_the_sum_of_the_devices(
    spans: list[tuple[str, float, float]], until: float
) -> None:
    """Trainings that overlap, some of them under way at the end."""
    m, moments = meter(), list[tuple[float, str, int, str]]()
    for n, (device, start, length) in enumerate(spans):
        moments.append((start, "begin", n, device))
        if n % 3:
            moments.append((start + length, "end", n, device))
    for now, what, n, device in sorted(moments, key=lambda each: (each[0], each[1] == "end")):
        m.begin(now, n, device) if what == "begin" else m.end(now, n)
    spent = sum(
        WATTS[device].train_w * (length if n % 3 else until - start)
        for n, (device, start, length) in enumerate(spans)
    )
    assert m.total_j(until) == pytest.approx(spent)
    assert m.summary(until, None).total_j == pytest.approx(spent)


# --- fleets --------------------------------------------------------------------------------------

COSTS = {"train_w": [4.0, 2.0], "up_j_per_mb": [300.0], "down_j_per_mb": [100.0]}
FLEET = {"clients": 4, "examples_per_client": 64, "speed_levels": 2, "step_time_s": 0.5}


def trained_s(folder: Path) -> dict[str, float]:
    """Seconds of training that updates tell of, by device."""
    found: dict[str, float] = defaultdict(float)
    for event in events(folder, "decided"):
        found[event["client"]] += event["metrics"]["train_s"]
    return found


def moved(folder: Path, kind: str, key: str) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for event in events(folder, kind):
        found[event["client"]] += event[key]
    return found


def test_a_fleet_by_what_its_record_tells(tmp_path: Path) -> None:
    """Power times seconds, joules times bytes; what is under way at the end comes on top."""
    settings = config(fleet={**FLEET, **COSTS}, run={"updates_max": 24, "virtual_s_max": 0.0})
    result, _ = recorded(settings, tmp_path)
    energy = result.energy
    assert energy is not None
    up, down = moved(tmp_path, "decided", "uplink_bytes"), moved(tmp_path, "downloaded", "bytes")
    watts = {f"device-{i:04d}": (4.0, 2.0)[i % 2] for i in range(4)}  # the second of two levels is the slower
    told_j = {c: watts[c] * s for c, s in trained_s(tmp_path).items()}
    assert energy.up_j == pytest.approx(sum(up.values()) * 300e-6)
    assert energy.down_j == pytest.approx(sum(down.values()) * 100e-6)
    longest_s = {c: 2 * 0.5 * (1.0, 5.0)[i % 2] for i, c in enumerate(sorted(watts))}
    for client, share in result.clients.items():
        least_j = told_j[client] + up[client] * 300e-6 + down[client] * 100e-6
        assert share.energy_j is not None
        assert least_j <= share.energy_j + 1e-9 <= least_j + watts[client] * longest_s[client] + 1e-6
    assert energy.total_j == pytest.approx(sum(s.energy_j or 0.0 for s in result.clients.values()))
    assert energy.devices == 4


def test_a_training_is_counted_until_the_virtual_time_is_up(tmp_path: Path) -> None:
    """Nothing happens after the download, which is there after six ways of 50 ms."""
    fleet = {**FLEET, **COSTS, "clients": 1, "step_time_s": 100.0}
    run = {"virtual_s_max": 9.0, "evaluate_every_versions": 1}
    result, _ = recorded(config(fleet=fleet, run=run), tmp_path)
    assert result.energy is not None
    assert (result.virtual_s, result.updates_applied) == (9.0, 0)
    assert result.energy.train_j == pytest.approx(4.0 * (9.0 - 6 * 0.05))


def test_history_grows_and_says_what_the_target_took(tmp_path: Path) -> None:
    costs = {**FLEET, **COSTS, "examples_per_client": 256}
    run = {"evaluate_every_versions": 1, "target_accuracy": 0.2}
    result, _ = recorded(config(fleet=costs, run=run), tmp_path)
    spent = [point.energy_j for point in result.history]
    assert spent[0] == 0.0
    assert all(a is not None and b is not None and a < b for a, b in pairwise(spent))
    assert result.energy is not None
    reached = next(p for p in result.history if p.accuracy is not None and p.accuracy >= 0.2)
    assert result.energy.to_target_j == reached.energy_j
    assert 0 < (result.energy.to_target_j or 0.0) < result.energy.total_j
    assert Result.read(tmp_path) == result
    page = (tmp_path / "report.html").read_text()
    assert "Energy" in page
    assert "in the median" in page


def test_what_came_to_nothing_was_spent_all_the_same() -> None:
    """Every training that begins is broken off by its device, which vanishes in it, or is counted whole."""
    fleet = {**FLEET, "train_w": [1.0], "dropout": 0.5, "availability_period_s": 5.0}
    settings = config(fleet=fleet)
    began: list[tuple[float, float]] = []
    with open_simulation(settings) as simulation:
        meter = simulation._recorder.energy
        assert meter is not None
        begin, end, since = meter.begin, meter.end, dict[object, float]()

        def begins(now: float, process: object, device: str) -> None:
            since.setdefault(process, now)
            begin(now, process, device)

        def ends(now: float, process: object) -> None:
            if process in since:
                began.append((since.pop(process), now))
            end(now, process)

        meter.begin, meter.end = begins, ends  # type: ignore[method-assign]
        simulation.run()
        result = simulation.result(0.0)
        told = sum(share.updates + share.rejected for share in result.clients.values())
    assert result.energy is not None
    assert len(began) > told + 3  # those that vanished
    spent = sum(b - a for a, b in began)
    assert spent <= result.energy.train_j + 1e-9 <= spent + sum(60.0 - s for s in since.values()) + 1e-6


@pytest.mark.parametrize("push", ["task", "overlap", "elastic"])
def test_a_device_draws_no_more_than_its_power(push: str) -> None:
    """However it pushes: for no longer than the run, and those that train on for nearly all of it."""
    more = {"server": {"tasks_per_client": 2}} if push == "overlap" else {}
    settings = config(
        "fedasync",
        client={"push": push},
        fleet={**FLEET, "train_w": [3.0]},
        run={"virtual_s_max": 20.0},
        **more,
    )
    result = simulate(settings)
    each = [share.energy_j for share in result.clients.values()]
    assert len(each) == 4
    assert all(joules is not None and 0 < joules <= 3.0 * 20.0 + 1e-9 for joules in each)
    if push == "elastic":
        assert min(j for j in each if j is not None) > 0.9 * 3.0 * 20.0


def test_counting_changes_no_history() -> None:
    """Digests, and who does what when."""
    fleet = {**FLEET, "dropout": 0.2, "up_mbps": 0.5, "down_mbps": 1.0, "server_in_mbps": 0.5}
    plain, counted = simulate(config(fleet=fleet)), simulate(config(fleet={**fleet, **COSTS}))
    assert plain.energy is None
    assert all(share.energy_j is None for share in plain.clients.values())
    assert counted.energy is not None
    assert (plain.model_sha256, plain.events) == (counted.model_sha256, counted.events)


def test_a_trace_says_it_of_its_devices(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("device,time_s,state,train_w,up_j_per_mb\na,0,on,7,0\nb,0,on,,\n")
    found = read_trace(str(path))
    assert [(d.train_w, d.up_j_per_mb, d.down_j_per_mb) for d in found.devices] == [
        (7.0, 0.0, None),
        (None,) * 3,
    ]
    write_trace(found, tmp_path / "again.csv")
    assert read_trace(str(tmp_path / "again.csv")) == found
    fleet = {**FLEET, "clients": 2, "trace": str(path), "up_j_per_mb": [1e6], "speed_ratio": 1.0}
    result = simulate(config(fleet=fleet))
    a, b = (result.clients[f"device-{i:04d}"] for i in range(2))
    trained_s = 2 * 0.5
    assert a.energy_j == pytest.approx(7 * trained_s * a.updates, rel=0.2)
    assert b.energy_j == pytest.approx(b.uplink_bytes)


@pytest.mark.parametrize("key", ["train_w", "up_j_per_mb", "down_j_per_mb"])
def test_what_is_no_power_is_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"fleet\.{key} must not be negative"):
        config(fleet={key: [1.0, -1.0]})
    with pytest.raises(ConfigError, match=rf"fleet\.{key} has 3 numbers.*there are 2"):
        simulate(config(fleet={**FLEET, key: [1.0, 2.0, 3.0]}))
    (tmp_path / "t.csv").write_text(f"device,time_s,{key}\na,0,-1\n")
    with pytest.raises(DataError, match=rf"line 2: {key} must be a number from 0 up"):
        read_trace(str(tmp_path / "t.csv"))


def test_results_of_before_are_read(tmp_path: Path) -> None:
    result: Any = simulate(config(fleet={**FLEET, **COSTS}, run={"updates_max": 3})).to_json()
    del result["energy"], result["devices_unfit"]
    for entry in (*result["history"], *result["clients"].values()):
        del entry["energy_j"]
    read = Result.from_json(json.loads(json.dumps(result)))
    assert (read.energy, read.devices_unfit) == (None, 0)
