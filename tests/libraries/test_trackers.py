"""Trackers of libraries of others: what each has written, read back by that library's own reader."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus import NOT_HERE, PATIENCE_S, PROMETHEUS, prometheus

import anabranch as ab
from anabranch.core.errors import ConfigError
from anabranch.reports.result import Result
from anabranch.reports.trackers import TRACKERS, tell_of
from anabranch.reports.tracking.run import Moment
from anabranch.testing import TrackerConformance

# What these libraries warn of is theirs.
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("default")]

Rows = dict[str, list[tuple[int, float]]]  # by name: step, value
AXES = ("run/time_s", "run/updates", "run/uplink_bytes", "run/downlink_bytes")


def of_tensorboard(folder: Path) -> Rows:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def of_mlflow(folder: Path) -> Rows:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder.absolute()}/mlflow.db")
    experiment = client.get_experiment_by_name("anabranch")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status in ("FINISHED", "KILLED")
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [(m.step, m.value) for m in history] for name, history in histories.items()}


BLOCK_BYTES, HEAD_BYTES = 32 * 1024, 7
WHOLE, FIRST, LAST = 1, 2, 4


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a log of LevelDB's kind, as W&B's files are: blocks of pieces, each with a head."""
    place, record = HEAD_BYTES, b""  # behind the file's own
    while place + HEAD_BYTES <= len(data):
        if (left := BLOCK_BYTES - place % BLOCK_BYTES) < HEAD_BYTES:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        piece = data[place + HEAD_BYTES : place + HEAD_BYTES + size]
        record = piece if kind in (WHOLE, FIRST) else record + piece
        place += HEAD_BYTES + size
        if kind in (WHOLE, LAST):
            yield record


def of_wandb(folder: Path) -> Rows:
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    latest, kinds = time.monotonic() + PATIENCE_S, list[str | None]()
    rows: Rows = {}
    while "exit" not in kinds:  # a process of W&B's own writes the end, soon after
        assert time.monotonic() < latest
        rows, kinds = {}, []
        for data in log_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            kinds.append(record.WhichOneof("record_type"))
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            for name, value in items.items():
                if name != "version" and not name.startswith("_"):
                    rows.setdefault(name, []).append((items["version"], value))
    return rows


READERS: dict[str, Callable[[Path], Rows]] = {
    "tensorboard": of_tensorboard,
    "mlflow": of_mlflow,
    "wandb": of_wandb,
}


class Kept(TrackerConformance):
    """That of a library which keeps what it is told in the run's folder."""

    reader: Callable[[Path], Rows]

    def test_it_says_of_each_run_what_it_was_told(self, tmp_path: Path, run: Any) -> None:
        tracker: Any = self.new()
        tracker.start(run)
        tracker.metrics(0, {"accuracy": 0.125})
        tracker.at(Moment(3, 1.5, 6, 1000, 2000))
        tracker.metrics(3, {"accuracy": 0.5, "loss": 2.0})
        tracker.finish({"status": "finished"})
        found = type(self).reader(tmp_path)
        assert found["accuracy"] == [(0, 0.125), (3, 0.5)]
        assert found["loss"] == [(3, 2.0)]
        assert [found[axis] for axis in AXES] == [[(3, 1.5)], [(3, 6.0)], [(3, 1000.0)], [(3, 2000.0)]]


class TestTensorBoard(Kept):
    tracker = TRACKERS.find("tensorboard")
    reader = staticmethod(of_tensorboard)


class TestMlflow(Kept):
    tracker = TRACKERS.find("mlflow")
    reader = staticmethod(of_mlflow)


class TestWeightsAndBiases(Kept):
    tracker = TRACKERS.find("wandb")
    reader = staticmethod(of_wandb)


def expected(result: Result) -> Rows:
    """What the run's own history says."""
    rows: Rows = {}
    for point in result.history:
        for name, value in {**Moment.of(point).values(), **point.measured}.items():
            if value is not None:
                rows.setdefault(name, []).append((point.version, value))
    return rows


def same(found: Rows, wanted: Rows) -> bool:
    """TensorBoard keeps single precision."""
    return found.keys() == wanted.keys() and all(
        [step for step, _ in found[name]] == [step for step, _ in wanted[name]]
        and all(
            math.isclose(a, b, rel_tol=1e-6) for (_, a), (_, b) in zip(found[name], wanted[name], strict=True)
        )
        for name in wanted
    )


def simulated(folder: Path, *names: str) -> Result:
    settings = {"run.trackers": list(names), "fleet.clients": 3, "client.steps": 5}
    return ab.simulate("synthetic", until=ab.Until(updates=20), settings=settings, out=folder).result


def test_a_simulation_and_a_report_of_it_tell_the_same(tmp_path: Path) -> None:
    result = simulated(tmp_path / "run", *READERS)
    assert len(result.history) > 1
    for name, reader in READERS.items():
        assert same(reader(tmp_path / "run"), expected(result)), name
    again = tmp_path / "again"
    again.mkdir()
    tell_of(result, again, list(READERS))
    for name, reader in READERS.items():
        assert same(reader(again), expected(result)), name


def test_a_live_run_is_told_as_well(tmp_path: Path) -> None:
    settings = {"run.trackers": list(READERS), "client.steps": 5}
    with ab.Server("synthetic", until=ab.Until(updates=10), settings=settings, data_dir=tmp_path) as server:
        with ab.Client("synthetic", server, id="device-0"):
            server.wait(600)
        with server.operator() as operator:
            newest = operator.status().version
            operator.report_metrics(newest, {"accuracy": 0.75})
        latest = time.monotonic() + PATIENCE_S
        while "accuracy" not in of_tensorboard(tmp_path / "data"):  # told of in the background
            assert time.monotonic() < latest
    for name, reader in READERS.items():
        found = reader(tmp_path / "data")
        assert found["accuracy"] == [(newest, 0.75)], name
        assert found["run/updates"] == [(newest, 10.0)], name
        assert found["run/uplink_bytes"][0][1] > 0, name


@pytest.mark.skipif(PROMETHEUS is None, reason=NOT_HERE)
def test_a_real_prometheus_takes_what_is_written_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = "global: {scrape_interval: 1m}\n"
    with prometheus(tmp_path / "prometheus", config, "--web.enable-remote-write-receiver") as found:
        monkeypatch.setenv("PROMETHEUS_REMOTE_WRITE_URL", f"http://{found.address}/api/v1/write")
        result = simulated(tmp_path / "run", "prometheus")
        names = {"accuracy", "loss"} & result.history[-1].measured.keys()
        assert names
        wanted = expected(result)
        for name in names:
            query = f'anabranch_run_metric{{job="anabranch", kind="simulated", metric="{name}"}}[1h]'
            (series,) = found.ask("query", query=query)["result"]
            assert [float(v) for _, v in series["values"]] == [value for _, value in wanted[name]]
            assert series["metric"]["workload"] == "synthetic"
        (versions,) = found.ask("query", query="anabranch_run_version[1h]")["result"]
        assert [int(v) for _, v in versions["values"]] == [point.version for point in result.history]
        (updates,) = found.ask("query", query="anabranch_run_updates[1h]")["result"]
        assert [int(v) for _, v in updates["values"]] == [point.updates for point in result.history]


def test_where_it_is_sent_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_REMOTE_WRITE_URL", raising=False)
    with pytest.raises(ConfigError, match="set PROMETHEUS_REMOTE_WRITE_URL"):
        TRACKERS.find("prometheus")()
