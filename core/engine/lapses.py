"""Who has had places that came to nothing: such a device waits while others want one, longer each time.

A place has come to nothing when its lease ended without an update: it ran out, its device asked anew, or
gave the task back. After the first time a device goes to the end of the line, as any that asks, and that is
all: one fault of a network or of the server does as much to many devices at once. After the n-th in a row it
gets none for 2^(n-1) - 1 leases, at most three, and from the second on all such devices together have at most
an eighth of the places, in turns: while one without such a past waits, for otherwise nobody would gain. An
update that is of use, even if it comes too late, ends the row.

In simulations of older releases the share was for who had lapsed once, too, and who came first had it. `LOT`
(`server.lapsed`) is that rule: what they have recorded is simulated again to the bit.

Beside the engine, as the line is (`waiting.py`): no part of its state or its journal, forgotten by a restart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from anabranch.core.config.ranges import LOT, TURNS
from anabranch.core.effects import Decided, Effect, Granted, LeaseEnd, LeaseEnded, Refused
from anabranch.core.engine.engine import Engine
from anabranch.core.model.updates import FLAWS, Ask, Reason, Task

DOUBLINGS_MAX = 2  # three leases: a device that was out of luck must come back
WAIT_S_MAX = 3600.0
RETRY_S_MAX = 60.0  # it may ask before: others may have gone
SHARE = 0.125  # of the places, for all of them while others wait; never less than one
NOTHING = (LeaseEnd.EXPIRED, LeaseEnd.SUPERSEDED, LeaseEnd.DROPPED)


@dataclass(frozen=True, slots=True)
class Lapse:
    """So many places in a row came to nothing; `until`: when the wait is over."""

    count: int
    until: float


class Lapses:
    """The devices whose places came to nothing, and until when each has to wait for another.

    `heard` must see every effect of the engine; the newest `kept_max` devices are kept. `rule`: `TURNS` or
    `LOT`, see above.
    """

    def __init__(self, kept_max: int, rule: str = TURNS) -> None:
        self._kept_max = kept_max
        self._share_from = 1 if rule == LOT else 2  # so many lapses in a row
        self.in_turns = rule == TURNS
        self._of: dict[str, Lapse] = {}
        self._held: set[str] = set()  # tasks of the devices that share a few places

    def __contains__(self, client_id: str) -> bool:
        """Whether a device is one of those that share a few places while others wait."""
        lapse = self._of.get(client_id)
        return lapse is not None and lapse.count >= self._share_from

    def waits(self, client_id: str, now: float) -> bool:
        """Whether a device has to wait for a time. Else it is only that there are too many like it."""
        lapse = self._of.get(client_id)
        return lapse is not None and now < lapse.until

    def heard(self, now: float, effects: Iterable[Effect]) -> None:
        """Take note of what an event has come to."""
        for effect in effects:
            match effect:
                case Granted(task) if task.client_id in self:
                    self._held.add(task.task_id)
                case Decided(client_id, receipt, _, False):
                    self._held.discard(receipt.task_id)
                    if receipt.decision.reason not in FLAWS:
                        self._of.pop(client_id, None)
                case LeaseEnded(task, end):
                    self._held.discard(task.task_id)
                    if end in NOTHING:
                        self._add(task, now)

    def refusal(self, engine: Engine, ask: Ask, now: float, ahead: int = 0) -> Refused | None:
        """Why a device gets no place while others wait for one, or None.

        `ahead`: so many of those that share a few places have waited longer for one of them.
        """
        lapse, retry_s = self._of.get(ask.client_id), engine.settings.retry_after_s
        if lapse is None or ask.client_id not in self:
            return None
        past = f"{lapse.count} of its tasks in a row came to nothing, and others wait"
        if self.waits(ask.client_id, now):
            left_s = lapse.until - now
            latest_s = min(max(left_s, retry_s[1]), RETRY_S_MAX)
            return Refused(
                ask, Reason.LAPSED, f"{past}: it has no place for {left_s:.0f} s", (latest_s / 2, latest_s)
            )
        if len(self._held) + ahead >= max(1, int(SHARE * engine.ledger.live)):
            return Refused(ask, Reason.LAPSED, f"{past}: such devices have {len(self._held)} places", retry_s)
        return None

    def _add(self, task: Task, now: float) -> None:
        before = self._of.pop(task.client_id, None)  # and to the end of the order
        count = 1 + (0 if before is None else before.count)
        leases = 2 ** min(count - 1, DOUBLINGS_MAX) - 1
        self._of[task.client_id] = Lapse(count, now + min(leases * task.lease_s, WAIT_S_MAX))
        if len(self._of) > self._kept_max:
            del self._of[next(iter(self._of))]
