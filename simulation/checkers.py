"""What must hold after every event of a simulation: an observer for tests.

The core's invariants look at a state; here is what only a history shows: versions that grow by one,
each update decided once, staleness that is counted right, and that the run goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from anabranch.core import events as ev
from anabranch.core.effects import Decided, Effect, Granted, Published, Refused
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.invariants import violations
from anabranch.core.model.submodels import TensorSet
from anabranch.core.model.updates import Verdict


class Checker:
    """Raises `AssertionError` at the first event after which something does not hold.

    `every`: how many events lie between two looks at the whole state, which cost the most.
    `version_within_s`: the longest time without a new version (0: any).
    """

    def __init__(self, engine: Engine, every: int = 1, version_within_s: float = 0.0) -> None:
        self.events = 0
        self._engine = engine
        self._every = every
        self._version_within_s = version_within_s
        self._version = engine.version
        self._published_at = 0.0
        self._now = 0.0
        # By which event. An event is one of the log, so the log's numbers are these.
        self._decided: dict[str, int] = {}
        self._folded: dict[str, int] = {}
        self._versions = {engine.version: 0}

    def restarted(self, engine: Engine) -> None:
        """The server came back after a crash: from now on this is its engine, of the same state."""
        self._engine = engine
        if engine.version != self._version:
            raise AssertionError(f"version {self._version} was published, {engine.version} came back")

    def taken_back(self, seq: int) -> None:
        """The log ends at event `seq` now: what came later never was."""
        self.events = seq
        self._decided = {update_id: at for update_id, at in self._decided.items() if at <= seq}
        self._folded = {update_id: at for update_id, at in self._folded.items() if at <= seq}
        self._versions = {version: at for version, at in self._versions.items() if at <= seq}
        self._version, self._now = max(self._versions), -math.inf

    def observe(self, event: ev.Event, effects: Sequence[Effect]) -> None:
        """Check one event and what came of it."""
        self.events += 1
        self._need(event.now >= self._now, event, f"time went back from {self._now}")
        self._now = event.now
        for effect in effects:
            match effect:
                case Published(version, _, update_ids):
                    self._need(
                        version == self._version + 1, event, f"version {version} after {self._version}"
                    )
                    self._version, self._published_at = version, event.now
                    self._versions[version] = self.events
                    twice = self._folded.keys() & set(update_ids)
                    self._need(not twice, event, f"updates {sorted(twice)} were folded in twice")
                    self._folded.update(dict.fromkeys(update_ids, self.events))
                case Decided():
                    self._check_decision(event, effect)
                case Granted(task, again=False):
                    self._need(task.base_version == self._engine.offered, event, "a task from an old version")
                case Refused():  # with a task given up by it: that is the event
                    self._need(not isinstance(event, ev.TaskAsked), event, "a refused ask was journalled")
        self._need(self._engine.version == self._version, event, "a version came without being published")
        self._check_liveness(event)
        if self.events % self._every == 0:
            for broken in violations(self._engine):
                self._need(False, event, broken)

    def _check_decision(self, event: ev.Event, effect: Decided) -> None:
        decision, update_id = effect.receipt.decision, effect.receipt.update_id
        assert isinstance(event, ev.UpdateArrived)
        known = update_id in self._decided
        self._need(effect.duplicate == known, event, f"update {update_id} decided twice")
        if known:
            return
        self._decided[update_id] = self.events
        if decision.verdict is Verdict.REJECTED:
            self._need(decision.weight is None, event, "a rejected update has a weight")
            return
        bound = self._engine.settings.staleness_max
        # `_version` has grown by now if this very update published.
        before = effect.receipt.version - (decision.verdict is Verdict.PUBLISHED)
        lag = before - event.update.base_version
        # Of some tensors only the versions that changed them count.
        least = 0 if isinstance(event.update.submodel, TensorSet) else lag
        self._need(0 <= least <= decision.staleness <= lag, event, f"staleness {decision.staleness}")
        self._need(not bound or decision.staleness <= bound, event, f"staleness over {bound}")
        weight = decision.weight
        fit = weight is not None and weight > 0 and math.isfinite(weight)
        self._need(fit, event, f"weight {weight} of an applied update")

    def _check_liveness(self, event: ev.Event) -> None:
        waited_s = event.now - self._published_at
        live = not self._version_within_s or waited_s <= self._version_within_s
        self._need(live, event, f"no new version for {waited_s:.1f} s")

    def _need(self, holds: bool, event: ev.Event, what: str) -> None:
        if not holds:
            raise AssertionError(f"event {self.events} at {event.now} s, {type(event).__name__}: {what}")
