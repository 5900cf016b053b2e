"""A run started from an App's name and options, without a file of settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import RUN, anabranch, answer, serving

from anabranch.api.configuration import is_config, run_name
from anabranch.core.errors import OUTCOMES, ConfigError, ManifestMismatch
from anabranch.reports.journal_files import JournalReader
from anabranch.reports.result import Result

OPTIONS = ("--updates", 24, "--clients", 4, "--seed", 3, "--target", 0.3, "--strategy", "fedbuff")
SETS = ("--set", "fleet.examples_per_client=40", "--set", "strategy.buffer_size=3", "--set", "run.name=small")


def test_an_app_and_options_are_the_same_run_as_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    of_file = answer(anabranch(tmp_path, "simulate", file, "--out", tmp_path / "a", "--json"))
    of_app = answer(
        anabranch(tmp_path, "simulate", "synthetic", *OPTIONS, *SETS, "--out", tmp_path / "b", "--json")
    )
    digests = ("model_sha256", "journal_sha256")
    assert [of_app[d] for d in digests] == [of_file[d] for d in digests]
    assert of_app["target_accuracy"] == 0.3


@pytest.mark.parametrize(
    ("options", "said", "ended_after"),
    [
        ((), True, {"updates_applied": 200}),
        (("--versions", 3), False, {"versions": 3}),
        (("--set", "run.updates_max=20"), False, {"updates_applied": 20}),
    ],
)
def test_a_run_without_an_end_gets_one_and_says_so(
    options: tuple[object, ...], said: bool, ended_after: dict[str, int], tmp_path: Path
) -> None:
    done = anabranch(tmp_path, "simulate", "synthetic", *options, "--set", "fleet.examples_per_client=20")
    assert done.returncode == 0, done.stderr
    assert ("no end was set, so 200 updates: --updates, --versions or --seconds" in done.stdout) == said
    (folder,) = (tmp_path / "runs").iterdir()
    assert "synthetic" in folder.name, "a run of an App bears its name"
    answer(anabranch(tmp_path, "report", folder, "--json"))
    result = json.loads((folder / "result.json").read_text())
    assert {name: result[name] for name in ended_after} == ended_after


@pytest.mark.parametrize("name", ["a" * 300, "\u00e9" * 130, "runs/" + "b" * 300])
def test_a_name_that_no_folder_can_have_is_named(name: str, tmp_path: Path) -> None:
    done = anabranch(tmp_path, "simulate", "synthetic", "--set", f"run.name={name}")
    assert done.returncode == OUTCOMES[ConfigError].exit_code
    assert f"run.name = '{name[:20]}...' has {len(name)} characters, too many" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_app_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_RUN_WORKLOAD", "fashion-mnist")
    options = ("--seconds", 2, "--set", "fleet.examples_per_client=20")
    assert anabranch(tmp_path, "simulate", "synthetic", *options, "--out", tmp_path / "a").returncode == 0
    config = JournalReader(tmp_path / "a").config
    assert (config.run.workload, config.run.virtual_s_max) == ("synthetic", 2.0)
    assert config.run.updates_max == 0, "one end is enough"


def test_a_search_takes_an_app(tmp_path: Path) -> None:
    options = ("--updates", 8, "--clients", 3, "--loss-max", 0.5, "--set", "fleet.examples_per_client=20")
    found = answer(anabranch(tmp_path, "search", "synthetic", *options, "--out", tmp_path, "--json"))
    assert found["kind"] == "found"


def test_what_an_argument_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("settings").touch()
    Path("app.py").touch()
    assert [is_config(s) for s in ("run.toml", "run.json", "settings")] == [True] * 3
    assert [is_config(s) for s in ("", "app.py", "app.py:App", "digits", "my.module:App")] == [False] * 5


@pytest.mark.parametrize(
    ("app", "name"),
    [
        ("digits", "digits"),
        ("examples/wine.py:App", "wine"),
        ("wine.py", "wine"),
        ("apps.wine:App", "wine"),
        ("flower:apps/my-app", "my-app"),
    ],
)
def test_a_run_is_named_after_its_app(app: str, name: str) -> None:
    assert run_name(app) == name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("simulate", "none.toml"), "none.toml does not exist"),
        (("simulate", "digits", "--flower", "x"), "name one App"),
        (("simulate", "digits", "--target", 2), "run.target_accuracy must be from 0 to 1"),
        (("simulate", "synthetic", "--seconds", -1), "--seconds"),
        (("simulate", "synthetic", "--workers", 10**30), "0<=x<=100000"),
        (("tune", "synthetic", "--trials", 10**30), "at least 2 and at most 100000"),
    ],
)
def test_what_cannot_be_is_said(arguments: tuple[object, ...], words: str, tmp_path: Path) -> None:
    done = anabranch(tmp_path, *arguments)
    assert done.returncode == OUTCOMES[ConfigError].exit_code
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["simulate", "tune", "search"])
def test_who_names_no_app_is_not_given_one(command: str, tmp_path: Path) -> None:
    done = anabranch(tmp_path, command, "--updates", 4)
    assert done.returncode == OUTCOMES[ConfigError].exit_code
    assert "name an App, such as digits" in done.stderr
    assert not any(tmp_path.iterdir())


def test_init_keeps_a_model_that_is_there(tmp_path: Path) -> None:
    assert anabranch(tmp_path, "init", "synthetic").returncode == 0
    model = tmp_path / "anabranch-model"
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    assert anabranch(tmp_path, "init", "synthetic").returncode == 0, "the same model is no other"
    other = anabranch(tmp_path, "init", "synthetic", "--seed", 1)
    assert other.returncode == OUTCOMES[ConfigError].exit_code
    assert "anabranch-model holds another model, of synthetic" in other.stderr
    assert "--out DIR, or replace that one with --force" in other.stderr
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    assert anabranch(tmp_path, "init", "synthetic", "--seed", 1, "--force").returncode == 0
    assert {path.name: path.read_bytes() for path in model.iterdir()} != before


def test_a_server_with_another_model_than_its_run_says_so(tmp_path: Path) -> None:
    ports = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0")
    for seed in (0, 1):
        assert anabranch(tmp_path, "init", "synthetic", "--seed", seed, "--out", f"m{seed}").returncode == 0
    with serving(tmp_path, "--model", "m0", *ports):
        pass
    other = anabranch(tmp_path, "server", "--model", "m1", *ports)
    assert other.returncode == OUTCOMES[ManifestMismatch].exit_code
    assert "started from another model than this one, with other first weights" in other.stderr
    with serving(tmp_path, "--model", "anabranch-data/manifest", *ports) as said:
        assert said["version"] == 0
    assert anabranch(tmp_path, "report", "anabranch-data").returncode == 0
    config = JournalReader(tmp_path / "anabranch-data" / "run").config
    assert (config.run.name, config.run.workload) == ("synthetic", "synthetic")


def test_seeds_are_runs_of_their_own_and_the_command_again_goes_on(tmp_path: Path) -> None:
    alone = answer(anabranch(tmp_path, "simulate", "synthetic", *OPTIONS, *SETS, "--json"))
    options = [o for o in OPTIONS if o not in ("--seed", 3)]
    command = ("simulate", "synthetic", *options, *SETS, "--seeds", "2..3", "--json")
    told = anabranch(tmp_path, *command)
    [row] = answer(told)["rows"]
    assert json.loads(told.stdout.splitlines()[0]) == {"kind": "progress", "share": 0, "done": 0, "runs": 2}
    folder = tmp_path / "runs" / "small-fedbuff-seeds"
    found = {Result.read(run).seed: Result.read(run) for run in folder.iterdir() if run.is_dir()}
    assert row["seeds"] == sorted(found) == [2, 3]
    assert found[3].journal_sha256 == alone["journal_sha256"]
    assert (folder / "compare.html").is_file()
    before = {run: (run / "result.json").stat().st_mtime_ns for run in folder.iterdir() if run.is_dir()}
    assert answer(anabranch(tmp_path, *command))["rows"] == [row]
    assert {run: (run / "result.json").stat().st_mtime_ns for run in before} == before


def test_a_sweep_says_how_many_runs_it_is_and_how_far(tmp_path: Path) -> None:
    """Two of its three choices are the same run."""
    file = tmp_path / "run.toml"
    wanted = "[sweep]\nseeds = [2]\ngrid = { 'strategy.buffer_size' = [3, 4, 3] }\n"
    file.write_text(RUN + wanted)
    done = anabranch(tmp_path, "simulate", file, "--out", "runs")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == [
        "2 runs in runs; what has ended there is not run again",
        "0 of 2 runs",
    ]
    assert len([run for run in (tmp_path / "runs").iterdir() if run.is_dir()]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seeds", "4..0"), "write FROM..TO, for example 0..4"),
        (("--seeds", "a"), "write FROM..TO"),
        (("--seeds", "0..1", "--seed", 3), "say --seeds and --parallel"),
        (("--seeds", "0..1", "--on", "clouds"), "give one of processes, ray"),
        (("--on", "ray"), "give --seeds, or a file with [sweep]"),
    ],
)
def test_seeds_that_are_none_are_said(options: tuple[object, ...], said: str, tmp_path: Path) -> None:
    done = anabranch(tmp_path, "simulate", "synthetic", *options)
    assert done.returncode == OUTCOMES[ConfigError].exit_code
    assert said in done.stderr
    assert not (tmp_path / "runs").exists()
