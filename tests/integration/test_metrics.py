"""What a server measures of itself: true to what was done, told to Prometheus and to operators alike."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from streams import StreamDevice
from wire import CALL_S, Served, server_config

from anabranch.client.operator import OperatorClient
from anabranch.core.errors import ConfigError, PortInUse, StoreCorrupt, Unavailable
from anabranch.core.limits import Limits
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server.exposition import Exposition
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.metrics import NEWEST, Metrics
from anabranch.server.store.base import Entry, Projection
from anabranch.server.store.memory import MemoryStore
from anabranch.server.writer import Writer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
OF_THE_LIBRARY = ("process_", "python_")


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path / "model", "test", {"w": np.zeros(8, np.float32)})


def config(tmp_path: Path, **tables: Any) -> Any:
    server = {"metrics_address": "127.0.0.1:0", **tables.pop("server", {})}
    return server_config(tmp_path / "data", server=server, **tables)


def scraped(served: Served) -> list[Metric]:
    assert served.info is not None
    with urllib.request.urlopen(f"http://{served.info.metrics_address}/metrics", timeout=600) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def samples(metrics: Iterable[Metric]) -> dict[str, float]:
    """Values by name and labels: `anabranch_calls_total{code=OK,method=Enrol}`; without the buckets."""
    return {
        sample.name
        + (
            "{" + ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items())) + "}"
            if sample.labels
            else ""
        ): (sample.value)
        for metric in metrics
        for sample in metric.samples
        if not sample.name.endswith("_bucket")
    }


def busy(served: Served) -> None:
    """One of all that is counted."""
    device, other = served.device("a"), served.device("b")
    late = other.task()
    for _ in range(3):
        device.work()
    other.answer(late)  # of the first version
    flawed = device.task()
    with pytest.raises(grpc.RpcError):
        device.push(flawed, np.full(8, np.nan, np.float32))
    task = device.task()
    answer = device.answer(task, update_id="twice")
    assert device.answer(task, update_id="twice").receive_seq == 0 != answer.receive_seq  # told again
    dropped = other.task()
    other.stub.DropTask(devices.DropTaskRequest(client_id="b", task_id=dropped.task_id), timeout=600)
    device.fetch(exact=True)
    with pytest.raises(grpc.RpcError):
        device.fetch(version=99)
    assert served.info is not None
    with served.admin() as operator:
        operator.quarantine("b", "enough")
        operator.pause()
    assert other.ask().WhichOneof("answer") == "refusal"


def test_who_asks_how_a_run_stands_has_its_model_with_it(tmp_path: Path, manifest: Manifest) -> None:
    with Served(config(tmp_path), manifest) as served:
        for asks in (OperatorClient.status, OperatorClient.model):
            with served.admin() as operator:
                asks(operator)
                assert operator.model() == manifest.spec
        assert samples(scraped(served))["anabranch_calls_total{code=OK,method=GetStatus}"] == 2


def test_every_figure_is_what_was_done(tmp_path: Path, manifest: Manifest) -> None:
    with Served(config(tmp_path), manifest) as served:
        busy(served)
        found = samples(scraped(served))
        model = served.manifest.spec.size_bytes
    assert found["anabranch_leader"] == found["anabranch_paused"] == 1
    assert found["anabranch_finished"] == found["anabranch_draining"] == found["anabranch_queue_events"] == 0
    assert found["anabranch_version"] == found["anabranch_versions_published_total"] == 5
    assert found["anabranch_updates_total{reason=,verdict=published}"] == 5
    assert found["anabranch_updates_total{reason=invalid,verdict=rejected}"] == 1
    assert found["anabranch_updates_total{reason=,verdict=duplicate}"] == 1
    assert found["anabranch_update_staleness_versions_count"] == 5
    assert found["anabranch_update_staleness_versions_sum"] == 3, "b's was of the first version, three before"
    assert found["anabranch_tasks_granted_total"] == 7
    assert found["anabranch_leases_ended_total{end=dropped}"] == 1
    assert found["anabranch_asks_refused_total{reason=paused}"] == 1
    assert found["anabranch_clients_enrolled"] == found["anabranch_clients_online"] == 2
    assert found["anabranch_clients_quarantined"] == found["anabranch_clients_barred_total"] == 1
    assert found["anabranch_clients_training"] == found["anabranch_tasks_live"] == 0
    assert found["anabranch_push_bytes_count"] == 6
    assert found["anabranch_push_bytes_sum"] == 6 * 32
    assert found["anabranch_uplink_bytes_total"] == 6 * 32
    assert found["anabranch_uplink_raw_bytes_total"] == 5 * 32, "the flawed one is none"
    assert found["anabranch_observer_bytes_total"] >= model
    assert found["anabranch_fold_seconds_count"] == 6
    assert found["anabranch_batch_events_sum"] == found["anabranch_log_seq"], "each event is in one batch"
    commits = found["anabranch_commit_seconds_count"]
    assert commits == found["anabranch_batch_events_count"] == found["anabranch_log_fsync_seconds_count"]
    # Rows that wait are written without a batch too: of the two times either may be more.
    assert min(found["anabranch_commit_seconds_sum"], found["anabranch_log_append_seconds_sum"]) > 0
    assert found["anabranch_calls_total{code=OK,method=PushUpdate}"] == 6
    assert found["anabranch_calls_total{code=INVALID_ARGUMENT,method=PushUpdate}"] == 1
    assert found["anabranch_calls_total{code=NOT_FOUND,method=FetchModel}"] == 1
    assert found["anabranch_calls_total{code=OK,method=Quarantine}"] == 1
    assert found["process_resident_memory_bytes"] > 1e6


@pytest.mark.parametrize(
    ("run", "value", "given_up"),
    [({"rejections_max": 3}, float("nan"), 1), ({"updates_max": 3}, 1.0, 0)],
    ids=["nothing could be used", "its budget"],
)
def test_how_a_run_ended_is_known_after_a_restart_too(
    tmp_path: Path, manifest: Manifest, run: dict[str, int], value: float, given_up: int
) -> None:
    with Served(config(tmp_path, run=run), manifest) as served:
        device = served.device()
        before = samples(scraped(served))
        for _ in range(3):
            with suppress(grpc.RpcError):
                device.answer(device.task(), value)
        ended = samples(scraped(served))
    with Served(config(tmp_path, run=run), manifest) as served:
        again = samples(scraped(served))
    told = [(of["anabranch_finished"], of["anabranch_given_up"]) for of in (before, ended, again)]
    assert told == [(0, 0), (1, given_up), (1, given_up)]


def test_requests_over_a_stream_count_as_the_calls_that_they_stand_for(
    tmp_path: Path, manifest: Manifest
) -> None:
    with Served(config(tmp_path), manifest) as served:
        device = StreamDevice(served.channel(), manifest.spec)
        device.enrol()
        device.work()
        with pytest.raises(grpc.RpcError):
            device.send(devices.Task(task_id="t-0"), bytes(32))  # this ends the stream
        device.close()
        ended, until = "anabranch_calls_total{code=NOT_FOUND,method=Exchange}", time.monotonic() + CALL_S
        # The device hears of the end before the server has counted it.
        while ended not in (found := samples(scraped(served))) and time.monotonic() < until:
            pass
    assert found["anabranch_calls_total{code=OK,method=AskTask}"] == 1
    assert found["anabranch_calls_total{code=OK,method=PushUpdate}"] == 1
    assert found["anabranch_calls_total{code=NOT_FOUND,method=PushUpdate}"] == 1
    assert found[ended] == 1


def test_a_request_over_a_stream_counts_by_what_its_device_is_told_of_the_store(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def damaged(*_: object) -> str:
        raise StoreCorrupt("a row of model_versions cannot be read")

    with Served(config(tmp_path), manifest) as served:
        device = StreamDevice(served.channel(), manifest.spec)
        device.enrol()
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "head_of", damaged)
            with pytest.raises(grpc.RpcError, match="its log says why"):
                device.task()
        device.close()
        counted, until = "anabranch_calls_total{{code={},method=AskTask}}", time.monotonic() + CALL_S
        told = counted.format("UNAVAILABLE")
        while told not in (found := samples(scraped(served))) and time.monotonic() < until:
            pass
    assert found[told] == 1
    assert counted.format("INTERNAL") not in found


def test_who_trains_is_counted_through_restarts(tmp_path: Path, manifest: Manifest) -> None:
    settings = config(tmp_path, server={"tasks_per_client": 2})
    with Served(settings, manifest) as served:
        a, b = served.device("a"), served.device("b")
        first, _, _ = a.task(), a.task(), b.task()
        assert samples(scraped(served))["anabranch_clients_training"] == 2
        assert samples(scraped(served))["anabranch_tasks_live"] == 3
        a.answer(first)
        assert samples(scraped(served))["anabranch_clients_training"] == 2, "a has another task"
    with Served(settings, manifest) as served:
        found = samples(scraped(served))
        assert (found["anabranch_clients_training"], found["anabranch_tasks_live"]) == (2, 2)
        assert found["anabranch_clients_online"] == 0, "nobody has called this one"


def test_the_page_has_every_metric_and_no_other(tmp_path: Path, manifest: Manifest) -> None:
    with Served(config(tmp_path), manifest) as served:
        busy(served)
        metrics = scraped(served)
    ours = [metric for metric in metrics if not metric.name.startswith(OF_THE_LIBRARY)]
    found = {}
    for metric in ours:
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
        found[name] = (metric.type, labels)
    rows = re.findall(r"^\| `(anabranch_\w+)` \| (\w+) \| (.*?) \|", PAGE, re.MULTILINE)
    table = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    table["anabranch_calls_shed_total"] = found["anabranch_calls_shed_total"]  # nobody was shed: no labels
    assert found == table
    assert all(metric.documentation for metric in ours)


def names_in(text: str) -> set[str]:
    """Names of metrics in queries, without the endings of a histogram's series."""
    names = set(re.findall(r"\b(?:anabranch|process)_\w+(?=[\[{\s)(]|$)", text))
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}


@pytest.mark.parametrize("file", ["prometheus/alerts.yml", "grafana/dashboards/anabranch.json"])
def test_what_is_asked_for_is_there(tmp_path: Path, manifest: Manifest, file: str) -> None:
    text = (ROOT / "docker" / file).read_text(encoding="utf-8")
    if file.endswith(".json"):
        board = json.loads(text)
        text = "\n".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
        text += "\n" + "\n".join(str(variable["query"]) for variable in board["templating"]["list"])
    with Served(config(tmp_path), manifest) as served:
        busy(served)
        there = {m.name + ("_total" if m.type == "counter" else "") for m in scraped(served)}
    asked = names_in(re.sub(r"label_values\(", "", text).replace(",", " "))
    assert len(asked) > 8
    assert asked <= there


def test_every_alert_has_its_line_on_the_page() -> None:
    rules = (ROOT / "docker" / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    assert re.findall(r"alert: (\w+)", rules) == re.findall(r"^\| `(Anabranch\w+)` \|", PAGE, re.MULTILINE)


@pytest.mark.usefixtures("no_rows")
def test_operators_see_the_same(tmp_path: Path, manifest: Manifest) -> None:
    with Served(server_config(tmp_path / "data"), manifest) as served:
        assert served.info is not None
        assert served.info.metrics_address == "", "nothing listens unless it is told to"
        device = served.device()
        for _ in range(3):
            device.work()
        device.task()
        with served.admin() as operator:
            told, status = operator.metrics(), operator.status()
        assert (told.queue, told.queue_max) == (0, Limits().queue_events_max)
        assert told.commit_s.count == told.append_s.count == told.fsync_s.count == told.log_seq == 8
        assert 0 < told.fsync_s.p50 <= told.fsync_s.p99 <= told.commit_s.p99
        assert told.fold_s.count == told.push_bytes.count == told.staleness.count == 3
        assert told.push_bytes.p99 == 32
        assert (told.clients_training, told.calls_shed, told.uploads_open) == (1, 0, 0)
        assert told.memory_bytes > 1e6 < told.disk_free_bytes
        assert told.leader.startswith(f"{socket.gethostname()}:")
        assert 0 <= status.uptime_s - told.uptime_s < 600
        assert json.loads(json.dumps(told.to_json()))["commit_s"]["count"] == 8


def test_percentiles_are_of_the_newest() -> None:
    measure = Metrics().commit_s
    assert measure.percentiles().count == 0
    for value in range(3 * NEWEST, 0, -1):
        measure.add(value)
    found = measure.percentiles()
    assert (found.count, found.p50, found.p90, found.p99) == (3 * NEWEST, 500, 900, 990)


class Stuck(MemoryStore):
    """A disk that does not come back, once it was told so."""

    def __init__(self) -> None:
        super().__init__(Limits())
        self.at_work, self.go = threading.Event(), threading.Event()
        self.go.set()

    def append(self, entries: Sequence[Entry], projections: Sequence[Projection] = ()) -> list[int | None]:
        if not self.go.is_set():
            self.at_work.set()
            assert self.go.wait(600)
        return super().append(entries, projections)


@pytest.mark.usefixtures("no_rows")
def test_a_stuck_disk_is_told_and_not_waited_for(tmp_path: Path, manifest: Manifest) -> None:
    store = Stuck()
    limits = Limits(queue_events_max=2)
    with Served(config(tmp_path), manifest, limits, store) as served:
        device = served.device()
        store.go.clear()

        def come(number: int) -> None:
            with suppress(grpc.RpcError):  # sent away
                served.device(f"d{number}")

        others = [threading.Thread(target=come, args=(n,), daemon=True) for n in range(4)]
        try:
            others[0].start()
            assert store.at_work.wait(600)
            for thread in others[1:]:
                thread.start()
            found: dict[str, float] = {}
            while "anabranch_calls_shed_total{method=Enrol}" not in found:
                found = samples(scraped(served))
            found = samples(scraped(served))
            assert found["anabranch_queue_events"] == found["anabranch_queue_events_max"] == 2
            assert found["anabranch_calls_total{code=RESOURCE_EXHAUSTED,method=Enrol}"] >= 1
            assert served.info is not None
            with served.admin() as operator:
                assert operator.metrics().queue == 2, "operators need not wait for the writer either"
        finally:
            store.go.set()
        for thread in others:
            thread.join(600)
        device.work()


def test_an_order_that_waits_for_the_writer_may_be_carried_out_yet(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CONTROL_S", "ROLLBACK_S"):
        monkeypatch.setattr(f"anabranch.client.operator.{name}", 1.0)
    store = Stuck()
    with Served(config(tmp_path), manifest, store=store) as served, served.admin() as operator:
        store.go.clear()
        try:
            for order in (operator.pause, lambda: operator.rollback(0, ["device-1"])):
                with pytest.raises(Unavailable, match=r"no answer in time: .*; the order may be carried out"):
                    order()
            with pytest.raises(Unavailable, match=r"the link is slow$"):  # no order
                operator.status()
        finally:
            store.go.set()


def test_the_address_is_refused_in_a_line() -> None:
    with pytest.raises(ConfigError, match="write host:port"):
        Exposition(Metrics().registry, "9464")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(PortInUse, match=r"server\.metrics_address: .* cannot be served on"),
    ):
        Exposition(Metrics().registry, f"127.0.0.1:{taken.getsockname()[1]}")


def test_what_others_may_read_is_said(caplog: pytest.LogCaptureFixture) -> None:
    import asyncio

    port = Exposition(Metrics().registry, "0.0.0.0:0")
    asyncio.run(port.close())
    assert "for whoever reaches it" in caplog.text
