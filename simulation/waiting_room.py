"""Where refused devices sleep until they are called: a fleet of a million costs what its active part does.

A live device that was refused asks again; a line (`core/engine/waiting.py`) says when. In a fleet of
which few are active at a time, those asks would be nearly all that happens. Here a refused device sleeps,
no event of its own in the queue. Whatever may make room (an update, a lost lease, a deadline, a new round)
calls as many as there is room for: those that have waited longest, or the devices of the round. A called
device asks as any other, one way to it and one way back later; meanwhile its place is kept.

This is the live line for devices that come back at the very moment: the same order, no time lost. A device
whose last tasks came to nothing asks again by itself while it has to wait for that (`core/engine/lapses.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from anabranch.core import events as ev
from anabranch.core.config.ranges import TURNS
from anabranch.core.effects import Effect, Refused
from anabranch.core.engine.admission import outstays
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.lapses import Lapses
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.updates import Ask, Reason, Task

MAKES_NO_ROOM = (ev.TaskAsked, ev.LeaseRenewed)
FOR_NOW = (Reason.AT_CAPACITY, Reason.NOT_SELECTED)  # what waiting helps against


class Sleeper(Protocol):
    """A device that waits."""

    @property
    def client_id(self) -> str:
        """Its name."""
        ...

    def called(self) -> None:
        """There may be a task for it: it shall ask."""
        ...


class WaitingRoom:
    """Where refused devices of a large fleet sleep until there may be room for them.

    `refusal` stands in for the engine's; `heard` and `call` hear of every event. `lapsed`: the rule for
    devices whose tasks came to nothing, see `Lapses`; those that share a few places have them by lot.
    """

    def __init__(self, engine: Engine, limits: Limits = DEFAULT_LIMITS, lapsed: str = TURNS) -> None:
        self._engine = engine
        self._sleepers: OrderedDict[str, Sleeper] = OrderedDict()  # who has waited longest comes first
        self._called: set[str] = set()
        self._bound: set[str] = set()  # of the sleepers, those that share few places: most may have any
        self._lapses = Lapses(limits.waiting_max, lapsed)

    def __len__(self) -> int:
        return len(self._sleepers)

    def begin(self) -> None:
        """A batch begins: who was called keeps its place over it."""

    def refusal(self, engine: Engine, ask: Ask, now: float) -> Refused | None:
        """Why this ask would get no task now, or None. A device that was called has a place."""
        was_called = ask.client_id in self._called
        self._called.discard(ask.client_id)
        refused = engine.refusal(ask, now, 0 if was_called else len(self._called))
        if refused is None and ask.task_id not in engine.ledger.tasks and self._sound:
            refused = self._lapses.refusal(engine, ask, now)
        if refused is not None and was_called:
            self._call(now)
        return refused

    def takes(self, refused: Refused, sleeper: Sleeper) -> bool:
        """Whether the refused device may sleep: False where only time helps, so that it asks again."""
        rounds = refused.reason is Reason.NOT_SELECTED
        if refused.final or refused.reason not in FOR_NOW or (rounds and self._selected is None):
            return False
        self._sleepers[sleeper.client_id] = sleeper
        if sleeper.client_id in self._lapses:
            self._bound.add(sleeper.client_id)
        return True

    def renews(self, engine: Engine, task: Task, now: float) -> bool:
        """Whether a heartbeat may renew the lease of this task: not for ever, while others wait."""
        return not (self._sleepers and outstays(task, now, engine.settings))

    def beats(self, beat: ev.LeaseRenewed) -> None:
        """A heartbeat has come; each device here is one process, so that says nothing."""

    def leave(self, client_id: str, now: float) -> None:
        """The device is out of reach: nobody waits for it."""
        self._sleepers.pop(client_id, None)
        self._bound.discard(client_id)
        if client_id in self._called:
            self._called.discard(client_id)
            self._call(now)

    def heard(self, now: float, effects: Iterable[Effect]) -> None:
        """Take note of what an event has come to."""
        self._lapses.heard(now, effects)

    def call(self, event: ev.Event) -> None:
        """An event was handled: who sleeps may have a place now."""
        if self._sleepers and not isinstance(event, MAKES_NO_ROOM):
            self._call(event.now)

    def clear(self) -> None:
        """Forget everybody."""
        self._sleepers.clear()
        self._bound.clear()
        self._called.clear()

    @property
    def _sound(self) -> bool:
        """Whether any of the sleepers may have any place."""
        return len(self._sleepers) > len(self._bound)

    @property
    def _selected(self) -> list[str] | None:
        return self._engine.strategy.selected(self._engine.state)

    def _call(self, now: float) -> None:
        selected = self._selected
        if selected is None:
            while self._sleepers and self._wake(next(iter(self._sleepers)), now):
                pass
        else:
            for client_id in selected:
                if client_id in self._sleepers:
                    self._wake(client_id, now)

    def _wake(self, client_id: str, now: float) -> bool:
        """Call a sleeper, unless it would be refused again; a task id matters only where it is known."""
        refused = self._engine.refusal(Ask(client_id, ""), now, len(self._called))
        if refused is not None and refused.reason in FOR_NOW:
            return False
        if refused is None:
            self._called.add(client_id)
        self._bound.discard(client_id)
        self._sleepers.pop(client_id).called()
        return True
