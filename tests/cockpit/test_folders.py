"""Folders that the cockpit shows: of a run that still goes on, of many runs, of a server's data."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cockpits import Browser, Printed, cockpit, entered
from nursery import COMMAND, run

from anabranch.api.cockpit import runs_below
from anabranch.cockpit.folder import RunFolder
from anabranch.cockpit.runs import Runs, ShownRun
from anabranch.core.errors import DataError, TooLarge
from anabranch.reports.journal_files import JOURNAL
from anabranch.reports.picture.picture import Picture
from anabranch.reports.result import Result

SMALL = ("--set", "run.workload=synthetic", "--set", "run.updates_max=40", "--set", "fleet.clients=3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is over."""
    where: Path = tmp_path_factory.mktemp("whole")
    done = run(COMMAND, "simulate", *SMALL, "--out", "run", "--json", cwd=where)
    assert done.returncode == 0, done.stderr
    return where / "run"


class Growing:
    """A run that is written again, a few lines at a time, as a simulation writes it."""

    def __init__(self, whole: Path, folder: Path) -> None:
        self.whole, self.folder = whole, folder
        folder.mkdir(parents=True)
        for name in ("journal.jsonl", "initial.safetensors"):
            shutil.copy(whole / name, folder)
        self.lines = (whole / "events.jsonl").read_bytes().splitlines(keepends=True)
        self.file = folder / "events.jsonl"
        self.file.touch()

    def write(self, data: bytes) -> None:
        """More of its events."""
        with self.file.open("ab") as file:
            file.write(data)

    def end(self) -> None:
        """Its result."""
        shutil.copy(self.whole / "result.json", self.folder)


def read_until(messages: Any, count: int) -> tuple[list[dict[str, Any]], str]:
    """So many records of a stream, and the place after them."""
    found: list[dict[str, Any]] = []
    for _, place, news in messages:
        assert news["dropped"] == 0
        found += news["records"]
        if len(found) >= count:
            return found, place
    raise AssertionError("the stream has ended")


def test_a_run_is_followed_as_it_grows(whole: Path, tmp_path: Path) -> None:
    growing = Growing(whole, tmp_path / "run")
    growing.write(b"".join(growing.lines[:20]))
    with entered(tmp_path / "run", cwd=tmp_path) as browser:
        (row,) = browser.get("/api/runs")["runs"]
        assert (row["updates"], row["version"]) == (None, None), "nobody has read its records yet"
        head = browser.get("/api/runs/run")
        (row,) = browser.get("/api/runs")["runs"]
        taken = [json.loads(line).get("verdict") in ("applied", "held") for line in growing.lines[:20]]
        assert (row["updates"], row["version"]) == (head["updates"], head["version"]) == (sum(taken), 0)
        assert (head["state"], head["kind"], head["ended"]) == ("running", "simulated", None)
        assert head["config"]["run"]["workload"] == "synthetic"
        with browser.stream("run") as messages:
            assert next(messages)[2]["records"] == []
            growing.write(b"".join(growing.lines[20:29]) + growing.lines[29][:30])  # a line that is not whole
            records, place = read_until(messages, 9)
            growing.write(growing.lines[29][30:])
            more, place = read_until(messages, 1)
        growing.write(b"".join(growing.lines[30:100]))
        with browser.stream("run", after=place) as messages:
            rest, place = read_until(messages, 70)
        events = [json.loads(line) for line in growing.lines]
        told = [(r["t"], r["kind"], r.get("client")) for r in records + more + rest]
        assert told == [(e["time_s"], e["kind"], e.get("client")) for e in events[20:100]]
        growing.write(b"".join(growing.lines[100:]))
        growing.end()
        with browser.stream("run", after=place) as messages:
            assert [event for event, *_ in messages][-1] == "ended"
        result = Result.read(whole)
        head = browser.get("/api/runs/run")
        assert (head["state"], head["updates"]) == ("finished", result.updates_applied)
        assert head["counters"]["up"] == result.uplink_bytes


def test_a_flower_app_is_simulated_or_live_as_any_other(whole: Path, tmp_path: Path) -> None:
    """In a simulation, over Flower's Grid while its ServerApp still writes, and after that."""
    for name in ("simulated", "over-a-grid"):
        going_on = Growing(whole, tmp_path / "runs" / name)
        going_on.write(going_on.lines[0])
        first, rest = (going_on.folder / JOURNAL).read_text().split("\n", 1)
        journal = json.loads(first)
        journal["config"]["run"]["workload"] = "flower:app"
        (going_on.folder / JOURNAL).write_text(f"{json.dumps(journal)}\n{rest}")
    (tmp_path / "runs" / "over-a-grid" / "payloads").mkdir()
    ended = Path(shutil.copytree(whole, tmp_path / "runs" / "ended"))
    result = json.loads((ended / "result.json").read_text())
    (ended / "result.json").write_text(json.dumps({**result, "workload": "flower:app", "kind": "live"}))
    shutil.copytree(whole, tmp_path / "runs" / "ours")
    with entered(tmp_path / "runs", cwd=tmp_path) as browser:
        rows = [browser.get(f"/api/runs/{row['id']}") for row in browser.get("/api/runs")["runs"]]
    assert {row["id"]: (row["kind"], row["units"], row["framework"], row["served"]) for row in rows} == {
        "simulated": ("simulated", "virtual", "Flower", False),
        "over-a-grid": ("live", "real", "Flower", False),
        "ended": ("live", "real", "Flower", False),
        "ours": ("simulated", "virtual", None, False),
    }


def test_a_cursor_of_another_cockpit_begins_with_now(whole: Path, tmp_path: Path) -> None:
    with entered(whole, cwd=tmp_path) as browser, browser.stream("run", after="0123abcd-3") as messages:
        _, _, news = next(messages)
    assert (news["records"], news["dropped"]) == ([], 0)


def test_who_was_away_for_long_hears_how_much_was_left_out(whole: Path, tmp_path: Path) -> None:
    growing = Growing(whole, tmp_path / "run")
    with entered(tmp_path / "run", cwd=tmp_path) as browser:
        with browser.stream("run") as messages:
            place = next(messages)[1]
        data = b"".join(growing.lines)
        growing.write(data * 4)
        growing.end()
        head: dict[str, Any] = {"counters": {"tasks": 0}}
        granted = sum(b'"granted"' in line for line in growing.lines) * 4
        while head["counters"]["tasks"] < granted:
            head = browser.get("/api/runs/run")
        with browser.stream("run", after=place) as messages:
            _, _, news = next(messages)
    assert len(news["records"]) == 200
    assert news["dropped"] == 4 * len(growing.lines) - 200


@pytest.mark.parametrize("ago_s", [3600.0, -3600.0], ids=["long ago", "and then the clock was set back"])
def test_a_run_that_was_killed_is_said_to_be(whole: Path, tmp_path: Path, ago_s: float) -> None:
    growing = Growing(whole, tmp_path / "run")
    growing.write(b"".join(growing.lines[:50]))
    long_ago = (tmp_path / "run" / "events.jsonl").stat().st_mtime - ago_s
    os.utime(tmp_path / "run" / "events.jsonl", (long_ago, long_ago))
    with entered(tmp_path / "run", cwd=tmp_path) as browser:
        head = browser.get("/api/runs/run")
        assert (head["state"], "killed" in head["why"]) == ("interrupted", True)
        with browser.stream("run") as messages:
            assert [event for event, *_ in messages] == ["news", "ended"]


def test_many_runs(whole: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("a", "b b", "sets/deep/c"):
        shutil.copytree(whole, runs / name)
    shutil.copytree(whole, runs / "broken")
    (runs / "broken" / "result.json").write_text("{")
    shutil.copytree(whole, runs / "torn")
    (runs / "torn" / "events.jsonl").write_text('{"time_s": 1.0}\n')
    with entered(runs, cwd=tmp_path) as browser:
        assert browser.get("/api/session")["runs"] == "many"
        rows = {row["id"]: row for row in browser.get("/api/runs")["runs"]}
        assert set(rows) == {"a", "b-b", "sets-deep-c", "broken", "torn"}
        assert (rows["broken"]["state"], "result.json" in rows["broken"]["why"]) == ("unreadable", True)
        for name in ("a", "b-b", "sets-deep-c"):
            assert browser.get(f"/api/runs/{name}/fleet")["total"] == 3
        torn = browser.ask("/api/runs/torn/fleet")
        assert (torn.status, "no event" in torn.json()["error"]) == (404, True)
        shutil.copytree(whole, runs / "later")
        shutil.rmtree(runs / "a")
        while {row["id"] for row in browser.get("/api/runs")["runs"]} != set(rows) - {"a"} | {"later"}:
            pass
        assert browser.ask("/api/runs/a").status == 404


def test_a_folder_that_goes_while_runs_are_listed_hides_no_other(tmp_path: Path) -> None:
    for name in ("a", "b/c", "d"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "events.jsonl").touch()
    found = runs_below(tmp_path)
    assert next(found).name == "a"
    shutil.rmtree(tmp_path / "b")
    assert [path.name for path in found] == ["d"]


def test_more_runs_than_are_held_open(whole: Path, tmp_path: Path) -> None:
    for number in range(9):
        shutil.copytree(whole, tmp_path / "runs" / f"r{number}")
    with entered(tmp_path / "runs", cwd=tmp_path) as browser:
        for _ in range(2):
            totals = [browser.get(f"/api/runs/r{number}/fleet")["total"] for number in range(9)]
            assert totals == [3] * 9


def test_a_servers_data(tmp_path: Path) -> None:
    words = ("--workload", "synthetic", "--clients", 1, "--set", "run.updates_max=4", "--out", "demo")
    done = run(COMMAND, "demo", *words, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (data,) = [path.parent for path in (tmp_path / "demo").rglob("anabranch.db")]
    before = sorted(path.relative_to(data) for path in data.rglob("*"))
    with entered(data, cwd=tmp_path) as browser:
        (row,) = browser.get("/api/runs")["runs"]
        assert (row["kind"], row["updates"], row["state"]) == ("live", 4, "finished")
        assert browser.get(f"/api/runs/{row['id']}/fleet")["rows"][0]["updates"] == 4
    assert sorted(path.relative_to(data) for path in data.rglob("*")) == before


def test_a_record_that_was_emptied_is_not_a_run_without_updates(whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    (copy / "events.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match=r"events\.jsonl is empty, and the run had updates"):
        RunFolder(copy).follow(Picture(), threading.Event(), lambda: None)


@pytest.mark.parametrize("what", ["nothing", "empty"])
def test_what_is_no_run_is_an_error(tmp_path: Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    done = run(COMMAND, "ui", what, cwd=tmp_path)
    assert (done.returncode, f"{what} " in done.stderr) == (5, True), done.stderr


def test_one_of_two_is_named(whole: Path, tmp_path: Path) -> None:
    done = run(COMMAND, "ui", whole, "--admin", "127.0.0.1:1", cwd=tmp_path)
    assert (done.returncode, "one of them" in done.stderr) == (2, True)


def test_a_port_that_is_taken_is_named_and_its_holder_ends_with_its_terminal(
    whole: Path, tmp_path: Path
) -> None:
    with cockpit(whole, cwd=tmp_path, by=signal.SIGHUP) as printed:
        where = Browser(first(printed)).host
        done = run(COMMAND, "ui", whole, "--listen", where, cwd=tmp_path)
    assert (done.returncode, where in done.stderr) == (34, True), done.stderr


def first(printed: Printed) -> str:
    """The first link."""
    return str(printed.next("cockpit")["link"])


def test_runs_of_one_name_are_told_apart_and_one_that_was_given_up_says_so(tmp_path: Path) -> None:
    named = ("--set", "run.name=mine", *SMALL)
    for folder, *more in (("runs/one",), ("runs/two", "--set", "client.learning_rate=1e38")):
        run(COMMAND, "simulate", *named, *more, "--out", folder, "--json", cwd=tmp_path)
    with entered("runs", cwd=tmp_path) as browser:
        rows = {row["title"]: row for row in browser.get("/api/runs")["runs"]}
        assert {title: (row["name"], row["given_up"]) for title, row in rows.items()} == {
            "one": ("mine", False),
            "two": ("mine", True),
        }
        assert "were all rejected" in browser.get("/api/runs/two")["ended"]
        # What travelled without an update that counted has its place in the course, too.
        wire = browser.get("/api/runs/two/wire")
        assert wire["up"] > 0
        assert (wire["series"]["up"][-1], wire["series"]["down"][-1]) == (wire["up"], wire["down"])


class Large(RunFolder):
    """A run for which there is memory only on other days."""

    fits = False

    def follow(self, picture: Picture, stop: threading.Event, caught_up: Callable[[], None]) -> None:
        picture.version = 7
        if not self.fits:
            raise MemoryError
        super().follow(picture, stop, caught_up)


def test_who_looks_at_a_run_without_memory_for_it_is_told_so(whole: Path) -> None:
    """The page waited for the reader, which was no more, and showed for ever that it reads."""
    source = Large(whole)
    shown = ShownRun("it", source)
    with pytest.raises(TooLarge, match="no memory for this run: give the cockpit more"):
        shown.open()
    assert shown.picture.version != 7, "what there is of it does not stay in memory"
    shown.close()
    source.fits = True
    assert shown.open().happened > 40
    shown.close()


def test_who_looks_at_events_that_lack_something_is_told_so(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    with (tmp_path / "run" / "events.jsonl").open("a") as file:
        file.write('{"time_s": 9e9, "kind": "decided", "client": "device-0", "version": 1}\n')
    shown = ShownRun("it", RunFolder(tmp_path / "run"))
    with pytest.raises(DataError, match=r"it cannot be shown: KeyError\(.*; the cockpit's log has more"):
        shown.open()
    shown.close()


class Endless(RunFolder):
    """A run that takes long to be read."""

    def follow(self, picture: Picture, stop: threading.Event, caught_up: Callable[[], None]) -> None:
        stop.wait()


def test_a_cockpit_that_ends_answers_who_waits_for_a_run_to_be_read(whole: Path) -> None:
    """It was cut off after some seconds, with a traceback."""
    runs = Runs(lambda: iter([Endless(whole)]), single=True)
    (run,) = runs.all()
    answered = threading.Event()

    def look() -> None:
        run.open()
        answered.set()

    threading.Thread(target=look, daemon=True).start()
    runs.leave()
    assert answered.wait(600)
