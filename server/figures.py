"""How a run stands in figures: for Prometheus when it asks, and for operators (`GetMetrics`)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from importlib.metadata import version as installed_version
from pathlib import Path

from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.server.metrics import Measure
from anabranch.server.run import LiveRun

Row = tuple[str, str, float]


class RunFigures:
    """Of a run that is served. Reads what never changes, or what is read in one step: from any thread."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run

    def info(self) -> dict[str, str]:
        """What is served, in words."""
        run = self._run
        return {
            "run": run.info.name,
            "run_id": run.info.run_id,
            "strategy": run.writer.glance.strategy,
            "anabranch": installed_version("anabranch"),
        }

    def gauges(self) -> Iterator[Row]:
        """Name, text, value of what goes up and down."""
        run, writer = self._run, self._run.writer
        glance = writer.glance
        yield "version", "The newest version of the model.", glance.version
        yield "log_seq", "The last event in the log.", writer.seq
        yield "queue_events", "Events and looks that wait for the writer.", writer.queue_size
        yield "queue_events_max", "From so many on a call is told to come again.", run.limits.queue_events_max
        yield "clients_enrolled", "Devices that are known.", glance.clients_enrolled
        yield "clients_online", "Devices that called within a lease.", run.presence.calling(writer.now())
        yield "clients_training", "Devices that have a task.", glance.clients_training
        yield "clients_quarantined", "Devices in quarantine.", glance.clients_quarantined
        yield "tasks_live", "Tasks whose lease goes on.", glance.live_tasks
        yield "sums_waiting", "Masked sums that wait for a keeper.", glance.sums_waiting
        yield "uploads_open", "Updates on their way in.", run.uploads.open_count
        yield "upload_held_bytes", "What memory has of updates on their way.", run.uploads.held_bytes
        yield "paused", "1: no tasks are handed out.", glance.paused
        yield "finished", "1: the run is over.", bool(glance.finished)
        yield "given_up", "1: it is over for want of updates that could be used.", glance.given_up
        yield "draining", "1: the server goes down.", run.draining
        free, size = run.disk_bytes()
        yield "disk_free_bytes", "What may still be written where the data lies.", free
        yield "disk_size_bytes", "What may be written there in all.", size
        yield "disk_full", "1: no update is taken, for want of room.", bool(writer.room.lack)
        yield "started_timestamp_seconds", "When the server began to serve the run.", run.started_at

    def counters(self) -> Iterator[Row]:
        """Name, text, value of what only grows, since the server started."""
        run = self._run
        whole, others = run.sent_to_devices.full_bytes, run.sent_to_observers.bytes
        yield "uplink_bytes", "What came of updates, those that failed too.", run.uploads.bytes_total
        yield (
            "uplink_raw_bytes",
            "Those that were taken, without compression.",
            run.intake.bytes_raw,
        )
        yield "downlink_bytes", "What was sent of models to devices.", run.sent_to_devices.bytes
        yield "downlink_raw_bytes", "The same models, whole and without compression.", whole
        yield "observer_bytes", "What was sent of models to evaluators and the like.", others

    def to_proto(self) -> operators.GetMetricsResponse:
        """For operators."""
        run, writer = self._run, self._run.writer
        metrics = writer.metrics
        return operators.GetMetricsResponse(
            queue=writer.queue_size,
            queue_max=run.limits.queue_events_max,
            queue_wait_s=_percentiles(metrics.queue_wait_s),
            commit_s=_percentiles(metrics.commit_s),
            append_s=_percentiles(metrics.append_s),
            fsync_s=_percentiles(metrics.fsync_s),
            fold_s=_percentiles(metrics.fold_s),
            batch_events=_percentiles(metrics.batch_events),
            push_bytes=_percentiles(metrics.push_bytes),
            staleness=_percentiles(metrics.staleness),
            calls_shed=metrics.shed,
            asks_refused=metrics.refused,
            memory_bytes=memory_bytes(),
            disk_free_bytes=run.disk_bytes()[0],
            leader=f"{socket.gethostname()}:{os.getpid()}",
            log_seq=writer.seq,
            clients_training=writer.glance.clients_training,
            uploads_open=run.uploads.open_count,
            uptime_s=writer.now() - run.started_at,
        )


def memory_bytes() -> int:
    """What this process holds in memory; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _percentiles(measure: Measure) -> operators.Percentiles:
    found = measure.percentiles()
    return operators.Percentiles(count=found.count, p50=found.p50, p90=found.p90, p99=found.p99)
