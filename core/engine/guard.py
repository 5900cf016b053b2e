"""What the server remembers of clients so that none of them rules the model: shares, rates, quarantine.

| setting           | what is bounded                                                                        |
|-------------------|----------------------------------------------------------------------------------------|
| buffer_max        | updates of one client among those that wait for the next version, its live tasks too   |
| window_max        | the same, with those folded into the last `window_versions` versions                   |
| tasks_per_minute  | tasks of one client: so many at once, then this rate                                   |
| flaws_max         | flawed updates of one client in a row; the last of them puts it into quarantine        |
| rejections_max    | flawed updates in a row, whoever sent them: then the run is given up                   |

All bounds are kept where a task is asked for, so no work is thrown away: an update counts against its client
from the grant on. A resent update and a refused ask cost no place in the log, and a client without a task
cannot send. Plain data: a snapshot has it as it is.

An update is flawed if no device sends it that runs our code and learns (`FLAWS`); a device that says itself
that its training has diverged counts as if it had sent one. It is the client's fault while any other client
may be well, and then the client is in quarantine before it could end the run; where the newest updates of all
of them were flawed it is the run's fault, and nobody goes into quarantine for that.

The rate is the generic cell rate algorithm (ITU-T I.371), which needs one number a client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from anabranch.core.engine.clipping import KEPT
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.engine.strategy import Refusal
from anabranch.core.model.updates import FLAWS, Reason

MINUTE_S = 60.0
READY_KEPT = 4096  # times of clients that are kept in any case; with more those that still count, and as many


@dataclass
class Guard:
    """What keeps one client from ruling the model: its shares, its rate, its flaws, quarantine.

    Changed by the engine alone.

    `lengths`: of the newest updates, as they came. `folded`: how many updates each client had in a version,
    oldest first; the last is the version in the making. `ready_at`: by client, when its next task is due by
    the rate; of a large fleet those are forgotten now and then whose time has come. `flaws` and `shortened`
    (updates that the clip has cut): by client, since it was last released. `quarantined`: by client, why.
    `flaws_in_row`: by client, since an update of it was last taken; `wasted`: of all clients, since an update
    of any was, and `last_flaw` says what the newest of them was.
    """

    lengths: list[float] = field(default_factory=list)
    folded: list[dict[str, int]] = field(default_factory=lambda: [{}])
    ready_at: dict[str, float] = field(default_factory=dict)
    flaws: dict[str, int] = field(default_factory=dict)
    shortened: dict[str, int] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)
    flaws_in_row: dict[str, int] = field(default_factory=dict)
    wasted: int = 0
    last_flaw: str = ""

    def refusal(self, client_id: str, live: int, now: float, s: EngineSettings) -> Refusal | None:
        """Why a client that has `live` other tasks may have none now, or None. Changes nothing."""
        if client_id in self.quarantined:
            return Refusal(Reason.QUARANTINED, self.quarantined[client_id])
        here = self.folded[-1].get(client_id, 0) + live
        if s.buffer_max and here >= s.buffer_max:
            detail = f"has {here} updates of the {s.buffer_max} that one client may have in a version"
            return Refusal(Reason.OVER_SHARE, detail)
        if s.window_max:
            lately = sum(of.get(client_id, 0) for of in self.folded) + live
            if lately >= s.window_max:
                bound = f"{s.window_max} that one client may have in {s.window_versions} versions"
                return Refusal(Reason.OVER_SHARE, f"has {lately} updates of the {bound}")
        if s.tasks_per_minute and self._ready_s(client_id, now, s) > 0:
            return Refusal(Reason.TOO_FAST, f"more than {s.tasks_per_minute:g} tasks a minute")
        return None

    def granted(self, client_id: str, now: float, s: EngineSettings) -> None:
        """A client has got a task."""
        if s.tasks_per_minute:
            count = len(self.ready_at)
            if client_id not in self.ready_at and count >= READY_KEPT and count.bit_count() == 1:
                # Once for each doubling: who is ready is as if it had never had a task.
                self.ready_at = {c: at for c, at in self.ready_at.items() if at > now}
            due = max(self.ready_at.get(client_id, now), now)
            self.ready_at[client_id] = due + MINUTE_S / s.tasks_per_minute

    def taken(self, client_id: str, length: float | None, cut: bool, s: EngineSettings) -> None:
        """An update was folded; `length` where lengths are kept, `cut` if it was shortened."""
        self.flaws_in_row.pop(client_id, None)
        self.wasted, self.last_flaw = 0, ""
        if length is not None:
            self.lengths = [*self.lengths, length][-KEPT:]
        if cut:
            self.shortened[client_id] = self.shortened.get(client_id, 0) + 1
        if _bounded(s):
            self.folded[-1][client_id] = self.folded[-1].get(client_id, 0) + 1

    def published(self, s: EngineSettings) -> None:
        """A version was made."""
        if _bounded(s):
            self.folded = [*self.folded, {}][-_kept(s) :]

    def hold(self, clients: Iterable[str], s: EngineSettings) -> None:
        """These are the clients of the updates that wait for the version in the making, one for each."""
        self.folded[-1] = dict(Counter(clients)) if _bounded(s) else {}

    def rebound(self, before: EngineSettings, s: EngineSettings, clients: Iterable[str], now: float) -> None:
        """Other settings are in force than `before`; `clients` as of `hold`.

        What was counted when there were bounds says nothing once there were none: shares begin anew with what
        waits. Of a rate that is raised or lifted a client owes no more tasks than before, and so less time.
        """
        if _bounded(before) != _bounded(s):
            self.folded = [{}]
            self.hold(clients, s)
        self.folded = self.folded[-_kept(s) :]
        earlier, rate = before.tasks_per_minute, s.tasks_per_minute
        if not rate:
            self.ready_at = {}
        elif earlier < rate:  # a lower one does not stretch what is owed already
            owed = {c: at - now for c, at in self.ready_at.items() if at > now}
            self.ready_at = {c: now + left_s * earlier / rate for c, left_s in owed.items()}

    def flawed(self, client_id: str, reason: Reason, detail: str, clients: int, s: EngineSettings) -> str:
        """An update was of no use; why its client, one of so many, goes into quarantine, or nothing."""
        if reason not in FLAWS or client_id in self.quarantined:
            return ""
        self.wasted, self.last_flaw = self.wasted + 1, detail
        self.flaws[client_id] = self.flaws.get(client_id, 0) + 1
        self.flaws_in_row[client_id] = count = self.flaws_in_row.get(client_id, 0) + 1
        if not 0 < s.flaws_max <= count:
            return ""
        if len(self.flaws_in_row.keys() | self.quarantined.keys()) >= clients:
            return ""
        return f"sent {count} updates in a row that cannot be used, the last: {reason}"

    def hopeless(self, s: EngineSettings) -> str:
        """Why the run is given up, or nothing."""
        if not 0 < s.rejections_max <= self.wasted:
            return ""
        return (
            f"the last {self.wasted} updates were all rejected ({self.last_flaw}): "
            "learning rate too large, or NaN in the data?"
        )

    def suspicion(self, client_id: str) -> int:
        """How many of a client's updates an honest device would hardly have sent."""
        return self.flaws.get(client_id, 0) + self.shortened.get(client_id, 0)

    def bar(self, client_id: str, why: str) -> None:
        """Put a client into quarantine."""
        self.quarantined[client_id] = why

    def release(self, client_id: str) -> bool:
        """Let a client out again, its past forgotten; whether it was in."""
        self.flaws.pop(client_id, None)
        self.flaws_in_row.pop(client_id, None)
        self.shortened.pop(client_id, None)
        return self.quarantined.pop(client_id, None) is not None

    def _ready_s(self, client_id: str, now: float, s: EngineSettings) -> float:
        """Seconds until the client's next task conforms to the rate; a minute's worth may come at once."""
        burst_s = MINUTE_S - MINUTE_S / s.tasks_per_minute
        return self.ready_at.get(client_id, now) - now - max(burst_s, 0.0)


def _bounded(s: EngineSettings) -> bool:
    """Whether shares of clients are, and so are counted."""
    return bool(s.buffer_max or s.window_max)


def _kept(s: EngineSettings) -> int:
    """Of how many versions shares are kept, with the one in the making."""
    return s.window_versions + 1 if s.window_max else 1
