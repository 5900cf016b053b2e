"""Every choice of a grid from the same seeds; a sweep that was interrupted goes on."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from shutil import copytree
from typing import Any

import pytest
from start_methods import OWN_PROCESSES

import anabranch as ab
from anabranch.api import sweeping
from anabranch.api.sweeping import _name
from anabranch.core.config.tables import merge
from anabranch.core.errors import ConfigError
from anabranch.reports.folders import locked
from anabranch.reports.result import RESULT_FILE
from anabranch.simulation.run import simulate

SMALL: dict[str, Any] = {
    "fleet": ab.Fleet(clients=4, examples_per_client=40),
    "until": ab.Until(updates=9),
    "progress": False,
}
GRID: dict[str, list[Any]] = {
    "strategy": ["fedasync", ab.strategies.FedBuff(buffer_size=3)],
    "client.steps": [2, 4],
}

OWN = """
from anabranch.workloads.synthetic import Synthetic


class App(Synthetic):
    def train(self, model, examples, plan, seed):
        found = super().train(model, examples, plan, seed)
        model["output.bias"] *= 1.0
        return found
"""


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({}, "fedasync-6d879b7851-seed0"),
        ({"delta_abs_max": 10.0}, "fedasync-ba97f9ff2f-seed0"),
    ],
)
def test_runs_of_an_older_release_are_found_again(limits: dict[str, Any], name: str) -> None:
    """These are its names, though chunks and messages are larger by default, where its line is asked for."""
    of_then = {"run": {"rules": 0}, "server": {"windows": "tasks"}, "limits": limits}
    assert _name(merge([("test", {"strategy": {"name": "fedasync"}, **of_then})])) == name


def test_a_seed_that_is_named_twice_is_one() -> None:
    found = ab.sweep("synthetic", {"strategy": ["fedasync"]}, seeds=[3, 5, 3], **SMALL)
    assert found.rows.column("seed") == [3, 5]
    assert len(found.runs) == 2


def test_choices_that_come_to_the_same_settings_are_one() -> None:
    grid: dict[str, list[Any]] = {"strategy": ["fedbuff", ab.strategies.FedBuff()], "client.steps": [2, 3, 2]}
    found = ab.sweep("synthetic", grid, seeds=[3], **SMALL)
    assert found.rows.column("client.steps") == [2, 3]
    assert not found.comparison.left_out


def test_every_choice_is_run_from_every_seed() -> None:
    found = ab.sweep("synthetic", GRID, seeds=[3, 5], **SMALL)
    expected = itertools.product(["fedasync", "fedbuff(buffer_size=3)"], [2, 4], [3, 5])
    cells = [(row["strategy"], row["client.steps"], row["seed"]) for row in found.rows]
    assert cells == list(expected)
    for (strategy, steps, seed), run in zip(cells[::3], found.runs[::3], strict=True):
        name, _, _ = strategy.partition("(")
        chosen = ab.strategies.FedBuff(buffer_size=3) if name == "fedbuff" else name
        settings = {"client.steps": steps}
        alone = ab.simulate(
            "synthetic",
            strategy=chosen,
            seed=seed,
            settings=settings,
            fleet=SMALL["fleet"],
            until=SMALL["until"],
        )
        assert alone.result.journal_sha256 == run.result.journal_sha256
    assert len(found.comparison.rows) == 4
    assert found.comparison.rows.column("seeds") == [2] * 4
    assert len(found.history) == sum(len(run.history) for run in found.runs)
    assert {"strategy", "client.steps", "seed", "accuracy"} <= set(found.history.columns)
    assert found.plot().svg.startswith("<svg")
    folder = found.runs[0].folder
    one = found.runs[0]
    del found, run
    assert one.weights(), "a run of a sweep keeps its folder"
    del one
    assert not folder.exists()


@pytest.mark.parametrize(
    "grid",
    [
        lambda: {"client.steps": (steps for steps in (1, 2)), "client.batch_size": map(int, "89")},
        lambda: ({"client.steps": steps, "client.batch_size": size} for steps in (1, 2) for size in (8, 9)),
    ],
    ids=["values", "choices"],
)
def test_a_grid_of_iterators_is_that_of_what_they_give(grid: Callable[[], Any]) -> None:
    found = ab.sweep("synthetic", grid(), seeds=1, strategy="fedasync", **SMALL)
    trained = [(run.config.client.steps, run.config.client.batch_size) for run in found.runs]
    assert trained == [(1, 8), (1, 9), (2, 8), (2, 9)]


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    first = ab.sweep("synthetic", {"strategy": ["fedasync"]}, seeds=2, out=tmp_path, **SMALL)
    before = {run.folder: (run.folder / RESULT_FILE).stat().st_mtime_ns for run in first.runs}
    torn = first.runs[1].folder / RESULT_FILE  # as a run leaves it that was killed
    torn.write_text(json.dumps({**json.loads(torn.read_text()), "status": "interrupted"}))
    again = ab.sweep("synthetic", {"strategy": ["fedasync", "fedbuff"]}, seeds=2, out=tmp_path, **SMALL)
    assert [run.folder for run in again.runs[:2]] == list(before)
    assert (again.runs[0].folder / RESULT_FILE).stat().st_mtime_ns == before[first.runs[0].folder]
    assert again.runs[1].result.status == "finished"
    assert again.runs[1].result.model_sha256 == first.runs[1].result.model_sha256
    assert len(list(tmp_path.iterdir())) == 4


class Heard(logging.Handler):
    """Whether anything was said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: Queue[str] = Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.put(record.getMessage())


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_that_another_sweep_has_under_way_is_waited_for(ended: bool, tmp_path: Path) -> None:
    whole = ab.sweep("synthetic", {"strategy": ["fedasync"]}, seeds=2, out=tmp_path / "whole", **SMALL).runs
    held, out, heard = whole[1].folder.name, tmp_path / "shared", Heard()
    logging.getLogger(sweeping.__name__).addHandler(heard)
    try:
        with ThreadPoolExecutor(1) as second:
            with locked(out / held, "a run"):
                found = second.submit(
                    ab.sweep, "synthetic", {"strategy": ["fedasync"]}, seeds=2, out=out, **SMALL
                )
                assert held in heard.said.get(timeout=600)
                if ended:
                    copytree(whole[1].folder, out / held, dirs_exist_ok=True)
            shared = found.result(timeout=600).runs
    finally:
        logging.getLogger(sweeping.__name__).removeHandler(heard)
    assert [run.result.journal_sha256 for run in shared] == [run.result.journal_sha256 for run in whole]
    assert (shared[1].result.wall_s == whole[1].result.wall_s) is ended, "what has ended is not run again"


def test_runs_of_an_app_that_was_changed_are_not_mixed(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "runs"
    file.write_text(OWN)
    first = ab.sweep(f"{file}:App", {"strategy": ["fedasync"]}, seeds=1, out=out, **SMALL)
    file.write_text(OWN.replace("1.0", "0.9"))
    with pytest.raises(ConfigError, match=r"seed0 has a run of other code.*mine\.py:App has changed"):
        ab.sweep(f"{file}:App", {"strategy": ["fedasync"]}, seeds=2, out=out, **SMALL)
    file.write_text(f"# A comment.\n{OWN}")
    again = ab.sweep(f"{file}:App", {"strategy": ["fedasync"]}, seeds=2, out=out, **SMALL)
    assert again.runs[0].result == first.runs[0].result
    # What an older release has left tells nothing of code, and is taken as it was.
    older = first.runs[0].folder / RESULT_FILE
    older.write_text(json.dumps({**json.loads(older.read_text()), "code": {}}))
    file.write_text(OWN.replace("1.0", "0.9"))
    assert ab.sweep(f"{file}:App", {"strategy": ["fedasync"]}, seeds=1, out=out, **SMALL)


def test_runs_of_a_trace_that_was_changed_are_not_mixed(tmp_path: Path) -> None:
    """The same file, by its settings: another line, and all the rest is as it was."""
    trace, out = tmp_path / "day.csv", tmp_path / "runs"
    fast, slow = ("device,time_s,up_mbps\na,0,1\n", "device,time_s,up_mbps\na,0,0.001\n")
    given = {**SMALL, "fleet": ab.Fleet(clients=4, trace=str(trace)), "out": out}
    trace.write_text(fast)
    first = ab.sweep("synthetic", {"strategy": ["fedasync"]}, seeds=1, **given)
    said = r"seed0 has a run of other code.*: fleet\.trace = '.*day\.csv' has changed"
    trace.write_text(slow)
    with pytest.raises(ConfigError, match=said):
        ab.sweep("synthetic", {"strategy": ["fedasync"]}, seeds=2, **given)
    ended = first.runs[0]
    with pytest.raises(ConfigError, match=said):
        simulate(ended.config, ended.folder, resume=True)
    assert ended.replay().matches, "which reads no trace"
    other = ab.sweep("synthetic", {"strategy": ["fedasync"]}, seeds=1, **{**given, "out": tmp_path / "slow"})
    assert len(ab.compare([*first.runs, *other.runs]).rows) == 2
    trace.write_text(fast)
    again = ab.sweep("synthetic", {"strategy": ["fedasync"]}, seeds=2, **given)
    assert again.runs[0].result == ended.result
    trace.unlink()  # nobody can tell, and what has ended is there
    assert ab.sweep("synthetic", {"strategy": ["fedasync"]}, seeds=1, **given).runs[0].result == ended.result


def test_runs_of_an_app_whose_neighbour_was_changed_are_not_mixed(tmp_path: Path) -> None:
    file, near, out = tmp_path / "mine.py", tmp_path / "near_to_mine.py", tmp_path / "runs"
    file.write_text(f"from near_to_mine import RATE\n{OWN}".replace("1.0", "RATE"))
    near.write_text("import far_from_mine\nRATE = far_from_mine.RATE\n")
    (tmp_path / "far_from_mine.py").write_text("RATE = 1.0\n")
    (tmp_path / "unused.py").write_text("RATE = 1.0\n")
    first = ab.sweep(f"{file}:App", {"strategy": ["fedasync"]}, seeds=1, out=out, **SMALL)
    (tmp_path / "unused.py").write_text("RATE = 2.0\n")
    near.write_text(f"# A comment.\n{near.read_text()}")
    again = ab.sweep(f"{file}:App", {"strategy": ["fedasync"]}, seeds=1, out=out, **SMALL)
    assert again.runs[0].result == first.runs[0].result
    (tmp_path / "far_from_mine.py").write_text("RATE = 0.9\n")
    with pytest.raises(
        ConfigError, match=r"other code.*: the code of far_from_mine\.py of \S*mine\.py:App has ch"
    ):
        ab.sweep(f"{file}:App", {"strategy": ["fedasync"]}, seeds=2, out=out, **SMALL)


def test_processes_beside_each_other_give_the_same(tmp_path: Path) -> None:
    grid: dict[str, list[Any]] = {"strategy": ["fedasync"]}
    here = ab.sweep("synthetic", grid, seeds=2, **SMALL)
    beside = ab.sweep("synthetic", grid, seeds=2, parallel=2, out=tmp_path, **SMALL)
    assert [r.result.journal_sha256 for r in beside.runs] == [r.result.journal_sha256 for r in here.runs]


def test_an_app_in_processes_beside_each_other_starts_its_own_as_it_does_alone(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_PROCESSES)
    grid: dict[str, list[Any]] = {"strategy": ["fedasync"]}
    here, beside = (
        ab.sweep(
            f"{tmp_path}/own.py", grid, seeds=2, parallel=parallel, out=tmp_path / str(parallel), **SMALL
        )
        for parallel in (1, 2)
    )
    assert [r.result.final_value for r in beside.runs] == [r.result.final_value for r in here.runs]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"grid": {"strategi": ["fedasync"]}}, r"name one of .*strategy"),
        ({"grid": {"strategy": "fedasync"}}, "give a list of values"),
        ({"grid": {"strategy": []}}, "give a list of values"),
        ({"grid": {"strategy": ["fedasync", "fedsync"]}}, "did you mean 'fedasync'"),
        ({"grid": {"until": [ab.Until(updates=1)]}}, "until is in the grid and beside it"),
        ({"grid": {}, "seeds": 0}, "at least one seed"),
        ({"grid": {}, "seed": 3}, "a sweep has seeds="),
        ({"grid": {"run.seed": [1, 2]}}, r"grid=\{'run.seed': \.\.\.\}\): a sweep has seeds="),
        ({"grid": [{"run.seed": 1}]}, r"grid=\{'run.seed': \.\.\.\}\): a sweep has seeds="),
        ({"grid": {}, "settings": {"run.seed": 7}}, r"settings=\{'run.seed': \.\.\.\}\): a sweep has seeds="),
        ({"grid": 3}, "a dict of lists, or a list of choices"),
        ({"grid": {"client.steps": iter(())}}, "give a list of values"),
        ({"grid": {}, "parallel": 0}, "at least 1 process"),
        ({"grid": {}, "parallel": 1.5}, "at least 1 process"),
        ({"grid": {}, "seeds": 2.5}, r"seeds=2\.5\): give how many, from 0, or a list of them"),
        ({"grid": {}, "seeds": "2"}, "seeds='2'\\): give how many, from 0, or a list of them"),
        ({"grid": {}, "seeds": [None]}, "at least one seed, each a whole number"),
        ({"grid": {3: [1]}}, r"grid=\{3: \.\.\.\}\): name one of .*strategy"),
        ({"grid": {}, "settings": ["client.steps"]}, "settings is a list: give a dict"),
        (
            {"grid": {}, "space": {"client.steps": [1, 2]}},
            "a study chooses so: give one of Optuna's as the grid",
        ),
        ({"grid": {}, "trials": 3}, "a study chooses so: give one of Optuna's as the grid"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_run(arguments: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        ab.sweep("synthetic", **{**SMALL, "out": tmp_path / "out", **arguments})
    assert not (tmp_path / "out").exists()
