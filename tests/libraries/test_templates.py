"""The folders of `anabranch new` that large libraries are for, walked as their README says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import anabranch, answer, killable
from ports import free_port

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("default")]

QUIET = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for a busy core are slower than none


def done(folder: Path, *words: str) -> str:
    """What a program says, which ends well."""
    command = [sys.executable, *words]
    found = subprocess.run(command, cwd=folder, env=QUIET, capture_output=True, text=True, timeout=1000)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.parametrize("template", ["transformers", "lightning"])
def test_it_runs_tests_itself_and_takes_part(template: str, tmp_path: Path) -> None:
    answer(anabranch(tmp_path, "new", "mine", "--template", template, "--json"))
    folder = tmp_path / "mine"
    assert (
        answer(anabranch(folder, "simulate", "run.toml", "--updates", 10, "--json"))["updates_applied"] == 10
    )
    assert "3 passed" in done(folder, "-m", "pytest", "-q")
    answer(anabranch(folder, "init", "app.py:app", "--out", "model", "--json"))
    options = ("run.toml", "--model", "model", "--updates", 4, "--address", "127.0.0.1:0")
    with killable(folder, *options, "--admin-address", "127.0.0.1:0") as (address, _):
        said = done(folder, "train.py", address, "device-0")
    assert "results that count: 4" in said


@pytest.mark.parametrize("template", ["transformers", "lightning"])
def test_its_device_joins_by_a_token(template: str, tmp_path: Path) -> None:
    answer(anabranch(tmp_path, "new", "mine", "--template", template, "--json"))
    folder, joins = tmp_path / "mine", free_port() - 2
    answer(anabranch(folder, "init", "app.py:app", "--out", "model", "--json"))
    answer(anabranch(folder, "admin", "ca", "init", "--json"))
    options = ("run.toml", "--model", "model", "--updates", 2, "--set", "identity.tls=always")
    ports = ("--address", f"127.0.0.1:{joins}", "--admin-address", "127.0.0.1:0")
    with killable(folder, *options, *ports) as (address, _):
        token = answer(anabranch(folder, "admin", "enrol", "device-1", "--json"))
        papers = (token["token"], token["ca_sha256"])
        said = done(folder, "train.py", address, "device-1", *papers)
    assert "results that count: 2" in said
