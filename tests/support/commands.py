"""The command line as its user meets it: processes of its own."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click  # noqa: TID251 - that of developers has them
import typer.main
from nursery import COMMAND, PIPE, Process, run

from anabranch.cli.program import app

# A small run, as a file of settings.
RUN = """
[run]
name = "small"
workload = "synthetic"
seed = 3
target_accuracy = 0.3
updates_max = 24
[fleet]
clients = 4
examples_per_client = 40
[strategy]
name = "fedbuff"
buffer_size = 3
"""


def anabranch(cwd: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return run(COMMAND, *arguments, cwd=cwd)


def with_torch(cwd: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The same where torch is there already, whose import takes longer than most commands that need it."""
    return run(COMMAND, *arguments, cwd=cwd, has=["torch"])


def started(cwd: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The same in an interpreter of its own, which imports what the command needs, and has its own seed of
    hashes."""
    command = [sys.executable, "-m", "anabranch.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=600)


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The last JSON line."""
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@contextmanager
def serving(cwd: Path, *arguments: object) -> Iterator[dict[str, Any]]:
    """A server process: what it says once it serves, and its `pid`. It drains at the end."""
    log = cwd / "server.log"
    with (
        log.open("wb") as file,
        Process(COMMAND, "server", *arguments, "--json", cwd=cwd, stdout=PIPE, stderr=file) as process,
    ):
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said.startswith('{"kind": "serving"'), (said, log.read_text())
            yield json.loads(said) | {"pid": process.pid}
        finally:
            process.terminate()
            assert process.wait(600) == 0, log.read_text()


@contextmanager
def killable(cwd: Path, *arguments: object) -> Iterator[tuple[str, Process]]:
    """A server process that is killed at the end, if not before: its address, and itself."""
    with killable_saying(cwd, *arguments) as (said, process):
        yield said["address"], process


@contextmanager
def killable_saying(cwd: Path, *arguments: object) -> Iterator[tuple[dict[str, Any], Process]]:
    """The same with all that it says when it serves."""
    with (
        (cwd / "server.log").open("ab") as log,
        Process(COMMAND, "server", "--json", *arguments, cwd=cwd, stdout=PIPE, stderr=log) as process,
    ):
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline()), process
        finally:
            process.kill()


def command_line() -> click.Group:
    """The command line, with every command loaded. The collector stays off where tests are collected."""
    group, collects = typer.main.get_command(app), gc.isenabled()
    assert isinstance(group, click.Group)
    with click.Context(group) as context:
        for name in group.list_commands(context):
            assert group.resolve_command(context, [name])
    if not collects:
        gc.disable()
    return group
