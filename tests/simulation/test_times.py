"""Virtual time is arithmetic: what the clock shows is what a reader computes by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleets import EXAMPLES, Ones, config, events

from anabranch.reports.result import Result
from anabranch.simulation.clock import VirtualClock
from anabranch.simulation.run import simulate
from anabranch.workloads.profiles import FADAS_FACTORS, speed_profile

SIZE = 25_000  # float32 values: 100,000 bytes, 0.8 Mbit


def one_device(**fleet: float) -> Result:
    settings = config(
        "fedasync",
        run={"versions_max": 3, "virtual_s_max": 0.0, "evaluate_every_versions": 1},
        fleet={"clients": 1, "step_time_s": 1.0, **fleet},
    )
    return simulate(settings, app=Ones(SIZE))


def published_at(result: Result) -> list[float]:
    return [p.time_s for p in result.history]


def test_one_device_by_hand() -> None:
    # Enrolled 0.5, started 1.0; then each task: ask 0.5, answer 0.5, fetch 0.5 + 0.5 + 0.8 Mbit / 2 Mbps,
    # two steps of 1 s, push 0.5 + 0.8 Mbit / 1 Mbps, acknowledged 0.5 later: 6.7 s and 6.2 s apart.
    result = one_device(latency_s=0.5, up_mbps=1.0, down_mbps=2.0)
    assert published_at(result) == pytest.approx([0.0, 6.7, 12.9, 19.1])
    assert result.virtual_s == pytest.approx(19.1)
    assert (result.uplink_bytes, result.downlink_bytes) == (300_000, 300_000)


def test_without_a_network_only_training_takes_time() -> None:
    assert published_at(one_device(latency_s=0.0)) == pytest.approx([0.0, 2.0, 4.0, 6.0])


def test_half_the_bandwidth_doubles_the_transfer() -> None:
    slow, fast = one_device(latency_s=0.0, up_mbps=0.1), one_device(latency_s=0.0, up_mbps=0.2)
    assert published_at(slow)[1] - 2.0 == pytest.approx(2 * (published_at(fast)[1] - 2.0)) == 8.0


@pytest.mark.parametrize("speed", ["fadas-mild", "fadas-large"])
def test_fadas_delays(speed: str, tmp_path: Path) -> None:
    settings = config(
        run={"virtual_s_max": 200.0},
        fleet={"clients": 12, "speed": speed, "latency_s": 0.0, "step_time_s": 1.0},
    )
    simulate(settings, tmp_path, app=Ones())
    group = speed_profile(settings.fleet, 0).group
    began: dict[str, float] = {}
    seen: dict[int, set[float]] = {}
    for event in events(tmp_path, "granted", "decided"):  # nothing takes time but the training
        if event["kind"] == "granted":
            began[event["client"]] = event["time_s"]
            continue
        device = int(event["client"].removeprefix("device-"))
        factor = (event["time_s"] - began[event["client"]]) / (EXAMPLES / 32)
        low, high = FADAS_FACTORS[speed][group[device]]
        assert low - 1e-6 <= factor <= high + 1e-6
        seen.setdefault(int(group[device]), set()).add(round(factor, 6))
    assert len(seen) >= 2
    assert len(seen[0]) > 20, "each task has a draw of its own"


def test_equal_times_keep_their_order() -> None:
    clock, seen = VirtualClock(), []
    for name in "abc":
        clock.at(1.0, lambda name=name: seen.append(name))  # type: ignore[misc]
    clock.at(0.5, lambda: clock.at(1.0, lambda: seen.append("d")))
    clock.at(1.0, lambda: clock.at(clock.now, lambda: seen.append("e")))
    clock.run(until_s=2.0)
    assert (seen, clock.now, clock.events) == (["a", "b", "c", "d", "e"], 1.0, 7)


def test_a_clock_that_is_stopped_keeps_what_was_due_at_the_same_moment() -> None:
    clock, seen = VirtualClock(), []
    for act in (clock.stop, lambda: seen.append("late")):
        clock.at(1.0, act)
    clock.run()
    assert (seen, clock.events, clock.has_more) == ([], 1, True)
    clock.clear()
    assert not clock.has_more


def test_the_clock_stops_where_it_is_told() -> None:
    clock, seen = VirtualClock(), []
    for at in (1.0, 2.0, 3.0):
        clock.at(at, lambda at=at: seen.append(at))  # type: ignore[misc]
    clock.run(until_s=2.0)
    assert (seen, clock.now) == ([1.0, 2.0], 2.0)
    clock.stop()
    clock.run()
    assert seen == [1.0, 2.0]
