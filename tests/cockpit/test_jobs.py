"""The cockpit of a server of several runs: all of them are shown, and an order goes to the right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cockpits import Browser, Printed, entered
from nursery import COMMAND, PIPE, Process, run

from anabranch.client.operator import open_operator
from anabranch.server.job_folder import set_stopped

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


class Served:
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
        with open_operator(f"{self.said['admin_address']}/{name}", None) as operator:
            return operator.status().paused


def add(folder: Path, name: str) -> None:
    (folder / "run.toml").write_text(RUN)
    done = run(COMMAND, "admin", "jobs", "add", name, "run.toml", "--folder", "jobs", cwd=folder)
    assert done.returncode == 0, done.stderr


@contextmanager
def server(folder: Path, *words: object) -> Iterator[Served]:
    """`anabranch server --jobs`; drained at the end."""
    where = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0")
    with (folder / "server.log").open("wb") as log:
        command = (COMMAND, "server", "--jobs", "jobs", *where, *words, "--json")
        with Process(*command, cwd=folder, stdout=PIPE, stderr=log) as process:
            printed = Printed(process)
            yield Served(folder, printed.next("serving"), printed)
            process.terminate()
            assert process.wait(600) == 0, (folder / "server.log").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a model."""
    done = run(COMMAND, "init", "synthetic", "--out", "anabranch-model", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path


def until(look: Callable[[], Any], good: Callable[[Any], bool]) -> Any:
    """Ask again until it is so; the test's own time limit ends it."""
    while not good(found := look()):
        pass
    return found


def listed(browser: Browser) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in browser.get("/api/runs")["runs"]}


def test_all_jobs_are_shown_and_ordered_each_by_its_name(folder: Path) -> None:
    with server(folder, "--ui", "127.0.0.1:0") as served:
        browser = Browser(served.printed.next("cockpit")["link"])
        assert browser.enter().status == 303
        session = browser.get("/api/session")
        assert (session["runs"], session["orders"]) == ("many", True)  # though there is none yet
        for name in ("one", "two"):
            served.add(name)
        served.train("one", 3)
        served.train("two", 5)
        rows = until(lambda: listed(browser), lambda rows: [r["updates"] for r in rows.values()] == [3, 5])
        assert list(rows) == ["one", "two"]
        for name, updates in (("one", 3), ("two", 5)):
            head = browser.get(f"/api/runs/{name}")
            assert (head["name"], head["counters"]["applied"]) == (name, updates)
            rows = browser.get(f"/api/runs/{name}/fleet")["rows"]
            assert [row["client"] for row in rows] == [f"of-{name}"]

        assert browser.order("two", "pause").status == 200
        assert (served.paused("one"), served.paused("two")) == (False, True)
        until(lambda: listed(browser), lambda rows: rows["two"]["state"] == "paused")
        assert listed(browser)["one"]["state"] == "running"

        set_stopped(folder / "jobs" / "one", True)
        until(lambda: listed(browser), lambda rows: rows["one"]["state"] == "interrupted")
        assert "no job 'one' is served here now" in listed(browser)["one"]["why"]
        assert b"no job 'one' is served here now" in browser.order("one", "pause").body
        set_stopped(folder / "jobs" / "one", False)
        until(lambda: listed(browser), lambda rows: rows["one"]["state"] == "running")


def test_a_cockpit_beside_it_is_of_all_or_of_one(folder: Path) -> None:
    with server(folder) as served:
        for name in ("one", "two"):
            served.add(name)
        admin = served.said["admin_address"]
        with entered("--admin", admin, cwd=folder) as browser:
            assert list(listed(browser)) == ["one", "two"]
        with entered("--admin", f"{admin}/two", cwd=folder) as browser:
            assert list(listed(browser)) == ["two"]
            assert browser.get("/api/session")["runs"] == 1
