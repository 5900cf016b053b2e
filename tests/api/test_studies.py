"""An Optuna study as the second form of a sweep: the real library, its storage in a file."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from left import loggers_put_back
from optuna.distributions import FloatDistribution, IntDistribution

import anabranch as ab
from anabranch.api.studies import PROGRAM
from anabranch.core.errors import ConfigError

SMALL: dict[str, Any] = {
    "fleet": ab.Fleet(clients=3, examples_per_client=40),
    "until": ab.Until(updates=6),
    "strategy": "fedasync",
    "settings": {"run.evaluate_every_versions": 2},
    "progress": False,
}
SPACE: dict[str, Any] = {
    "client.learning_rate": FloatDistribution(0.01, 0.5, log=True),
    "client.steps": IntDistribution(1, 4),
}
optuna.logging.set_verbosity(optuna.logging.WARNING)


STORAGES: list[optuna.storages.RDBStorage] = []  # of the test


@pytest.fixture(autouse=True)
def _storages_left_closed() -> Iterator[None]:
    """Optuna's set the level of alembic's log, and close their files when they are told to."""
    with loggers_put_back():
        yield
    while STORAGES:
        STORAGES.pop().engine.dispose()


def study_in(folder: Path, **more: Any) -> optuna.Study:
    """That of a file, new or as it was left; what it draws is settled."""
    sampler = optuna.samplers.RandomSampler(seed=3)
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'study.db'}")
    STORAGES.append(storage)
    return optuna.create_study(
        storage=storage,
        study_name="it",
        load_if_exists=True,
        direction=more.pop("direction", "maximize"),
        sampler=sampler,
        **more,
    )


def test_each_choice_is_run_from_the_same_seeds(tmp_path: Path) -> None:
    study = study_in(tmp_path)
    found = ab.sweep("synthetic", study, space=SPACE, trials=3, seeds=[4, 7], **SMALL)
    assert found.rows.column("seed") == [4, 7] * 3
    values = found.rows.column("final_value")
    for trial, pair in zip(study.trials, zip(values[::2], values[1::2], strict=True), strict=True):
        assert trial.value == pytest.approx(statistics.fmean(pair))
    assert found.rows.column("client.steps")[::2] == [trial.params["client.steps"] for trial in study.trials]
    alone = ab.simulate(
        "synthetic",
        seed=7,
        **{**SMALL, "settings": {**SMALL["settings"], **study.trials[0].params}},
    )
    assert alone.result.journal_sha256 == found.runs[1].result.journal_sha256


def test_choices_that_a_study_makes_twice_are_run_and_shown_once(tmp_path: Path) -> None:
    study = study_in(tmp_path)
    for steps in (2, 3, 2):
        study.enqueue_trial({"client.steps": steps})
    space = {"client.steps": IntDistribution(1, 4)}
    found = ab.sweep("synthetic", study, space=space, trials=3, seeds=[4], **SMALL)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3
    assert found.rows.column("client.steps") == [2, 3]
    assert not found.comparison.left_out


class Halted(Exception):
    """In the place of what ends a program."""


def test_a_study_that_was_broken_off_goes_on(tmp_path: Path) -> None:
    whole = ab.sweep("synthetic", study_in(tmp_path), space=SPACE, trials=3, seeds=2, **SMALL)

    def broken(trial: optuna.Trial) -> dict[str, Any]:
        choice = {name: trial._suggest(name, d) for name, d in SPACE.items()}
        if trial.number == 1:
            raise Halted
        return choice

    other = tmp_path / "other"
    other.mkdir()
    runs = other / "runs"
    with pytest.raises(Halted):
        ab.sweep("synthetic", study_in(other), space=broken, trials=3, seeds=2, out=runs, **SMALL)
    assert [trial.state.name for trial in study_in(other).trials] == ["COMPLETE", "RUNNING"]
    before = {path: path.stat().st_mtime_ns for path in runs.glob("*/result.json")}
    again = ab.sweep("synthetic", study_in(other), space=SPACE, trials=3, seeds=2, out=runs, **SMALL)
    states = [trial.state.name for trial in study_in(other).trials]
    assert states == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert again.rows.column("final_value")[:4] == whole.rows.column("final_value")[:4]
    assert len(again.runs) == 4, "the sampler has begun anew, so that its third choice is the first again"
    done = ab.sweep("synthetic", study_in(other), space=SPACE, trials=3, seeds=2, out=runs, **SMALL)
    assert done.rows.column("final_value") == again.rows.column("final_value"), "nothing is left to try"


def test_a_choice_that_lags_behind_is_pruned(tmp_path: Path) -> None:
    pruner = optuna.pruners.ThresholdPruner(lower=0.1, n_warmup_steps=1)
    study = study_in(tmp_path, pruner=pruner)
    study.enqueue_trial({"client.learning_rate": 0.2})
    study.enqueue_trial({"client.learning_rate": 1e-9})

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {
            "client.learning_rate": trial.suggest_float("client.learning_rate", 1e-9, 1.0),
            "client.steps": 9,
        }

    settings = {"run.evaluate_every_versions": 3}
    found = ab.sweep("synthetic", study, space=space, trials=2, seeds=2, **{**SMALL, "settings": settings})
    first, second = study.trials
    assert (first.state.name, second.state.name) == ("COMPLETE", "PRUNED")
    assert sorted(first.intermediate_values) == [0, 1, 2, 10**9, 10**9 + 1, 10**9 + 2]
    assert max(second.intermediate_values) == 1, "it has not come to its end"
    assert found.rows.column("client.steps") == [9, 9]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"space": None}, r"sweep\(study, space=...\)"),
        ({"space": {"steps": IntDistribution(1, 2)}}, "name one of"),
        ({"parallel": 2}, "start the program several times"),
        ({"direction": "minimize"}, r"of accuracy the maximum is best: create_study\(direction='maximize'\)"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    study = study_in(tmp_path, direction=given.pop("direction", "maximize"))
    with pytest.raises(ConfigError, match=said):
        ab.sweep("synthetic", study, **{"space": SPACE, "trials": 1, "seeds": 1, **SMALL, **given})


@pytest.mark.parametrize("of_studies", [{"space": SPACE}, {"trials": 20}])
def test_what_is_of_studies_says_so_without_one(of_studies: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"sweep\(space=\.\.\., trials=\.\.\.\): a study chooses so"):
        ab.sweep("synthetic", {"client.steps": [1, 2]}, seeds=1, **SMALL, **of_studies)


def test_what_another_program_has_in_hand_is_its_own_until_it_has_ended(tmp_path: Path) -> None:
    """As of several that share the work: the other one is a process that goes on until it is told to end."""
    other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    study = study_in(tmp_path)
    in_hand = study.ask(SPACE)
    in_hand.set_user_attr(PROGRAM, f"{socket.gethostname()}:{other.pid}")
    elsewhere = study.ask(SPACE)
    elsewhere.set_user_attr(PROGRAM, f"not-{socket.gethostname()}:{other.pid}")
    try:
        ab.sweep("synthetic", study, space=SPACE, trials=1, seeds=1, **SMALL)
        assert [trial.state.name for trial in study.trials] == ["RUNNING", "RUNNING", "COMPLETE"]
    finally:
        other.communicate()
    ab.sweep("synthetic", study, space=SPACE, trials=2, seeds=1, **SMALL)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "RUNNING", "COMPLETE", "COMPLETE"]
    assert study.trials[3].params == in_hand.params
    assert study.trials[3].user_attrs[PROGRAM] == f"{socket.gethostname()}:{os.getpid()}"


@pytest.mark.parametrize(
    "sampler",
    [lambda: optuna.samplers.GridSampler({"client.steps": [1, 2]}), optuna.samplers.BruteForceSampler],
    ids=["grid", "brute force"],
)
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_sampler_that_has_tried_everything_ends_the_sweep(sampler: Callable[[], Any]) -> None:
    """Both stop the study with their last choice, which Optuna lets its own loop alone do."""
    study = optuna.create_study(direction="maximize", sampler=sampler())
    space = {"client.steps": IntDistribution(1, 2)}
    found = ab.sweep("synthetic", study, space=space, trials=5, seeds=1, **SMALL)
    assert sorted(found.rows.column("client.steps")) == [1, 2]
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE"]


def broken_off(study: optuna.Study, space: dict[str, Any]) -> optuna.Trial:
    """One that a program had in hand which has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    trial = study.ask(space)
    trial.set_user_attr(PROGRAM, f"{socket.gethostname()}:{ended.pid}")
    return trial


@pytest.mark.parametrize(("finished", "in_hand"), [(0, 1), (1, 1), (2, 1), (1, 2), (0, 3)])
def test_a_grid_that_was_broken_off_goes_on_to_its_end(finished: int, in_hand: int) -> None:
    """GridSampler stops the study with its last choice, and knows no place of what is taken up again."""
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.GridSampler({"client.steps": [1, 2, 3]})
    )
    space = {"client.steps": IntDistribution(1, 3)}
    if finished:
        ab.sweep("synthetic", study, space=space, trials=finished, seeds=1, **SMALL)
    for _ in range(in_hand):
        broken_off(study, space)
    ab.sweep("synthetic", study, space=space, trials=9, seeds=1, **SMALL)
    complete = [trial.params["client.steps"] for trial in study.trials if trial.state.name == "COMPLETE"]
    assert sorted(complete) == [1, 2, 3]
    assert [trial.state.name for trial in study.trials].count("FAIL") == in_hand
    assert len(study.trials) == 3 + in_hand


def test_a_choice_that_was_broken_off_twice_is_taken_up_again() -> None:
    """What is enqueued has no place in the grid, and is in hand when the next program ends."""
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.GridSampler({"client.steps": [1, 2]})
    )
    space = {"client.steps": IntDistribution(1, 2)}
    lost = broken_off(study, space)
    study.enqueue_trial(lost.params)
    study.tell(lost.number, state=optuna.trial.TrialState.FAIL)
    broken_off(study, space)
    found = ab.sweep("synthetic", study, space=space, trials=9, seeds=1, **SMALL)
    assert sorted(found.rows.column("client.steps")) == [1, 2]
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL", "COMPLETE", "COMPLETE"]


def test_a_trial_of_which_nobody_says_who_has_it_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """As an earlier checkout left it: it may be under way, so that a person has to say that it is not."""
    study = optuna.create_study(direction="maximize")
    left = [study.ask(SPACE), study.ask(SPACE)]
    broken_off(study, SPACE)
    ab.sweep("synthetic", study, space=SPACE, trials=1, seeds=1, **SMALL)
    assert [trial.state.name for trial in study.trials] == ["RUNNING", "RUNNING", "FAIL", "COMPLETE"]
    said = [record.message for record in caplog.records if record.name == "anabranch.api.studies"]
    assert len(said) == 1
    assert said[0].startswith("trials 0, 1 of the study are under way")
    for trial in left:
        study.enqueue_trial(study.trials[trial.number].params)
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    caplog.clear()
    ab.sweep("synthetic", study, space=SPACE, trials=3, seeds=1, **SMALL)
    assert [trial.params for trial in study.trials[4:]] == [trial.params for trial in left]
    assert not caplog.records


def test_a_choice_that_the_space_does_not_want_is_pruned() -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        if (steps := trial.suggest_int("steps", 1, 3)) == 2:
            raise optuna.TrialPruned
        return {"client.steps": steps}

    study = optuna.create_study(direction="maximize")
    for steps in (2, 3):
        study.enqueue_trial({"steps": steps})
    found = ab.sweep("synthetic", study, space=space, trials=2, seeds=1, **SMALL)
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "COMPLETE"]
    assert found.rows.column("client.steps") == [3]


def test_a_choice_that_cannot_be_run_is_not_tried_again() -> None:
    study = optuna.create_study(direction="maximize")
    with pytest.raises(ConfigError, match="learning_rate must be greater than 0"):
        ab.sweep(
            "synthetic",
            study,
            space={"client.learning_rate": FloatDistribution(-2, -1)},
            trials=1,
            seeds=1,
            **SMALL,
        )
    steps = {"client.steps": IntDistribution(1, 2)}
    found = ab.sweep("synthetic", study, space=steps, trials=1, seeds=1, **SMALL)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]
    assert len(found.runs) == 1


def test_a_study_of_several_values_is_refused() -> None:
    study = optuna.create_study(directions=["maximize", "minimize"])
    with pytest.raises(ConfigError, match="several directions"):
        ab.sweep("synthetic", study, space=SPACE, trials=1, seeds=1, **SMALL)
    assert study.trials == []
