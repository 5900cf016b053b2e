"""What a server logs, as programs and people read it: times with a zone, levels, fields."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from commands import anabranch
from grpc._cython import cygrpc  # type: ignore[attr-defined] # the stubs leave it out
from left import loggers_put_back
from nursery import COMMAND, PIPE, Process, run
from wire import QUICK, Device

from anabranch.cli.logs import GRPC, set_up_logging
from anabranch.server.manifest import Manifest, read_manifest, write_manifest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    write_manifest(folder, "test", {"w": np.zeros(3, np.float32)}, ())
    return folder


@contextmanager
def serving(model: Path, data: Path, *words: str) -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and at the end the lines of its log."""
    command = [COMMAND, "server", "--model", str(model), "--data-dir", str(data), "--json", *words]
    command += ["--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0"]
    command += ["--set", "strategy.buffer_size=1", "--set", "run.updates_max=3"]
    lines: list[str] = []
    with Process(*command, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        try:
            yield json.loads(said)["address"], lines
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=600)
            lines += errors.splitlines()
    assert process.returncode == 0, errors


def work(address: str, manifest: Manifest) -> None:
    """Three updates, one of them without numbers before the last."""
    with grpc.insecure_channel(address, options=QUICK) as channel:
        device = Device(channel, manifest.spec)
        device.enrol()
        device.work()
        device.work()
        with pytest.raises(grpc.RpcError):
            device.answer(device.task(), float("nan"))
        device.work()


def test_a_servers_log_for_programs(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "data") as (address, lines):
        work(address, read_manifest(model))
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    for line in found:
        assert datetime.fromisoformat(line["at"]).utcoffset() is not None
    versions = [line for line in found if "versions" in line]
    assert sum(line["versions"] for line in versions) == 3
    assert (versions[-1]["version"], versions[-1]["level"]) == (3, "INFO")
    assert sum(line["updates"] for line in versions) == 3
    (rejection,) = [line for line in found if "reason" in line]
    assert (rejection["level"], rejection["reason"], rejection["client"]) == (
        "WARNING",
        "invalid",
        "device-1",
    )
    (end,) = [line for line in found if line["text"].startswith("end of the run after")]
    assert (end["version"], end["updates"], end["rejected"], end["given_up"]) == (3, 3, 1, False)


@pytest.mark.parametrize("command", ["server", "client"])
def test_what_ends_a_command_for_programs_is_a_line_like_the_others(command: str, tmp_path: Path) -> None:
    words = {"server": ["--model", "nowhere"], "client": ["no_such_module:App", "--id", "a"]}[command]
    done = run(COMMAND, command, *words, "--json", cwd=tmp_path)
    last = json.loads(done.stderr.splitlines()[-1])
    assert (done.returncode != 0, last["level"]) == (True, "ERROR")
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["kind"], told["detail"]) == ("error", last["text"])


def test_the_level_is_a_choice(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "data", "--log-level", "warning") as (address, lines):
        work(address, read_manifest(model))
    assert {json.loads(line)["level"] for line in lines} == {"WARNING"}
    with serving(model, tmp_path / "other", "--log-level", "debug") as (address, lines):
        work(address, read_manifest(model))
    assert [line for line in lines if "Granted(" in json.loads(line)["text"]]


APP = """import numpy as np


class App:
    def model(self):
        return {"w": np.zeros(3, np.float32)}

    def data(self, shard):
        return np.zeros((2, 1)), np.zeros(2)

    def train(self, model, examples, plan, seed):
        model["w"] += GAIN
"""


def test_a_device_tells_its_steps_to_who_logs_that_much(model: Path, tmp_path: Path) -> None:
    told: dict[str, set[str]] = {}
    for name, gain in (("good", "1"), ("flawed", "np.nan")):
        (tmp_path / f"{name}.py").write_text(APP.replace("GAIN", gain))
    with serving(model, tmp_path / "data") as (address, _):
        for app, level in (("good", "info"), ("good", "warning"), ("flawed", "warning"), ("flawed", "error")):
            name = f"{app}-{level}"
            options = ["--server", address, "--id", name, "--tasks-max", "1", "--log-level", level]
            done = anabranch(tmp_path, "client", f"{app}.py:App", *options)
            assert done.returncode == 0, done.stderr
            told[f"{app} {level}"] = {line.split(" ")[0] for line in done.stdout.splitlines()} - {f"{name}:"}
            answered = "1 update answered" + (", 1 of them rejected" if app == "flawed" else "")
            assert answered in done.stdout.splitlines()
    steps = {"granted", "trained", "pushed"}
    assert steps < told["good info"]
    quiet = told["good info"] - steps - {"fetched"}
    assert told["good warning"] == told["flawed error"] == quiet > {"enrolled", "stopped"}
    assert told["flawed warning"] == quiet | {"failed"}


@pytest.mark.parametrize("command", [["server"], ["client", "synthetic"], ["evaluate", "synthetic"]])
def test_a_level_that_is_none_is_an_error(command: list[str], tmp_path: Path) -> None:
    done = anabranch(tmp_path, *command, "--log-level", "loud")
    assert done.returncode == 2
    assert "--log-level must be one of debug, info, warning, error, not 'loud'" in done.stderr


def test_strangers_leave_no_lines_of_grpc_in_the_log(model: Path, tmp_path: Path) -> None:
    """Its C core would write lines of its own, of broken handshakes for example."""
    with serving(model, tmp_path / "data") as (address, lines):
        credentials = grpc.ssl_channel_credentials(None)
        with grpc.secure_channel(address, credentials) as channel:
            call: Any = channel.unary_unary("/anabranch.v1.Devices/Enrol")
            with pytest.raises(grpc.RpcError):
                call(b"", timeout=5.0)
        work(address, read_manifest(model))
    assert all(line.startswith('{"at": ') for line in lines)


def test_who_goes_away_in_the_midst_of_an_answer_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    """As gRPC says it: with a traceback, as often as a member likes."""
    gone, broken = cygrpc.ExecuteBatchError("send"), cygrpc.InternalError("a fault")
    with loggers_put_back():
        logging.root.handlers = []
        set_up_logging(as_json=False)
        for error in (gone, broken):
            try:
                raise error
            except cygrpc.BaseError:
                logging.getLogger(GRPC).exception("raised in core by servicer method [/x]")
    said = capsys.readouterr().err
    assert "a fault" in said
    assert "ExecuteBatchError" not in said
