"""What happens, for whoever watches: the newest happenings in memory, with a cursor to go on from."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.core.effects import (
    Barred,
    CohortLost,
    Decided,
    Effect,
    Finished,
    Granted,
    LeaseEnded,
    Published,
    Refused,
    Reopened,
    RolledBackTo,
    SettingsSet,
    Unbarred,
)
from anabranch.core.model.submodels import share_of

KEPT = 10_000


@dataclass(frozen=True)
class Happening:
    """One thing that happened. `seq` is the last event in the log at that time; several may share it."""

    seq: int
    at_s: float
    kind: str
    client_id: str
    version: int
    data: Mapping[str, Any]


class Feed:
    """The newest `KEPT` happenings, and those who wait for the next. For the event loop's thread."""

    def __init__(self) -> None:
        self._kept: deque[Happening] = deque(maxlen=KEPT)
        self._total = 0
        self._news: asyncio.Event | None = None  # of those who wait, if somebody does
        self._closed = False

    def hear(self, seq: int, now: float, effects: Sequence[Effect]) -> None:
        """Note the effects of an event; `seq`: the last one in the log by then."""
        for effect in effects:
            if (happening := _happening(seq, now, effect)) is not None:
                self.add(happening)

    def add(self, happening: Happening) -> None:
        """Note a happening."""
        self._kept.append(happening)
        self._total += 1
        self._wake()

    def close(self) -> None:
        """End every watch, once it has all that there is."""
        self._closed = True
        self._wake()

    async def follow(self, after_seq: int | None) -> AsyncIterator[Happening]:
        """Everything after a cursor that is still kept, then what comes; from now on with None.

        Whoever reads too slowly misses what is no longer kept.
        """
        place = self._total if after_seq is None else self._total - len(self._kept)
        while not self._closed or place < self._total:  # what had happened by then is told in any case
            place = max(place, self._total - len(self._kept))
            if place == self._total:
                self._news = self._news or asyncio.Event()
                await self._news.wait()
                continue
            happening = self._kept[place - self._total]
            place += 1
            if after_seq is None or happening.seq > after_seq:
                yield happening

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None


def _happening(seq: int, now: float, effect: Effect) -> Happening | None:
    match effect:
        case Granted(task=task, again=False):
            data = {"task_id": task.task_id, "expires_at_s": task.expires_at, "uplink": task.uplink}
            data |= {} if (share := share_of(task.submodel)) is None else {"share": share}
            return Happening(seq, now, "granted", task.client_id, task.base_version, data)
        case Refused(ask=ask, reason=reason, detail=detail):
            return Happening(seq, now, "refused", ask.client_id, 0, {"reason": reason, "detail": detail})
        case Decided():
            return _judged(seq, now, effect)
        case Published(version=version, update_ids=update_ids, heard=heard):
            told = {"updates": len(update_ids)} | ({"heard": heard} if heard else {})
            return Happening(seq, now, "published", "", version, told)
        case LeaseEnded(task=task, end=end):
            data = {"task_id": task.task_id, "end": end}
            return Happening(seq, now, "lease_ended", task.client_id, task.base_version, data)
        case CohortLost(number=number, update_ids=update_ids, why=why):
            told = {"cohort": number, "updates": len(update_ids)}
            return Happening(seq, now, "cohort_lost", "", 0, {**told, "why": why})
        case Finished(why=why):
            return Happening(seq, now, "finished", "", 0, {"why": why})
        case _:
            return _ordered(seq, now, effect)


def _judged(seq: int, now: float, decided: Decided) -> Happening:
    """What became of an update."""
    receipt, payload = decided.receipt, decided.payload
    decision = receipt.decision
    data: dict[str, Any] = {
        "update_id": receipt.update_id,
        "task_id": receipt.task_id,
        "verdict": decision.verdict,
        "staleness": decision.staleness,
        "weight": decision.weight,
        "reason": decision.reason,
        "detail": decision.detail,
        "examples": decided.examples,
        "duplicate": decided.duplicate,
        "metrics": dict(decided.metrics),
    }
    if payload is not None:
        data |= {"uplink_bytes": payload.size_bytes, "codec": payload.codec, "raw_bytes": decided.raw_bytes}
    return Happening(seq, now, "decided", decided.client_id, receipt.version, data)


def _ordered(seq: int, now: float, effect: Effect) -> Happening | None:
    """What operators do, or the guard in their place."""
    match effect:
        case Barred(client_id=client_id, why=why):
            return Happening(seq, now, "quarantined", client_id, 0, {"why": why})
        case Unbarred(client_id=client_id):
            return Happening(seq, now, "released", client_id, 0, {})
        case RolledBackTo(version=version, to_version=to_version, left_out=left_out):
            data = {"to_version": to_version, "updates_left_out": left_out}
            return Happening(seq, now, "rolled_back", "", version, data)
        case SettingsSet(changes=changes):
            values = {c.path: c.value for c in changes}
            return Happening(seq, now, "settings_changed", "", 0, {"by": changes[0].by, **values})
        case Reopened():
            return Happening(seq, now, "reopened", "", 0, {})
        case _:
            return None
