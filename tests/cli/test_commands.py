"""The command line as a user meets it: real processes, exit codes, JSON lines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import RUN, answer, started
from commands import anabranch as run_command
from safetensors.numpy import load_file, save_file

from anabranch.cli.program import COMMANDS, loaded
from anabranch.core.errors import (
    OUTCOMES,
    AppError,
    ConfigError,
    FolderMissing,
    ReplayMismatch,
    Unavailable,
)
from anabranch.reports.against import AT
from anabranch.reports.equal import AFTER, at_equal
from anabranch.reports.metrics import metric_text
from anabranch.reports.result import Result
from anabranch.server.manifest import INITIAL


def anabranch(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return run_command(cwd or Path.cwd(), *arguments)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text(RUN)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, config: Path) -> Path:
    folder: Path = tmp_path_factory.mktemp("runs") / "a"
    result = answer(anabranch("simulate", config, "--out", folder, "--json"))
    assert result["updates_applied"] == 24
    return folder


RESULT_KEYS = {
    *("strategy", "workload", "seed", "versions", "updates_applied", "updates_rejected", "uplink_bytes"),
    *("downlink_bytes", "final_accuracy", "best_accuracy", "time_to_target_s", "bytes_to_target"),
    *("staleness", "model_sha256", "journal_sha256", "wall_s", "history"),
}


def test_a_run_leaves_its_folder(run: Path) -> None:
    names = {p.name for p in run.iterdir()}
    assert {"result.json", "report.html", "events.jsonl", "journal.jsonl", "payloads.zip"} <= names
    result = json.loads((run / "result.json").read_text())
    assert set(result) >= RESULT_KEYS
    assert set(result["staleness"]) == {"mean", "p50", "p90", "max", "histogram"}
    assert result["history"]
    assert set(result["history"][-1]) == {
        *("time_s", "version", "updates", "accuracy", "loss", "uplink_bytes", "downlink_bytes", "metrics"),
        "energy_j",
    }


def test_the_same_run_twice_has_the_same_digests(run: Path, config: Path, tmp_path: Path) -> None:
    """The second in an interpreter of its own: another seed of hashes."""
    asked = ("simulate", config, "--out", tmp_path / "b", "--workers", 2, "--json")
    again = answer(started(tmp_path, *asked))
    first = json.loads((run / "result.json").read_text())
    assert {k: again[k] for k in ("model_sha256", "journal_sha256")} == {
        k: first[k] for k in ("model_sha256", "journal_sha256")
    }


def test_the_executor_is_a_flag(config: Path, tmp_path: Path) -> None:
    arrays = anabranch("simulate", config, "--out", tmp_path / "a", "--executor", "batched")
    assert arrays.returncode == OUTCOMES[ConfigError].exit_code
    assert "fleet.executor = 'batched' needs a torch model" in arrays.stderr
    unknown = anabranch("simulate", config, "--out", tmp_path / "b", "--executor", "gpu")
    assert "fleet.executor must be one of auto, serial, processes, batched, compiled, ray" in unknown.stderr


def test_where_no_cluster_of_ray_answers_is_said_at_once(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "127.0.0.1:{1}".format(*taken.getsockname())
    done = anabranch("simulate", config, "--out", tmp_path / "a", "--ray-address", address)
    assert done.returncode == 2, done.stderr
    assert f"ray.address: no cluster answers at '{address}'" in done.stderr


def test_replay_reproduces_and_notices(run: Path, tmp_path: Path) -> None:
    assert answer(anabranch("replay", run, "--json"))["version"] == 8
    forged = tmp_path / "forged"
    forged.mkdir()
    for path in run.iterdir():
        (forged / path.name).write_bytes(path.read_bytes())
    result = json.loads((forged / "result.json").read_text())
    result["model_sha256"] = "0" * 64
    (forged / "result.json").write_text(json.dumps(result))
    done = anabranch("replay", forged)
    assert done.returncode == OUTCOMES[ReplayMismatch].exit_code
    assert "result.json says otherwise" in done.stderr


def test_report_and_compare(run: Path, config: Path, tmp_path: Path) -> None:
    (run / "report.html").unlink()
    assert Path(answer(anabranch("report", run, "--json"))["page"]).is_file()
    other = tmp_path / "async"
    answer(anabranch("simulate", config, "--strategy", "fedasync", "--out", other, "--json"))
    page = tmp_path / "compare.html"
    rows = answer(anabranch("compare", run, other, "--out", page, "--json"))["rows"]
    assert [r["strategy"] for r in rows] == ["fedbuff", "fedasync"]
    assert "fedasync" in page.read_text()
    shown = anabranch("compare", run, other, "--out", page)
    assert "fedasync" in shown.stdout
    assert "when the run that came least far had ended" in shown.stdout
    for against in AT:
        for row in at_equal([Result.read(run), Result.read(other)], against):
            assert row.value is not None
            assert metric_text(row.metric, row.value.mean).split()[0] in shown.stdout
            assert AFTER[row.against](row.at).split()[0] in shown.stdout


def test_config_show_names_the_source(config: Path) -> None:
    rows = answer(anabranch("config", "show", config, "--set", "run.seed=9", "--json"))
    assert rows["run.seed"] == {"value": 9, "source": "--set"}
    assert rows["strategy.buffer_size"]["source"] == str(config)
    assert rows["server.lease_s"]["source"] == "default"


def test_init_says_what_is_whole_in_a_model_of_one_layer_and_where_its_code_counts(tmp_path: Path) -> None:
    source = """
import torch
from anabranch.workloads.digits import Digits

class Line(Digits):
    def model(self):
        return torch.nn.Linear(64, 10)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(64, 16), torch.nn.Linear(16, 10)

    def forward(self, x):
        return self.b(self.a(x).relu()) / self.b.in_features

class Counting(Digits):
    def model(self):
        return Net()
"""
    (tmp_path / "apps.py").write_text(source)
    for app, whole in (
        ("Line", "10 of the model (the model's output)"),
        (
            "Counting",
            "16 of a (a number in the model's code that is made of its size), 10 of b (the model's output)",
        ),
    ):
        said = anabranch("init", f"{tmp_path / 'apps.py'}:{app}", "--out", tmp_path / app)
        assert f"whole in each: {whole}\n" in said.stdout


def test_init_writes_what_a_server_starts_from(tmp_path: Path) -> None:
    said = answer(anabranch("init", "synthetic", "--out", tmp_path / "model", "--json"))
    assert said["parameters"] > 0
    assert {p.name for p in (tmp_path / "model").iterdir()} == {"manifest.json", "initial.safetensors"}
    assert json.loads((tmp_path / "model" / "manifest.json").read_text())["seed"] == 0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["simulate", "none.toml"], ConfigError, "none.toml does not exist"),
        (["simulate", "--set", "run.sed=1"], ConfigError, "did you mean 'seed'"),
        (["simulate", "--set", "strategy.name=fedbuf"], ConfigError, "did you mean 'fedbuff'"),
        (["simulate"], ConfigError, "name an App, such as digits"),
        (["simulate", "--set", "run.workload=synthetic"], ConfigError, "set run.virtual_s_max"),
        (
            ["simulate", "--set", "run.workload=mine.py:App", "--set", "run.updates_max=1"],
            AppError,
            "mine.py",
        ),
        (["init", "nonsense"], AppError, "nonsense"),
        (["report", "nowhere"], FolderMissing, "nowhere"),
        (["replay", "nowhere"], FolderMissing, "nowhere"),
        (["verify", "nowhere"], FolderMissing, "nowhere"),
        (["compare", "nowhere"], FolderMissing, "nowhere"),
        (["health", "127.0.0.1:1"], Unavailable, "127.0.0.1:1"),
        (["admin", "status", "--admin", "127.0.0.1:1"], Unavailable, "127.0.0.1:1"),
        (["client", "synthetic", "--shard", "8/8"], ConfigError, "INDEX/COUNT"),
        (["server", "--model", "nowhere"], FolderMissing, "anabranch init"),
        (["server", "."], ConfigError, "a model is named by `anabranch server --model .`"),
    ],
)
def test_bad_input_has_an_exit_code_and_says_what_to_do(
    arguments: Any, error: Any, words: str, tmp_path: Path
) -> None:
    done = anabranch(*arguments, cwd=tmp_path)
    assert done.returncode == OUTCOMES[error].exit_code, done.stderr
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [], "a refused command leaves nothing behind"


@pytest.mark.parametrize(
    "words", [["simulat"], ["admin", "paus"], ["admin", "ca", "shw"], ["simulate", "--sed"]]
)
def test_a_near_word_is_offered_once(words: list[str], tmp_path: Path) -> None:
    """Of a command by typer and by click 8.4, of an option by click alone."""
    done = anabranch(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.replace("\n", " ").count("Did you mean") == 1, done.stderr


@pytest.mark.parametrize(
    ("word", "guessed"), [("--server", ""), ("--insecur", "--insecure"), ("--identiy", "--identity")]
)
def test_nobody_is_led_into_the_clear_by_a_guess(word: str, guessed: str, tmp_path: Path) -> None:
    """The spelling nearest to `--server`, which operators' commands do not have, is `--insecure`."""
    done = anabranch("admin", "status", word, "127.0.0.1:7070", cwd=tmp_path)
    assert done.returncode == 2
    said = done.stderr.replace("\n", " ").partition("Did you mean")[2]
    assert bool(said) == bool(guessed)
    assert guessed in said


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        (["help"], []),
        (["help", "simulate"], ["simulate"]),
        (["help", "admin"], ["admin"]),
        (["help", "admin", "pause"], ["admin", "pause"]),
        (["admin", "help"], ["admin"]),
        (["admin", "help", "ca", "init"], ["admin", "ca", "init"]),
    ],
)
def test_help_is_a_word_for_help(asked: list[str], meant: list[str], tmp_path: Path) -> None:
    done, usual = anabranch(*asked, cwd=tmp_path), anabranch(*meant, "--help", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (usual.returncode, usual.stdout) == (0, done.stdout)
    assert f"Usage: {' '.join(['anabranch', *meant])} " in done.stdout


def test_help_on_no_command_is_told_which_are_near(tmp_path: Path) -> None:
    done = anabranch("help", "simulat", cwd=tmp_path)
    assert (done.returncode, "No such command 'simulat'" in done.stderr) == (2, True)
    assert "'simulate'" in done.stderr


def test_the_list_of_commands_needs_none_of_them() -> None:
    code = """
import sys
from anabranch.cli.program import run
sys.argv[1:] = ["--help"]
assert run() == 0
print(*sorted({"torch", "numpy", "sqlalchemy", "grpc", "pydantic"} & sys.modules.keys()), file=sys.stderr)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stderr.strip() == ""
    assert all(f" {name} " in found.stdout for name in COMMANDS)


def test_simulations_need_neither_certificates_nor_a_server() -> None:
    code = """
import sys
import anabranch.cli.calibrating, anabranch.cli.search, anabranch.cli.simulate, anabranch.cli.tune
print(*sorted({"cryptography.x509", "grpc", "asyncio", "sqlalchemy", "torch"} & sys.modules.keys()))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


@pytest.mark.parametrize("name", ["server", "health"])
def test_a_command_is_not_left_without_the_collector(name: str) -> None:
    """It is off while modules are imported."""
    code = f"""
import gc, sys
from anabranch.cli import main, program
sys.argv[1:] = [{name!r}, "--help"]
try:
    main.main()
except SystemExit as done:
    assert not done.code, done.code
assert gc.isenabled()
assert gc.get_freeze_count()
"""
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_of_each_what_its_own_help_says(name: str) -> None:
    own = loaded(name).help or ""
    assert own.split("\n\n")[0].replace("\n", " ") == COMMANDS[name][1]


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("si", "simulate"), ("admin ver", "versions"), ("admin ca sh", "show"), ("simulate --cl", "--clients")],
)
def test_a_shell_completes_what_was_typed(typed: str, completed: str) -> None:
    """By the script that is printed; commands that are loaded late have their options too."""
    program = Path(sys.executable).with_name("anabranch")
    script = f"""
eval "$({program} --show-completion bash)"
COMP_WORDS=(anabranch {typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_anabranch_completion {program}
echo "${{COMPREPLY[@]}}"
"""
    found = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == [completed], found.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fills_the_lines_of_a_terminal(name: str) -> None:
    """No paragraph is broken where its source is."""
    waiting = [loaded(name)]
    while waiting:
        command = waiting.pop()
        assert all("\n" not in text for text in (command.help or "").split("\n\n")), command.name
        waiting += getattr(command, "commands", {}).values()


def test_search_finds_a_pair_and_writes_why(config: Path, tmp_path: Path) -> None:
    options = ("--updates", 12, "--warm-up-updates", 6, "--loss-max", 0.5, "--out", tmp_path, "--json")
    done = anabranch("search", config, *options)
    found = answer(done)
    kinds = {json.loads(line)["kind"] for line in done.stdout.splitlines()}
    assert kinds - {"progress"} == {"trial", "found"}
    search = json.loads((tmp_path / "search.json").read_text())
    assert (search["kept"], search["bits"]) == (found["kept"], found["bits"])
    assert sum(d["taken"] for d in search["decisions"]) > 2, "half the accuracy may go"
    page = (tmp_path / "search.html").read_text()
    assert page.count("<tr>") == 1 + len(search["decisions"])
    shown = answer(anabranch("config", "show", tmp_path / "found.toml", "--json"))
    assert shown["strategy.kept"] == {"value": found["kept"], "source": str(tmp_path / "found.toml")}


def test_a_run_starts_from_exported_weights(tmp_path: Path) -> None:
    first, exported = {"w": np.zeros(3, np.float32)}, tmp_path / "exported.safetensors"
    assert anabranch("init", "synthetic", "--out", tmp_path / "a", "--seed", 1).returncode == 0
    weights = {n: w + 1 for n, w in load_file(tmp_path / "a" / INITIAL).items()}
    save_file(weights, exported)
    answer(anabranch("init", "synthetic", "--out", tmp_path / "b", "--weights", exported, "--json"))
    found = load_file(tmp_path / "b" / INITIAL)
    assert {n: w.tolist() for n, w in found.items()} == {n: w.tolist() for n, w in weights.items()}
    seeds = [json.loads((tmp_path / name / "manifest.json").read_text()).get("seed") for name in ("a", "b")]
    assert seeds == [1, None], "of weights that were given nobody knows one"
    save_file(first, exported)
    failed = anabranch("init", "synthetic", "--out", tmp_path / "c", "--weights", exported)
    assert failed.returncode == OUTCOMES[ConfigError].exit_code
    assert "has no weights of this model" in " ".join(failed.stderr.split())
    assert not (tmp_path / "c").exists()
