"""`result.json`: there and back, and what is said of a broken one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabranch.core.errors import DataError
from anabranch.reports.result import Result

REQUIRED = {
    *("strategy", "workload", "seed", "kind", "config", "versions", "events", "anabranch_version"),
    *("updates_applied", "updates_rejected", "uplink_bytes", "downlink_bytes", "clients", "rejections"),
    *("final_accuracy", "best_accuracy", "target_accuracy", "time_to_target_s", "bytes_to_target"),
    *("metric", "mode", "target", "final_value", "best_value"),
    *("staleness", "history", "model_sha256", "journal_sha256", "wall_s", "virtual_s"),
    *("uplink_bytes_raw", "downlink_bytes_full_equivalent", "compression", "coverage"),
    *("status", "why", "given_up", "started_at", "host", "parameters", "model_bytes"),
    *("settings_changed", "fairness", "privacy", "masked", "devices_unfit", "energy", "code"),
    "updates_left_out",
}


@pytest.mark.parametrize("updates", [0, 60])
def test_there_and_back(record: Callable[..., Result], tmp_path: Path, updates: int) -> None:
    result = record(updates=updates)
    path = result.write(tmp_path / "run")
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]
    assert Result.read(tmp_path / "run") == result


def test_it_has_the_fields_that_are_promised(record: Callable[..., Result], tmp_path: Path) -> None:
    data = json.loads(record().write(tmp_path).read_text())
    assert set(data) == REQUIRED
    assert set(data["staleness"]) == {"mean", "p50", "p90", "max", "histogram"}
    assert set(data["history"][0]) == {
        "time_s", "version", "updates", "accuracy", "loss", "uplink_bytes", "downlink_bytes",
        "metrics", "energy_j",
    }  # fmt: skip
    assert set(data["clients"]["a"]) == {
        "updates", "rejected", "examples", "staleness_mean", "uplink_bytes", "downlink_bytes",
        "metrics", "heard", "energy_j",
    }  # fmt: skip
    assert data["staleness"]["histogram"]["0"] > 0


def test_nan_is_never_written(record: Callable[..., Result], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        replace(record(), wall_s=float("nan")).write(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["mine", "runs/mine"])
def test_where_runs_lie_below_one_of_them_is_named(
    place: str, record: Callable[..., Result], tmp_path: Path
) -> None:
    record().write(tmp_path / place)
    with pytest.raises(DataError, match=f"name the folder of a run that has ended, such as .*/{place}$"):
        Result.read(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"result\.json is missing: name the folder of a run that has ended$"):
        Result.read(tmp_path)
    (tmp_path / "anabranch.db").touch()
    told = f"`anabranch report {tmp_path}` makes one, and `anabranch verify {tmp_path}`"
    with pytest.raises(DataError, match=told):
        Result.read(tmp_path)
    (tmp_path / "journal.jsonl").touch()
    with pytest.raises(DataError, match=r"has a journal and no result\.json.*--resume$"):
        Result.read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", '{"a": NaN}', "\x00"])
def test_what_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(DataError, match=r"result\.json cannot be read"):
        Result.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.pop("seed"), "'seed' is missing"),
        (lambda d: d.update(seed="1"), "seed must be int, not '1'"),
        (lambda d: d.update(seed=True), "seed must be int, not True"),
        (lambda d: d.update(wall_s=None), "wall_s must be float, not None"),
        (lambda d: d.update(wall_s=float("inf")), "wall_s must be finite"),
        (lambda d: d.update(kind="dreamt"), "kind must be one of live, simulated, not 'dreamt'"),
        (lambda d: d.update(history={}), "history must be a list"),
        (lambda d: d["history"][2].pop("loss"), r"history\[2\]: 'loss' is missing"),
        (lambda d: d.update(staleness=[]), "staleness must be an object"),
        (lambda d: d["staleness"]["histogram"].update(x=1), "histogram: its keys must be int"),
        (lambda d: d["clients"].update(a=3), r"clients\['a'\] must be an object, not 3"),
        (lambda d: d.update(rejections=[1]), "rejections must be an object"),
    ],
)
def test_a_malformed_field_is_named(
    record: Callable[..., Result], change: Callable[[dict[str, Any]], object], says: str
) -> None:
    data = json.loads(json.dumps(record().to_json()))
    change(data)
    with pytest.raises(DataError, match=says):
        Result.from_json(data)


def test_whole_numbers_serve_as_floats_and_unknown_keys_are_passed_over(
    record: Callable[..., Result],
) -> None:
    data = record().to_json() | {"wall_s": 2, "later_field": 1}
    assert Result.from_json(data).wall_s == 2.0


def test_a_result_of_before_there_were_metrics_is_read(record: Callable[..., Result], tmp_path: Path) -> None:
    data = record().to_json()
    for point in data["history"]:
        del point["metrics"]
    (tmp_path / "result.json").write_text(json.dumps(data))
    assert all(dict(point.metrics) == {} for point in Result.read(tmp_path).history)


def test_something_else_is_no_result() -> None:
    with pytest.raises(DataError, match="result must be an object, not 3"):
        Result.from_json(3)
