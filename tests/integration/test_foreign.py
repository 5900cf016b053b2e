"""A client of another hand, and the test vector: programs that have the code of the messages alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from wire import Served, server_config

from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.server.manifest import write_manifest
from anabranch.workloads.app import load_app

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
EXCHANGE = EXAMPLES / "foreign_exchange.json"
Run = Callable[..., subprocess.CompletedProcess[str]]
# Runs a file where what pip installed for development is not found.
ALONE = """
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program with the code that the page's command generates; anabranch itself cannot be imported."""
    folder = tmp_path_factory.mktemp("foreign")
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8").replace("\\\n", "")
    (protoc,) = re.findall(r"^\$ python -m (grpc_tools.*)$", page, re.MULTILINE)
    command = [sys.executable, "-m", *protoc.replace("=generated", f"={folder}").split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (folder / "anabranch" / "__init__.py").touch()  # a whole package: what is installed is not looked at

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", ALONE, *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": str(folder)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)

    (folder / "probe.py").write_text("import anabranch.core")
    assert "ModuleNotFoundError" in run(folder / "probe.py").stderr
    return run


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A new run of examples/foreign.toml."""
    tensors = load_app(f"{EXAMPLES / 'foreign_model.py'}:App").model()
    manifest = write_manifest(tmp_path / "model", "test", tensors)
    tables = tomllib.loads((EXAMPLES / "foreign.toml").read_text(encoding="utf-8"))
    network = {"address": "127.0.0.1:0", "admin_address": "127.0.0.1:0", "data_dir": str(tmp_path / "data")}
    tables["server"] |= network
    with Served(server_config(tmp_path / "data", **tables), manifest) as server:
        yield server


def descend(vector: np.ndarray, plan: dict[str, float]) -> np.ndarray:
    """What the client's task must come to, by matrices: its examples, as many batches as the plan says."""
    grid = np.array([(x / 4, y / 4) for x in range(3) for y in range(2)])
    x = np.column_stack([grid, grid.sum(1) / 2])
    y = x @ [1.0, 2.0, -1.0] + 0.5
    rows = np.column_stack([x, np.ones(len(x))])
    for _ in range(int(plan["epochs"])):
        for batch in (slice(0, 4), slice(4, 6)):
            error = rows[batch] @ vector - y[batch]
            vector = vector - plan["learning_rate"] * error @ rows[batch] / len(error)
    return vector


def test_a_foreign_client_takes_part_to_the_end_of_the_run(foreign: Run, served: Served) -> None:
    assert served.info is not None
    start = served.model().astype(float)
    done = foreign(EXAMPLES / "foreign_client.py", served.info.address, "foreign-1")
    assert done.returncode == 0, done.stderr
    pushed = [line for line in done.stdout.splitlines() if line.startswith("pushed")]
    assert pushed == [f"pushed: published , version {version}" for version in (1, 2, 3)]
    assert "the run has ended" in done.stdout
    expected = start
    for _ in pushed:
        expected = descend(expected, {"epochs": 2, "learning_rate": 0.125})
    np.testing.assert_allclose(served.model(), expected, rtol=0, atol=1e-6)
    status = served.operator().GetStatus(operators.GetStatusRequest())
    assert (status.updates_applied, status.updates_rejected, status.clients) == (3, 0, 1)


def test_the_test_vector_is_what_the_server_answers(foreign: Run, served: Served) -> None:
    assert served.info is not None
    done = foreign(EXAMPLES / "foreign_replay.py", served.info.address)
    assert done.returncode == 0, done.stdout + done.stderr
    count = len(json.loads(EXCHANGE.read_text(encoding="utf-8"))["steps"])
    assert f"{count} of {count} answers are as recorded" in done.stdout


def test_another_answer_is_found(foreign: Run, served: Served, tmp_path: Path) -> None:
    assert served.info is not None
    recording = json.loads(EXCHANGE.read_text(encoding="utf-8"))
    refused, fetched = recording["steps"][0], next(s for s in recording["steps"] if s["call"] == "FetchModel")
    recording["steps"] = [refused, recording["steps"][1], fetched]
    fetched["responses"][0] = fetched["responses"][0][:-2] + "ff"
    (tmp_path / "other.json").write_text(json.dumps(recording))
    done = foreign(EXAMPLES / "foreign_replay.py", served.info.address, tmp_path / "other.json")
    assert (done.returncode, "2 of 3 answers" in done.stdout) == (1, True), done.stdout + done.stderr


def test_the_recording_is_of_this_tree(served: Served) -> None:
    assert served.info is not None
    command = [sys.executable, str(ROOT / "scripts" / "record_exchange.py"), served.info.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(EXCHANGE.read_text(encoding="utf-8"))
