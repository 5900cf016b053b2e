"""An engine with a line before it, driven as the drivers do: by hand, or by devices in time."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from machines import Bench

from anabranch.core import events as ev
from anabranch.core.config.ranges import PLACES, TURNS
from anabranch.core.effects import Granted, LeaseEnded, Refused
from anabranch.core.engine.admission import dropped_by
from anabranch.core.engine.waiting import WaitingLine
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.model.updates import Ask


class Room:
    """An engine with a line before it, driven as the drivers do."""

    def __init__(
        self,
        places: int = 1,
        waiting_max: int = 1000,
        strategy: str = "fedbuff",
        names: Iterable[str] = "abcdef",
        lapsed: str = TURNS,
        windows: str = PLACES,
        ended_max: int = 0,
        **options: Any,
    ) -> None:
        options = {"concurrency": places, "retry_after_s": (0.5, 2.0), **options}
        self.bench = Bench(strategy, **options)
        self.line = WaitingLine(replace(DEFAULT_LIMITS, waiting_max=waiting_max), lapsed, windows, ended_max)
        self.bench.enrol(*names)
        self.tasks: dict[str, str] = {}
        self.asked = 0

    def ask(self, client: str, now: float) -> Granted | Refused:
        """Apply for a task under a new id."""
        self.asked += 1
        task_id = f"t{self.asked}"
        refused = self.line.refusal(self.bench.engine, Ask(client, task_id), now)
        if refused is not None:
            if dropped := dropped_by(refused, now, self.bench.engine):
                self.tasks.pop(client)
                self.line.heard(now, self.bench.do(dropped))
            return refused
        effects = self.bench.ask(client, task_id, now)
        self.line.heard(now, effects)
        (granted,) = (e for e in effects if isinstance(e, Granted))
        self.tasks[client] = task_id
        return granted

    def push(self, client: str, now: float) -> None:
        """Answer the client's task."""
        self.line.heard(now, self.bench.push(client, self.tasks.pop(client), now=now))

    def is_granted(self, client: str, now: float) -> bool:
        """Ask, and say whether there was a task."""
        return isinstance(self.ask(client, now), Granted)

    def drop(self, client: str, now: float) -> None:
        """Give the client's task back."""
        self.line.heard(now, self.bench.do(ev.TaskDropped(now, client, self.tasks.pop(client), "a crash")))

    def tick(self, now: float) -> None:
        """Let time pass: a lease that ends takes its task along, as far as its device knows of it here."""
        effects = self.bench.tick(now)
        self.line.heard(now, effects)
        for effect in effects:
            if isinstance(effect, LeaseEnded):
                self.tasks.pop(effect.task.client_id, None)

    def beat(self, client: str, progress: float, now: float) -> None:
        """A heartbeat, which renews the lease unless the line is against it."""
        task = self.bench.engine.ledger.tasks[self.tasks[client]]
        if self.line.renews(self.bench.engine, task, now):
            self.bench.do(ev.LeaseRenewed(now, client, task.task_id, progress))


def contest(room: Room, honest: Iterable[str], hostile: Mapping[str, float], until: float) -> Counter[str]:
    """Honest devices that train for a second each, and hostile ones that ask anew every so many seconds.

    Returns the updates of each honest device.
    """
    done: Counter[str] = Counter(dict.fromkeys(honest, 0))
    due = [(0.0, n, client) for n, client in enumerate([*hostile, *done])]
    heapq.heapify(due)
    while due[0][0] < until:
        now, n, client = heapq.heappop(due)
        while (deadline := room.bench.engine.next_deadline()) is not None and deadline <= now:
            room.tick(deadline)
        if client in hostile:
            room.ask(client, now)
            next_s = hostile[client]
        elif client in room.tasks:
            room.push(client, now)
            done[client] += 1
            next_s = 0.0
        else:
            answer = room.ask(client, now)
            next_s = 1.0 if isinstance(answer, Granted) else answer.retry_after_s[1]
        heapq.heappush(due, (now + next_s, n, client))
    return done


@dataclass
class Worked:
    """What a fleet came to: `updates` of each device, and how many `places` were in use from when on."""

    updates: Counter[str]
    places: list[tuple[float, int]]


def work(room: Room, task_s: Mapping[str, float], until: float, begins: Mapping[str, float]) -> Worked:
    """Devices that train for so long each, and come when they are told; at first at `begins`, or at 0."""
    worked = Worked(Counter(dict.fromkeys(task_s, 0)), [])
    due = [(begins.get(client, 0.0), n, client) for n, client in enumerate(task_s)]
    heapq.heapify(due)
    while due[0][0] < until:
        now, n, client = heapq.heappop(due)
        while (deadline := room.bench.engine.next_deadline()) is not None and deadline <= now:
            room.tick(deadline)
        if client in room.tasks:
            room.push(client, now)
            worked.updates[client] += 1
            next_s = 0.0
        else:
            answer = room.ask(client, now)
            next_s = task_s[client] if isinstance(answer, Granted) else answer.retry_after_s[1]
        worked.places.append((now, room.bench.engine.ledger.live))
        heapq.heappush(due, (now + next_s, n, client))
    return worked
