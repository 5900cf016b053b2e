"""A follower measures a run: it fetches each new version as any device does, and evaluates it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from anabranch.client.frozen import built_frozen, fetched_frozen
from anabranch.client.history import HistoryRestored
from anabranch.client.kept import Keepsake
from anabranch.client.messages import FetchedModel
from anabranch.client.neighbours import Neighbours
from anabranch.client.state import fresh_seed
from anabranch.client.stopping import Bell, Interrupted, interruptible, persist
from anabranch.client.trainer import LocalTrainer
from anabranch.client.transport import Transport
from anabranch.core.config.goal import AUTO_GOAL, Goal
from anabranch.core.config.ranges import SERVED
from anabranch.core.config.tables import ClientTable, Config
from anabranch.core.errors import AnabranchError, AppError, ManifestMismatch
from anabranch.core.model.metrics import finite
from anabranch.core.model.params import ParamSpec
from anabranch.reports.text import counted
from anabranch.strategies.submodels.progressive import grown
from anabranch.workloads.app import App, Shard
from anabranch.workloads.calls import data_of

T = TypeVar("T")


@dataclass(frozen=True)
class Measurement:
    """The App's metrics of one version."""

    version: int
    metrics: Mapping[str, float]
    published_at_s: float


class MetricsSink(Protocol):
    """Where measurements are reported: the operators' service, or anything else."""

    def report_metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a version."""
        ...


class Follower:
    """Yields a `Measurement` of the newest version whenever there is a newer one.

    It ends after the last version of a finished run, after the first with `once`, or at SIGTERM and
    SIGINT. `every` > 1 measures only every so many versions, and the last. `poll_s`: how often to ask.
    `on_failure` hears of errors that pass; a report that fails is one of them. `on_answer` hears that the
    server is there. `kept`: of a device, for its own buffers. `goal`: what the run is judged by, if that is
    known: an App that does not measure it is an error. `frozen_sha256` (hex): of the run's frozen
    tensors that travel apart, and `served` the run's model, where they are known: with the latter a
    `ManifestMismatch` names the first tensor that differs.
    """

    def __init__(
        self,
        app: App,
        transport: Transport,
        shard: Shard,
        settings: ClientTable | None = None,
        *,
        sink: MetricsSink | None = None,
        once: bool = False,
        every: int = 1,
        poll_s: float = 0.5,
        threads: int = 0,
        neighbours: Neighbours | None = None,
        on_failure: Callable[[AnabranchError], None] | None = None,
        on_answer: Callable[[], None] | None = None,
        on_end: Callable[[], None] | None = None,
        bell: Bell | None = None,
        kept: Keepsake | None = None,
        goal: Goal = AUTO_GOAL,
        config: Mapping[str, Any] | None = None,
        frozen_sha256: str = "",
        served: ParamSpec | None = None,
    ) -> None:
        self._goal = goal
        self._settings = settings or ClientTable()
        self._transport, self._sink, self._once = transport, sink, once
        self._every, self._poll_s = every, poll_s
        self._on_failure = on_failure or (lambda _: None)
        self._on_answer = on_answer or (lambda: None)
        self._on_end = on_end or (lambda: None)
        self._bell = bell or Bell(time.monotonic)
        self._seed, self._name = fresh_seed(), app.name
        self._local = LocalTrainer(app, self._settings, threads, neighbours=neighbours)
        self._local.kept = kept or Keepsake()
        if served is not None:
            self._local.adopt(served)
        self._examples = data_of(app, shard)
        run = Config.from_json(config or {})
        self._growth = None if config is None else grown(run, self._local.spec)
        self._local.frozen_served, self._frozen_sha256 = run.run.frozen == SERVED, frozen_sha256

    def stop(self) -> None:
        """From any thread: end soon."""
        self._bell.stop()

    def __iter__(self) -> Iterator[Measurement]:
        """The measurements, as they come.

        Raises `ManifestMismatch` for a run of another model, or of frozen tensors that this App should build
        and does not; `AppError` for an App that does not measure what the run is judged by.
        """
        with interruptible(self._bell):
            try:
                for measurement in self._measurements():
                    self._bell.patient = True  # a signal may not hit the caller's own work
                    yield measurement
                    self._bell.patient = False
                    self._bell.check()
            except Interrupted:
                return

    def _measurements(self) -> Iterator[Measurement]:
        seen: int | None = None
        while True:
            model = self._next(seen)
            if model.modified:
                seen = model.version
                if (measured := self._measured(model)).metrics:
                    yield measured
            over = model.final and seen == model.version
            if over:
                self._on_end()
            if over or self._once:
                return
            if not model.modified:
                self._bell.rest(self._poll_s)

    def _next(self, seen: int | None) -> FetchedModel:
        """The newest version if it is `every` above the last one seen, or the run's last.

        Of a run that was put back to before that one, the newest.
        """
        model = self._fetch(None if seen is None else seen + self._every - 1)
        is_put_back = seen is not None and model.version < seen
        if not model.modified and (is_put_back or (model.final and model.version != seen)):
            return self._fetch(None)
        return model

    def _fetch(self, newer_than: int | None) -> FetchedModel:
        try:
            model = self._persist(
                lambda: self._transport.fetch(self._local.spec.layout_hash, newer_than=newer_than, exact=True)
            )
        except ManifestMismatch as other:  # the server's words are for devices, which enrol
            raise ManifestMismatch(self._of_another_model()) from other
        except HistoryRestored as restored:  # it keeps nothing of the versions before
            self._on_failure(restored)
            return self._fetch(None)
        self._on_answer()
        return model

    def _of_another_model(self) -> str:
        tensors = self._local.spec.tensors
        size = f"{counted(len(tensors), 'tensor')} of {counted(sum(t.size for t in tensors), 'number')}"
        return (
            f"the server's run is of another model than {self._name}, which has {size}: measure it by the "
            "App that the run began with; --admin, the operators' port, has the tensor named that differs"
        )

    def _have_frozen(self) -> None:
        """What travels apart, once."""
        local, spec, sha256 = self._local, self._local.spec, self._frozen_sha256
        if not spec.apart or local.apart is not None:
            return
        if local.frozen_served:
            found = self._persist(lambda: fetched_frozen(self._transport, spec, sha256))
        else:
            found = built_frozen(spec, local.own_frozen, sha256)
        local.apart = found.tensors

    def _persist(self, call: Callable[[], T]) -> T:
        base_s, cap_s = self._settings.retry_base_s, self._settings.retry_cap_s
        return persist(call, self._bell, self._seed, base_s, cap_s, self._on_failure)

    def _measured(self, model: FetchedModel) -> Measurement:
        self._have_frozen()
        stage = 0 if self._growth is None else self._growth.stage_of(model.version)
        metrics = self._local.evaluate(self._local.decode(model), self._examples, stage)
        if metrics and (lack := self._goal.lacking(metrics)):
            raise AppError(lack)
        if self._sink is not None and metrics:
            try:
                self._sink.report_metrics(model.version, finite(metrics))
            except AnabranchError as error:
                self._on_failure(error)
        return Measurement(model.version, metrics, model.published_at_s)
