"""The study of regimes: who stays away, that its settings are settings, how many times sooner."""

from __future__ import annotations

import math
from typing import Any

import pytest
from measuring import benchmark

from anabranch.workloads.profiles import speed_profile

regimes = benchmark("study_regimes")
store = benchmark("arena.store")


def record(seed: int, curve: list[list[float]], accuracy: float = 90.0) -> Any:
    """A run that went so: seconds, accuracy in %, MB up, MB down."""
    figures = {"updates": 1, "versions": 1, "staleness": 0.0, "up_mb": 4.0, "down_mb": 4.0}
    names = {"row": "", "setting": {}, "share": 1.0, "seed": seed, "part": "test", "key": ""}
    ends = {"accuracy": accuracy, "half": 0.0, "worst_tenth": 0.0, "model_sha256": "", "curve": curve}
    return store.Record(**names, **figures, **ends)


def test_the_slower_half_has_no_memory_for_more_than_half_of_the_units() -> None:
    for regime in regimes.REGIMES:
        (match, *_) = regimes.todo(regime.name)
        config = match.row.point(regime, match.row.grid.points[0]).config(1, "test")
        profile = speed_profile(config.fleet, seed=1)
        times_s: dict[float, list[float]] = {}
        for i, width_max in enumerate(profile.width_max.tolist()):
            times_s.setdefault(width_max, []).append(profile.task_time_s(i, 0, 1))
        if regime.links != regimes.MEMORY:
            assert set(times_s) == {1.0}
            continue
        assert max(times_s[1.0]) < min(times_s[0.5])
        assert abs(len(times_s[1.0]) - len(times_s[0.5])) <= regimes.SPEED_LEVELS // 2


@pytest.mark.parametrize("match", regimes.todo(), ids=lambda match: f"{match.cell.name} {match.row.strategy}")
def test_every_row_has_settings_that_go_together(match: Any) -> None:
    (setting, *_) = match.row.grid.points
    config = match.row.point(match.cell, setting).config(1, "test")
    assert config.strategy.name == "fedbuff"
    fits = match.row.strategy in regimes.FITTING
    assert fits or match.cell.links != regimes.MEMORY


def test_sooner_is_the_geometric_mean_of_the_seeds_quotients() -> None:
    slow = [record(seed, [[10.0, 50.0, 1.0, 1.0], [80.0, 90.0, 2.0, 2.0]]) for seed in (1, 2)]
    fast = [record(1, [[20.0, 95.0, 1.0, 1.0]]), record(2, [[40.0, 95.0, 1.0, 0.0]])]
    found = regimes._sooner(fast, slow)
    assert found.mean == pytest.approx(math.sqrt(4 * 2))
    assert found.low == pytest.approx(2)
    assert found.high == pytest.approx(4)


def test_a_run_that_never_is_there_counts_as_its_end() -> None:
    slow = [record(1, [[10.0, 50.0, 1.0, 1.0], [80.0, 90.0, 2.0, 2.0]])]
    never = [record(1, [[10.0, 40.0, 1.0, 1.0], [160.0, 60.0, 3.0, 3.0]], accuracy=60.0)]
    assert regimes._sooner(never, slow).mean == pytest.approx(0.5)
    sooner, took, points = regimes._against(never, slow)
    assert "0 of 5 there" in sooner
    assert took.startswith("2.00")
    assert points.startswith("-30.0")
