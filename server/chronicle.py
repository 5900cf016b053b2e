"""What the server's log says of its run: versions, updates that were not taken, stalls, and the end.

It hears what the feed hears. What comes many times a second is gathered into one line, which says what it is
of: `versions 120 to 180`. What lasts is said again after pauses that double.

| line                | level   | at most                                                              |
|---------------------|---------|----------------------------------------------------------------------|
| versions            | info    | one in `VERSIONS_S`: a second at first, a minute once an hour is over |
| updates not taken   | warning | one in `GATHERED_S` for each reason; info where a device was only late |
| leases without one  | info    | one in `GATHERED_S` for each way to end; warning where trainings diverge |
| a stall             | warning | first after `STALL_S`, or the shortest open lease if that is longer  |
| devices that starve | warning | first after `STARVING_S` without a task                              |
| a write that hangs  | warning | first after `HANG_S`; info when it is over                           |
| a small fleet       | warning | at version 1, where it took more updates than there are devices      |
| quarantine          | warning | each; info where it ends                                             |
| a rollback          | warning | each                                                                 |
| a masked sum lost   | warning | each                                                                 |
| the run's end       | info    | once; warning where the run was given up                             |
| settings changed    | info    | each, and that the run goes on where it had ended                     |

All times are those of events, in seconds; nothing here reads a clock.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch.core.effects import (
    Barred,
    CohortLost,
    Decided,
    Effect,
    Finished,
    Granted,
    LeaseEnd,
    LeaseEnded,
    Published,
    Refused,
    Reopened,
    RolledBackTo,
    SettingsSet,
    Unbarred,
)
from anabranch.core.engine.engine import Engine
from anabranch.core.model.updates import FLAWS, Reason, Verdict
from anabranch.host import rare_versions
from anabranch.host.standstill import WANTS_ONE, Pause
from anabranch.reports.text import bytes_text, counted, duration_text
from anabranch.server.glance import Glance

log = logging.getLogger(__name__)

VERSIONS_S = (1.0, 60.0)  # and in between a sixtieth of how long this server has run
GATHERED_S = 10.0
STALL_S = 60.0
STARVING_S = 300.0
HANG_S = 10.0  # as long as a device waits for an answer
ASKS_S = 120.0  # who has not asked for so long is not waiting any more
NAMED = 3  # devices that a line names at most

PASSED_OVER = (Reason.RUN_FINISHED, Reason.NONE)


@dataclass
class _Versions:
    """Versions that no line was written of so far."""

    first: int = 0
    last: int = 0
    updates: int = 0
    staleness: int = 0

    def text(self) -> str:
        which = f"version {self.last}" if self.first == self.last else f"versions {self.first} to {self.last}"
        mean = self.staleness / self.updates if self.updates else 0.0
        return f"{which}: {counted(self.updates, 'update')}, staleness {mean:.1f} on average"


@dataclass
class _Gathered:
    """Happenings of one kind that no line was written of so far, and when the last line was."""

    clients: Counter[str] = field(default_factory=Counter)
    detail: str = ""
    said_at: float | None = None

    def due(self, now: float) -> bool:
        return bool(self.clients) and (self.said_at is None or now - self.said_at >= GATHERED_S)


@dataclass
class _Wait:
    """A device without a task: since when, when it asked last, and what it was told then."""

    since: float
    asked_at: float
    why: str


@dataclass(frozen=True)
class Coming:
    """Updates that are on their way in: how many, and how many of their bytes have come."""

    updates: int = 0
    received: int = 0
    size: int = 0


@dataclass(frozen=True)
class Standing:
    """What a run waits for: its open tasks, the one that is out longest, and who could get one."""

    tasks: int
    oldest: str
    oldest_at: float
    shortest_lease_s: float
    clients: int
    quarantined: int
    paused: bool

    @classmethod
    def of(cls, engine: Engine) -> Standing:
        """That of an engine; to be asked for in the writer's thread."""
        tasks = engine.ledger.tasks.values()
        oldest = min(tasks, key=lambda task: task.granted_at, default=None)
        return cls(
            len(tasks),
            "" if oldest is None else oldest.client_id,
            0.0 if oldest is None else oldest.granted_at,
            min((task.lease_s for task in tasks), default=0.0),
            len(engine.ledger.clients),
            len(engine.guard.quarantined),
            engine.paused,
        )


class Chronicle:
    """Writes the lines of a server's log about its run, gathered where they come fast.

    It hears of effects, and looks when time has passed; both on the event loop's thread. `glance`: how the
    run stands.
    """

    def __init__(self, glance: Callable[[], Glance], now: float) -> None:
        self._glance, self._began = glance, now
        self._versions: _Versions | None = None
        self._versions_at: float | None = None
        self._rejected: dict[Reason, _Gathered] = {}
        self._lost: dict[str, _Gathered] = {}
        self._waits: dict[str, _Wait] = {}
        self._busy_since: float | None = None  # somebody works or asks, and no update has come
        self._stall, self._starving = Pause(STALL_S), Pause(STARVING_S)
        self._hang = Pause(HANG_S)
        self._phase = glance().phase
        if why := glance().finished:
            _say(logging.INFO, f"the run had ended before: {why}", why=why)
        if glance().paused:
            _say(logging.WARNING, "the run is paused, as it was: `anabranch admin resume` has it go on")

    def hear(self, now: float, effects: Sequence[Effect]) -> None:
        """Take note of what came of an event."""
        ended: Finished | None = None
        for effect in effects:
            log.debug("%s", f"version {effect.version}" if isinstance(effect, Published) else effect)
            match effect:
                case Granted(task, False):
                    self._waits.pop(task.client_id, None)
                    self._busy(now)
                case Refused():
                    self._refused(effect, now)
                case Decided(duplicate=False):
                    self._decided(effect, now)
                case Published():
                    self._published(effect, now)
                    self._switched(effect.version)
                case LeaseEnded(task, end, diverged) if end is not LeaseEnd.CANCELLED:  # as its round says
                    lost = self._lost.setdefault("diverged" if diverged else end.value, _Gathered())
                    lost.clients[task.client_id] += 1
                    lost.detail = diverged
                case Barred() | Unbarred() | RolledBackTo() | CohortLost() | SettingsSet() | Reopened():
                    self._ordered(effect, now)
                case Finished():
                    ended = effect
        self._gathered(now)
        if ended is not None:
            self._ended(ended.why, ended.given_up, now)

    def look(self, now: float) -> bool:
        """Time has passed; whether nothing has come for so long that `stalled` should be asked."""
        if self._versions is not None and self._versions_due(now):
            self._say_versions(now)
        self._gathered(now)
        self._say_starving(now)
        if self._glance().finished or self._busy_since is None:
            return False
        return now - self._busy_since >= STALL_S

    def stalled(self, standing: Standing, now: float, coming: Coming | None = None) -> None:
        """Say what is waited for, unless that is only as long as it must be, or has been said lately.

        `coming`: updates that are on their way, over a slow link perhaps.
        """
        coming = coming or Coming()
        self._waits = {c: w for c, w in self._waits.items() if now - w.asked_at <= ASKS_S}
        if not (standing.tasks or self._waits or standing.quarantined):
            self._busy_since = None  # they have all gone
        if standing.paused or self._busy_since is None:
            return
        lasted_s = now - self._busy_since
        if lasted_s < standing.shortest_lease_s or not self._stall.due(lasted_s):
            return
        _say(
            logging.WARNING,
            f"no update for {duration_text(lasted_s)}: {self._waited_for(standing, now, coming)}",
            seconds=round(lasted_s),
            version=self._glance().version,
            tasks=standing.tasks,
            coming=coming.updates,
            asking=len(self._waits),
            quarantined=standing.quarantined,
        )

    def hanging(self, lasted_s: float) -> None:
        """Say that one turn of the writer has taken so long, and when it is over.

        Whoever waits for it hears nothing, and what the writer is asked for waits as well.
        """
        if self._hang.due(lasted_s):
            text = (
                f"the log has taken nothing for {duration_text(lasted_s)}: its disk, its database or "
                "server.archive hangs, or something is long in computing; nobody is answered meanwhile, and "
                "nothing is lost"
            )
            _say(logging.WARNING, text, seconds=round(lasted_s))
        elif lasted_s < HANG_S and self._hang.after_s:
            self._hang.over()
            _say(logging.INFO, "the log takes events again")

    # --- what is heard ---------------------------------------------------------------------

    def _refused(self, refused: Refused, now: float) -> None:
        client_id = refused.ask.client_id
        if refused.reason not in WANTS_ONE:
            self._waits.pop(client_id, None)
            return
        known, why = self._waits.get(client_id), f"{refused.reason}: {refused.detail}"
        self._waits[client_id] = _Wait(now if known is None else known.since, now, why)
        self._busy(now)

    def _ordered(self, effect: Effect, now: float) -> None:
        """What operators do, or the guard in their place."""
        match effect:
            case Barred(client_id, why):
                self._waits.pop(client_id, None)
                _say(logging.WARNING, f"{client_id} is in quarantine: {why}", client=client_id, why=why)
            case Unbarred(client_id):
                _say(logging.INFO, f"{client_id} is out of quarantine", client=client_id)
            case RolledBackTo(version, to_version, left_out):
                if self._versions is not None:
                    self._say_versions(now)
                count = counted(left_out, "update")
                text = f"rolled back: version {version} leaves {count} of after version {to_version} out"
                _say(logging.WARNING, text, version=version, to_version=to_version, left_out=left_out)
            case CohortLost():
                _say_sum_lost(effect)
            case SettingsSet(changes):
                said = ", ".join(f"{c.path} = {c.value!r} (was {c.was!r})" for c in changes)
                values = {c.path: c.value for c in changes}
                _say(logging.INFO, f"{said}, set by {changes[0].by}", by=changes[0].by, settings=values)
            case Reopened():
                _say(logging.INFO, "the run had ended, and goes on: start its devices again")

    def _busy(self, now: float) -> None:
        if self._busy_since is None:
            self._busy_since = now

    def _decided(self, decided: Decided, now: float) -> None:
        decision = decided.receipt.decision
        if decision.verdict is not Verdict.REJECTED:
            self._busy_since = now
            self._stall.over()
        elif decision.reason not in PASSED_OVER:
            gathered = self._rejected.setdefault(decision.reason, _Gathered())
            gathered.clients[decided.client_id] += 1
            gathered.detail = decision.detail

    def _published(self, published: Published, now: float) -> None:
        # What waits for its sum may be of a later version, or of before this server's start.
        receipts = self._glance().receipts
        found = [receipt for u in published.update_ids if (receipt := receipts.get(u)) is not None]
        if rare := rare_versions.said_of(published, self._glance().clients_enrolled):
            _say(logging.WARNING, rare, version=published.version, updates=len(published.update_ids))
        self._versions = self._versions or _Versions(first=published.version)
        self._versions.last = published.version
        self._versions.updates += len(published.update_ids)
        self._versions.staleness += sum(receipt.decision.staleness for receipt in found)
        if self._versions_due(now):
            self._say_versions(now)

    def _switched(self, version: int) -> None:
        """Say which phase has begun, if one has."""
        before, self._phase = self._phase, self._glance().phase
        if before != self._phase:
            _say(
                logging.INFO, f"{self._phase}: begun by version {version}", phase=self._phase, version=version
            )

    # --- what is said ------------------------------------------------------------------------

    def _versions_due(self, now: float) -> bool:
        """Whoever has started a server looks on; a year of it is a log that somebody keeps."""
        least_s, most_s = VERSIONS_S
        pause_s = min(max(least_s, (now - self._began) / 60), most_s)
        return self._versions_at is None or now - self._versions_at >= pause_s

    def _say_versions(self, now: float) -> None:
        assert self._versions is not None
        told, self._versions, self._versions_at = self._versions, None, now
        _say(
            logging.INFO,
            told.text(),
            version=told.last,
            versions=told.last - told.first + 1,
            updates=told.updates,
            staleness=told.staleness / told.updates if told.updates else 0.0,
        )

    def _gathered(self, now: float) -> None:
        for reason, some in self._rejected.items():
            if some.due(now):
                count, who = some.clients.total(), _who(some.clients)
                level = logging.WARNING if reason in FLAWS else logging.INFO
                text = f"{counted(count, 'update')} not taken ({reason}) of {who}: {some.detail}"
                _say(level, text, **_fields(some), reason=reason.value, detail=some.detail)
                self._rejected[reason] = _Gathered(said_at=now)
        for end, some in self._lost.items():
            if some.due(now):
                self._say_lost(end, some)
                self._lost[end] = _Gathered(said_at=now)

    def _say_lost(self, end: str, some: _Gathered) -> None:
        count, who = some.clients.total(), _who(some.clients)
        if some.detail:
            text = f"{counted(count, 'training')} diverged on {who}: {some.detail}"
            _say(logging.WARNING, text, **_fields(some), end=end, detail=some.detail)
        else:
            text = f"{counted(count, 'lease')} {end} without an update: {who}"
            _say(logging.INFO, text, **_fields(some), end=end)

    def _say_starving(self, now: float) -> None:
        if self._glance().finished or not self._waits:
            return
        client_id, longest = min(self._waits.items(), key=lambda item: item[1].since)
        if now - longest.asked_at > ASKS_S:
            del self._waits[client_id]
            return
        lasted_s = now - longest.since
        if lasted_s < STARVING_S:
            self._starving.over()
        elif self._starving.due(lasted_s):
            starving = sum(now - wait.since >= STARVING_S for wait in self._waits.values())
            text = (
                f"{counted(starving, 'device')} asking in vain for over {duration_text(STARVING_S)}, "
                f"{client_id} for {duration_text(lasted_s)}: {longest.why}"
            )
            _say(logging.WARNING, text, client=client_id, devices=starving, seconds=round(lasted_s))

    def _ended(self, why: str, given_up: bool, now: float) -> None:
        if self._versions is not None:
            self._say_versions(now)
        glance = self._glance()
        counters, version = glance.counters, glance.version
        totals = {
            "version": version,
            "updates": counters.applied,
            "rejected": counters.rejected,
            "leases_lost": counters.leases_lost,
            "tasks_open": glance.live_tasks,
            "clients": glance.clients_enrolled,
            "seconds": round(now - self._began),
        }
        late = f"{counted(glance.live_tasks, 'task')} open, of which what comes is rejected, "
        text = (
            f"end of the run after {counted(version, 'version')} of "
            f"{counted(counters.applied, 'update')} ({counters.rejected} rejected, "
            f"{counted(counters.leases_lost, 'lease')} lost, {late * bool(glance.live_tasks)}"
            f"{counted(totals['clients'], 'device')}, "
            f"{duration_text(now - self._began)} since this server started): {why}"
        )
        _say(logging.WARNING if given_up else logging.INFO, text, why=why, given_up=given_up, **totals)

    def _waited_for(self, standing: Standing, now: float, coming: Coming) -> str:
        parts = []
        if standing.tasks:
            out_s = duration_text(now - standing.oldest_at)
            parts.append(f"{counted(standing.tasks, 'task')} open, that of {standing.oldest} for {out_s}")
        if coming.updates:
            came = f"{bytes_text(coming.received)} of {bytes_text(coming.size)} came"
            parts.append(f"{counted(coming.updates, 'update')} on the way in, {came}")
        if self._waits:
            client_id, wait = next(iter(self._waits.items()))
            parts.append(f"{counted(len(self._waits), 'device')} asking, {client_id} is told {wait.why}")
        if standing.quarantined:
            parts.append(f"{standing.quarantined} of {counted(standing.clients, 'device')} in quarantine")
        return "; ".join(parts)


def _say(level: int, text: str, **fields: Any) -> None:
    log.log(level, "%s", text, extra={"fields": fields})


def _say_sum_lost(lost: CohortLost) -> None:
    count = len(lost.update_ids)
    text = f"masked sum {lost.number} is given up, and its {counted(count, 'update')} with it: {lost.why}"
    _say(logging.WARNING, text, cohort=lost.number, updates=count, why=lost.why)


def _fields(some: _Gathered) -> Mapping[str, Any]:
    """Of whom a line is: `client` where there is one."""
    one = {"client": next(iter(some.clients))} if len(some.clients) == 1 else {}
    return {"count": some.clients.total(), "clients": len(some.clients), **one}


def _who(clients: Counter[str]) -> str:
    """Who has most of it, and how many others there are."""
    named = [f"{c} ({n})" if n > 1 else c for c, n in clients.most_common(NAMED)]
    others = len(clients) - len(named)
    return ", ".join([*named, *([f"{others} others"] if others else [])])
