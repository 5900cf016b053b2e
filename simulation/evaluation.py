"""Measures versions on held-out data while the virtual clock runs. No part of the journal.

A measurement is begun at its virtual moment and recorded when the next one begins, or in the end: so
worker processes may do it meanwhile, and the record comes in the same order whatever their number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from anabranch.core import events as ev
from anabranch.core.config.goal import Goal
from anabranch.core.config.tables import RunTable
from anabranch.core.effects import Effect, Published
from anabranch.core.engine.engine import Engine
from anabranch.core.errors import AppError
from anabranch.core.model.chains import AUTO
from anabranch.core.model.params import Vector
from anabranch.reports.models import Best
from anabranch.reports.recorder import Recorder
from anabranch.simulation.clock import VirtualClock
from anabranch.simulation.executors.base import Evaluation, Executor, Pending
from anabranch.simulation.versions import Model, Versions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeasuredVersion:
    """What the App's `evaluate` returned of a version; `time_s` is when the measurement began."""

    time_s: float
    version: int
    metrics: Mapping[str, float]


class Evaluator:
    """Has versions measured on held-out data, at their virtual moments.

    `[run] evaluate_every_s` and `evaluate_every_versions` say when; the end counts too.
    """

    def __init__(
        self,
        run: RunTable,
        clock: VirtualClock,
        versions: Versions,
        executor: Executor,
        recorder: Recorder,
        best: Best[Vector],
        tell: Callable[[MeasuredVersion], None],
    ) -> None:
        self._run, self._goal = run, Goal.of(run)
        self._clock = clock
        self._versions = versions
        self._executor = executor
        self._recorder = recorder
        self._best = best
        self._tell = tell
        self._last_version = -1
        self.newest: MeasuredVersion | None = None
        self.stopped = False  # at the target
        self._in_hand: tuple[float, Model, Pending[Mapping[str, float]]] | None = None

    def begin(self) -> None:
        """Measure version 0, unless only the end is to be measured."""
        if self._run.evaluate_every_s or self._run.evaluate_every_versions:
            self._measure()
            if self._goal.metric != AUTO:
                self._settle()  # whether there is such a metric is better known before all the training
        if self._run.evaluate_every_s:
            self._clock.at(self._run.evaluate_every_s, lambda: self._on_time(1))

    def observe(self, event: ev.Event, effects: Sequence[Effect]) -> None:  # noqa: ARG002
        """Measure a version that was just published, if it is one of those to be measured."""
        every = self._run.evaluate_every_versions
        if every and any(isinstance(e, Published) and e.version % every == 0 for e in effects):
            self._measure()

    def taken_back(self, engine: Engine, _: int) -> None:
        """The newest versions are about to be lost, and others will have their numbers."""
        self._settle()
        self._best.taken_back(engine.version)
        self._last_version, self.newest = -1, None

    def finish(self) -> None:
        """Measure the last version, and record what is in hand."""
        self._measure()
        self._settle()

    def _on_time(self, number: int) -> None:
        self._measure()
        if not (self._clock.has_more or self._run.virtual_s_max):
            return  # there will be no other version, and measuring alone would go on for ever
        self._clock.at((number + 1) * self._run.evaluate_every_s, lambda: self._on_time(number + 1))

    def _measure(self) -> None:
        if self._versions.version == self._last_version:
            return
        model = self._versions.exact()
        self._settle()
        self._last_version = model.version
        now = self._clock.now
        self._in_hand = now, model, self._executor.evaluate(Evaluation(model.vector, now, model.version))
        if self._run.stop_at_target:  # what comes next depends on it
            self._settle()

    def _settle(self) -> None:
        if self._in_hand is None:
            return
        time_s, model, pending = self._in_hand
        self._in_hand = None
        metrics = pending.result()
        if not metrics:
            return  # the App may have none, of this version or of any, and has said so
        if lack := self._goal.lacking(metrics):
            raise AppError(lack)
        if self.newest is None and (said := self._goal.idle(metrics)):
            log.warning(said)
        self.newest = MeasuredVersion(time_s, model.version, metrics)
        self._recorder.evaluated(time_s, model.version, metrics)
        self._best.offer(model.version, metrics, lambda: model.vector)
        self._tell(self.newest)
        if self._run.stop_at_target and self._goal.reached(metrics):
            self.stopped = True
            self._clock.stop()
