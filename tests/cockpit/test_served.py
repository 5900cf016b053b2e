"""A running server's figures as the cockpit counts them, from a server that says what this test wants."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from waits import until

from anabranch.api import cockpit_live
from anabranch.api.cockpit_live import ServedRun
from anabranch.client.operator import (
    ClientStanding,
    MaskedSums,
    OperatorClient,
    PublishedVersion,
    RunStatus,
    SettingAnswer,
)
from anabranch.client.watching import WatchedEvent
from anabranch.cockpit import news, runs
from anabranch.cockpit.asking import Asked
from anabranch.cockpit.defence import defence
from anabranch.cockpit.fleet import fleet
from anabranch.cockpit.news import News
from anabranch.cockpit.ordering import Ordering
from anabranch.cockpit.runs import OPEN_MAX, Runs, ShownRun, counters, head_of, row_of
from anabranch.cockpit.series import series
from anabranch.cockpit.source import Head
from anabranch.cockpit.visitors import Visitor
from anabranch.cockpit.wire import wire
from anabranch.core.errors import AnabranchError, Unavailable
from anabranch.core.privacy.accountant import epsilon_of
from anabranch.reports.picture.picture import Picture

BEGAN_S = 1000.0  # the run, before this test
UPDATE = {"verdict": "held", "staleness": 0, "weight": 1.0, "uplink_bytes": 8}


class Server(OperatorClient):
    """Says of a run what the test wants. `asked`: how often it was asked how the run stands."""

    def __init__(self) -> None:
        self.began, self.asked = time.time() - BEGAN_S, 0
        self.applied, self.finished = 0, ""
        self.gone, self.online, self.clients_known = False, 0, 1
        self.quarantined: dict[str, str] = {}
        self.changes: tuple[SettingAnswer, ...] = ()
        self.sums_lost = 0
        self.config: dict[str, Any] = {}
        self.closed = threading.Event()

    def status(self) -> RunStatus:
        self.asked += 1
        if self.gone:
            raise Unavailable("nobody answers")
        return RunStatus(
            run="it",
            run_id="1",
            strategy="fedbuff",
            version=0,
            updates_applied=self.applied,
            clients=self.clients_known,
            paused=False,
            finished=self.finished,
            uptime_s=BEGAN_S,
            config=self.config,
            quarantined=self.quarantined,
            created_at_s=self.began,
            best_version=None,
            best_accuracy=None,
            updates_rejected=0,
            updates_duplicate=0,
            live_tasks=0,
            leases_lost=0,
            uplink_bytes=0,
            downlink_bytes=0,
            uplink_bytes_raw=0,
            downlink_bytes_full_equivalent=0,
            observer_bytes=0,
            clients_online=self.online,
            tasks_granted=0,
            settings_changed=self.changes,
            masked_sums=MaskedSums(0, (), (), self.sums_lost),
        )

    def clients(self, limit: int = 0, tag: str = "") -> list[ClientStanding]:
        return [ClientStanding("a", self.applied, 0, 0, 0, "", None, True, None)] if self.applied else []

    def pages_of_clients(self, limit: int = 0) -> Iterator[list[ClientStanding]]:
        yield self.clients()

    def versions(self, after: int = 0, limit: int = 0, held: bool = False) -> list[PublishedVersion]:
        return []

    def metrics(self) -> None:  # type: ignore[override]
        raise AnabranchError("not here")

    def update(self, seq: int, at_s: float) -> WatchedEvent:
        """An update of the only device."""
        return WatchedEvent(seq, at_s, "decided", "a", 0, {"task_id": f"t{seq}", **UPDATE})


@contextmanager
def followed(server: Server) -> Iterator[tuple[Picture, threading.Event]]:
    """The picture of its run, which goes on meanwhile; and whether the cockpit says that it is up to now."""
    picture, stop, caught_up = Picture(), threading.Event(), threading.Event()
    following = threading.Thread(target=ServedRun(server).follow, args=(picture, stop, caught_up.set))
    following.start()
    try:
        yield picture, caught_up
    finally:
        stop.set()
        server.closed.set()
        following.join()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is asked again all the time."""
    monkeypatch.setattr(cockpit_live, "STATUS_S", 0.01)
    monkeypatch.setattr(cockpit_live, "CLIENTS_S", 0.01)


def test_a_server_that_is_never_quiet_is_shown_at_once() -> None:
    class Busy(Server):
        def watch(self, after_seq: int | None = None) -> Iterator[WatchedEvent]:
            yield self.update(1, self.began)
            while not self.closed.wait(0.001):
                yield self.update(2, time.time())

    with followed(Busy()) as (_, caught_up):
        assert caught_up.wait(600)


def test_what_happens_while_it_is_asked_counts_once() -> None:
    class OnTheWay(Server):
        """Of five updates it has told three when it is asked; the others come after the answer."""

        asked_at = 0

        def watch(self, after_seq: int | None = None) -> Iterator[WatchedEvent]:
            yield from (self.update(n, self.began + n) for n in range(3))
            self.applied = 5
            until(lambda: self.asked >= 2 or self.closed.is_set())  # of the start, and of what was before
            yield from (self.update(n, self.began + n) for n in (3, 4))
            self.asked_at = self.asked
            self.closed.wait()

    server = OnTheWay()
    with followed(server) as (picture, _):
        until(lambda: picture.happened == 5 and server.asked >= server.asked_at + 3)
        with picture.lock:
            assert picture.count("applied") == 5
            assert picture.devices.columns["updates"].tolist() == [5]


def test_what_happens_while_the_picture_is_begun_has_its_bytes_once() -> None:
    class Meanwhile(Server):
        """Two updates come between its answers to how the run stands, and are told of after them."""

        def __init__(self) -> None:
            super().__init__()
            self.applied, self.answered, self.told = 3, 0, threading.Event()

        def status(self) -> RunStatus:
            if self.answered:
                self.told.wait()
            found = replace(super().status(), uplink_bytes=8 * self.applied)
            self.answered += 1
            return found

        def watch(self, after_seq: int | None = None) -> Iterator[WatchedEvent]:
            yield from (self.update(n, self.began + n) for n in range(3))
            self.told.set()
            until(lambda: self.answered >= 2 or self.closed.is_set())
            self.applied = 5
            until(lambda: self.answered >= 3 or self.closed.is_set())
            yield from (self.update(n, self.began + n) for n in (3, 4))
            self.closed.wait()

    with followed(Meanwhile()) as (picture, _):
        until(lambda: picture.happened == 5)
        with picture.lock:
            assert (picture.count("applied"), picture.count("up")) == (5, 40)


def test_the_time_of_a_run_that_has_ended_stands_still() -> None:
    class Ended(Server):
        finished_after_s = 30.0

        def watch(self, after_seq: int | None = None) -> Iterator[WatchedEvent]:
            yield self.update(1, self.began + 29.0)
            yield WatchedEvent(
                2, self.began + self.finished_after_s, "finished", "", 0, {"why": "its budget"}
            )
            yield WatchedEvent(3, self.began + 500.0, "refused", "a", 0, {})
            self.closed.wait()

    server = Ended()
    server.applied, server.finished = 1, "its budget"
    with followed(server) as (picture, caught_up):
        assert caught_up.wait(600)
        until(lambda: server.asked >= 5)
        with picture.lock:
            assert picture.now_s == pytest.approx(30.0)
            assert picture.clock_s >= BEGAN_S


def test_the_time_of_a_server_that_is_away_stands_still() -> None:
    class Quiet(Server):
        def watch(self, after_seq: int | None = None) -> Iterator[WatchedEvent]:
            self.closed.wait()
            yield from ()

    server = Quiet()
    with followed(server) as (picture, caught_up):
        assert caught_up.wait(600)
        server.gone = True
        until(lambda: server.asked >= 5)
        asked = server.asked
        until(lambda: server.asked >= asked + 2)
        with picture.lock:
            stands = picture.now_s
        until(lambda: server.asked >= asked + 5)
        with picture.lock:
            assert picture.now_s == stands


class Quiet(Server):
    """Nothing happens of which it could tell."""

    def watch(self, after_seq: int | None = None) -> Iterator[WatchedEvent]:
        self.closed.wait()
        yield from ()


@contextmanager
def shown(server: Server, job: str = "") -> Iterator[ShownRun]:
    """Its run as the cockpit's pages ask for it."""
    run = ShownRun("it", ServedRun(server, job=job))
    try:
        run.open()
        yield run
    finally:
        run.leave()
        server.closed.set()
        run.close()


def test_a_page_is_told_how_a_quiet_run_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that fall silent are no event: a page that waited for one would show them online for ever."""
    monkeypatch.setattr(news, "EVERY_S", 0.001)
    monkeypatch.setattr(news, "STANDS_S", 0.01)
    monkeypatch.setattr(news, "ALIVE_S", 1.0)
    server = Quiet()
    server.online = 1

    async def told(run: ShownRun) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        async for message in News(lambda: False).stream(run, ""):
            assert not message.startswith(":"), "that the line is there is all that is told"
            if message.startswith("event: news"):
                found.append(json.loads(message.partition("data: ")[2]))
                server.online = 0  # its lease of silence ended after the first message
                if found[-1]["counters"]["online"] == 0:
                    return found
        raise AssertionError("the stream has ended")

    with shown(server) as run:
        first, *_, last = asyncio.run(told(run))
    assert (first["counters"]["online"], last["counters"]["online"]) == (1, 0)
    assert last["now_s"] > first["now_s"]
    assert last["records"] == []


class Away(Quiet):
    """It was there once."""

    why = ""

    def status(self) -> RunStatus:
        if self.why:
            raise Unavailable(self.why)
        return super().status()


def test_a_page_is_told_of_another_reason_why_a_server_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is of the call that was cut off, and would stand there as long as nothing happens."""
    monkeypatch.setattr(news, "EVERY_S", 0.001)
    monkeypatch.setattr(cockpit_live, "STATUS_S", 0.001)
    server, reasons = Away(), ["nobody answers", "the stream was cut"]

    async def told(run: ShownRun) -> list[str]:
        found: list[str] = []
        async for message in News(lambda: False).stream(run, ""):
            if message.startswith("event: news"):
                found.append(run.source.head().why)
                if found[-1] == "nobody answers":
                    return found
                server.why = reasons.pop()
        raise AssertionError("the stream has ended")

    with shown(server) as run:
        assert asyncio.run(told(run))[-1] == "nobody answers"


def test_a_run_whose_server_was_away_at_the_first_look_is_followed_once_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its page would be an error until the cockpit is started anew."""
    monkeypatch.setattr(runs, "AGAIN_S", 0.0)
    server = Away()
    run = ShownRun("it", ServedRun(server))
    server.why = "it starts anew"
    with pytest.raises(Unavailable, match="starts anew"):
        run.open()
    server.why = ""
    try:
        assert run.open() is run.picture
        assert not run.over
    finally:
        run.leave()
        server.closed.set()
        run.close()


def test_of_many_pictures_none_goes_that_a_page_listens_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be told of an empty one: no update, version 0."""
    monkeypatch.setattr(news, "EVERY_S", 0.001)
    monkeypatch.setattr(news, "STANDS_S", 0.01)
    servers = [Quiet() for _ in range(OPEN_MAX + 1)]
    sources = [ServedRun(server, job=f"job-{number}") for number, server in enumerate(servers)]
    shown_runs = Runs(lambda: iter(sources), single=False)

    async def told() -> None:
        first, *others, last = shown_runs.all()
        first.open()
        stream = News(lambda: False).stream(first, "")
        for run in (*others, last):
            async for message in stream:  # the others were looked at once, and before its next message
                if message.startswith("event: news"):
                    break
            shown_runs.get(run.id).open()
        assert [run.is_open for run in (first, others[0], last)] == [True, False, True]
        first.close()
        assert not [message async for message in stream if "event" in message], "the page calls again"

    try:
        asyncio.run(told())
    finally:
        for run, server in zip(shown_runs.all(), servers, strict=True):
            run.leave()
            server.closed.set()
            run.close()


def test_a_picture_that_is_forgotten_while_its_server_is_asked_is_told_of_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one is empty at first: as if the run had begun again."""
    monkeypatch.setattr(news, "EVERY_S", 0.001)

    class Asked(ServedRun):
        def head(self) -> Head:
            found = super().head()
            run.close()
            return found

    async def told() -> list[str]:
        return [message async for message in News(lambda: False).stream(run, "") if "event" in message]

    server = Quiet()
    run = ShownRun("it", Asked(server))
    try:
        run.open().version = 7
        (message,) = asyncio.run(told())
    finally:
        run.leave()
        server.closed.set()
        run.close()
    assert json.loads(message.partition("data: ")[2])["version"] == 7


def test_a_changed_setting_is_told_with_what_it_was() -> None:
    class Changed(Server):
        def watch(self, after_seq: int | None = None) -> Iterator[WatchedEvent]:
            for n, (path, value) in enumerate(CHANGES[1:], 2):
                yield WatchedEvent(n, self.began + n, "settings_changed", "", 0, {"by": "alice", path: value})
            self.closed.wait()

    server = Changed()
    was = {"server.lease_s": 60.0, "run.updates_max": 500, "run.rejections_max": 100}
    newest = dict(CHANGES)
    at = {path: n for n, (path, _) in enumerate(CHANGES, 1)}
    server.changes = tuple(
        SettingAnswer(path, newest[path], was[path], "alice", server.began + at[path]) for path in newest
    )
    with followed(server) as (picture, caught_up):
        assert caught_up.wait(600)
        with picture.lock:
            found = [(c["path"], c["was"], c["value"], c["by"]) for c in picture.settings_changed]
    assert found == [
        ("server.lease_s", 60.0, 20.0, "alice"),  # before what the server has kept
        ("run.updates_max", None, 500, "alice"),  # what it was nobody knows any more
        ("run.updates_max", 500, 900, "alice"),
        ("run.rejections_max", 100, 7, "alice"),
    ]


CHANGES = (
    ("server.lease_s", 20.0),
    ("run.updates_max", 500),
    ("run.updates_max", 900),
    ("run.rejections_max", 7),
)


def test_a_name_in_quarantine_that_nobody_has_is_no_device() -> None:
    server = Quiet()
    server.quarantined, server.clients_known = {"tyop": "odd"}, 0
    with shown(server) as run:
        assert counters(run.picture)["clients"] == 0
        # Since when it is in there the server does not say: not since somebody looked.
        assert defence(run.picture, {})["quarantined"] == [{"client": "tyop", "why": "odd", "at_s": None}]
        said = {
            client: Ordering().ask(run, Visitor(1, "", 0.0), "quarantine", {"client": client})["says"]
            for client in ("tyop", "other")
        }
    assert "called so far" not in said["tyop"]  # it is known: it is in there already
    assert said["other"].endswith("No device of this name has called so far.")


def test_a_masked_sum_that_was_lost_was_seen_and_counts_in_epsilon() -> None:
    """Two before the cockpit was opened, one as it looks on: not a version of them there is."""

    class Losing(Server):
        def watch(self, after_seq: int | None = None) -> Iterator[WatchedEvent]:
            told = {"cohort": 3, "updates": 4, "why": "revoked"}
            yield WatchedEvent(1, time.time(), "cohort_lost", "", 0, told)
            self.closed.wait()

    server = Losing()
    server.sums_lost = 3
    config = {"privacy": {"clip": 1.0, "noise": 2.0, "participations": 5}}
    with followed(server) as (picture, caught_up):
        assert caught_up.wait(600)
        with picture.lock:
            found = defence(picture, config)["privacy"]["epsilon_so_far"]
    assert found == epsilon_of(math.sqrt(3) / 2.0, 1e-6)


def test_bytes_down_of_before_the_cockpit_are_not_known() -> None:
    """A server has them as a sum alone: none had not travelled until somebody looked."""

    class Kept(Server):
        more = threading.Event()

        def watch(self, after_seq: int | None = None) -> Iterator[WatchedEvent]:
            yield from (self.update(n, self.began + n) for n in (1, 2))
            self.more.wait()
            yield self.update(3, time.time())
            self.closed.wait()

        def status(self) -> RunStatus:
            return replace(super().status(), downlink_bytes=500)

    server = Kept()
    with followed(server) as (picture, caught_up):
        assert caught_up.wait(600)
        until(lambda: server.asked >= 3)
        server.more.set()
        until(lambda: picture.happened == 3)
        with picture.lock:
            assert series(picture, Asked({}))["down"] == [None, None, 500]
            assert wire(picture, Asked({}))["series"]["down"] == [None, None, 500]


@pytest.mark.parametrize(
    ("config", "cut"),
    [
        ({"robust": {"clip": 2.0}}, 7),
        ({"privacy": {"clip": 1.0, "noise": 2.0, "participations": 5}}, None),
        ({"secagg": {"mode": "keeper", "keepers": ["north"], "clip": 1.0}}, None),
    ],
    ids=["clip", "private", "masked"],
)
def test_who_cuts_unseen_is_not_said_to_have_cut_nothing(config: dict[str, Any], cut: int | None) -> None:
    class Cutting(Quiet):
        def clients(self, limit: int = 0, tag: str = "") -> list[ClientStanding]:
            return [ClientStanding("a", 9, 0, 0, 7, "", None, True, None)]

    with shown(Cutting()) as run:
        assert defence(run.picture, config)["clipped"] == cut
    assert defence(Picture(), config)["clipped"] is None, "records do not tell it"


def test_what_a_server_has_against_its_devices() -> None:
    """The worst first, whatever it is; of two that are as bad the first by name."""
    against = {"a": (9, 1, 2, 0), "b": (8, 7, 0, 3), "c": (7, 3, 2, 4), "d": (6, 0, 0, 0), "e": (5, 2, 3, 0)}

    class Suspicious(Quiet):
        def clients(self, limit: int = 0, tag: str = "") -> list[ClientStanding]:
            return [ClientStanding(name, *figures, "", None, True, None) for name, figures in against.items()]

    with shown(Suspicious()) as run:
        found = defence(run.picture, {"robust": {"clip": 2.0}})
        assert [(row["client"], row["flaws"], row["shortened"]) for row in found["flaws"]] == [
            *(("c", 2, 4), ("b", 0, 3), ("e", 3, 0), ("a", 2, 0)),
        ]
        assert found["clipped"] == 7
        for words, order in (
            ({"sort": "flaws", "order": "desc"}, "cbead"),
            ({"sort": "flaws", "order": "desc", "limit": "2"}, "cb"),
            ({"sort": "flaws", "order": "desc", "limit": "1", "offset": "2"}, "e"),
            ({"sort": "rejected"}, "daecb"),
        ):
            rows = fleet(run.picture, Asked(words), None)["rows"]
            columns = ("updates", "rejected", "flaws", "shortened")
            assert [tuple(row[name] for name in columns) for row in rows] == [against[name] for name in order]


def test_a_served_run_is_live_whosever_app_it_is() -> None:
    for workload, framework in (("flower:app", "Flower"), ("digits", None)):
        server = Quiet()
        server.config = {"run": {"workload": workload}}
        with shown(server) as run:
            head = head_of(run)
        told = head["kind"], head["units"], head["framework"], head["served"]
        assert told == ("live", "real", framework, True)


def test_jobs_of_one_name_are_told_apart() -> None:
    for job, title in (("wards", "wards"), ("", "it")):
        with shown(Quiet(), job) as run:
            row = row_of(run)
            assert (row["title"], row["name"]) == (title, "it")
            says = Ordering().ask(run, Visitor(1, "", 0.0), "pause", {})["says"]
            assert f"Pause the run `{title}`" in says
