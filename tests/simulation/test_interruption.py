"""A run that does not come to its end leaves what there is, and that tells the truth."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import Ones, config
from safetensors.numpy import load_file

from anabranch.core.errors import ConfigError
from anabranch.core.model.params import digest
from anabranch.core.model.updates import LocalPlan
from anabranch.reports.models import BEST, FINAL
from anabranch.reports.result import Result
from anabranch.simulation.interruption import Interruptions
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import simulate
from anabranch.workloads.app import Examples

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopping(Ones):
    """Does something else in its `at`th training; its accuracy grows with the model."""

    def __init__(self, at: int, deed: Any) -> None:
        super().__init__()
        self._left, self._deed = at, deed

    def train(
        self, model: dict[str, Any], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        self._left -= 1
        if self._left == 0:
            self._deed()
        return super().train(model, examples, plan, seed)

    def evaluate(self, model: dict[str, Any], examples: Examples) -> dict[str, float]:
        return {"accuracy": float(model["w"][0]) / 100, "loss": 1.0}


@pytest.fixture(autouse=True)
def _with_a_terminal() -> Iterator[None]:
    """Under `nohup` the end of the terminal is kept from a run, which would go on for ever."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def raise_error() -> None:
    raise ZeroDivisionError("the data are bad\nand more")


@pytest.mark.parametrize(
    ("deed", "raised", "why"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGINT), KeyboardInterrupt, "Ctrl-C"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), SystemExit, "a signal to stop"),
        (lambda: os.kill(os.getpid(), signal.SIGHUP), SystemExit, "a signal to stop"),  # its terminal closed
        (raise_error, Exception, "the data are bad"),
    ],
)
def test_what_there_is_is_left(tmp_path: Path, deed: Any, raised: type[BaseException], why: str) -> None:
    settings = config("fedbuff", run={"virtual_s_max": 1e9, "evaluate_every_versions": 1})
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(raised):
        simulate(settings, tmp_path, app=Stopping(20, deed))
    assert [signal.getsignal(number) for number in SIGNALS] == before
    result = Result.read(tmp_path)
    assert result.status == "interrupted"
    assert why in result.why
    assert "interrupted" in (tmp_path / "report.html").read_text()
    assert 0 < result.updates_applied < 20
    assert digest(load_file(tmp_path / FINAL)["w"]) == result.model_sha256
    assert replay_run(tmp_path, app=Ones()).matches


def test_the_best_version_is_not_the_last_one(tmp_path: Path) -> None:
    class Worse(Stopping):
        def evaluate(self, model: dict[str, Any], examples: Examples) -> dict[str, float]:
            there = float(model["w"][0])
            return {"accuracy": there if there < 0.9 else float("nan") if there < 1.2 else 0.0}

    result = simulate(
        config("fedasync", run={"updates_max": 30, "evaluate_every_versions": 1}),
        tmp_path,
        app=Worse(0, None),
    )
    assert (result.status, result.final_accuracy) == ("finished", 0.0)
    assert result.best_accuracy == pytest.approx(0.75, abs=0.16)
    best, final = load_file(tmp_path / BEST), load_file(tmp_path / FINAL)
    assert best["w"][0] == pytest.approx(result.best_accuracy, rel=1e-5)
    assert final["w"][0] > 1.2


def test_a_run_of_losses_alone_has_its_best_version(tmp_path: Path) -> None:
    class Regression(Ones):
        def evaluate(self, model: dict[str, Any], examples: Examples) -> dict[str, float]:
            return {"loss": abs(float(model["w"][0]) - 1.0), "mae": 2.0}

    run = {"updates_max": 20, "evaluate_every_versions": 1}
    result = simulate(config("fedasync", run=run), tmp_path, app=Regression())
    losses = [p.loss for p in result.history if p.loss is not None]
    assert abs(float(load_file(tmp_path / BEST)["w"][0]) - 1.0) == pytest.approx(min(losses))
    assert min(losses) < losses[-1]
    assert (result.final_accuracy, result.history[0].metrics) == (None, {"mae": 2.0})
    assert result.parameters == 4
    assert result.model_bytes == 16


def test_a_folder_with_a_run_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    simulate(config(run={"updates_max": 4}), tmp_path, app=Ones())
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="holds a run already"):
        simulate(config(run={"updates_max": 8}), tmp_path, app=Ones())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept


def test_a_signal_waits_for_what_must_be_whole() -> None:
    done: list[str] = []

    def work(whole: AbstractContextManager[None]) -> None:
        with whole:
            os.kill(os.getpid(), signal.SIGINT)
            done.append(str(np.sum(np.ones(3))))
        done.append("never")

    with Interruptions() as interruptions, pytest.raises(KeyboardInterrupt):
        work(interruptions.whole)
    assert done == ["3.0"]


def test_what_is_told_of_children_is_not_raised_in_the_place_of_a_stop() -> None:
    """A stop of the whole process group ends a DataLoader's workers as well, of which torch tells."""

    def told(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")

    def trained() -> None:
        with Interruptions():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os.kill(os.getpid(), signal.SIGCHLD)

    before = signal.signal(signal.SIGCHLD, told)
    try:
        with pytest.raises(SystemExit):
            trained()
    finally:
        signal.signal(signal.SIGCHLD, before)
