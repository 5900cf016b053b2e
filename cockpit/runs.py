"""The runs that the cockpit shows: each has a source, and a picture once somebody looks at it."""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import Any

from anabranch.cockpit.source import Head, Listing, Source, TakenBack
from anabranch.core.config.tables import Config
from anabranch.core.errors import AnabranchError, ConfigError, DataError, FolderMissing, StoreNewer, TooLarge
from anabranch.reports.picture.picture import Picture

log = logging.getLogger(__name__)

OPEN_MAX = 6  # pictures at a time: one of a million events takes some hundred MB
LIST_S = 2.0  # so old the list of runs may be
AGAIN_S = 2.0  # so long after a run could not be followed it is tried again
CAUGHT_UP_S = 60.0  # a request waits for so long until what there is has been read
NO_MEMORY = "there is no memory for this run: give the cockpit more, or look at it elsewhere"
COUNTERS = ("applied", "rejected", "duplicate", "tasks", "leases_lost", "up", "down", "up_raw", "down_full")


class ShownRun:
    """One run: who tells of it, and what was told so far."""

    def __init__(self, run_id: str, source: Source) -> None:
        self.id, self.source, self.picture = run_id, source, Picture()
        self.looked_at = time.monotonic()
        self.over = False  # nothing more is told
        self._failure: AnabranchError | None = None
        self._failed_at = 0.0
        self._stop, self._caught_up = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._opening = threading.Lock()

    @property
    def title(self) -> str:
        """What it is called, as no other that is shown is: many runs of one file have one `run.name`."""
        return self.source.name

    @property
    def is_open(self) -> bool:
        """Whether its picture is being made, or is."""
        return self._thread is not None

    def open(self) -> Picture:
        """Its picture, of all that there is now. Raises what the source raises, and asks it again later."""
        self.looked_at = time.monotonic()
        with self._opening:
            if self._failure is not None and self.looked_at - self._failed_at >= AGAIN_S:
                self._forget()
            if self._thread is None:
                name = f"anabranch-cockpit-{self.id}"
                thread = threading.Thread(target=self._follow, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # its stack has no room
                    raise TooLarge(NO_MEMORY) from error
                self._thread = thread
        self._caught_up.wait(CAUGHT_UP_S)
        if self._failure is not None:
            raise self._failure
        return self.picture

    def close(self) -> None:
        """Forget its picture."""
        with self._opening:
            self._forget()

    def leave(self) -> None:
        """Follow it no longer: it is not listed any more."""
        self._stop.set()

    def _forget(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._thread, self.picture, self.over, self._failure = None, Picture(), False, None
        self._stop, self._caught_up = threading.Event(), threading.Event()

    def _follow(self) -> None:
        # Made while there is memory for them.
        empty, short = Picture(), TooLarge(NO_MEMORY)
        error: Exception | None = None
        try:
            self._tell_all()
        except MemoryError:
            error = short
        except Exception as found:  # noqa: BLE001 - whatever it is: who looks must not wait for this thread
            error = found
        try:
            if error is not None:
                self.picture = empty
                self._fail(error)
        finally:
            self.over = True
            self._caught_up.set()

    def _tell_all(self) -> None:
        picture: Picture | None = self.picture
        while picture is not None:
            picture = self._tell(picture)

    def _fail(self, error: Exception) -> None:
        self._failed_at = time.monotonic()
        if isinstance(error, AnabranchError):
            self._failure = error
            log.warning("%s cannot be followed: %s", self.id, error)
        else:
            self._failure = DataError(f"{self.id} cannot be shown: {error!r}; the cockpit's log has more")
            log.error("%s cannot be followed", self.id, exc_info=error)

    def _tell(self, picture: Picture) -> Picture | None:
        """Tell it what the source says. Where that is taken back, there is another picture to tell."""

        def show() -> None:
            self.picture = picture
            self._caught_up.set()

        try:
            self.source.follow(picture, self._stop, show)
        except TakenBack:
            log.info("%s was put back to an earlier state, and is read anew", self.id)
            return Picture()
        return None


class Runs:
    """All that are shown, by their ids. `single`: there is one, and it is all that was asked for.

    `operator`: whose papers give orders to any of them, also to those that are not here yet; None: see each.
    """

    def __init__(self, listing: Listing, single: bool, operator: str | None = None) -> None:
        self._listing, self.single, self.operator = listing, single, operator
        self._lock = threading.Lock()
        self._runs: dict[str, ShownRun] = {}
        self._ids: dict[str, str] = {}  # of a source's own name
        self._listed_at = -LIST_S

    def all(self) -> list[ShownRun]:
        """Those that there are now."""
        with self._lock:
            if time.monotonic() - self._listed_at >= LIST_S:
                found = {self._id(source.name): source for source in self._listing()}
                for run_id, source in found.items():
                    self._runs.setdefault(run_id, ShownRun(run_id, source))
                for gone in self._runs.keys() - found.keys():
                    self._runs.pop(gone).leave()
                self._listed_at = time.monotonic()
            return list(self._runs.values())

    def get(self, run_id: str) -> ShownRun:
        """One of them, by its id and nothing else. Raises `FolderMissing`."""
        found = next((run for run in self.all() if run.id == run_id), None)
        if found is None:
            raise FolderMissing(f"no run {run_id!r} here: /api/runs lists them")
        self._make_room(found)
        return found

    def leave(self) -> None:
        """Follow none any longer: who waits until one has been read is answered now."""
        with self._lock:
            for run in self._runs.values():
                run.leave()

    def _make_room(self, wanted: ShownRun) -> None:
        """Of many pictures the one goes that nobody has looked at for longest."""
        if wanted.is_open:
            return
        with self._lock:
            opened = sorted((r for r in self._runs.values() if r.is_open), key=lambda r: r.looked_at)
            for run in opened[: max(len(opened) - OPEN_MAX + 1, 0)]:
                run.close()

    def _id(self, name: str) -> str:
        """A word for addresses, the same for a name at each listing."""
        if name not in self._ids:
            word = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "run"
            taken, number, found = set(self._ids.values()), 1, word
            while found in taken:
                number += 1
                found = f"{word}-{number}"
            self._ids[name] = found
        return self._ids[name]


def row_of(run: ShownRun) -> dict[str, Any]:
    """A run in the list of them. One that cannot be read says why."""
    try:
        head = run.source.head()
    except AnabranchError as error:
        return {"id": run.id, "title": run.title, "state": "unreadable", "why": str(error)}
    return _row(run, head)


def standing(run: ShownRun, head: Head) -> tuple[str, str]:
    """How a run stands, and why. What was seen of it may have ended before its source says so."""
    if head.state == "running" and run.picture.finished:
        return "finished", run.picture.finished
    return head.state, head.why


def _row(run: ShownRun, head: Head) -> dict[str, Any]:
    picture, best, goal = run.picture, head.best, head.goal
    with picture.lock:
        if run.is_open:
            goal = goal.among(picture.measured.names)
            known = picture.measured.best(goal.metric, greater=goal.signed(1.0) > 0)
            best = best if known is None else known
        state, why = standing(run, head)
        return {
            "id": run.id,
            "title": run.title,
            "name": head.name,
            "strategy": head.strategy,
            "workload": head.workload,
            "kind": head.kind,
            "framework": head.framework,
            "served": run.source.orders is not None,
            "state": state,
            "why": why,
            "given_up": head.given_up,
            "updates": _count(run, head.updates, picture.count("applied")),
            "version": _count(run, head.version, picture.version),
            "metric": goal.metric,
            "best": best,
            "seed": head.seed,
            "started_at": head.started_at,
        }


def _count(run: ShownRun, told: int | None, seen: int) -> int | None:
    """The larger of what its source says and what was seen; None where neither is anything yet."""
    return told if not run.is_open else max(told or 0, seen)


def head_of(run: ShownRun) -> dict[str, Any]:
    """All of a run that is no table."""
    picture, head = run.open(), run.source.head()
    row = _row(run, head)
    with picture.lock:
        names = picture.measured.names
        judged = head.goal.among(names)
        return {
            **row,
            "config": head.config,
            "config_toml": _toml(head),
            "metrics": [{"name": name, "mode": judged.way(name)} for name in names],
            "judged_by": None if judged.metric not in names else judged.metric,
            "target": judged.target,
            "counters": counters(picture, head),
            "uptime_s": head.uptime_s,
            "now_s": picture.now_s,
            "from_s": picture.from_s,
            "ended": (row["why"] or row["state"]) if row["state"] in ("finished", "interrupted") else None,
            "settings_changed": picture.settings_changed,
            "units": "virtual" if head.kind == "simulated" else "real",
        }


def counters(picture: Picture, head: Head | None = None) -> dict[str, Any]:
    """What was counted so far."""
    found: dict[str, Any] = {name: picture.count(name) for name in COUNTERS}
    # Whoever was put into quarantine under a name that nobody has is none of the server's devices.
    found["clients"] = picture.known.get("clients", len(picture.devices))
    found["online"] = picture.known.get("online") if head is None or head.online is None else head.online
    return found


def _toml(head: Head) -> str:
    """The settings as a file has them; empty where they are those of a later release."""
    try:
        return Config.from_json(head.config).to_toml() if head.config else ""
    except (ConfigError, StoreNewer):
        return ""
