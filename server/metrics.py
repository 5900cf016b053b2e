"""What a server measures of itself, as Prometheus and operators read it: docs/observability.md has the table.

What an update costs is a few additions: nothing is computed before somebody asks. No label has a name of a
client, a task or an update, so that there are as many series with a thousand devices as with one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from anabranch.core.effects import Barred, Decided, Effect, Granted, LeaseEnded, Published, Refused
from anabranch.core.model.updates import Verdict
from anabranch.server.shedding import Shedding

NEWEST = 1000  # values of which the percentiles are
PREFIX = "anabranch_"
LEADER, LEADS = f"{PREFIX}leader", "1: this process serves the run; 0: it stands by, starts, or has failed."

MILLISECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MICROSECONDS = (0.00001, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
FIBONACCI = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 377, 987)
POWERS = tuple(2**n for n in range(11))
BYTES = tuple(4**n * 1024 for n in range(10))  # 1 KiB to 256 MiB


@dataclass(frozen=True)
class Quantiles:
    """Of the newest values of a measure: nearest rank, 0 where there are none. `count`: of all there were."""

    count: int = 0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


class Measure:
    """A distribution: a histogram since the start, and the newest values. From any thread."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._histogram = Histogram(PREFIX + name, text, buckets=buckets, registry=registry)
        self._newest: deque[float] = deque(maxlen=NEWEST)
        self._count = 0

    def add(self, value: float) -> None:
        """One more."""
        self._histogram.observe(value)
        self._newest.append(value)
        self._count += 1

    def percentiles(self) -> Quantiles:
        """Of the newest values."""
        values = sorted(self._newest.copy())
        if not values:
            return Quantiles()
        p50, p90, p99 = (values[math.ceil(len(values) * q) - 1] for q in (0.5, 0.9, 0.99))
        return Quantiles(self._count, p50, p90, p99)


class Figures(Protocol):
    """How a server stands now; asked by whatever thread reads the metrics."""

    def gauges(self) -> Iterable[tuple[str, str, float]]:
        """Name, text, value of what goes up and down."""
        ...

    def counters(self) -> Iterable[tuple[str, str, float]]:
        """The same of what only grows; names without `_total`."""
        ...

    def info(self) -> dict[str, str]:
        """What is served, in words."""
        ...


class Metrics:
    """Everything that one server process measures. `figures` are None until it leads a run."""

    def __init__(self) -> None:
        self.registry, registry = CollectorRegistry(), CollectorRegistry()
        self.registry.register(_WithoutBirths(registry))
        self.figures: Figures | None = None
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        registry.register(_Now(self))
        self._made_measures(registry)
        self._made_counters(registry)
        self._series: dict[tuple[Counter, tuple[str, ...]], Counter] = {}
        self._shedding = Shedding()
        self.shed = self.refused = 0  # calls of all methods, asks for all reasons

    def _made_measures(self, registry: CollectorRegistry) -> None:
        def measure(name: str, text: str, buckets: Sequence[float]) -> Measure:
            return Measure(name, text, buckets, registry)

        self.queue_wait_s = measure(
            "queue_wait_seconds", "From an event's entry in the queue to its batch.", MILLISECONDS
        )
        self.commit_s = measure(
            "commit_seconds", "A batch in the writer's thread: settled, logged, folded.", MILLISECONDS
        )
        self.append_s = measure(
            "log_append_seconds", "A batch's transaction of the log, until it is on the disk.", MILLISECONDS
        )
        self.fsync_s = measure(
            "log_fsync_seconds", "The mark of a batch: one write and one fsync, nothing else.", MILLISECONDS
        )
        self.fold_s = measure(
            "fold_seconds", "An update in the engine: its verdict, and the version if one came.", MICROSECONDS
        )
        self.batch_events = measure("batch_events", "Events that share a commit.", POWERS)
        self.push_bytes = measure("push_bytes", "Size of the payloads of updates, as they came.", BYTES)
        self.staleness = measure("update_staleness_versions", "Of updates that counted.", FIBONACCI)

    def _made_counters(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        self._updates = counter("updates", "Updates that were decided.", "verdict", "reason")
        self._refusals = counter("asks_refused", "Asks that got no task.", "reason")
        self._leases = counter("leases_ended", "Leases that ended without an update.", "end")
        self._calls = counter("calls", "Calls that were answered.", "method", "code")
        self._shed = counter("calls_shed", "Calls that were told to come again later.", "method")
        self._granted = counter("tasks_granted", "Tasks that were handed out.")
        self._published = counter("versions_published", "Versions of the model.")
        self._quarantined = counter("clients_barred", "Clients that were put into quarantine.")

    def hear(self, effects: Sequence[Effect]) -> None:
        """Count what events have come to."""
        for effect in effects:
            match effect:
                case Decided(receipt=receipt, duplicate=False):
                    decision = receipt.decision
                    self._labelled(self._updates, decision.verdict.value, decision.reason.value).inc()
                    if decision.verdict is not Verdict.REJECTED:
                        self.staleness.add(decision.staleness)
                case Granted(again=False):
                    self._granted.inc()
                case Refused(reason=reason):
                    self._refusals.labels(reason.value).inc()
                    self.refused += 1
                case LeaseEnded(end=end):
                    self._leases.labels(end.value).inc()
                case Published():
                    self._published.inc()
                case Barred():
                    self._quarantined.inc()

    def _labelled(self, counter: Counter, *labels: str) -> Counter:
        """One of a counter's series: prometheus_client looks at each label each time. For one thread."""
        key = counter, labels
        if (found := self._series.get(key)) is None:
            found = self._series[key] = counter.labels(*labels)
        return found

    def repeated(self) -> None:
        """An update came again, and was told its old verdict."""
        self._updates.labels("duplicate", "").inc()

    def called(self, method: str, code: str, shed: str | None) -> None:
        """A call has ended, or was `shed` for that reason. For the event loop's thread."""
        self._labelled(self._calls, method, code).inc()
        if shed is not None:
            self._shed.labels(method).inc()
            self.shed += 1
            self._shedding.heard(method, shed)


class _WithoutBirths(Collector):
    """Leaves out when each series began: in Prometheus' text these are series of their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class _Now(Collector):
    """What is looked up when it is asked for."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        figures = self._metrics.figures
        yield GaugeMetricFamily(LEADER, LEADS, 0.0 if figures is None else 1.0)
        if figures is None:
            return
        yield InfoMetricFamily(f"{PREFIX}run", "What is served.", figures.info())
        for name, text, value in figures.gauges():
            yield GaugeMetricFamily(PREFIX + name, text, value)
        for name, text, value in figures.counters():
            yield CounterMetricFamily(PREFIX + name, text, value)
