"""A real server of several runs, its devices, and its cockpit if it is to have one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cockpits import Printed
from nursery import COMMAND, PIPE, Process, run

from anabranch.client.operator import open_operator

RUN = """
[run]
workload = "synthetic"
[fleet]
clients = 2
examples_per_client = 40
[strategy]
name = "fedbuff"
buffer_size = 1
"""
WHERE = ("--model", "model", "--folder", "jobs")


class ServedJobs:
    """A server of jobs, its cockpit and its devices."""

    def __init__(self, folder: Path, said: dict[str, Any], printed: Printed) -> None:
        self.folder, self.said, self.printed = folder, said, printed

    def add(self, name: str) -> None:
        """Another job; returns once it is served."""
        add(self.folder, name)
        self.until(name, "running")

    def until(self, name: str, state: str) -> None:
        """Wait until the server has said that a job stands so."""
        number = 0
        while (line := self.printed.next("job", number)) and (line["job"], line["state"]) != (name, state):
            number += 1

    def train(self, name: str, tasks: int) -> None:
        """A device does some tasks of a job."""
        where = ("--server", f"{self.said['address']}/{name}", "--id", f"of-{name}", "--tasks-max", tasks)
        done = run(COMMAND, "client", "synthetic", *where, "--json", cwd=self.folder)
        assert done.returncode == 0, done.stderr

    def paused(self, name: str) -> bool:
        """What the server itself says."""
        with open_operator(f"{self.said['admin_address']}/{name}", None) as operator:
            return operator.status().paused


def add(folder: Path, name: str) -> None:
    """Put a job into the folder's jobs; the first one brings the model."""
    if not (folder / "model").exists():
        done = run(COMMAND, "init", "synthetic", "--out", "model", cwd=folder)
        assert done.returncode == 0, done.stderr
    (folder / "run.toml").write_text(RUN)
    done = run(COMMAND, "admin", "jobs", "add", name, "run.toml", *WHERE, cwd=folder)
    assert done.returncode == 0, done.stderr


@contextmanager
def jobs_server(folder: Path, *words: object) -> Iterator[ServedJobs]:
    """`anabranch server --jobs`; drained at the end."""
    where = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0")
    with (folder / "server.log").open("wb") as log:
        command = (COMMAND, "server", "--jobs", "jobs", *where, *words, "--json")
        with Process(*command, cwd=folder, stdout=PIPE, stderr=log) as process:
            printed = Printed(process)
            yield ServedJobs(folder, printed.next("serving"), printed)
            process.terminate()
            assert process.wait(600) == 0, (folder / "server.log").read_text()
