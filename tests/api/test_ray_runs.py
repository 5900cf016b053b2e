"""Whole runs that Ray carries out: those of this process, whoever dies on the way."""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import anabranch, answer
from fleets import Broken, Deadly
from ray_cluster import ray_cluster

import anabranch as ab
from anabranch.api import ray_runs
from anabranch.core.config.ray import RayTable
from anabranch.core.errors import AppError, ConfigError
from anabranch.reports.result import RESULT_FILE

HAS_RAY = importlib.util.find_spec("ray") is not None
pytestmark = [pytest.mark.skipif(not HAS_RAY, reason="ray is not installed"), pytest.mark.slow]
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

    with ray_cluster(num_cpus=2):
        yield
        assert ray.is_initialized(), "whoever found it running leaves it"


def test_a_sweep_comes_to_the_same_and_goes_on_where_it_was(tmp_path: Path) -> None:
    grid: dict[str, list[Any]] = {"strategy": ["fedasync"]}
    here = ab.sweep("synthetic", grid, seeds=2, **SMALL)
    there = ab.sweep("synthetic", grid, seeds=2, parallel=2, on="ray", out=tmp_path, **SMALL)
    assert [r.result.journal_sha256 for r in there.runs] == [r.result.journal_sha256 for r in here.runs]
    ended = [(run.folder / RESULT_FILE).stat().st_mtime_ns for run in there.runs]
    again = ab.sweep("synthetic", grid, seeds=2, parallel=2, on="ray", out=tmp_path, **SMALL)
    assert [(run.folder / RESULT_FILE).stat().st_mtime_ns for run in again.runs] == ended


def test_a_run_whose_process_is_killed_goes_on_in_another(tmp_path: Path) -> None:
    """kill -9 in the middle of trainings, twice, of a run that keeps what it needs to go on."""
    (tmp_path / "struck").mkdir()
    alone = ab.sweep(Deadly(), seeds=1, **SMALL)
    found = ab.sweep(
        Deadly(str(tmp_path / "struck")), seeds=1, parallel=2, on="ray", out=tmp_path / "runs", **SMALL
    )
    assert len(list((tmp_path / "struck").iterdir())) == 2, "all have struck"
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
        (
            {"on": "ray", "settings": {"ray.cpus": 64.0}},
            "a run needs 64 CPUs on one machine, .* has 2 CPUs: lower ray.cpus$",
        ),
    ],
)
def test_where_runs_cannot_be_it_is_said(arguments: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        ab.sweep("synthetic", seeds=1, out=tmp_path, **{**SMALL, **arguments})
    assert not list(tmp_path.iterdir())


def test_a_cluster_of_the_command_line_is_for_the_runs_that_a_file_has_on_it(tmp_path: Path) -> None:
    """The option alone chooses the executor, of which runs that are on Ray already would ask for more."""
    file = tmp_path / "run.toml"
    file.write_text('[run]\nworkload = "synthetic"\nupdates_max = 5\n[sweep]\nseeds = 2\non = "ray"\n')
    done = anabranch(tmp_path, "simulate", file, "--ray-address", "127.0.0.1:1")
    assert "ray.address: no cluster answers at '127.0.0.1:1'" in done.stderr, "nobody listens at port 1"


@pytest.mark.parametrize(
    ("nodes", "table", "said"),
    [
        ([{"CPU": 2.0}, {"CPU": 2.0}], RayTable(cpus=2.0), ""),
        ([{}, {"CPU": 2.0, "GPU": 1.0}], RayTable(gpus=0.5), ""),
        ([{"CPU": 1.0}, {"CPU": 2.0}], RayTable(cpus=3.0), "3 CPUs on one .* has 2 CPUs: lower ray.cpus$"),
        (
            [{"CPU": 8.0}, {"CPU": 2.0, "GPU": 1.0}],
            RayTable(cpus=4.0, gpus=1.0),
            "4 CPUs and 1 GPUs on one .* has 8 CPUs and 0 GPUs: lower ray.gpus$",
        ),
        ([{"CPU": 1.0}], RayTable(cpus=2.0, gpus=1.0), "has 1 CPUs and 0 GPUs: lower ray.cpus and ray.gpus$"),
    ],
)
def test_one_machine_must_have_room_for_a_run(
    nodes: list[dict[str, float]], table: RayTable, said: str
) -> None:
    try:
        ray_runs._check_room(nodes, table)
        found = ""
    except ConfigError as error:
        found = str(error)
    assert bool(found) == bool(said)
    assert re.search(said, found)


def test_a_temporary_folder_is_for_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    (node,) = ray.nodes()
    monkeypatch.setattr(ray, "nodes", lambda: [node, {**node, "NodeManagerAddress": "192.0.2.1"}])
    said = r"Ray has 2 machines, and a temporary folder .* give out="
    with pytest.raises(ConfigError, match=said):
        ab.sweep(Broken(), seeds=1, on="ray", **SMALL)
    with pytest.raises(ConfigError, match=said):
        ab.tune(Broken(), {"client.learning_rate": [0.03, 0.3]}, defaults=False, on="ray", **SMALL)
    with pytest.raises(AppError, match="by design"):
        ab.sweep(Broken(), seeds=1, on="ray", out=tmp_path, **SMALL)


def test_a_death_that_is_not_the_works_is_told() -> None:
    """Ray makes this one itself: of a machine that lacks what the task's environment asks for."""
    with ray_runs.ray_runs(1, RayTable(cpus=0.5), shared=True) as runs:
        runs._remote = runs._remote.options(runtime_env={"working_dir": "file:///none.zip"})
        with pytest.raises(AppError, match=r"(?s)Ray cannot carry a run out: .*none\.zip"):
            runs.submit(len, "").result()


def test_what_is_handed_over_while_runs_are_closed_is_ended() -> None:
    listed = threading.Event()

    class Late(set[Any]):
        """It gets what is added once `close` has looked."""

        def add(self, one: Any) -> None:
            assert listed.wait(60.0)
            super().add(one)

        def __iter__(self) -> Iterator[Any]:
            found = super().__iter__()
            listed.set()
            return found

    with ray_runs.ray_runs(1, RayTable(cpus=0.5), shared=True) as runs:
        runs._under_way = Late()
        done = runs.submit(time.sleep, 60.0)
        while not done.running():
            time.sleep(0.01)
    assert isinstance(done.exception(), AppError), "it has not come to its end"


def test_without_ray_it_is_said_what_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # what an import finds of a package that is not installed
    with pytest.raises(ConfigError, match=r"^on = 'ray' \(--on ray\) needs Ray: pip install .*\[ray\]"):
        ab.sweep("synthetic", seeds=1, on="ray", out=tmp_path, **SMALL)
