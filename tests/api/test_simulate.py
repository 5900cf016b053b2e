"""`simulate` and the command are one function; ends, callbacks, and what is said of what is wrong."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import anabranch, answer
from prices import Prices
from proving import in_slices
from start_methods import OWN_PROCESSES

import anabranch as ab
from anabranch.cli.summary import summary
from anabranch.client.trainer import LocalTrainer
from anabranch.core.config.tables import ClientTable
from anabranch.core.errors import ConfigError, DataError
from anabranch.reports.journal_files import PAYLOADS
from anabranch.reports.result import Result
from anabranch.workloads.app import Shard, app_of
from anabranch.workloads.digits import Digits
from anabranch.workloads.synthetic import Synthetic

SMALL = ab.Fleet(clients=4, examples_per_client=40)


def small(**arguments: Any) -> ab.Run:
    """A run of a moment."""
    return ab.simulate("synthetic", **{"fleet": SMALL, "until": ab.Until(updates=12), **arguments})


def test_it_is_the_run_of_the_command(tmp_path: Path) -> None:
    options = ["--strategy", "teasq", "--updates", 12, "--clients", 4, "--seed", 3, "--out", tmp_path / "a"]
    sets = [
        "--set",
        "fleet.examples_per_client=40",
        "--set",
        "strategy.kept=0.1",
        "--set",
        "fleet.up_mbps=1.0",
    ]
    of_command = answer(anabranch(tmp_path, "simulate", "synthetic", *options, *sets, "--json"))
    fleet = ab.Fleet(clients=4, examples_per_client=40, links=ab.Links(up_mbps=1))
    run = small(strategy=ab.strategies.Teasq(kept=0.1), fleet=fleet, seed=3)
    digests = ("model_sha256", "journal_sha256")
    assert [getattr(run.result, d) for d in digests] == [of_command[d] for d in digests]
    again = ab.simulate(run.config)
    assert [getattr(again.result, d) for d in digests] == [of_command[d] for d in digests]


@pytest.mark.parametrize("app", [Synthetic(), Synthetic], ids=["object", "class"])
def test_an_app_is_given_itself(app: Any) -> None:
    run, by_name = small(), ab.simulate(app, fleet=SMALL, until=ab.Until(updates=12))
    assert by_name.result.model_sha256 == run.result.model_sha256
    assert by_name.config.run.workload == "anabranch.workloads.synthetic:Synthetic"
    assert (by_name.config.run.name, by_name.result.workload) == ("synthetic", "synthetic")


def test_a_run_without_an_end_gets_one_and_says_so() -> None:
    with pytest.warns(UserWarning, match=r"no end was set, so 200 updates: until=Until") as said:
        run = ab.simulate("synthetic", fleet=SMALL, settings={"run.evaluate_every_versions": 0})
    assert (run.result.updates_applied, said[0].filename) == (200, __file__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert small(until=ab.Until(versions=2)).result.versions == 2


def test_a_target_is_an_end() -> None:
    options: dict[str, Any] = {"strategy": "fedasync", "fleet": ab.Fleet(clients=4)}
    whole = small(**options, until=ab.Until(updates=30, accuracy=0.3, go_on=True)).result
    stopped = small(**options, until=ab.Until(updates=30, accuracy=0.3))
    reached = next(p for p in whole.history if p.accuracy is not None and p.accuracy >= 0.3)
    assert (whole.updates_applied, whole.time_to_target_s) == (30, reached.time_s)
    assert stopped.result.why == "the target was reached"
    assert stopped.result.history == tuple(p for p in whole.history if p.version <= reached.version)
    assert stopped.result.versions == reached.version
    assert stopped.replay().version == reached.version


def test_a_target_of_any_metric_is_an_end() -> None:
    until = ab.Until(updates=60, metric="mse", mode="min", target=0.5)
    training = ab.Training(steps=5, batch_size=10, learning_rate=0.1)
    run = ab.simulate(
        Prices(), strategy="fedasync", fleet=ab.Fleet(clients=4), training=training, until=until
    )
    values = run.history.column("mse")
    assert values[-1] <= 0.5 < min(values[:-1])


def test_callbacks_hear_of_the_run() -> None:
    heard: list[ab.RunProgress] = []
    run = small(callbacks=[heard.append])
    assert [p.metrics["accuracy"] for p in heard if p.evaluated] == run.history.column("accuracy")


def test_a_callback_ends_the_run_and_the_run_is_given_back(tmp_path: Path) -> None:
    def stop(progress: ab.RunProgress) -> None:
        if progress.version >= 5:
            raise ab.StopRun("that is enough")

    run = small(strategy="fedasync", callbacks=[stop], out=tmp_path / "run")
    assert (run.result.status, run.result.why) == ("interrupted", "that is enough")
    assert 5 <= run.result.versions < 12
    assert run.replay().version == run.result.versions
    with pytest.raises(DataError, match=r"interrupted.*give it an out"):
        small(strategy="fedasync", callbacks=[stop]).replay()


class Told:
    """A tracker."""

    name = "told"

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def start(self, run: Any) -> None:
        self.heard.append(run.seed)

    def metrics(self, version: int, values: Any) -> None:
        self.heard.append(version)

    def finish(self, result: Any) -> None:
        self.heard.append(result["model_sha256"])


def test_a_tracker_is_a_callback() -> None:
    told = Told()
    run = small(seed=8, callbacks=[told])
    assert told.heard == [8, *run.history.column("version"), run.result.model_sha256]
    with pytest.raises(ConfigError, match="give a function of one RunProgress, or a tracker"):
        small(callbacks=["jsonl"])
    for alone in (print, "jsonl"):
        with pytest.raises(ConfigError, match="give a list of functions"):
            small(callbacks=alone)
    with pytest.raises(ConfigError, match=r"callbacks: Told is a class: give an object, Told\(\)"):
        small(callbacks=[Told])


@pytest.mark.parametrize("workers", [-1, 1.5, "2", None])
def test_workers_are_counted(workers: Any) -> None:
    with pytest.raises(ConfigError, match=f"workers={workers!r}: give how many processes train"):
        small(workers=workers)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), "1"])
def test_a_checkpoint_is_every_so_many_seconds(seconds: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"checkpoint_s={seconds!r}: give virtual seconds"):
        small(out=tmp_path / "run", checkpoint_s=seconds)
    assert not (tmp_path / "run").exists()


def test_a_file_is_no_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    for resume in (False, True):
        with pytest.raises(NotADirectoryError, match=str(tmp_path / "run")):
            small(out=tmp_path / "run", resume=resume)
    assert (tmp_path / "run").read_text() == "mine"


class InPercent(Synthetic):
    """Its accuracies are no shares."""

    def evaluate(self, model: Any, examples: Any) -> dict[str, float]:
        return {"accuracy": 100 * super().evaluate(model, examples)["accuracy"]}


@pytest.mark.parametrize(("app", "told"), [(InPercent, 1), (Synthetic, 0)])
def test_an_accuracy_in_percent_meets_any_target_and_is_told_of(
    app: Any, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    until = ab.Until(updates=12, accuracy=0.99)
    run = ab.simulate(app, strategy="fedasync", fleet=SMALL, until=until)
    assert (run.result.time_to_target_s == 0.0) == bool(told)
    assert caplog.text.count("accuracy is a share, from 0 to 1: divide it") == told
    assert summary(run.result, None).count("accuracy is a share, from 0 to 1: divide it") == told


def test_a_run_that_is_simulated_anew_for_its_replay_is_told_to_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"run.trackers": ["jsonl"], "run.keep_payloads": False}
    run = small(strategy="fedasync", out=tmp_path / "run", settings=settings)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(run.history)
    run.replay()
    assert caplog.messages == []  # a tracker without a folder would be complained of
    assert (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() == lines


def test_what_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fails(progress: ab.RunProgress) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        small(callbacks=[fails])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_one_runs_and_a_temporary_one_goes_with_it(tmp_path: Path) -> None:
    run = small(out=tmp_path / "run")
    assert Result.read(tmp_path / "run") == run.result
    assert (tmp_path / "run" / PAYLOADS).is_file()
    with pytest.raises(ConfigError, match="holds a run already"):
        small(out=tmp_path / "run")
    temporary = small()
    folder = temporary.folder
    assert folder.is_dir()
    assert not (folder / PAYLOADS).exists(), "it replays by simulation"
    assert temporary.result.journal_sha256 == run.result.journal_sha256
    del temporary
    assert not folder.exists()


def test_a_run_that_is_given_up_says_so_and_is_a_run(caplog: pytest.LogCaptureFixture) -> None:
    hostile = {"fleet.attackers": 1.0, "fleet.attack": "nan", "run.rejections_max": 20}
    run = small(settings=hostile)
    assert run.result.given_up.startswith("the last 20 updates were all rejected")
    assert f"fedbuff on synthetic was given up: {run.result.given_up}" in caplog.messages


FEW = 'fleet=ab.Fleet(clients=4), until=ab.Until(updates=4), out="run"'
SCRIPTS = {
    "simulate": f'ab.simulate("synthetic", workers=2, {FEW})',
    "sweep": f'ab.sweep("synthetic", {{"client.steps": [1, 2]}}, parallel=2, progress=False, {FEW})',
    "tune": f'ab.tune("synthetic", {{"client.steps": [1, 2]}}, parallel=2, defaults=False, seeds=1, {FEW})',
    "sweep of a file": 'ab.sweep("sweep.toml", progress=False, out="run")',
    "tuning of a file": f'ab.tune("tune.toml", {{"client.steps": [1, 2]}}, defaults=False, seeds=1, {FEW})',
}
SHORT = '[run]\nworkload = "synthetic"\nupdates_max = 4\n[fleet]\nclients = 4\n'


# Each pool of workers once: for values, and with `make slow` for runs, and for runs that a file names.
WITH_SLOW = ("sweep", "tuning of a file")
WITH_PROVE = {*SCRIPTS} - {"simulate", *WITH_SLOW}


@pytest.mark.parametrize("name", in_slices(SCRIPTS, WITH_PROVE, WITH_SLOW))
def test_a_script_whose_own_lines_a_worker_would_carry_out_is_told_to_guard_them(
    name: str, tmp_path: Path
) -> None:
    for file in ("sweep", "tune"):
        (tmp_path / f"{file}.toml").write_text(f"{SHORT}[{file}]\nparallel = 2\nseeds = 2\n")
    (tmp_path / "bare.py").write_text(f"import anabranch as ab\n{SCRIPTS[name]}\n")
    command = [sys.executable, "bare.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "AppError: a worker process has ended before it was done" in done.stderr
    said = "does not keep its own lines under `if __name__ == '__main__':`"
    assert said in done.stderr.splitlines()[-1]
    assert f"{said}; this worker ends" in done.stderr


def test_a_script_that_guards_them_has_workers(tmp_path: Path) -> None:
    guarded = f"import anabranch as ab\nif __name__ == '__main__':\n    {SCRIPTS['simulate']}\n"
    (tmp_path / "guarded.py").write_text(guarded)
    assert subprocess.run([sys.executable, "guarded.py"], cwd=tmp_path, timeout=600).returncode == 0


def test_what_a_process_of_somebody_elses_simulates_as_it_begins_is_simulated(tmp_path: Path) -> None:
    own = 'ab.simulate("synthetic", fleet=ab.Fleet(clients=4), until=ab.Until(updates=4))'
    script = (
        f"import anabranch as ab\n{own}\nfrom multiprocessing import get_context\n"
        "if __name__ == '__main__':\n    with get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(abs, [-3]))\n"
    )
    (tmp_path / "own.py").write_text(script)
    command = [sys.executable, "own.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "[3]\n")


def test_an_app_in_a_worker_starts_processes_as_it_does_without_workers(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_PROCESSES)
    app, until = f"{tmp_path}/own.py", ab.Until(updates=1)
    here, there = (
        ab.simulate(app, strategy="fedasync", until=until, workers=workers).weights()["w"].tolist()
        for workers in (0, 2)
    )
    assert there == here


NOTEBOOK = """
import anabranch as ab, torch

def make(): return torch.nn.Linear(2, 2)

class Plain:
    def model(self): return make()
    def data(self, shard): return [[1.0, 2.0]], [0]

class Mine(Plain, ab.App): pass

given = ab.app(make, ([[1.0, 2.0]] * 40, [0] * 40))
for app, executor in ((Mine, "auto"), (Plain, "batched"), (given, "processes")):
    try:
        ab.simulate(app, workers=2, settings={"fleet.executor": executor}, until=ab.Until(updates=2))
    except ab.AnabranchError as error:
        print(error)
"""


def test_workers_that_cannot_see_what_a_notebook_defines_are_refused() -> None:
    # Of `-c`, as of a notebook, there is no file that a worker could import.
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, timeout=600)
    said = "simulate(workers=2): other processes cannot see what a notebook defines: put the App in a file\n"
    assert (done.stdout, done.stderr, done.returncode) == (3 * said, "", 0)


@pytest.mark.parametrize("updates", [3, 4])
def test_a_run_without_a_version_warns_that_nothing_was_learned(
    updates: int, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = ab.strategies.FedBuff(buffer_size=4)
    ab.simulate("synthetic", strategy=strategy, fleet=ab.Fleet(clients=4), until=ab.Until(updates=updates))
    told = [r.getMessage() for r in caplog.records if "nothing was learned" in r.getMessage()]
    assert len(told) == 4 - updates


class Evenly(Synthetic):
    """Does not look at `shard.fleet`."""

    def data(self, shard: ab.Shard) -> ab.Examples:
        return super().data(Shard(shard.role, shard.index, shard.count, seed=shard.seed))


class Keeping(Synthetic):
    """Makes its split once, for whichever device asks first."""

    parts: list[ab.Examples] | None = None

    def data(self, shard: ab.Shard) -> ab.Examples:
        if shard.role != "train":
            return super().data(shard)
        data = super().data
        if self.parts is None:
            self.parts = [data(replace(shard, index=i)) for i in range(shard.count)]
        return self.parts[shard.index]


def test_an_app_that_keeps_its_split_goes_by_it(caplog: pytest.LogCaptureFixture) -> None:
    app = Keeping()
    for seed in range(2):
        ab.simulate(
            app,
            strategy="fedasync",
            fleet=ab.Fleet(clients=4, split=ab.Dirichlet(0.3)),
            seed=seed,
            until=ab.Until(updates=10),
        )
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == []


@pytest.mark.parametrize(
    ("app", "fleet", "said"),
    [
        (Evenly(), ab.Fleet(clients=4, split=ab.Dirichlet(0.3)), "fleet.split = 'dirichlet' changes nothing"),
        (Evenly(), ab.Fleet(clients=4, examples_per_client=40), "fleet.examples_per_client = 40 changes"),
        (Evenly(), ab.Fleet(clients=4), ""),
        (Synthetic(), ab.Fleet(clients=4, split=ab.Dirichlet(0.3)), ""),
        (Digits(), ab.Fleet(clients=129, split=ab.Dirichlet(0.3)), ""),
        (Digits(), ab.Fleet(clients=130, split=ab.Dirichlet(0.3)), "10 classes have 129 examples each"),
    ],
)
def test_a_split_that_an_app_does_not_go_by_or_a_crude_one_is_warned_of_once(
    app: Any, fleet: ab.Fleet, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in range(2):
        ab.simulate(app, strategy="fedasync", fleet=fleet, seed=seed, until=ab.Until(updates=10))
    found = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(found) == bool(said)
    assert said in "".join(found)


class Joined(Synthetic):
    """May go by the settings of the device: it hears of them."""

    def join(self, config: Mapping[str, Any]) -> None:
        """As of any App."""


class Standing:
    """The same without the base."""

    def __init__(self, app: ab.App) -> None:
        self.model, self.data, self.join = app.model, app.data, app.join
        self.train, self.evaluate = app.train, app.evaluate


@pytest.mark.parametrize(
    ("app", "settings", "said"),
    [
        (
            Synthetic(),
            {"client.device": "cuda"},
            ["synthetic: its model is arrays of numpy, so client.device = 'cuda' "],
        ),
        (
            Synthetic(),
            {"client.device": "mps", "client.precision": "bfloat16"},
            ["'mps' and client.precision = 'bfloat16' changes nothing"],
        ),
        (Synthetic(), {"client.device": "cpu", "client.precision": "float32"}, []),
        (Joined(), {"client.device": "cuda"}, []),
        (app_of(Standing(Joined()), "standing"), {"client.device": "cuda"}, []),
    ],
)
@pytest.mark.parametrize("live", [False, True])
def test_an_app_of_arrays_for_which_an_accelerator_is_asked_is_told(
    app: Any, settings: dict[str, Any], said: list[str], live: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if live:
        LocalTrainer(
            app, ClientTable(**{key.removeprefix("client."): value for key, value in settings.items()})
        )
    else:
        fleet, until = ab.Fleet(clients=4), ab.Until(updates=10)
        ab.simulate(app, strategy="fedasync", fleet=fleet, settings=settings, until=until)
    found = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(found) == len(said)
    assert all(words in line for words, line in zip(said, found, strict=True))


def test_a_target_that_is_never_measured_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    until = ab.Until(updates=20, accuracy=0.9)
    ab.simulate(Prices(), strategy="fedasync", fleet=ab.Fleet(clients=4), until=until)
    found = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(found) == 1
    assert found[0].startswith("the target is of the accuracy, and evaluate returns none, but mse")
