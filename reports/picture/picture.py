"""The picture of a run: what has happened, folded record by record into tables that views are made of."""

from __future__ import annotations

import math
import statistics
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from anabranch.reports.picture.columns import Columns
from anabranch.reports.picture.devices import DeviceRows
from anabranch.reports.picture.happening import Happened
from anabranch.reports.picture.measurements import Measurements
from anabranch.reports.picture.threads import APPLIED, HELD, LOST, NONE, REJECTED, Threads

RECENT_MAX = 20_000  # happenings, for who comes back after a short while
FOLDED_AT_ONCE = 1000  # so many between two looks of others


class Picture:
    """What the cockpit knows of a run. One thread tells it, others look while they hold `lock`.

    `known` are counts that its source has from elsewhere, of all that happened before it was looked at:
    of two counts the larger one is right. `from_s`: since when the tasks are known. `now_s` is how far the
    run has come, and stands still once it has ended; `clock_s` goes on, as devices still come and go.
    `down_from_s`: until then the bytes down are not known, as a server has them as a sum alone.
    """

    fetches_told = False  # a live server's log has no downloads
    parts_told = False  # some task was of a part of the model
    down_from_s = -math.inf

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.devices, self.threads = DeviceRows(), Threads()
        self.versions = Columns(
            version=np.int64, time=np.float64, updates=np.int64, up=np.int64, down=np.int64
        )
        self.steps = Columns(
            time=np.float64,
            version=np.int64,
            updates=np.int64,
            up=np.int64,
            down=np.int64,
            raw=np.int64,
            staleness=np.int32,
        )
        self.rejected = Columns(time=np.float64, reason=np.int16)
        self.heard = Columns(time=np.float64, version=np.int64, least=np.float32, middle=np.float32)
        self.server = Columns(
            time=np.float64, queue=np.float64, commit=np.float64, shed=np.float64, memory=np.float64
        )
        self.counts: Counter[str] = Counter()
        self.known: dict[str, int] = {}
        self.measured = Measurements()
        self.compression: list[tuple[int, float, str, str]] = []
        self.settings_changed: list[dict[str, Any]] = []
        self.version, self.now_s, self.clock_s, self.from_s = 0, 0.0, 0.0, 0.0
        self.finished = ""
        self.happened = 0
        self._recent: deque[Happened] = deque(maxlen=RECENT_MAX)
        self._folds: dict[str, Callable[[Happened], None]] = {
            "granted": self._granted,
            "downloaded": self._downloaded,
            "decided": self._decided,
            "lease_ended": self._lease_ended,
            "published": self._published,
            "taken_back": self._taken_back,
            "evaluated": self._evaluated,
            "compression": self._compression,
            "settings_changed": self._settings_changed,
            "finished": self._finished,
            "reopened": self._reopened,
            "quarantined": self._quarantined,
            "released": self._released,
            "cohort_lost": self._sum_lost,
            "refused": self._refused,
            "resent": self._resent,
            "vanished": self._vanished,
            "failed": self._failed,
        }
        self.versions.add(0, 0.0, 0, 0, 0)

    def tell(self, happenings: Iterable[Happened]) -> None:
        """Fold what has happened, in order."""
        with self.lock:
            for happening in happenings:
                self.passed(happening.t)
                fold = self._folds.get(happening.kind)
                if fold is not None:
                    fold(happening)
                self.happened += 1
                self._recent.append(happening)

    def passed(self, time_s: float) -> None:
        """It is this late, or later."""
        self.clock_s = max(self.clock_s, time_s)
        if not self.finished:
            self.now_s = max(self.now_s, time_s)

    def count(self, name: str) -> int:
        """A count of the whole run: what was seen here, or what its source knows where that is more."""
        return max(self.counts[name], self.known.get(name, 0))

    def is_known(self, name: str, count: int, in_all: bool) -> None:
        """What its source has counted by now. `in_all`: of the whole run, with all that was told here.

        Then more was counted here only where something was on its way while its source was asked for the
        sums of before: it was in them, and was told again.
        """
        if name == "down" and name not in self.known and len(self.steps):
            self.down_from_s = float(self.steps["time"][-1])
        self.known[name] = count
        if in_all:
            self.counts[name] = min(self.counts[name], count)

    def since(self, cursor: int, most: int) -> tuple[list[Happened], int]:
        """What happened after a cursor (a number of happenings), the newest, and how many are left out."""
        with self.lock:
            fresh = self.happened - cursor
            found = min(fresh, most, len(self._recent))
            if found <= 0:
                return [], 0
            newest = [self._recent[i] for i in range(len(self._recent) - found, len(self._recent))]
            return newest, fresh - found

    @property
    def size_bytes(self) -> int:
        """What its tables take of memory."""
        tables = (self.versions, self.steps, self.rejected, self.heard, self.server, self.measured)
        return self.devices.size_bytes + self.threads.size_bytes + sum(t.size_bytes for t in tables)

    # --- tasks and updates ---------------------------------------------------------------------

    def _seen(self, h: Happened) -> int:
        row = self.devices.row(h.client)
        self.devices.columns.cells["seen"][row] = h.t
        return row

    def _granted(self, h: Happened) -> None:
        row = self._seen(h)
        cells = self.devices.columns.cells
        self.threads.granted(row, str(h.data.get("task", "")), h.version or 0, h.t)
        cells["open"][row] += 1
        cells["base"][row] = h.version or 0
        cells["away"][row] = False
        self.parts_told |= "share" in h.data
        cells["width"][row] = h.data.get("share", 1.0)
        if (until := h.data.get("lease_until_s")) is not None:
            self.devices.lease_until[row] = until
        self.counts["tasks"] += 1

    def _downloaded(self, h: Happened) -> None:
        self.fetches_told = True
        row, size = self._seen(h), h.data["bytes"]
        self.devices.columns.cells["down"][row] += size
        self.counts["down"] += size
        self.counts["down_full"] += h.data.get("full_bytes", size)
        if (thread := self.threads.newest_open(row)) is not None:
            self.threads.columns.cells["down"][thread] += size

    def _decided(self, h: Happened) -> None:
        if h.data.get("duplicate"):
            return self._resent(h)
        row, data = self._seen(h), h.data
        cells = self.devices.columns.cells
        rejected, staleness = data["verdict"] == "rejected", int(data["staleness"])
        size = int(data.get("uplink_bytes", 0))
        raw = int(data.get("raw_bytes", size))
        self._end(row, h, staleness, size, raw)
        cells["up"][row] += size
        cells["rejected" if rejected else "updates"][row] += 1
        cells["away"][row] = False
        self.counts["up"] += size
        self.counts["up_raw"] += raw
        self.counts["rejected" if rejected else "applied"] += 1
        if rejected:
            self.rejected.add(h.t, self.threads.reasons.number(data.get("reason") or "unspecified"))
            return None
        cells["examples"][row] += int(data.get("examples", 0))
        cells["staleness_sum"][row] += staleness
        cells["judged"][row] += 1
        self._step(h.t, h.version or 0, staleness)
        return None

    def _end(self, device: int, h: Happened, staleness: int, size: int, raw: int) -> None:
        """The task that an update is of has its end."""
        threads, data, version = self.threads, h.data, h.version or 0
        verdict = {"published": APPLIED, "held": HELD}.get(data["verdict"], REJECTED)
        thread = threads.of_update(device, str(data.get("task", "")))
        if thread is None:  # it was granted before this picture began
            base = max(version - (verdict == APPLIED) - staleness, 0)
            thread = threads.granted(device, str(data.get("task", "")), base, math.nan)
            threads.ended(thread, h.t, verdict)
        elif threads.ended(thread, h.t, verdict, str(data.get("task", ""))):
            self.devices.columns.cells["open"][device] -= 1
        cells = threads.columns.cells
        left = cells["left"][thread]
        if left == left:
            self.devices.timed(device, h.t - left)
        cells["version"][thread] = version if verdict == APPLIED else NONE
        cells["staleness"][thread] = staleness
        cells["reason"][thread] = threads.reasons.number(data.get("reason") or "")
        cells["codec"][thread] = threads.codecs.number(str(data.get("codec", "")) or self._uplink_of(thread))
        cells["weight"][thread] = math.nan if data.get("weight") is None else data["weight"]
        cells["up"][thread], cells["raw"][thread] = size, raw
        threads.measured(thread, (data.get("metrics") or {}).items())

    def _uplink_of(self, thread: int) -> str:
        """The codec that was in force where a task began; of records that do not say."""
        base = self.threads.columns.cells["base"][thread]
        return next((uplink for version, _, uplink, _ in reversed(self.compression) if version <= base), "")

    def _step(self, t: float, version: int, staleness: int) -> None:
        totals = (self.count(name) for name in ("applied", "up", "down", "up_raw"))
        self.steps.add(t, max(version, self.version), *totals, staleness)

    def _lease_ended(self, h: Happened) -> None:
        row, thread = self.devices.row(h.client), self.threads.open_task(str(h.data.get("task", "")))
        self.counts["leases_lost"] += h.data.get("end") != "cancelled"  # its round was over
        if thread is not None:
            self.threads.ended(thread, h.t, LOST, lapsed=True)
            self.devices.columns.cells["open"][row] -= 1

    def _failed(self, h: Happened) -> None:
        row = self._seen(h)
        for thread in self.threads.open_of(row)[:1]:
            self.threads.ended(thread, h.t, LOST)
            self.devices.columns.cells["open"][row] -= 1

    def _vanished(self, h: Happened) -> None:
        self.devices.columns.cells["away"][self._seen(h)] = True

    def _resent(self, h: Happened) -> None:
        self._seen(h)
        self.counts["duplicate"] += 1

    def _refused(self, h: Happened) -> None:
        self._seen(h)
        self.counts["refused"] += 1

    # --- versions ------------------------------------------------------------------------------

    def _published(self, h: Happened) -> None:
        self.version = version = h.version or 0
        self.threads.published(version)
        totals = (self.count(name) for name in ("applied", "up", "down"))
        if version > int(self.versions["version"][-1]):
            self.versions.add(version, h.t, *totals)
        if heard := h.data.get("heard"):
            for client, share in heard:
                self.devices.was_heard(self.devices.row(client), share)
            shares = [share for _, share in heard]
            self.heard.add(h.t, version, min(shares), statistics.median(shares))

    def _sum_lost(self, _: Happened) -> None:
        self.counts["sums_lost"] += 1

    def _taken_back(self, h: Happened) -> None:
        self.version = h.version or 0
        self.versions.cut(int(np.searchsorted(self.versions["version"], self.version, side="right")))
        self.measured.cut(self.version)

    def _evaluated(self, h: Happened) -> None:
        self.measured.add(h.version or 0, h.others)

    def has_published(self, version: int, time_s: float, updates: int) -> None:
        """A version of before this picture, as its source knows of it; told in order."""
        with self.lock:
            if version > int(self.versions["version"][-1]):
                self.versions.add(version, time_s, updates, 0, 0)
                self.version = version
                self.passed(time_s)

    def has_measured(self, version: int, metrics: Mapping[str, float]) -> None:
        """What was measured of a version before this picture."""
        with self.lock:
            self.measured.add(version, metrics)

    # --- the run -------------------------------------------------------------------------------

    def _compression(self, h: Happened) -> None:
        self.compression.append((h.version or 0, h.t, h.data["uplink"], h.data["downlink"]))

    def _settings_changed(self, h: Happened) -> None:
        change = {**h.others, "at_s": h.t}
        if change.get("was") is None:  # a feed tells the new value alone
            earlier = (c for c in reversed(self.settings_changed) if c["path"] == change["path"])
            change["was"] = next((c["value"] for c in earlier), None)
        self.settings_changed.append(change)

    def _finished(self, h: Happened) -> None:
        self.finished = str(h.data.get("why", "")) or "finished"
        self.now_s = max(self.now_s, h.t)  # its source may have said so before

    def _reopened(self, _: Happened) -> None:
        self.finished = ""

    def _quarantined(self, h: Happened) -> None:
        self.devices.quarantined[self.devices.row(h.client)] = (str(h.data.get("why", "")), h.t)

    def _released(self, h: Happened) -> None:
        row = self.devices.row(h.client)
        self.devices.quarantined.pop(row, None)
        self.devices.flaws.pop(row, None)
