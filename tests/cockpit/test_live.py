"""The cockpit of a live server: a process beside it, which shows what happens and gives orders."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from cockpits import Browser, Printed, entered
from nursery import COMMAND, PIPE, Process, run
from ports import free_port
from waits import until

from anabranch.client.operator import OperatorClient, open_operator, operator_wallet
from anabranch.client.watching import WatchedEvent

MARKS = itertools.count()
UI = ("--ui", "127.0.0.1:0")
RUN = """
[run]
workload = "synthetic"
updates_max = 1000
[fleet]
clients = 2
examples_per_client = 40
[strategy]
name = "fedbuff"
buffer_size = 2
[robust]
rule = "median"
"""


@dataclass
class Served:
    """A server with its cockpit."""

    folder: Path
    process: Process
    said: dict[str, Any]
    printed: Printed
    identity: Path | None = None

    @property
    def link(self) -> str:
        return str(self.printed.next("cockpit")["link"])

    @property
    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    def enter(self) -> Browser:
        browser = Browser(self.link)
        assert browser.enter().status == 303
        return browser

    def operator(self) -> OperatorClient:
        return open_operator(self.said["admin_address"], operator_wallet(self.identity))

    def train(self, name: str, tasks: int, *more: object) -> None:
        """A device does some tasks."""
        where = ("--server", self.said["address"], "--id", name, "--tasks-max", tasks)
        done = run(COMMAND, "client", "synthetic", *where, *more, "--json", cwd=self.folder)
        assert done.returncode == 0, done.stderr

    def cockpit(self) -> psutil.Process:
        """The child."""
        (child,) = [p for p in psutil.Process(self.process.pid).children() if "--until-eof" in p.cmdline()]
        return child

    def happened(self) -> list[WatchedEvent]:
        """All that has happened so far, but for the mark that is made here to know where it ends."""
        mark = f"mark-{next(MARKS)}"
        with self.operator() as operator, ExitStack() as stack:
            operator.quarantine(mark)
            watch = operator.watch(0)
            stack.callback(watch.close)  # type: ignore[attr-defined]
            found = []
            for event in watch:
                if event.client_id == mark:
                    break
                found += [event][: not event.client_id.startswith("mark-")]
            operator.release(mark)
            return found


@contextmanager
def server(folder: Path, *words: object) -> Iterator[Served]:
    """`anabranch server` with these words; drained at the end unless it is gone."""
    (folder / "run.toml").write_text(RUN)
    if not (folder / "model").exists():
        assert run(COMMAND, "init", "synthetic", "--out", "model", "--json", cwd=folder).returncode == 0
    where = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0", "--data-dir", "data")
    with (folder / "server.log").open("ab") as log:
        command = (COMMAND, "server", "run.toml", "--model", "model", *where, *words, "--json")
        with Process(*command, cwd=folder, stdout=PIPE, stderr=log) as process:
            printed = Printed(process)
            yield Served(folder, process, printed.next("serving"), printed)
            if process.poll() is None:
                process.terminate()
                assert process.wait(600) == 0, (folder / "server.log").read_text()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose devices have done some tasks."""
    with server(tmp_path_factory.mktemp("live"), *UI) as found:
        found.train("a", 3)
        found.train("b", 5)
        yield found


@pytest.fixture(scope="module")
def browser(live: Served) -> Browser:
    return live.enter()


def test_it_shows_what_the_server_says(live: Served, browser: Browser) -> None:
    with live.operator() as operator:
        status = operator.status()
    head = until(
        lambda: browser.get("/api/runs/synthetic"),
        lambda h: h["counters"]["applied"] == status.updates_applied,
    )
    counters = head["counters"]
    assert (head["kind"], head["units"], head["version"]) == ("live", "real", status.version)
    assert (counters["tasks"], counters["clients"]) == (status.tasks_granted, 2)
    assert (counters["up"], counters["down"]) == (status.uplink_bytes, status.downlink_bytes)
    assert counters["up_raw"] == status.uplink_bytes_raw
    rows = {row["client"]: row for row in browser.get("/api/runs/synthetic/fleet")["rows"]}
    assert {name: row["updates"] for name, row in rows.items() if row["updates"]} == {"a": 3, "b": 5}
    assert sum(row["up"] for row in rows.values()) == status.uplink_bytes
    assert {row["down"] for row in rows.values()} == {None}, "its log does not say who fetched what"


def test_its_river_is_what_happened(live: Served, browser: Browser) -> None:
    happened = live.happened()
    granted = [e for e in happened if e.kind == "granted"]
    published = [e.version for e in happened if e.kind == "published"]
    river = until(
        lambda: browser.get("/api/runs/synthetic/river"), lambda r: len(r["versions"]) == len(published) + 1
    )
    assert [version for version, _ in river["versions"]] == [0, *published]
    assert len(river["threads"]) == len(granted)
    lanes = Counter(river["lanes"][thread[0]] for thread in river["threads"])
    assert lanes == Counter(e.client_id for e in granted)
    bases = sorted(thread[1] for thread in river["threads"])
    assert bases == sorted(e.version for e in granted)
    with live.operator() as operator:
        began = operator.status().created_at_s
    assert sorted(t[2] for t in river["threads"]) == [e.at_s - began for e in granted]


def test_whom_the_rule_has_heard(live: Served, browser: Browser) -> None:
    told = [e.data["heard"] for e in live.happened() if e.kind == "published"]
    assert [client for client, _ in told[0]] == ["a", "a"], "as they came"
    shares: dict[str, list[float]] = {"a": [], "b": []}
    for client, share in itertools.chain(*told):
        shares[client].append(share)
    found = until(
        lambda: browser.get("/api/runs/synthetic/defence")["heard"],
        lambda f: len(f["series"]["time"]) == len(told),
    )
    assert {row["client"]: (row["updates"], row["heard"]) for row in found["devices"]} == {
        client: (len(of), pytest.approx(sum(of) / len(of))) for client, of in shares.items()
    }


def test_how_the_server_fares(live: Served, browser: Browser) -> None:
    found = until(lambda: browser.get("/api/runs/synthetic/server"), lambda f: len(f["series"]["time"]) > 1)
    with live.operator() as operator:
        metrics = operator.metrics()
    assert (found["leader"], found["queue_max"]) == (metrics.leader, metrics.queue_max)
    assert metrics.memory_bytes / 2 < found["memory_bytes"] < metrics.memory_bytes * 2
    assert 0 < found["commit_ms"]["p50"] <= found["commit_ms"]["p99"]
    assert 0 < found["uptime_s"] <= metrics.uptime_s
    assert found["series"]["time"] == sorted(found["series"]["time"])
    assert len(found["series"]["memory"]) == len(found["series"]["time"])


def test_an_order_is_given_when_it_is_confirmed(live: Served, browser: Browser) -> None:
    orders = "/api/runs/synthetic/orders"
    asked = browser.post(orders, {"order": "pause"})
    assert asked.status == 202
    assert asked.json()["says"].startswith("Pause the run `synthetic`")
    with live.operator() as operator:
        assert not operator.status().paused
        given = browser.post(orders, {"confirm": asked.json()["confirm"]})
        assert (given.status, given.json()) == (200, {"done": "paused"})
        assert operator.status().paused
        again = browser.post(orders, {"confirm": asked.json()["confirm"]})
        assert again.status == 403
        assert browser.get("/api/runs/synthetic")["state"] == "paused"  # whatever was said a moment ago
        assert browser.order("synthetic", "resume").json() == {"done": "resumed"}
        assert browser.get("/api/runs/synthetic")["state"] == "running"
        assert not operator.status().paused
    assert "order by session 1 of the cockpit: Pause the run `synthetic`" in live.log
    assert "done for session 1 of the cockpit: resumed" in live.log


def test_every_order_reaches_the_engine(live: Served, browser: Browser) -> None:
    with live.operator() as operator:
        assert browser.order("synthetic", "quarantine", client="a", why="odd").status == 200
        assert operator.status().quarantined == {"a": "odd"}
        until(
            lambda: browser.get("/api/runs/synthetic/defence")["quarantined"],
            lambda found: [(q["client"], q["why"]) for q in found] == [("a", "odd")],
        )
        assert browser.order("synthetic", "release", client="a").json() == {"done": "a is out of quarantine"}
        assert operator.status().quarantined == {}
        done = browser.order(
            "synthetic", "set", settings={"server.lease_s": 77, "run.rejections_max": 90}
        ).json()
        assert "server.lease_s = 77.0 (was 60.0)" in done["done"]
        assert operator.status().config["server"]["lease_s"] == 77.0
        before = operator.status().version
        done = browser.order("synthetic", "rollback", to_version=1, everyone=True).json()
        assert done["done"].startswith(f"version {before + 1}, without ")
        assert operator.status().version == before + 1
    refused = browser.order("synthetic", "set", settings={"server.shoe": 1})
    assert (refused.status, "server.shoe" in refused.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "JSON"),
        ({"order": "dance"}, "order='dance'"),
        ({"order": "release"}, "arguments.client"),
        ({"order": "pause", "arguments": {"hard": True}}, "arguments.hard"),
        ({"order": "rollback", "arguments": {"to_version": -1}}, "arguments.to_version"),
        ({"order": "rollback", "arguments": {"to_version": 1}}, "arguments.without"),
        ({"order": "set", "arguments": {"settings": {}}}, "arguments.settings"),
        ({"order": "pause", "confirm": "x"}, "and then"),
        ([], "{order, arguments}"),
    ],
)
def test_a_bad_order_is_named(browser: Browser, body: Any, named: str) -> None:
    answer = browser.post("/api/runs/synthetic/orders", body)
    assert answer.status == 400
    assert named in answer.json()["error"]


def test_a_stream_goes_on_where_it_was(live: Served, browser: Browser) -> None:
    before = len(live.happened())
    with browser.stream("synthetic") as messages:
        kind, place, _ = next(messages)
        assert kind == "news"
    found: list[dict[str, Any]] = []
    messages_read = 0
    with ThreadPoolExecutor() as pool:
        trained = pool.submit(live.train, "c", 8)
        while not trained.done() or len(found) < len(live.happened()) - before:
            with browser.stream("synthetic", after=place) as messages:  # cut off after each message
                _, place, news = next(messages)
            assert news["dropped"] == 0
            found += [r for r in news["records"] if not r.get("client", "").startswith("mark-")]
            messages_read += bool(news["records"])
    trained.result()
    told = [(r["kind"], r.get("client", ""), r.get("task")) for r in found]
    assert told == [(e.kind, e.client_id, e.data.get("task_id")) for e in live.happened()[before:]]
    assert messages_read > 1


def test_a_model_goes_out(live: Served, browser: Browser, tmp_path: Path) -> None:
    with live.operator() as operator:
        operator.export(tmp_path / "model.safetensors")
    assert browser.ask("/api/runs/synthetic/export").body == (tmp_path / "model.safetensors").read_bytes()


def test_the_server_lives_on_without_it(tmp_path: Path) -> None:
    with server(tmp_path, *UI) as live:
        assert live.link
        live.cockpit().kill()
        live.train("a", 2)
        until(lambda: live.log, lambda log: "the cockpit has ended (exit code -9), the server goes on" in log)
        with entered("--admin", live.said["admin_address"], cwd=tmp_path) as browser:
            head = browser.get("/api/runs/synthetic")
            assert head["counters"]["applied"] == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_server(number: signal.Signals, tmp_path: Path) -> None:
    with server(tmp_path, *UI) as live:
        browser = live.enter()
        child = live.cockpit()
        with browser.stream("synthetic") as messages:
            assert next(messages)
            live.process.send_signal(number)
            assert live.process.wait(600) == {signal.SIGKILL: -9}.get(number, 0)
            assert psutil.wait_procs([child], timeout=600)[0] == [child]
    assert "the cockpit has ended" not in live.log


def test_what_was_before_the_server_started_is_summed_up(tmp_path: Path) -> None:
    with server(tmp_path) as first:
        first.train("a", 4)
    with server(tmp_path, *UI) as live:
        live.train("b", 2)
        browser = live.enter()
        head = until(lambda: browser.get("/api/runs/synthetic"), lambda h: h["counters"]["applied"] == 6)
        with live.operator() as operator:
            status, versions = operator.status(), operator.versions()
        assert (head["counters"]["tasks"], head["version"]) == (status.tasks_granted, status.version)
        assert head["from_s"] > 0
        river = browser.get("/api/runs/synthetic/river")
        assert [v for v, _ in river["versions"]] == [0, *(v.version for v in versions if v.version)]
        assert [thread[0] for thread in river["threads"] if river["lanes"][thread[0]] == "a"] == []
        rows = {r["client"]: r["updates"] for r in browser.get("/api/runs/synthetic/fleet")["rows"]}
        assert rows == {"a": 4, "b": 2}
        series = browser.get("/api/runs/synthetic/series")
        assert series["updates"] == [5, 6]


def test_a_page_that_is_open_while_the_data_are_put_back_shows_what_is_there_then(tmp_path: Path) -> None:
    admin = f"127.0.0.1:{free_port()}"
    with server(tmp_path) as first:
        first.train("a", 2)
    shutil.copytree(tmp_path / "data", tmp_path / "kept")
    with (
        server(tmp_path, "--admin-address", admin) as second,
        entered("--admin", admin, cwd=tmp_path) as browser,
    ):
        second.train("lost", 6)
        until(lambda: browser.get("/api/runs/synthetic"), lambda h: h["counters"]["applied"] == 8)
        second.process.terminate()
        assert second.process.wait(600) == 0
        shutil.rmtree(tmp_path / "data")
        shutil.copytree(tmp_path / "kept", tmp_path / "data")
        with server(tmp_path, "--admin-address", admin) as third:
            third.train("new", 1)
            head = until(lambda: browser.get("/api/runs/synthetic"), lambda h: h["counters"]["applied"] == 3)
            assert (head["version"], head["counters"]["tasks"]) == (1, 3)
            river = until(lambda: browser.get("/api/runs/synthetic/river"), lambda r: r["threads"])
            assert {river["lanes"][thread[0]] for thread in river["threads"]} == {"new"}
            assert [version for version, _ in river["versions"]] == [0, 1]


def test_a_guarded_server_wants_an_operators_papers(tmp_path: Path) -> None:
    assert run(COMMAND, "admin", "ca", "init", "--json", cwd=tmp_path).returncode == 0
    assert run(COMMAND, "admin", "operator", "alice", "--json", cwd=tmp_path).returncode == 0
    tls = ("--set", "identity.tls=always")
    assert run(COMMAND, "init", "synthetic", "--out", "model", "--json", cwd=tmp_path).returncode == 0
    refused = run(COMMAND, "server", "--model", "model", *UI, *tls, "--json", cwd=tmp_path)
    assert (refused.returncode, "--ui-identity" in refused.stderr) == (2, True)
    with server(tmp_path, *UI, "--ui-identity", tmp_path / "alice", *tls) as live:
        live.identity = tmp_path / "alice"
        browser = live.enter()
        session = browser.get("/api/session")
        assert (session["operator"], session["orders"]) == ("alice", True)
        assert browser.order("synthetic", "pause").json() == {"done": "paused"}
        with live.operator() as operator:
            assert operator.status().paused
        lines = [json.loads(line)["text"] for line in live.log.splitlines()]
        assert "paused by operator 'alice'" in lines
        assert "done for session 1 of the cockpit, operator 'alice': paused" in lines


def test_a_servers_cockpit_is_for_its_machine(tmp_path: Path) -> None:
    assert run(COMMAND, "init", "synthetic", "--out", "model", "--json", cwd=tmp_path).returncode == 0
    refused = run(COMMAND, "server", "--model", "model", "--ui", "0.0.0.0:0", cwd=tmp_path)
    assert (refused.returncode, "listen on 127.0.0.1" in refused.stderr) == (2, True)
