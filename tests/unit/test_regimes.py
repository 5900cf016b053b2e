"""The study of regimes: who stays away, that its settings are settings, how many times sooner."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from measuring import benchmark

from anabranch.core.config.tables import FleetTable
from anabranch.workloads.profiles import speed_profile
from anabranch.workloads.traces import read_trace

regimes = benchmark("study_regimes")
store = benchmark("arena.store")


def record(seed: int, curve: list[list[float]], accuracy: float = 90.0) -> Any:
    """A run that went so: seconds, accuracy in %, MB up, MB down."""
    figures = {"updates": 1, "versions": 1, "staleness": 0.0, "up_mb": 4.0, "down_mb": 4.0}
    names = {"row": "", "setting": {}, "share": 1.0, "seed": seed, "part": "test", "key": ""}
    ends = {"accuracy": accuracy, "half": 0.0, "worst_tenth": 0.0, "model_sha256": "", "curve": curve}
    return store.Record(**names, **figures, **ends)


def test_those_who_stay_away_are_the_slower_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    regimes.write_absent()
    trace = read_trace(str(regimes.ABSENT))
    fleet = FleetTable(clients=regimes.DEVICES, speed_levels=regimes.SPEED_LEVELS)
    profile = speed_profile(fleet, seed=1)
    times_s: dict[bool, list[float]] = {True: [], False: []}
    for i in range(regimes.DEVICES):
        times_s[trace.of(i).moments[0].on].append(profile.task_time_s(i, 0, 1))
    assert max(times_s[True]) < min(times_s[False])
    assert abs(len(times_s[True]) - len(times_s[False])) <= regimes.SPEED_LEVELS // 2


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
