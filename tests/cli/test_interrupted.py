"""Ctrl-C, whenever it comes: one line and 130. What is interrupted sends the signal itself."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import anabranch, serving

from anabranch.reports.result import RESULT_FILE, Result

# The first look for a module sends the signal, then the command runs on as it does.
DURING_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.{number})

sys.meta_path.insert(0, Interrupt())
sys.argv = ["anabranch", *{arguments!r}]
from anabranch.cli.main import main
main()
"""

APP = """
import os, signal
import numpy as np
import anabranch

class App(anabranch.App):
    def model(self):
        return {"w": np.zeros(2)}
    def data(self, shard):
        return anabranch.Examples(np.ones((4, 2)), np.ones(4))
    def train(self, model, examples, plan, seed):
        model["w"] += 1
        try:
            open("pressed", "x").close()  # once, whoever is the first
        except FileExistsError:
            return
        os.killpg(os.getpgid(0), signal.SIGINT)
    def evaluate(self, model, examples):
        return {"accuracy": 1.0, "loss": 0.0}
"""


def interrupted(
    code: str | None,
    *arguments: str,
    cwd: Path,
    ended: tuple[int, str] = (130, "interrupted"),
    **environment: str,
) -> str:
    """Run it in a process group of its own, as a terminal does, and see how it ends; what it has printed."""
    command = [sys.executable, *(["-c", code] if code else ["-m", "anabranch.cli.main"]), *arguments]
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        start_new_session=True,
    )
    assert (done.returncode, done.stderr.strip()) == ended, "below a bar, if there is one"
    return done.stdout


@pytest.mark.parametrize(
    "module", ["anabranch.cli.program", "typer", "numpy", "anabranch.strategies.registry"]
)
def test_while_the_command_line_is_loaded(module: str, tmp_path: Path) -> None:
    code = DURING_IMPORT.format(module=module, arguments=["config", "show"], number="SIGINT")
    assert interrupted(code, cwd=tmp_path) == ""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("torch", ["init", "digits"]),
        ("anabranch.client.run", ["client", "synthetic"]),
        ("anabranch.server.app", ["server"]),
    ],
)
def test_while_a_command_is_loaded(module: str, arguments: list[str], tmp_path: Path) -> None:
    code = DURING_IMPORT.format(module=module, arguments=arguments, number="SIGINT")
    assert interrupted(code, cwd=tmp_path) == ""


@pytest.mark.parametrize(("number", "ends"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_container_that_is_told_to_stop_while_it_starts_does(number: str, ends: int) -> None:
    """As its first process, to which the kernel passes on no signal that it does not handle."""
    unshare = shutil.which("unshare")
    first = [str(unshare), "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if unshare is None or subprocess.run([*first, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    code = DURING_IMPORT.format(module="numpy", arguments=["config", "show"], number=number)
    done = subprocess.run([*first, sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (ends, "", "")


# Of two workers one may train before the other has evaluated the first version, or has been started at all.
@pytest.mark.parametrize(("workers", "says"), [("0", "0 updates"), ("2", "getting 2 devices ready")])
def test_while_devices_train(workers: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(APP)
    settings = ["--set", "run.workload=mine.py:App", "--set", "run.updates_max=9", "--set", "fleet.clients=2"]
    printed = interrupted(None, "simulate", *settings, "--workers", workers, cwd=tmp_path)
    assert says in printed
    assert "Traceback" not in printed


LONG = """
[run]
workload = "mine.py:App"
updates_max = 12
evaluate_every_versions = 1
[fleet]
clients = 2
[strategy]
name = "fedasync"
"""


# What Python imports first: a process that is begun to work tells all of Ctrl-C, once.
AT_ITS_START = """
import os, signal, sys
if "--multiprocessing-fork" in sys.orig_argv:
    try:
        open("pressed", "x").close()
        os.killpg(os.getpgid(0), signal.SIGINT)
    except FileExistsError:
        pass
"""


@pytest.mark.parametrize("customised", [AT_ITS_START, ""], ids=["while they start", "while they train"])
def test_runs_side_by_side_end_and_none_begins(customised: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(APP)
    (tmp_path / "run.toml").write_text(LONG)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(customised)
    runs = ["--seeds", "0..5", "--parallel", "2", "--out", "runs"]
    interrupted(None, "simulate", "run.toml", *runs, cwd=tmp_path, PYTHONPATH=str(tmp_path / "first"))
    assert (tmp_path / "pressed").exists()
    ended = [Result.read(file.parent).status for file in (tmp_path / "runs").glob(f"*/{RESULT_FILE}")]
    assert "finished" not in ended


ALONE = """        signal.alarm(120)  # where nobody passes it on
        try:
            open("pressed", "x").close()
        except FileExistsError:  # both are at work
            os.kill(os.getppid(), signal.SIGINT)  # of the command alone, as a supervisor stops it
        signal.pause()
"""


@pytest.mark.parametrize(
    ("tells", "code", "says"),
    [
        ("os.kill(os.getppid(), signal.SIGINT)", 130, "interrupted"),
        ("os.kill(os.getppid(), signal.SIGTERM)", 143, ""),
        ("os.killpg(os.getpgid(0), signal.SIGHUP)", 129, ""),  # as a terminal does that is closed
    ],
)
def test_runs_side_by_side_end_in_order_and_go_on_later(
    tells: str, code: int, says: str, tmp_path: Path
) -> None:
    alone = ALONE.replace("os.kill(os.getppid(), signal.SIGINT)", tells)
    told = APP[: APP.index("        try:\n")] + alone + APP[APP.index("    def evaluate") :]
    (tmp_path / "mine.py").write_text(told)
    (tmp_path / "run.toml").write_text(LONG)
    runs = ["--seeds", "0..1", "--parallel", "2", "--out", "runs"]
    interrupted(None, "simulate", "run.toml", *runs, cwd=tmp_path, ended=(code, says))
    assert all((folder / RESULT_FILE).exists() for folder in (tmp_path / "runs").iterdir() if folder.is_dir())
    ended = [Result.read(file.parent).status for file in (tmp_path / "runs").glob(f"*/{RESULT_FILE}")]
    assert set(ended) == {"interrupted"}


@pytest.mark.parametrize(("signal", "code", "says"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "")])
def test_a_search_that_is_ended_leaves_no_empty_folder(
    signal: str, code: int, says: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(APP.replace("signal.SIGINT", f"signal.{signal}"))
    interrupted(None, "search", "mine.py:App", "--clients", "2", cwd=tmp_path, ended=(code, says))
    assert (tmp_path / "pressed").exists()
    assert not (tmp_path / "runs").exists()


FAILS = """        try:
            open("first", "x").close()
        except FileExistsError:
            open("under_way", "w").close()  # a pipe: the other one reads there
            signal.alarm(120)  # where nobody breaks it off
            signal.pause()
        open("under_way").close()
        raise ValueError("the first one cannot train")
"""


def test_a_run_that_fails_is_told_while_others_are_under_way_which_go_on_later(tmp_path: Path) -> None:
    """They may have taken hours, at whose end somebody read of an error that they all have."""
    told = APP[: APP.index("        try:\n")] + FAILS + APP[APP.index("    def evaluate") :]
    (tmp_path / "mine.py").write_text(told)
    (tmp_path / "run.toml").write_text(LONG)
    os.mkfifo(tmp_path / "under_way")
    done = anabranch(tmp_path, "simulate", "run.toml", "--seeds", "0..1", "--parallel", "2", "--out", "runs")
    assert (done.returncode, "the first one cannot train" in done.stderr) == (3, True), done.stderr
    folders = [folder for folder in (tmp_path / "runs").iterdir() if folder.is_dir()]
    ended = [Result.read(folder).status for folder in folders if (folder / RESULT_FILE).exists()]
    assert ended == ["interrupted"] * 2, "whoever was broken off goes on"


# In its fourth training.
COUNTING = "        self.done = getattr(self, 'done', 0) + 1\n        if self.done < 4:\n            return\n"
LATER = APP.replace("        try:\n", COUNTING + "        try:\n")


def digests_of(printed: str) -> tuple[str, str]:
    result = json.loads(printed.splitlines()[-1])
    return result["journal_sha256"], result["model_sha256"]


def test_a_run_says_how_it_goes_on_and_does(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LATER)
    (tmp_path / "run.toml").write_text(LONG)
    printed = interrupted(None, "simulate", "run.toml", "--out", "runs/it", cwd=tmp_path)
    said = next(line.strip() for line in printed.splitlines() if "--resume" in line)
    assert said == "anabranch simulate run.toml --out runs/it --resume"
    refused = anabranch(tmp_path, "simulate", "run.toml", "--out", "runs/it")
    assert (refused.returncode, "go on with it by --resume" in refused.stderr) == (2, True), refused.stderr
    other = anabranch(tmp_path, *shlex.split(said)[1:], "--set", "client.epochs=3")
    assert (other.returncode, "client.epochs is 1 there and 3 here" in other.stderr) == (2, True), (
        other.stderr
    )
    assert "interrupted" not in other.stdout
    went_on = anabranch(tmp_path, *shlex.split(said)[1:], "--json")
    whole = anabranch(tmp_path, "simulate", "run.toml", "--out", "runs/whole", "--json")
    assert (went_on.returncode, whole.returncode) == (0, 0), went_on.stderr + whole.stderr
    assert digests_of(went_on.stdout) == digests_of(whole.stdout)
    again = anabranch(tmp_path, *shlex.split(said)[1:], "--json")
    assert digests_of(again.stdout) == digests_of(whole.stdout), "one that has ended is told again"


def test_an_app_that_was_changed_meanwhile_does_not_go_on(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LATER)
    (tmp_path / "run.toml").write_text(LONG)
    interrupted(None, "simulate", "run.toml", "--out", "it", cwd=tmp_path)
    (tmp_path / "mine.py").write_text(LATER.replace('model["w"] += 1', 'model["w"] += 2'))
    refused = anabranch(tmp_path, "simulate", "run.toml", "--out", "it", "--resume")
    assert (refused.returncode, "the code of mine.py:App has changed" in refused.stderr) == (2, True)
    commented = "# A comment is no change.\n" + LATER
    (tmp_path / "mine.py").write_text(commented)
    assert anabranch(tmp_path, "simulate", "run.toml", "--out", "it", "--resume").returncode == 0
    (tmp_path / "mine.py").write_text(commented.replace('model["w"] += 1', 'model["w"] += 2'))
    told = anabranch(tmp_path, "simulate", "run.toml", "--out", "it", "--resume")
    assert (told.returncode, "has ended: the code of mine.py:App has changed" in told.stderr) == (2, True)
    (tmp_path / "mine.py").write_text(LATER)
    assert anabranch(tmp_path, "simulate", "run.toml", "--out", "it", "--resume").returncode == 0


LOADER = """
import os, signal
import torch
import anabranch

class Struck(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        open(f"worker-{torch.utils.data.get_worker_info().id}", "w").close()
        if os.path.exists("worker-0") and os.path.exists("worker-1"):  # one that only begins has a traceback
            try:
                open("struck", "x").close()
                os.killpg(os.getpgid(0), signal.NUMBER)
            except FileExistsError:
                pass
        return torch.ones(2), 0

class App(anabranch.App):
    def model(self):
        return torch.nn.Linear(2, 2)
    def data(self, shard):
        return torch.utils.data.DataLoader(Struck(), 4, num_workers=2)
"""


@pytest.mark.parametrize("number", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_a_device_and_the_workers_of_its_loader_at_once(number: str, tmp_path: Path) -> None:
    """As a terminal's Ctrl-C and a service's stop do: no error, and at Ctrl-C no worker says a word."""
    (tmp_path / "mine.py").write_text(LOADER.replace("NUMBER", number))
    anabranch(tmp_path, "init", "mine.py:App", "--out", "model")
    anywhere = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0")
    with serving(tmp_path, "--model", "model", *anywhere, "--updates", "9") as server:
        command = [sys.executable, "-m", "anabranch.cli.main", "client", "mine.py:App"]
        done = subprocess.run(
            [*command, "--server", server["address"]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            start_new_session=True,
        )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert f"stopped why={number}" in said
    assert number == "SIGTERM" or "Traceback" not in said, said


def test_a_run_that_its_app_ends_before_it_has_learned_anything_is_not_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(APP)
    fails = ("simulate", "mine.py:App", "--out", "it", "--metric", "none_such", "--mode", "max")
    ended = anabranch(tmp_path, *fails)
    assert (ended.returncode, "evaluate returns no such metric" in ended.stderr) == (3, True), ended.stderr
    assert "--resume" not in ended.stdout + ended.stderr
