"""A simulation that was killed goes on, and comes to what it would have come to: digests, files, all."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import broken_off
import numpy as np
import pytest
from broken_off import VARIANTS
from fleets import Ones, config
from nursery import PIPE, Process
from proving import in_slices
from safetensors import safe_open
from safetensors.numpy import load_file

from anabranch.api.simulating import run_simulation
from anabranch.compress.feedback import Memory
from anabranch.core.errors import ConfigError, DataError, FolderMissing, ReplayMismatch
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import LocalPlan
from anabranch.host.build import Blueprint
from anabranch.identity.noise_key import NOISE_KEY
from anabranch.reports.folders import CHECKPOINT, FolderBusy, locked
from anabranch.reports.html import REPORT_FILE
from anabranch.reports.journal_files import INITIAL, JOURNAL
from anabranch.reports.models import BEST, FINAL
from anabranch.reports.result import RESULT_FILE
from anabranch.simulation.checkpoint import FORGOTTEN, Checkpoint, RunOrigin
from anabranch.simulation.executors.base import LocalResult
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import simulate
from anabranch.workloads.app import Examples

REAL = ("wall_s", "started_at", "host")  # of real time, and where it was


def left(folder: Path) -> dict[str, Any]:
    """All that a run has left, but for what real time it took: report.html shows the same figures."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir()}
    del found[REPORT_FILE]
    result = json.loads(found[RESULT_FILE])
    found[RESULT_FILE] = {key: value for key, value in result.items() if key not in REAL}
    for name in (BEST, FINAL):  # their metadata come in any order
        with safe_open(folder / name, "np") as file:
            tensors = {key: array.tobytes() for key, array in load_file(folder / name).items()}
            found[name] = file.metadata(), tensors
    return found


def killed(variant: str, out: Path, at_version: int, after_s: float = 0.0) -> int | None:
    """The version at which it was killed, by itself or after some time; None if it came to its end."""
    with Process(broken_off.__file__, variant, out, at_version, stdout=PIPE) as process:
        if after_s:
            try:
                process.wait(after_s)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate(timeout=600)
        code = process.wait()
    assert code in (0, -signal.SIGKILL)
    return None if code == 0 else at_version


WITH_PROVE = ("stacks of workers",)  # which are each tried by themselves as well
WITH_SLOW = ("processes", "batched")  # which come to the serial results: tests/conformance/test_executors.py
TWICE = ("feedback", "faults")  # killed once more after they have gone on


@pytest.mark.parametrize("variant", in_slices(VARIANTS, WITH_PROVE, WITH_SLOW))
def test_a_killed_run_goes_on_to_the_same(
    variant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = broken_off.run(variant, whole)
    draws = random.Random(variant)
    kills = 2 if variant in TWICE else 1
    points = sorted(draws.sample(range(2, expected.versions), kills))
    for at in points:
        assert killed(variant, broken, at) == at
    result = broken_off.run(variant, broken)
    assert "no more checkpoints" not in caplog.text
    assert (result.status, result.versions) == ("finished", expected.versions)
    assert left(broken) == left(whole)
    assert replay_run(broken, broken_off.Keeping() if variant == "kept" else None).matches
    assert not (broken / CHECKPOINT).exists()


def test_a_run_that_is_killed_at_any_moment_goes_on(tmp_path: Path) -> None:
    """Wherever it was: in its start, in an event, in the writing of a checkpoint."""
    expected = broken_off.run("feedback", tmp_path / "whole")
    draws, broken = random.Random(0), tmp_path / "broken"
    for _ in range(4):
        killed("feedback", broken, 0, after_s=draws.uniform(0.05, 1.0))
    assert broken_off.run("feedback", broken).journal_sha256 == expected.journal_sha256
    assert left(broken) == left(tmp_path / "whole")


def test_a_run_that_is_killed_once_its_result_is_there_has_left_all_that_it_leaves(tmp_path: Path) -> None:
    """It is given back as it is, and never looked at again."""
    expected = broken_off.run("feedback", tmp_path / "whole")
    killed("feedback", tmp_path / "broken", broken_off.ENDED)
    assert (tmp_path / "broken" / CHECKPOINT).exists(), "killed before anything else was done"
    assert broken_off.run("feedback", tmp_path / "broken").journal_sha256 == expected.journal_sha256
    assert left(tmp_path / "broken") == left(tmp_path / "whole")


class Interrupting(Ones):
    """Counts its trainings; one of them is interrupted by a signal that comes in it."""

    def __init__(self) -> None:
        super().__init__(size=300)
        self.trainings = 0
        self.interrupted_in = 0

    def train(
        self, model: dict[str, Any], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        self.trainings += 1
        if self.trainings == self.interrupted_in:
            os.kill(os.getpid(), signal.SIGINT)
        return super().train(model, examples, plan, seed)


LONG = config("fedasync", run={"updates_max": 60, "evaluate_every_versions": 10})


def paused(out: Path, in_training: int = 40) -> Interrupting:
    """A run that was interrupted, of which every training is on record; its App."""
    app = Interrupting()
    app.interrupted_in = in_training
    with pytest.raises(KeyboardInterrupt):
        simulate(LONG, out, app, resume=True)
    app.interrupted_in = 0
    return app


def test_a_run_that_was_paused_repeats_no_training(tmp_path: Path) -> None:
    expected = simulate(LONG, tmp_path / "whole", plain := Interrupting())
    app = paused(tmp_path / "broken")
    before = json.loads((tmp_path / "broken" / RESULT_FILE).read_text())
    result = simulate(LONG, tmp_path / "broken", app, resume=True)
    assert app.trainings == plain.trainings + 1, "but for the one that was broken off"
    assert left(tmp_path / "broken") == left(tmp_path / "whole")
    assert result.wall_s > before["wall_s"]
    assert result.started_at == before["started_at"]
    assert result.journal_sha256 == expected.journal_sha256


class Moving(Interrupting):
    """Its run's folder is moved away within a training."""

    def __init__(self, folder: Path, to: Path) -> None:
        super().__init__()
        self._folder, self._to = folder, to

    def train(
        self, model: dict[str, Any], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        if self.trainings == 40:
            self._folder.rename(self._to)
        return super().train(model, examples, plan, seed)


@pytest.mark.parametrize("checkpoint_s", [None, 1.0])
def test_a_run_whose_folder_is_taken_away_ends_and_goes_on_once_it_is_back(
    checkpoint_s: float | None, tmp_path: Path
) -> None:
    out, aside = tmp_path / "out", tmp_path / "aside"
    app = Moving(out, aside)
    with pytest.raises(FolderMissing, match="was moved, replaced or removed under a run"):
        simulate(LONG, out, app, checkpoint_s=checkpoint_s)
    assert not out.exists()
    ended = app.trainings
    assert ended < 60 or checkpoint_s is None, "where it is looked at in between"
    aside.rename(out)
    simulate(LONG, tmp_path / "whole", Interrupting())
    simulate(LONG, out, Interrupting(), resume=True)
    assert left(out) == left(tmp_path / "whole")


def test_one_that_has_ended_is_given_back(tmp_path: Path) -> None:
    app = Interrupting()
    first = simulate(LONG, tmp_path, app, resume=True)
    trained = app.trainings
    assert simulate(LONG, tmp_path, app, resume=True) == first
    assert app.trainings == trained
    with pytest.raises(ConfigError, match=r"which has ended: run\.seed is 0 there and 1 here"):
        simulate(config("fedasync", run={**LONG.to_json()["run"], "seed": 1}), tmp_path, app, resume=True)


def test_one_that_has_ended_is_given_back_wherever_the_work_would_be_done(tmp_path: Path) -> None:
    run = LONG.to_json()["run"]
    first = simulate(LONG, tmp_path, Interrupting(), resume=True)
    for executor in ("auto", "serial", "processes", "ray"):
        there = config("fedasync", run=run, fleet={"executor": executor}, ray={"cpus": 0.5})
        assert simulate(there, tmp_path, Interrupting(), resume=True) == first
    stacked = config("fedasync", run=run, fleet={"executor": "batched"})
    with pytest.raises(ConfigError, match=r"fleet\.executor is \"serial\" there and \"batched\" here"):
        simulate(stacked, tmp_path, Interrupting(), resume=True)


@pytest.mark.parametrize(
    ("tables", "app", "said"),
    [
        ({"client": {"epochs": 2}}, Interrupting(), r"client\.epochs is 1 there and 2 here"),
        ({"run": {"seed": 4}}, Interrupting(), r"run\.seed is 0 there and 4 here"),
        ({}, Ones(size=301), "the code of .* has changed|the App's first weights are other ones"),
    ],
)
def test_a_run_of_something_else_does_not_go_on(tables: Any, app: Any, said: str, tmp_path: Path) -> None:
    paused(tmp_path)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    run = {"updates_max": 60, "evaluate_every_versions": 10, **tables.get("run", {})}
    with pytest.raises(ConfigError, match=said):
        simulate(config("fedasync", **{**tables, "run": run}), tmp_path, app, resume=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept


def test_a_private_run_may_begin_by_going_on(tmp_path: Path) -> None:
    privacy = {"clip": 1.0, "noise": 1.0, "participations": 16}
    private = config("fedbuff", run={"updates_max": 12, "evaluate_every_versions": 0}, privacy=privacy)
    first = simulate(private, tmp_path, resume=True)
    key = (tmp_path / NOISE_KEY).read_bytes()
    assert (first.status, first.versions) == ("finished", 4)
    assert simulate(private, tmp_path, resume=True) == first
    assert replay_run(tmp_path).matches
    # Broken off, it goes on with its own key, to the same: or there would be two sums with one noise.
    (tmp_path / RESULT_FILE).unlink()
    again = simulate(private, tmp_path, resume=True)
    assert again.journal_sha256 == first.journal_sha256
    (tmp_path / RESULT_FILE).unlink()
    (tmp_path / NOISE_KEY).unlink()
    with pytest.raises(DataError, match=r"privacy\.key is missing"):
        simulate(private, tmp_path, resume=True)
    assert not (tmp_path / NOISE_KEY).exists()
    (tmp_path / NOISE_KEY).write_bytes(key)
    assert simulate(private, tmp_path, resume=True).journal_sha256 == first.journal_sha256


PRIVATE = config(
    "fedbuff",
    run={"updates_max": 30, "evaluate_every_versions": 0},
    privacy={"clip": 1.0, "noise": 1.0, "participations": 16},
)


class Doubling(Interrupting):
    """Adds twice as much, from one of its trainings on."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def train(
        self, model: dict[str, Any], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        found = super().train(model, examples, plan, seed)
        model["w"] += float(self.trainings > self.after)
        return found


class Drifting(Interrupting):
    """Of one code, whatever its data are."""

    def __init__(self, data: float = 0.0) -> None:
        super().__init__()
        self.data_are = data

    def train(
        self, model: dict[str, Any], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        found = super().train(model, examples, plan, seed)
        model["w"] += self.data_are
        return found


class Elsewhere(Interrupting):
    """Begins with other weights."""

    def model(self) -> dict[str, Any]:
        return {"w": np.ones(self.size, np.float32)}


def paused_in_private(out: Path, **run: Any) -> bytes:
    """A private run was interrupted, and has no checkpoint; its journal."""
    app = Interrupting()
    app.interrupted_in = 20
    with pytest.raises(KeyboardInterrupt):
        simulate(PRIVATE, out, app, checkpoint_s=0, **run)
    assert not (out / CHECKPOINT).exists()
    return (out / JOURNAL).read_bytes()


@pytest.mark.parametrize("app", [Doubling(0), Doubling(15), Elsewhere()], ids=["other", "later", "elsewhere"])
def test_a_private_run_goes_on_with_the_updates_that_it_had_or_not_at_all(app: Any, tmp_path: Path) -> None:
    """Or its noise would be on two sums, whose difference has none."""
    journal = paused_in_private(tmp_path)
    key, first = (tmp_path / NOISE_KEY).read_bytes(), (tmp_path / INITIAL).read_bytes()
    with pytest.raises(ReplayMismatch, match="cannot go on: begin in another folder"):
        simulate(PRIVATE, tmp_path, app, resume=True)
    assert (tmp_path / JOURNAL).read_bytes() == journal, "what shows what was published stays"
    assert (tmp_path / INITIAL).read_bytes() == first
    result = simulate(PRIVATE, tmp_path, Interrupting(), resume=True)
    assert result.status == "finished"
    assert (tmp_path / JOURNAL).read_bytes().startswith(journal)
    assert (tmp_path / NOISE_KEY).read_bytes() == key
    assert replay_run(tmp_path).matches


def test_a_refused_attempt_leaves_nothing_that_stands_in_the_way(tmp_path: Path) -> None:
    """Data are no part of what a run's code is known by: what was trained on others may not be kept."""
    trained = Drifting()
    trained.interrupted_in = 20
    with pytest.raises(KeyboardInterrupt):
        simulate(PRIVATE, tmp_path, trained, checkpoint_s=0)
    for _ in range(2):
        with pytest.raises(ReplayMismatch, match="cannot go on"):
            simulate(PRIVATE, tmp_path, Drifting(data=1.0), checkpoint_s=0.01, resume=True)
        assert not (tmp_path / CHECKPOINT).exists()
    assert simulate(PRIVATE, tmp_path, Drifting(), checkpoint_s=0.01, resume=True).status == "finished"
    assert replay_run(tmp_path).matches


@pytest.mark.parametrize("key", ["restore_every_s", "lost_tail"])
def test_a_private_run_has_no_faults_that_take_its_server_back(key: str, tmp_path: Path) -> None:
    set_too: dict[str, Any] = {key: 0.5}
    faulty = replace(PRIVATE, faults=replace(PRIVATE.faults, **set_too))
    with pytest.raises(ConfigError, match=rf"faults\.{key} = 0.5 has versions come again"):
        simulate(faulty, tmp_path, Interrupting())
    assert not list(tmp_path.iterdir())
    spec = ParamSpec.of(Interrupting().model())
    Blueprint.of(faulty, spec, key=bytes(32))  # one that is on record replays


@pytest.mark.parametrize("left", [0, 40, -1, -40], ids=["nothing", "torn first", "torn last", "torn"])
def test_a_private_run_goes_on_from_a_journal_that_was_cut_off(left: int, tmp_path: Path) -> None:
    """As a killed process leaves it."""
    journal = paused_in_private(tmp_path)
    (tmp_path / JOURNAL).write_bytes(journal[:left])
    assert simulate(PRIVATE, tmp_path, Interrupting(), resume=True).status == "finished"
    assert (tmp_path / JOURNAL).read_bytes().startswith(journal)
    assert replay_run(tmp_path).matches


def test_a_private_run_without_digests_does_not_go_on(tmp_path: Path) -> None:
    unnamed = replace(PRIVATE, run=replace(PRIVATE.run, payload_digest="none"))
    app = Interrupting()
    app.interrupted_in = 20
    with pytest.raises(KeyboardInterrupt):
        simulate(unnamed, tmp_path, app, keep_payloads=False, resume=True)
    with pytest.raises(ConfigError, match=r"run\.payload_digest = 'none': a private run goes on"):
        simulate(unnamed, tmp_path, Interrupting(), keep_payloads=False, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_the_noise_key_of_another_run_is_neither_used_nor_lost(resume: bool, tmp_path: Path) -> None:
    """All else of that run was moved away."""
    (tmp_path / NOISE_KEY).write_text("ab" * 32)
    (tmp_path / INITIAL).write_bytes(b"somebody's")
    with pytest.raises(ConfigError, match=r"privacy\.key is the noise key of another run"):
        simulate(PRIVATE, tmp_path, Interrupting(), resume=resume)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        NOISE_KEY: b"ab" * 32,
        INITIAL: b"somebody's",
    }


@pytest.mark.parametrize(
    ("strategy", "wrong"),
    [
        ("delayed_nesterov", {"submodel": {"name": "fragments"}}),
        ("fedasync", {"privacy": {"clip": 1.0, "noise": 1.0}}),
        ("fedasync", {"client": {"push": "elastic"}, "fleet": {"clients": 65}}),
    ],
)
def test_of_a_run_that_is_refused_nothing_is_left(strategy: str, wrong: Any, tmp_path: Path) -> None:
    run = {"updates_max": 3, "evaluate_every_versions": 0}
    with pytest.raises(ConfigError):
        simulate(config(strategy, run=run, **wrong), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert simulate(config("fedasync", run=run), tmp_path).status == "finished"
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError):
        simulate(config(strategy, run=run, **wrong), tmp_path, resume=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


class Standing(Interrupting):
    """With a frozen tensor beside what it trains, whose value is `level`."""

    level = 1.0

    def model(self) -> dict[str, Any]:
        return {**super().model(), "base": np.full(3, self.level, np.float32)}

    def trained(self, model: Any) -> Any:
        return [name for name in model if name != "base"]


def test_a_run_of_other_frozen_weights_does_not_go_on(tmp_path: Path) -> None:
    app = Standing()
    app.interrupted_in = 40
    with pytest.raises(KeyboardInterrupt):
        simulate(LONG, tmp_path, app, resume=True)
    app.interrupted_in, app.level = 0, 2.0
    with pytest.raises(ConfigError, match="the App's frozen weights have changed"):
        simulate(LONG, tmp_path, app, resume=True)
    app.level = 1.0
    assert simulate(LONG, tmp_path, app, resume=True).status == "finished"


def test_a_run_of_another_trace_does_not_go_on(tmp_path: Path) -> None:
    trace, out = tmp_path / "day.csv", tmp_path / "run"
    rows = ["device,time_s,state,step_time_s", "a,0,on,0.1", "b,0,on,0.2"]
    trace.write_text("\n".join(rows))
    run = {"updates_max": 60, "evaluate_every_versions": 10}
    traced = config("fedasync", run=run, fleet={"speed": "traced", "trace": str(trace)})
    app = Interrupting()
    app.interrupted_in = 40
    with pytest.raises(KeyboardInterrupt):
        simulate(traced, out, app, resume=True)
    app.interrupted_in = 0
    trace.write_text("\n".join([*rows[:2], "b,0,on,0.9"]))
    with pytest.raises(ConfigError, match=r"fleet\.trace = '.*day\.csv' has changed"):
        simulate(traced, out, app, resume=True)
    trace.write_text("\n".join(rows))
    assert simulate(traced, out, app, resume=True).status == "finished"


@pytest.mark.parametrize("done", ["cut", "overwritten", "emptied", "of another program"])
def test_a_damaged_checkpoint_costs_no_more_than_time(done: str, tmp_path: Path, caplog: Any) -> None:
    simulate(LONG, tmp_path / "whole", Interrupting())
    app = paused(tmp_path / "broken")
    path = tmp_path / "broken" / CHECKPOINT
    data = path.read_bytes()
    if done == "of another program":
        path.unlink()
        sqlite3.connect(path).execute("CREATE TABLE facts (other TEXT)").connection.close()
    else:
        torn = {"cut": data[:-8192], "overwritten": b"x" * 8192 + data[8192:], "emptied": b""}
        path.write_bytes(torn[done])
    path.with_name(f"{CHECKPOINT}-journal").write_bytes(b"")  # as SQLite leaves it where it is killed
    simulate(LONG, tmp_path / "broken", app, resume=True)
    assert "the run begins anew" in caplog.text
    assert left(tmp_path / "broken") == left(tmp_path / "whole")


def test_two_processes_do_not_go_on_with_one_run(tmp_path: Path) -> None:
    other = Checkpoint(tmp_path, RunOrigin({}, {}, "", "", ""), 1.0, resume=False)
    with other, pytest.raises(ConfigError, match="a run is under way in"):
        simulate(LONG, tmp_path, Interrupting(), resume=True)
    assert simulate(LONG, tmp_path, Interrupting(), resume=True).status == "finished"


@pytest.mark.parametrize("written", [{}, {JOURNAL: b"of the other"}])
def test_of_a_run_that_has_just_begun_a_second_one_takes_nothing(
    written: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first comes after the second has looked at the folder, and before that wants it for itself."""
    out, of_second = tmp_path / "run", RunOrigin.of
    with ExitStack() as first:

        def begin_first(*given: Any) -> RunOrigin:
            first.enter_context(locked(out, "a run"))
            for name, data in written.items():
                (out / name).write_bytes(data)
            return of_second(*given)

        monkeypatch.setattr(RunOrigin, "of", begin_first)
        with pytest.raises(FolderBusy, match="a run is under way"):
            run_simulation(config("fedbuff"), out, Ones(), resume=True)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == written


def test_an_app_that_gives_something_else_is_found_out(tmp_path: Path) -> None:
    app = paused(tmp_path)
    with sqlite3.connect(tmp_path / CHECKPOINT) as file:
        file.execute("UPDATE results SET work = 'device 77, task t' WHERE number = 5")
    file.close()
    with pytest.raises(ReplayMismatch, match="piece of work 5 was device 77"):
        simulate(LONG, tmp_path, app, resume=True)


def test_of_a_checkpoint_that_could_not_be_written_there_is_nothing(tmp_path: Path) -> None:
    origin = RunOrigin({}, {}, "", "", "")
    with Checkpoint(tmp_path, origin, 1.0, resume=False) as checkpoint:
        checkpoint.keep(1 << 70, "work", {"accuracy": 0.5})  # a number that SQLite does not take
        checkpoint.save()
    with sqlite3.connect(tmp_path / CHECKPOINT) as file:
        assert file.execute("SELECT name FROM sqlite_master").fetchall() == []
    file.close()


def test_of_memories_the_file_has_those_that_devices_hold(tmp_path: Path) -> None:
    def result(n: int) -> LocalResult:
        return LocalResult(b"x", "raw", 1, {}, Memory(np.full(3, n, np.float32), n))

    origin = RunOrigin({}, {}, "", "", "")
    with Checkpoint(tmp_path, origin, 1.0, resume=False) as checkpoint:
        held = [result(n) for n in range(4)]
        for n, one in enumerate(held):
            checkpoint.keep(n, "work", one)
        checkpoint.save()
        del one, held[1:3]
        checkpoint.keep(4, "work", result(4))
        checkpoint.save()
    with Checkpoint(tmp_path, origin, 1.0, resume=True) as checkpoint:
        recalled = [checkpoint.recall(n) for n in range(5)]
        found = {n: r.memory for n, r in enumerate(recalled) if isinstance(r, LocalResult)}
        assert [n for n, memory in found.items() if memory is FORGOTTEN] == [1, 2]
        assert found[3] is not None
        assert (found[3].residual.tolist(), found[3].base_version) == ([3.0] * 3, 3)
