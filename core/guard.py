"""What the server remembers of clients so that none of them rules the model: shares, rates, quarantine.

| setting           | what is bounded                                                                        |
|-------------------|----------------------------------------------------------------------------------------|
| buffer_max        | updates of one client among those that wait for the next version, its live tasks too   |
| window_max        | the same, with those folded into the last `window_versions` versions                   |
| tasks_per_minute  | tasks of one client: so many at once, then this rate                                   |
| flaws_max         | updates that no honest device sends; the last of them puts the client into quarantine |

All bounds are kept where a task is asked for, so no work is thrown away: an update counts against its client
from the grant on. A resent update and a refused ask cost no place in the log, and a client without a task
cannot send. Plain data: a snapshot has it as it is.

The rate is the generic cell rate algorithm (ITU-T I.371), which needs one number a client.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from anabranch.core.clipping import KEPT
from anabranch.core.settings import EngineSettings
from anabranch.core.strategy import Refusal
from anabranch.core.updates import Reason

MINUTE_S = 60.0

# What a device that runs our code, on a link that checks its bytes, never sends.
FLAWS = frozenset(
    (Reason.INVALID, Reason.WRONG_BASE, Reason.FUTURE_BASE, Reason.NO_SUBMODELS, Reason.WRONG_SUBMODEL)
)


@dataclass
class Guard:
    """See the module. Changed by the engine alone.

    `lengths`: of the newest updates, as they came. `folded`: how many updates each client had in a version,
    oldest first; the last is the version in the making. `ready_at`: by client, when its next task is due by
    the rate. `flaws` and `shortened` (updates that the clip has cut): by client, since it was last released.
    `quarantined`: by client, why.
    """

    lengths: list[float] = field(default_factory=list)
    folded: list[dict[str, int]] = field(default_factory=lambda: [{}])
    ready_at: dict[str, float] = field(default_factory=dict)
    flaws: dict[str, int] = field(default_factory=dict)
    shortened: dict[str, int] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)

    def refusal(self, client_id: str, live: int, now: float, s: EngineSettings) -> Refusal | None:
        """Why a client that has `live` other tasks may have none now, or None. Changes nothing."""
        if client_id in self.quarantined:
            return Refusal(Reason.QUARANTINED, self.quarantined[client_id])
        here = self.folded[-1].get(client_id, 0) + live
        if s.buffer_max and here >= s.buffer_max:
            detail = f"has {here} updates of the {s.buffer_max} that one client may have in a version"
            return Refusal(Reason.OVER_SHARE, detail)
        lately = sum(of.get(client_id, 0) for of in self.folded) + live
        if s.window_max and lately >= s.window_max:
            bound = f"{s.window_max} that one client may have in {s.window_versions} versions"
            return Refusal(Reason.OVER_SHARE, f"has {lately} updates of the {bound}")
        if s.tasks_per_minute and self._ready_s(client_id, now, s) > 0:
            return Refusal(Reason.TOO_FAST, f"more than {s.tasks_per_minute:g} tasks a minute")
        return None

    def granted(self, client_id: str, now: float, s: EngineSettings) -> None:
        """A client has got a task."""
        if s.tasks_per_minute:
            due = max(self.ready_at.get(client_id, now), now)
            self.ready_at[client_id] = due + MINUTE_S / s.tasks_per_minute

    def taken(self, client_id: str, length: float | None, cut: bool, s: EngineSettings) -> None:
        """An update was folded; `length` where lengths are kept, `cut` if it was shortened."""
        if length is not None:
            self.lengths = [*self.lengths, length][-KEPT:]
        if cut:
            self.shortened[client_id] = self.shortened.get(client_id, 0) + 1
        if s.buffer_max or s.window_max:
            self.folded[-1][client_id] = self.folded[-1].get(client_id, 0) + 1

    def published(self, s: EngineSettings) -> None:
        """A version was made."""
        if s.buffer_max or s.window_max:
            self.folded = [*self.folded, {}][-(s.window_versions + 1 if s.window_max else 1) :]

    def flawed(self, client_id: str, reason: Reason, s: EngineSettings) -> str:
        """An update was of no use; why its client goes into quarantine for that, or nothing."""
        if reason not in FLAWS or client_id in self.quarantined:
            return ""
        self.flaws[client_id] = count = self.flaws.get(client_id, 0) + 1
        if not 0 < s.flaws_max <= count:
            return ""
        return f"sent {count} updates that cannot be used, the last: {reason}"

    def suspicion(self, client_id: str) -> int:
        """How many of a client's updates an honest device would hardly have sent."""
        return self.flaws.get(client_id, 0) + self.shortened.get(client_id, 0)

    def bar(self, client_id: str, why: str) -> None:
        """Put a client into quarantine."""
        self.quarantined[client_id] = why

    def release(self, client_id: str) -> bool:
        """Let a client out again, its past forgotten; whether it was in."""
        self.flaws.pop(client_id, None)
        self.shortened.pop(client_id, None)
        return self.quarantined.pop(client_id, None) is not None

    def _ready_s(self, client_id: str, now: float, s: EngineSettings) -> float:
        """Seconds until the client's next task conforms to the rate; a minute's worth may come at once."""
        burst_s = MINUTE_S - MINUTE_S / s.tasks_per_minute
        return self.ready_at.get(client_id, now) - now - max(burst_s, 0.0)
