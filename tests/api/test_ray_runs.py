"""Whole runs that Ray carries out: those of this process, whoever dies on the way."""

from __future__ import annotations

import gc
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import anabranch, answer
from fleets import Broken, Deadly

import anabranch as ab
from anabranch.api import ray_runs
from anabranch.core.errors import AppError, ConfigError
from anabranch.reports.result import RESULT_FILE
from anabranch.simulation.executors.ray import on_this_machine

HAS_RAY = importlib.util.find_spec("ray") is not None
pytestmark = pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
SMALL: dict[str, Any] = {
    "fleet": ab.Fleet(clients=4, examples_per_client=40),
    "until": ab.Until(updates=9),
    "progress": False,
    "settings": {"ray.cpus": 0.5},
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One for all tests: runs use a Ray that is there, and leave it."""
    import ray

    with warnings.catch_warnings(action="ignore"):  # its own start-up's
        ray.init(num_cpus=2, log_to_driver=False, logging_level="error", **on_this_machine())
    yield
    assert ray.is_initialized(), "whoever found it running leaves it"
    with warnings.catch_warnings(action="ignore"):  # it does not wait for the processes that it ends
        ray.shutdown()
        gc.collect()


def test_a_sweep_comes_to_the_same_and_goes_on_where_it_was(tmp_path: Path) -> None:
    grid: dict[str, list[Any]] = {"strategy": ["fedasync"]}
    here = ab.sweep("synthetic", grid, seeds=2, **SMALL)
    there = ab.sweep("synthetic", grid, seeds=2, parallel=2, on="ray", out=tmp_path, **SMALL)
    assert [r.result.journal_sha256 for r in there.runs] == [r.result.journal_sha256 for r in here.runs]
    ended = [(run.folder / RESULT_FILE).stat().st_mtime_ns for run in there.runs]
    again = ab.sweep("synthetic", grid, seeds=2, parallel=2, on="ray", out=tmp_path, **SMALL)
    assert [(run.folder / RESULT_FILE).stat().st_mtime_ns for run in again.runs] == ended


def test_a_run_whose_process_is_killed_goes_on_in_another(tmp_path: Path) -> None:
    """kill -9 in the middle of trainings, five times, of a run that keeps what it needs to go on."""
    (tmp_path / "struck").mkdir()
    alone = ab.sweep(Deadly(), seeds=1, **SMALL)
    found = ab.sweep(
        Deadly(str(tmp_path / "struck")), seeds=1, parallel=2, on="ray", out=tmp_path / "runs", **SMALL
    )
    assert len(list((tmp_path / "struck").iterdir())) == 5, "all have struck"
    assert found.runs[0].result.model_sha256 == alone.runs[0].result.model_sha256


def test_a_run_that_kills_every_process_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runs, "DEATHS_MAX", 1)
    with pytest.raises(AppError, match="a run has ended the process that carries it out 2 times"):
        ab.sweep(Deadly(always=True), seeds=1, on="ray", out=tmp_path, **SMALL)


def test_a_tuning_comes_to_the_same(tmp_path: Path) -> None:
    ranges = {"client.learning_rate": [0.03, 0.3]}
    fast: dict[str, Any] = {"trials": 2, "seeds": 1, "fresh_seeds": 2, "extensions": 0, "defaults": False}
    here = ab.tune("synthetic", ranges, **fast, **SMALL)
    there = ab.tune("synthetic", ranges, **fast, **SMALL, parallel=2, on="ray", out=tmp_path)
    assert there.report == here.report


def test_the_command_has_a_ray_of_its_own(tmp_path: Path) -> None:
    small = ("--clients", 4, "--updates", 9, "--set", "fleet.examples_per_client=40")
    on_ray = ("--seeds", "0..1", "--parallel", 2, "--on", "ray", "--out", tmp_path / "runs")
    (row,) = answer(anabranch(tmp_path, "simulate", "synthetic", *small, *on_ray, "--json"))["rows"]
    assert row["seeds"] == [0, 1]
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 2


def test_what_a_run_raises_comes_back(tmp_path: Path) -> None:
    with pytest.raises(AppError, match="ZeroDivisionError: by design"):
        ab.sweep(Broken(), seeds=1, on="ray", out=tmp_path, **SMALL)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"on": "clouds"}, "sweep.on = 'clouds': give one of processes, ray"),
        ({"on": "ray", "settings": {"fleet.executor": "ray"}}, "leave one of the two out"),
        ({"on": "ray", "settings": {"ray.cpus": 64.0}}, "a run needs 64 CPUs, and Ray has 2: lower ray.cpus"),
    ],
)
def test_where_runs_cannot_be_it_is_said(arguments: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        ab.sweep("synthetic", seeds=1, out=tmp_path, **{**SMALL, **arguments})
    assert not list(tmp_path.iterdir())
