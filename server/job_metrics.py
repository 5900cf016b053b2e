"""What Prometheus reads of a server of several runs: each job's figures with the label `job`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from anabranch.server.job import HostedJob, JobState
from anabranch.server.jobs import Jobs
from anabranch.server.metrics import LEADER, LEADS, PREFIX, Metrics

LABEL = "job"


def registry_of(process: Metrics, jobs: Jobs) -> CollectorRegistry:
    """Everything: what is of the process (its memory, its ports' calls) has no job."""
    registry = CollectorRegistry()
    registry.register(OfJobs(process, jobs))
    return registry


class OfJobs(Collector):
    """One family of each name, as Prometheus' text wants it. Asked by threads of the port."""

    def __init__(self, process: Metrics, jobs: Jobs) -> None:
        self._process, self._jobs = process, jobs

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is depends on the jobs."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        families = {metric.name: metric for metric in self._process.registry.collect() if metric.samples}
        for name in [name for name in families if name.startswith(PREFIX) and not name.startswith(CALLS)]:
            del families[name]  # of a run, and the process leads none
        for job in list(self._jobs.all()):
            metrics = job.metrics
            for metric in _away(job) if metrics is None else metrics.registry.collect():
                if not metric.name.startswith(PREFIX) or metric.name.startswith(CALLS):
                    continue
                samples = [s._replace(labels={LABEL: job.name, **s.labels}) for s in metric.samples]
                families.setdefault(metric.name, _empty(metric)).samples.extend(samples)
        yield from families.values()


CALLS = f"{PREFIX}calls"  # counted by the ports, which are of all jobs


def _away(job: HostedJob) -> Iterator[Metric]:
    """Of a job that is to be served and is not: a series that only went away would be missed by no alert.

    One that its operator stops is missed by nobody, from when it is told to on.
    """
    if job.state is not JobState.STOPPED and not job.stop.is_set():
        yield GaugeMetricFamily(LEADER, LEADS, 0.0)


def _empty(metric: Metric) -> Metric:
    return Metric(metric.name, metric.documentation, metric.type, metric.unit)
