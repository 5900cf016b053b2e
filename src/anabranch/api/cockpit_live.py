"""A running server as what the cockpit shows: its run over the operators' port, and orders to it."""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from anabranch.client.operator import ClientStanding, OperatorClient, RunStatus
from anabranch.client.watching import WatchedEvent, WatchPlace
from anabranch.cockpit.series import thinned
from anabranch.cockpit.source import Head, State, TakenBack
from anabranch.core.config.goal import Goal
from anabranch.core.errors import AnabranchError
from anabranch.reports.picture.columns import plain
from anabranch.reports.picture.happening import Happened
from anabranch.reports.picture.picture import FOLDED_AT_ONCE, Picture

STATUS_S = 1.0  # so often the server is asked how its run stands
CLIENTS_S = 10.0  # and what is against its devices
QUIET_S = 0.3  # what the server has kept has come, once nothing has come for so long, or news of now has
KEPT_S = 5.0  # so long is waited for it; what comes later is told as it comes
AGAIN_S = 1.0
SERVER_POINTS = 1000
KNOWN = {  # a count of the picture: the status has it as
    "applied": "updates_applied",
    "rejected": "updates_rejected",
    "duplicate": "updates_duplicate",
    "tasks": "tasks_granted",
    "leases_lost": "leases_lost",
    "sums_lost": "sums_lost",
    "up": "uplink_bytes",
    "up_raw": "uplink_bytes_raw",
    "down": "downlink_bytes",
    "down_full": "downlink_bytes_full_equivalent",
    "clients": "clients",
    "online": "clients_online",
}
# The others are of this start of the server; of lost sums servers of older releases say nothing.
OF_THE_RUN = ("applied", "rejected", "tasks", "leases_lost")
GROWING = ("version", "updates_applied", "tasks_granted")  # of a run whose data nobody puts back


class ServedRun:
    """See `Source`. `client` is an operator's connection, whose papers are those of `operator`.

    `job`: of which it is, on a server of several runs.
    """

    def __init__(self, client: OperatorClient, operator: str = "", job: str = "") -> None:
        self._client, self.operator = client, operator
        self._status, self._asked_at, self._gone = client.status(), time.monotonic(), ""
        # What the picture was told of how the run stands, and when.
        self._noted, self._noted_at = self._status, self._asked_at
        self._asking = threading.Lock()
        self.name = job or self._status.run
        self.orders = OperatorOrders(client)

    def head(self) -> Head:
        """What the server said last, which is no older than a second while it answers."""
        status = self._asked()
        config, began = status.config, status.created_at_s
        goal = Goal.of_json(config)
        return Head(
            name=status.run,
            strategy=status.strategy,
            workload=str(config.get("run", {}).get("workload", "")),
            kind="live",
            seed=int(config.get("run", {}).get("seed", 0)),
            state=self._state(status),
            why=status.finished or self._gone,
            given_up=status.given_up,
            config=config,
            started_at=began,
            updates=status.updates_applied,
            version=status.version,
            goal=goal.among({status.best_metric}) if status.best_metric else goal,
            best=status.best_value,
            uptime_s=status.uptime_s,
            silence_s=float(config.get("server", {}).get("lease_s", 60.0)),
            online=status.clients_online,
        )

    def changed(self) -> None:
        """The server is asked anew at the next look."""
        with self._asking:
            self._asked_at = -STATUS_S

    def follow(self, picture: Picture, stop: threading.Event, caught_up: Callable[[], None]) -> None:
        """Tell what the server has kept, and then what happens; over and over, until `stop`."""
        with closing(_Feed(self._client, self._status.created_at_s, stop)) as feed:
            status = self._asked(anew=True)  # the cockpit may have been made long ago
            self._begin(picture, status, feed.kept(_now_s(status)))
            caught_up()
            clients_at = time.monotonic()
            while not stop.is_set():
                picture.tell(feed.next(STATUS_S / 4))
                self._look(picture)
                if time.monotonic() - clients_at >= CLIENTS_S:
                    self._look_at_clients(picture)
                    clients_at = time.monotonic()

    def server(self, picture: Picture) -> dict[str, Any]:
        """How the server fares. Raises `Unavailable`, and `ProtocolError` for an older one."""
        found = self._client.metrics()
        with picture.lock:
            table = picture.server
            names = {"queue": "queue", "commit_ms": "commit", "shed": "shed", "memory": "memory"}
            rows = thinned(table["queue"], SERVER_POINTS)
            series = {name: plain(table[column][rows]) for name, column in names.items()}
            series["time"] = plain(table["time"][rows])
        return {
            "queue": found.queue,
            "queue_max": found.queue_max,
            "commit_ms": _quantiles(found.commit_s, 1000.0),
            "fsync_ms": _quantiles(found.fsync_s, 1000.0),
            "batch": _quantiles(found.batch_events, 1.0),
            "shed": found.calls_shed,
            "refused": found.asks_refused,
            "memory_bytes": found.memory_bytes,
            "leader": found.leader,
            "disk_free_bytes": found.disk_free_bytes,
            "uptime_s": found.uptime_s,
            "series": series,
        }

    @contextmanager
    def export(self, version: int | None) -> Iterator[Path]:
        """See `OperatorClient.export`."""
        with tempfile.TemporaryDirectory(prefix="anabranch-cockpit-") as folder:
            path = Path(folder) / "model.safetensors"
            self._client.export(path, version)
            yield path

    def _asked(self, anew: bool = False) -> RunStatus:
        with self._asking:
            if anew or time.monotonic() - self._asked_at >= STATUS_S:
                try:
                    self._status, self._gone = self._client.status(), ""
                except AnabranchError as error:
                    self._gone = str(error)
                self._asked_at = time.monotonic()
            return self._status

    def _state(self, status: RunStatus) -> State:
        if self._gone:
            return "interrupted"
        if status.finished:
            return "finished"
        return "paused" if status.paused else "running"

    def _begin(self, picture: Picture, status: RunStatus, kept: Sequence[Happened]) -> None:
        """The picture up to now: what was kept of what happened, and of all before it the sums.

        `status` is not of after what was kept: what came in between would be in the sums, and be told later.
        """
        judged = [h for h in kept if h.kind == "decided" and not h.data.get("duplicate")]
        taken = [h for h in judged if h.data["verdict"] != "rejected"]
        before = {
            "applied": status.updates_applied - len(taken),
            "rejected": status.updates_rejected - len(judged) + len(taken),
            "tasks": status.tasks_granted - sum(h.kind == "granted" for h in kept),
            "up": status.uplink_bytes - sum(h.data.get("uplink_bytes", 0) for h in judged),
            "up_raw": status.uplink_bytes_raw - sum(h.data.get("raw_bytes", 0) for h in judged),
        }
        first = next((h.version or 0 for h in kept if h.kind == "published"), status.version + 1)
        now = kept[0].t if kept else _now_s(status)
        with picture.lock:
            picture.from_s = now if before["tasks"] > 0 else 0.0
            picture.counts.update({name: max(count, 0) for name, count in before.items()})
            began, updates = status.created_at_s, 0
            for v in chain.from_iterable(self._client.pages_of_versions()):
                updates += v.updates
                if v.version < first:
                    picture.has_published(v.version, v.published_at_s - began, updates)
                picture.has_measured(v.version, v.metrics)
        for at in range(0, len(kept), FOLDED_AT_ONCE):
            picture.tell(kept[at : at + FOLDED_AT_ONCE])
        with picture.lock:
            picture.settings_changed[:0] = _changes_before(status, now)
        self._note(picture, self._client.status())
        with suppress(AnabranchError):  # those that have something against them are asked for again
            for clients in self._client.pages_of_clients():
                self._stand(picture, clients)

    def _look(self, picture: Picture) -> None:
        if time.monotonic() - self._noted_at >= STATUS_S:
            status, self._noted_at = self._asked(anew=True), time.monotonic()
            if not self._gone:
                if _is_earlier(status, self._noted):
                    raise TakenBack
                self._note(picture, status)
                self._look_at_server(picture)

    def _look_at_server(self, picture: Picture) -> None:
        try:
            found = self._client.metrics()
        except AnabranchError:  # it is asked again
            return
        with picture.lock:
            now = _now_s(self._status)
            commit_ms = found.commit_s.p50 * 1000.0
            picture.server.add(now, found.queue, commit_ms, found.calls_shed, found.memory_bytes)

    def _note(self, picture: Picture, status: RunStatus) -> None:
        """How the run stands: asked after all that the picture was told, so that it is in there."""
        self._noted = status
        with picture.lock:
            for name, its in KNOWN.items():
                picture.is_known(name, int(getattr(status, its)), in_all=name in OF_THE_RUN)
            _note_changes(picture, status)
            picture.version = max(picture.version, status.version)
            picture.finished = status.finished
            picture.passed(_now_s(status))
            rows = picture.devices
            rows.run_twice = {rows.row(client) for client in status.run_twice}
            known = {rows.row(client): why for client, why in status.quarantined.items()}
            rows.quarantined = {  # the status does not say since when, the feed does
                row: rows.quarantined.get(row, (why, None)) for row, why in known.items()
            }

    def _look_at_clients(self, picture: Picture) -> None:
        try:
            found = self._client.clients()
        except AnabranchError:  # it is asked again
            return
        self._stand(picture, found)

    def _stand(self, picture: Picture, found: Sequence[ClientStanding]) -> None:
        began = self._status.created_at_s
        with picture.lock:
            rows = picture.devices
            for c in found:
                row = rows.row(c.client_id)
                rows.stands(row, c.updates_taken, c.updates_rejected, (c.flaws, c.shortened))
                if c.last_seen_s is not None:
                    rows.seen(row, c.last_seen_s - began)
                if c.versions_behind is not None:
                    rows.given(row, picture.version - c.versions_behind)


class _Feed:
    """What the server tells of, from what it has kept on; it is called again where the line breaks."""

    def __init__(self, client: OperatorClient, began: float, stop: threading.Event) -> None:
        self._client, self._began, self._stop, self._closed = client, began, stop, False
        self._told: queue.SimpleQueue[Happened] = queue.SimpleQueue()
        self._place = WatchPlace(after_seq=0)
        self._thread = threading.Thread(target=self._watch, name="anabranch-cockpit-watch", daemon=True)
        self._thread.start()

    def kept(self, now_s: float) -> list[Happened]:
        """What the server has kept. A busy one is never quiet: what happens from now on ends it, too."""
        found: list[Happened] = []
        until = time.monotonic() + KEPT_S
        while fresh := self.next(QUIET_S):
            found += fresh
            if fresh[-1].t >= now_s or time.monotonic() >= until:
                break
        return found

    def next(self, wait_s: float) -> list[Happened]:
        """What was told since the last call; nothing if nothing comes within this time."""
        try:
            found = [self._told.get(timeout=wait_s)]
        except queue.Empty:
            return []
        while len(found) < FOLDED_AT_ONCE and not self._told.empty():
            found.append(self._told.get())
        return found

    def close(self) -> None:
        """Hear no more: the thread ends with the next event, or with the server."""
        self._closed = True

    @property
    def _over(self) -> bool:
        return self._closed or self._stop.is_set()

    def _watch(self) -> None:
        while not self._over:
            with suppress(AnabranchError):
                self._hear()
            self._stop.wait(AGAIN_S)

    def _hear(self) -> None:
        for event in self._place.fresh(self._client.watch):
            for happened in happened_of(event, self._began):
                self._told.put(happened)
            if self._over:
                return


def happened_of(event: WatchedEvent, began: float) -> Iterator[Happened]:
    """What a server tells, as the picture is told; `began`: when the run did, in Unix seconds."""
    t, data = event.at_s - began, dict(event.data)
    version: int | None = event.version
    if "task_id" in data:
        data["task"] = data.pop("task_id")
    if "expires_at_s" in data:
        data["lease_until_s"] = data.pop("expires_at_s") - began
    if event.kind == "settings_changed":
        by = data.pop("by", "")
        for path, value in data.items():
            yield Happened(t, event.kind, "", None, {"path": path, "value": value, "was": None, "by": by})
        return
    if event.kind in ("refused", "finished", "quarantined", "released", "reopened"):
        version = None
    yield Happened(t, event.kind, event.client_id, version, data)


def _now_s(status: RunStatus) -> float:
    """How late it is in the run: by its server, as this machine's clock may be wrong, or was set since."""
    return (status.now_s or time.time()) - status.created_at_s


def _is_earlier(status: RunStatus, before: RunStatus) -> bool:
    """Whether a run stands as it did before it stood so: its data were put back, or it is another one."""
    less = any(getattr(status, name) < getattr(before, name) for name in GROWING)
    return less or status.run_id != before.run_id


def _note_changes(picture: Picture, status: RunStatus) -> None:
    """What a changed setting was, which the feed does not tell."""
    was = {(c.path, c.at_s - status.created_at_s): c.was for c in status.settings_changed}
    for change in picture.settings_changed:
        change["was"] = was.get((change["path"], change["at_s"]), change["was"])


def _changes_before(status: RunStatus, from_s: float) -> list[dict[str, Any]]:
    """The changes of before what the server has kept, the newest of each setting, as the picture has them."""
    return [
        {"path": c.path, "value": c.value, "was": c.was, "by": c.by, "at_s": c.at_s - status.created_at_s}
        for c in sorted(status.settings_changed, key=lambda c: c.at_s)
        if c.at_s - status.created_at_s < from_s
    ]


class OperatorOrders:
    """See `Orders`: as an operator gives them."""

    def __init__(self, client: OperatorClient) -> None:
        self._client = client

    def pause(self) -> None:
        """Hand out no more tasks."""
        self._client.pause()

    def resume(self) -> None:
        """Hand out tasks again."""
        self._client.resume()

    def quarantine(self, client: str, why: str) -> None:
        """No task for a device, and no update of it."""
        self._client.quarantine(client, why)

    def release(self, client: str) -> bool:
        """Let a device out of quarantine; whether it was in."""
        return self._client.release(client)

    def rollback(self, to_version: int, without: Sequence[str], everyone: bool) -> tuple[int, int]:
        """Publish a version without some updates."""
        return self._client.rollback(to_version, without, everyone)

    def set_settings(self, values: Mapping[str, Any]) -> list[str]:
        """Change settings; each in words."""
        done = self._client.set_settings(values)
        return [*done.lines(), *done.warnings]


def _quantiles(found: Any, scale: float) -> dict[str, float | None]:
    """As the page has them; unknown where there was nothing to measure."""
    return {name: getattr(found, name) * scale if found.count else None for name in ("p50", "p90", "p99")}
