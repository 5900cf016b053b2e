"""Device profiles: the ratios the configuration promises, and draws that no other device changes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.config.tables import FleetTable
from anabranch.core.errors import ConfigError
from anabranch.simulation.network import NetworkLink
from anabranch.workloads.profiles import level_order, speed_profile

KINDS = ["levels", "lognormal", "fadas-mild", "fadas-large"]


@given(
    kind=st.sampled_from(KINDS), few=st.integers(1, 10), more=st.integers(1, 20), seed=st.integers(0, 2**40)
)
def test_a_device_more_changes_no_other_device(kind: str, few: int, more: int, seed: int) -> None:
    small = speed_profile(FleetTable(speed=kind, clients=few), seed)
    large = speed_profile(FleetTable(speed=kind, clients=few + more), seed)
    for name in ("step_time_s", "group", "spread", "up_bps", "down_bps", "latency_s"):
        np.testing.assert_array_equal(getattr(small, name), getattr(large, name)[:few])
    assert small.task_time_s(few - 1, 3, 10) == large.task_time_s(few - 1, 3, 10)


@pytest.mark.parametrize("clients", [2, 8, 100])
def test_levels_span_the_ratio_evenly(clients: int) -> None:
    profiles = speed_profile(FleetTable(clients=clients, speed_ratio=5.0, step_time_s=0.2), 0)
    assert profiles.step_time_s.min() == pytest.approx(0.2)
    assert profiles.step_time_s.max() == pytest.approx(1.0)
    by_level = sorted(set(zip(profiles.group.tolist(), profiles.step_time_s.tolist(), strict=True)))
    steps = np.diff([t for _, t in by_level])
    if clients >= 8:
        assert len(by_level) == 8
        np.testing.assert_allclose(steps, 0.8 / 7)
    assert (steps > 0).all()


@given(levels=st.integers(1, 40), few=st.integers(1, 40))
def test_every_level_is_dealt_once_and_each_in_the_middle_of_the_lowest_widest_gap(
    levels: int, few: int
) -> None:
    order = level_order(levels, levels)
    assert sorted(order) == list(range(levels))
    assert level_order(levels, min(few, levels)) == order[:few]
    assert order[:2] == (0, levels - 1)[:levels]
    for number, level in enumerate(order[2:], 2):
        gaps = list(itertools.pairwise(sorted(order[:number])))
        widest = max(high - low for low, high in gaps)
        low, high = next((low, high) for low, high in gaps if high - low == widest)
        assert level == (low + high) // 2


def test_levels_beyond_the_devices_cost_nothing() -> None:
    profiles = speed_profile(FleetTable(clients=3, speed_levels=10**9, speed_ratio=5.0, step_time_s=1.0), 0)
    np.testing.assert_allclose(profiles.step_time_s, [1.0, 5.0, 3.0])


def test_lognormal_spread_and_equal_groups() -> None:
    profiles = speed_profile(FleetTable(clients=2000, speed="lognormal", speed_ratio=5.0, step_time_s=0.1), 0)
    logs = np.log(profiles.step_time_s / 0.1)
    assert abs(float(logs.mean())) < 0.03
    assert float(logs.std()) == pytest.approx(math.log(5.0) / 4, rel=0.06)
    assert np.bincount(profiles.group, minlength=8).min() > 180
    assert (np.diff(profiles.group[np.argsort(profiles.step_time_s)]) >= 0).all()


@pytest.mark.parametrize(("kind", "slowest"), [("fadas-mild", (5, 8)), ("fadas-large", (50, 80))])
def test_fadas_classes_and_durations(kind: str, slowest: tuple[int, int]) -> None:
    profiles = speed_profile(FleetTable(clients=600, speed=kind, step_time_s=1.0), 0)
    sizes = np.bincount(profiles.group, minlength=3)
    assert sizes[0] > sizes[1] > sizes[2] > 0
    for group, (low, high) in enumerate([(1, 2), (3, 5), slowest]):
        device = int(np.flatnonzero(profiles.group == group)[0])
        times = [profiles.task_time_s(device, task, 10) / 10 for task in range(300)]
        assert low <= min(times) < low + 0.1 * (high - low)
        assert high - 0.1 * (high - low) < max(times) <= high
        assert np.mean(times) == pytest.approx(profiles.step_time_s[device], rel=0.05)


def test_transfers_take_latency_and_bandwidth() -> None:
    profiles = speed_profile(FleetTable(clients=2, up_mbps=8.0, down_mbps=0.0, latency_s=0.05), 0)
    link = NetworkLink.of(profiles, 1)
    assert link.upload_s(1_000_000) == pytest.approx(1.05)
    assert link.download_s(1_000_000) == 0.05


def test_an_unknown_speed_is_named() -> None:
    with pytest.raises(ConfigError, match=r"fleet.speed must be one of levels.*'warp'"):
        speed_profile(FleetTable(speed="warp"), 0)


def test_measured_devices_are_as_they_were_measured_and_come_again() -> None:
    fleet = FleetTable(
        clients=5,
        speed="measured",
        speed_levels=2,
        latency_s=0.7,
        down_mbps=3.0,
        step_times_s=(0.3, 0.1, 0.2),
        step_spreads=(0.0, 0.5, 0.0),
        up_rates_mbps=(1.0, 0.0, 2.0),
    )
    found = speed_profile(fleet, seed=0)
    assert found.step_time_s.tolist() == pytest.approx([0.3, 0.1, 0.2, 0.3, 0.1])
    assert found.group.tolist() == [1, 0, 0, 1, 0]
    assert found.up_bps.tolist() == [1e6, math.inf, 2e6, 1e6, math.inf]
    assert found.down_bps.tolist() == [3e6] * 5
    assert found.latency_s.tolist() == [0.7] * 5
    times = [found.task_time_s(1, task, 10) for task in range(200)]
    assert 0.5 <= min(times) < 0.55
    assert 1.45 < max(times) <= 1.5
    assert [found.task_time_s(0, task, 10) for task in range(5)] == pytest.approx([3.0] * 5)
