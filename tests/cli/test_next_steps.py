"""What is said at the end of a run can be pasted: the printed command lines are taken from it and run."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from commands import anabranch, answer
from commands import serving as served
from nursery import COMMAND, PIPE, Process
from safetensors.numpy import load_file

from anabranch.cli.next_steps import once_stopped, while_served
from anabranch.client.operator import OperatorClient
from anabranch.core.config.tables import Config, IdentityTable, ServerTable

APP = '''
import numpy as np

import anabranch


class App(anabranch.App):
    """Where the examples lie, on average."""

    def model(self):
        return {"w": np.zeros(2, np.float32)}

    def data(self, shard):
        x = np.arange(8, dtype=np.float32).reshape(4, 2)
        return anabranch.Examples(x, np.zeros(4, np.int64))

    def train(self, model, examples, plan, seed):
        model["w"] += 0.1 * (examples.x.mean(0) - model["w"])

    def evaluate(self, model, examples):
        return {"accuracy": float(model["w"][0] / 4.0), "loss": 0.5}
'''
PORTS = ["--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0"]
SERVER = ["server", "--updates", "4", *PORTS, "--set", "strategy.buffer_size=2"]
TELL = r"""anabranch() { printf '%s\0' "$@"; }"""
GUARDED = ["--set", "identity.tls=always", "--set", "identity.join_address=127.0.0.1:0"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an App, whose name a shell would take apart."""
    home = tmp_path / "my runs"
    home.mkdir()
    (home / "app.py").write_text(APP)
    return home


def commands_in(said: str) -> list[str]:
    """The lines that are there to be pasted."""
    return [line.strip() for line in said.splitlines() if line.startswith("  anabranch ")]


def paste(line: str, folder: Path) -> str:
    """What a line prints, typed at a prompt in the folder; it must succeed."""
    # The shell takes the line apart, and what it calls tells its arguments; tests/journeys types all of it.
    taken = subprocess.run(["bash", "-c", f"{TELL}\n{line}"], cwd=folder, capture_output=True, text=True)
    done = anabranch(folder, *taken.stdout.split("\0")[:-1]) if taken.stdout else taken
    assert (taken.returncode, done.returncode) == (0, 0), f"$ {line}\n{done.stdout}{done.stderr}"
    return done.stdout


class Server:
    """A server as a person sees it."""

    def __init__(self, process: Process) -> None:
        self._process, self.said = process, ""

    def until(self, pattern: str) -> re.Match[str]:
        """Read on until a line matches."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said += line
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no {pattern!r}:\n{self.said}")

    def stop(self) -> str:
        """Drain it; what it says last."""
        self._process.send_signal(signal.SIGINT)
        rest, _ = self._process.communicate(timeout=600)
        assert self._process.returncode == 0
        return rest


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[Server]:
    with (
        (folder / "server.log").open("ab") as log,
        Process(COMMAND, *SERVER, *words, cwd=folder, stdout=PIPE, stderr=log) as process,
    ):
        try:
            yield Server(process)
        finally:
            process.kill()


@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
def test_what_a_server_says_at_the_end_can_be_pasted(guarded: bool, folder: Path) -> None:
    assert anabranch(folder, "init", "app.py:App").returncode == 0
    words, papers = (GUARDED if guarded else []), []
    if guarded:
        assert anabranch(folder, "admin", "ca", "init").returncode == 0
        told = answer(anabranch(folder, "admin", "enrol", "device-0", "--json"))
        papers = ["--token", told["token"], "--ca-sha256", told["ca_sha256"]]
    with serving(folder, *words) as server:
        found = server.until(r"on ([\d.:]+), operators on ([\d.:]+)(?:, devices join on ([\d.:]+))?")
        address, admin, join = found.groups()
        papers += ["--join", join] if join else []
        device = anabranch(folder, "client", "app.py:App", "--server", address, *papers)
        assert "4 updates answered" in device.stdout, device.stderr
        server.until("admin export")
        steps = commands_in(server.said)
        for line in steps:
            paste(line, folder)
        assert "--best" not in steps[-1]  # nobody has measured anything
        identity = ["--identity", "operator"] if guarded else []
        follower = ["evaluate", "app.py:App", "--once", "--server", address, "--admin", admin, *identity]
        assert anabranch(folder, *follower).returncode == 0
        server.stop()
    with serving(folder, *words) as server:  # the run is over, which is said again
        server.until("admin export")
        steps = commands_in(server.said)
        assert len(steps) == 1  # the operator has papers by now
        assert "version 2" in paste(steps[0], folder)
        for line in commands_in(server.stop()):
            paste(line, folder)
    # The report's models come from the log alone, replayed: what was taken out must be the same.
    (reported,) = folder.glob("anabranch-data/run*/final.safetensors")
    expected = load_file(reported)["w"]
    assert np.all(expected > 0.0)
    for name in ("final.safetensors", "best.safetensors"):
        assert np.array_equal(load_file(folder / name)["w"], expected)
        assert np.array_equal(load_file(reported.with_name(name))["w"], expected)


def test_the_command_behind_a_model_can_be_pasted_whatever_its_folder_is_called(folder: Path) -> None:
    done = anabranch(folder, "init", "app.py:App", "--out", "the model")
    assert [shlex.split(line) for line in commands_in(done.stdout)] == [
        ["anabranch", "server", "--model", "the model"]
    ], done.stderr


def test_for_programs_it_is_a_field(folder: Path) -> None:
    assert anabranch(folder, "init", "app.py:App").returncode == 0
    with serving(folder, "--json") as server:
        address = json.loads(server.until('"serving"').string)["address"]
        device = anabranch(folder, "client", "app.py:App", "--server", address, "--json")
        assert {line["kind"] for line in map(json.loads, device.stdout.splitlines())} >= {"stopped"}
        ended = json.loads(server.until('"ended"').string)
        assert "4 updates" in ended["why"]
        for line in ended["next"]:
            paste(line, folder)
        drained = json.loads(server.stop())
    assert [line.split()[1] for line in drained["next"]] == ["report", "verify"]
    assert (folder / "final.safetensors").is_file()


def test_a_device_says_what_becomes_of_its_folder(folder: Path) -> None:
    assert anabranch(folder, "init", "app.py:App").returncode == 0
    with serving(folder) as server:
        address = server.until(r"on ([\d.:]+),")[1]
        device = ["client", "app.py:App", "--server", address, "--state-dir", "my state"]
        stopped = anabranch(folder, *device, "--tasks-max", "1").stdout
        assert "1 tasks done" in stopped
        assert "start it again and it goes on: 'my state'" in stopped
        ended = anabranch(folder, *device).stdout
        assert "the run ended after 4 updates" in ended
        assert "'my state' is not needed any more" in ended
        paste("rm -r 'my state'", folder)
        assert "the run ended after 4 updates" in anabranch(folder, *device).stdout
        server.stop()


def test_what_a_simulation_says_at_the_end_can_be_pasted(folder: Path) -> None:
    simulate = ["simulate", "app.py:App", "--updates", "6", "--clients", "2"]
    for seed in ("1", "2"):
        said = anabranch(folder, *simulate, "--seed", seed).stdout
        for line in commands_in(said):
            paste(line, folder)
        assert ("anabranch compare" in said) == (seed == "2"), "one run alone is compared with nothing"
        found = re.search(r"model: (\S+), the best version (\S+)", said)
        assert found
        assert [set(load_file(folder / name)) for name in found.groups()] == [{"w"}, {"w"}]
    compared = paste(next(line for line in commands_in(said) if "compare" in line) + " --json", folder)
    assert json.loads(compared)["rows"][0]["seeds"] == [1, 2]


def test_a_server_that_listens_on_every_address_is_called_here() -> None:
    config = Config(server=ServerTable(admin_address="0.0.0.0:0"))
    assert while_served(config, "0.0.0.0:7071", insecure=True, best=True) == [
        "anabranch admin export --best best.safetensors --admin 127.0.0.1:7071"
    ]
    assert while_served(config, "[::]:7071", insecure=True, best=False) == [
        "anabranch admin export final.safetensors --admin '[::1]:7071'"
    ]
    config = Config(
        server=ServerTable(admin_address="10.0.0.7:0"), identity=IdentityTable(folder="/srv/the authority")
    )
    assert while_served(config, "10.0.0.7:7071", insecure=True, best=False)[0].endswith("--insecure")
    assert while_served(config, "10.0.0.7:7071", insecure=False, best=False)[0] == (
        "anabranch admin operator operator --folder '/srv/the authority'"
    )


def test_a_password_is_not_printed() -> None:
    config = Config(server=ServerTable(database="postgresql://me:canary@host/runs", data_dir="my data"))
    assert once_stopped(config) == [
        "anabranch report 'my data' --database 'postgresql://me:***@host/runs'",
        "anabranch verify 'my data' --database 'postgresql://me:***@host/runs'",
    ]


def test_the_settings_that_new_has_made_are_those_of_the_server_that_init_names(tmp_path: Path) -> None:
    assert anabranch(tmp_path, "new", "mine", "--template", "numpy").returncode == 0
    mine = tmp_path / "mine"
    (line,) = commands_in(anabranch(mine, "init", "app.py:App").stdout)
    assert line == "anabranch server run.toml --model anabranch-model"
    with (
        served(mine, *shlex.split(line)[2:], *PORTS) as said,
        OperatorClient(said["admin_address"]) as operator,
    ):
        assert operator.status().config["strategy"]["buffer_size"] == 2
    for settings in ("[run]\nworkload = 'digits'\n", "run = 3\n", "[run\n", ""):
        (mine / "run.toml").write_text(settings)
        (line,) = commands_in(anabranch(mine, "init", "app.py:App", "--force").stdout)
        assert line == "anabranch server --model anabranch-model", "settings of another App, or of none"
