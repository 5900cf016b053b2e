"""Versions as the nodes of a Grid judge them: one at a time, and the last one of a run in any case."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anabranch.core.config.tables import Config
from anabranch.core.errors import AppError
from anabranch.core.model.metrics import ACCURACY, LOSS
from anabranch.core.model.params import Tensors
from anabranch.flower.app import mean_metrics, named
from anabranch.flower.logbook import Logbook
from anabranch.flower.messages import EVALUATE, Reply
from anabranch.flower.played import Judge
from anabranch.reports.models import BEST, Best, write_model
from anabranch.reports.recorder import Recorder

if TYPE_CHECKING:
    from flwr.app import Message

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _UnderWay:
    """A version that nodes judge: the messages that wait, and the replies so far."""

    version: int
    model: Tensors
    waiting: set[str]
    replies: list[Reply] = field(default_factory=list)


class GridEvaluation:
    """Has versions judged by the nodes of a Grid, one at a time, and the last one of a run in any case.

    What comes due while another version is judged gives way to what comes later.

    `since` gives the seconds since the run began.
    """

    def __init__(
        self, config: Config, logbook: Logbook, recorder: Recorder, since: Callable[[], float]
    ) -> None:
        self._config, self._logbook, self._recorder, self._since = config, logbook, recorder, since
        self._every = config.run.evaluate_every_versions
        self._under_way: _UnderWay | None = None
        self._best: Best[None] = Best(recorder.goal)
        self._due = 0 if self._every and not logbook.resumed else -1
        self.judged = -1  # the newest version of which all replies are here

    @property
    def waiting(self) -> Collection[str]:
        """The messages whose replies are still to come."""
        return () if self._under_way is None else self._under_way.waiting

    def resume(self) -> None:
        """Go on from what an earlier process has measured."""
        for version, metrics in self._logbook.measurements():
            self.judged = max(self.judged, version)
            self._recorder.evaluated(self._since(), version, metrics)
            self._best.offer(version, metrics, lambda: None)  # its file is there

    def published(self, version: int) -> None:
        """There is a new version."""
        if self._every and version % self._every == 0:
            self._due = version

    def wants(self, version: int, is_last: bool) -> bool:
        """Whether the newest version should be judged now."""
        if self._under_way is not None:
            return False
        return self._due > self.judged or (is_last and self.judged != version)

    def begin(self, version: int, model: Tensors, message_ids: Iterable[str]) -> None:
        """Nodes were asked to judge a version, which is this model."""
        self._under_way, self._due = _UnderWay(version, model, set(message_ids)), version

    def take(self, message_id: str, message: Message) -> None:
        """A reply has come; with the last one the version is judged."""
        asked = self._under_way
        assert asked is not None, "only what was asked is answered"
        asked.waiting.discard(message_id)
        try:
            asked.replies.append(Reply.of(message, EVALUATE))
        except AppError as error:
            log.warning("evaluation of version %d: %s", asked.version, error)
        if not asked.waiting:
            self.conclude()

    def conclude(self) -> None:
        """Whoever has not answered by now is waited for no more: a version is judged by the others."""
        asked, self._under_way = self._under_way, None
        if asked is None:
            return
        self.judged = asked.version
        if asked.waiting and asked.replies:
            log.warning(
                "version %d is measured without %d of the nodes that were asked, which do not answer",
                asked.version,
                len(asked.waiting),
            )
        if not asked.replies:
            log.warning("version %d could not be measured: no node answered", asked.version)
            return
        self._conclude(asked, lambda: mean_metrics(asked.replies))

    def judge(self, version: int, model: Tensors, by: Judge) -> None:
        """The ServerApp itself judges a version, now."""
        self._due = self.judged = version
        self._conclude(_UnderWay(version, model, set()), lambda: by(version, model))

    def _conclude(self, asked: _UnderWay, measured: Callable[[], dict[str, float]]) -> None:
        """A version has these metrics, if they can be had."""
        try:
            metrics = measured()
            metrics |= named(metrics, self._config.flower, self._recorder.workload, self._recorder.goal)
        except AppError as error:
            log.warning("version %d: %s", asked.version, error)
            return
        if not metrics:
            log.warning("version %d is not measured: there is no metric that is one number", asked.version)
            return
        self._measured(asked, metrics)

    def _measured(self, asked: _UnderWay, metrics: dict[str, float]) -> None:
        """The model is on disk before what was measured of it: after a crash it is there then."""
        version = asked.version
        if self._best.offer(version, metrics, lambda: None):
            write_model(self._logbook.folder / BEST, asked.model, version, metrics)
        self._logbook.measured(version, metrics)
        self._recorder.evaluated(self._since(), version, metrics)
        names = dict.fromkeys((self._recorder.goal.metric, ACCURACY, LOSS))
        told = ", ".join(f"{name} {metrics[name]:.4f}" for name in names if name in metrics)
        log.info("version %d: %s", version, told)
