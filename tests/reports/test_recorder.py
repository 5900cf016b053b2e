"""The recorder: lists of events with their exact result, and counts that add up."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_lists import lists_up_to

from anabranch.core.config.goal import Goal
from anabranch.core.errors import DataError
from anabranch.core.model.updates import Decision, Reason, Verdict
from anabranch.reports.recorder import EVENT_KINDS, Recorder, summarise
from anabranch.reports.result import ClientShare, Kind, Point, Staleness


def recorder(target: float = 0.8, kind: Kind = "simulated", path: Path | None = None) -> Recorder:
    return Recorder("fedbuff", "digits", 7, Goal(target=target or None), {"run": {"seed": 7}}, kind, path)


def held(staleness: int = 0) -> Decision:
    return Decision(Verdict.HELD, staleness, 1.0)


def published(staleness: int = 0) -> Decision:
    return Decision(Verdict.PUBLISHED, staleness, 0.5)


def test_a_run_comes_to_exactly_this() -> None:
    r = recorder()
    r.evaluated(0.0, 0, {"accuracy": 0.1, "loss": 2.3})
    r.granted(1.0, "a", "t1", 0)
    r.downloaded(1.5, "a", 100)
    r.granted(1.6, "b", "t2", 0)
    r.downloaded(1.8, "b", 100)
    r.granted(1.9, "idle", "t3", 0)
    r.decided(3.0, "a", 0, held(), 40, 10)
    r.decided(4.0, "b", 1, published(), 60, 30)
    r.published(4.0, 1)
    r.decided(5.0, "a", 1, Decision(Verdict.REJECTED, 5, None, Reason.STALE), 40, 10)
    r.decided(6.0, "a", 2, published(3), 40, 10)
    r.published(6.0, 2)
    r.evaluated(8.0, 2, {"accuracy": 0.81, "loss": 0.7})
    r.evaluated(9.0, 1, {"accuracy": 0.79, "loss": 0.8})
    got = r.result("m", "j", 0.25)

    assert got.history == (
        Point(0.0, 0, 0, 0.1, 2.3, 0, 0),
        Point(4.0, 1, 2, 0.79, 0.8, 100, 200),
        Point(6.0, 2, 3, 0.81, 0.7, 180, 200),
    )
    assert got.clients == {
        "a": ClientShare(2, 1, 20, 1.5, 120, 100),
        "b": ClientShare(1, 0, 30, 0.0, 60, 100),
        "idle": ClientShare(0, 0, 0, 0.0, 0, 0),
    }
    assert got.staleness == Staleness(1.0, 0, 3, 3, {0: 2, 3: 1})
    assert (got.versions, got.updates_applied, got.updates_rejected) == (2, 3, 1)
    assert (got.uplink_bytes, got.downlink_bytes, got.events) == (180, 200, 14)
    assert (got.final_accuracy, got.best_accuracy) == (0.81, 0.81)
    assert (got.time_to_target_s, got.bytes_to_target) == (6.0, 380)
    assert got.rejections == {"stale": 1}
    assert (got.wall_s, got.virtual_s) == (0.25, 9.0)
    assert (got.strategy, got.workload, got.seed, got.kind) == ("fedbuff", "digits", 7, "simulated")
    assert (got.model_sha256, got.journal_sha256) == ("m", "j")


def test_a_late_evaluation_carries_the_counts_of_its_publication() -> None:
    r = recorder()
    r.decided(1.0, "a", 1, published(), 10, 1)
    r.published(1.0, 1)
    for i in range(5):
        r.downloaded(2.0 + i, "a", 1000)
        r.decided(2.0 + i, "a", 1, held(), 10, 1)
    r.evaluated(60.0, 1, {"accuracy": 0.9, "loss": 0.1})
    assert r.result("", "", 60.0).history == (Point(1.0, 1, 1, 0.9, 0.1, 10, 0),)


def test_the_final_accuracy_is_of_the_newest_version_and_the_best_of_any() -> None:
    r = recorder()
    for version, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7)):
        r.published(float(version), version)
        r.evaluated(10.0 - version, version, {"accuracy": accuracy, "loss": 0.0})
    got = r.result("", "", 0.0)
    assert (got.final_accuracy, got.best_accuracy, got.time_to_target_s) == (0.7, 0.9, 2.0)


def test_a_second_evaluation_of_a_version_replaces_the_first() -> None:
    r = recorder()
    r.published(1.0, 1)
    r.evaluated(2.0, 1, {"accuracy": 0.4, "loss": 1.0})
    r.evaluated(3.0, 1, {"accuracy": 0.5, "loss": 0.9})
    assert [p.accuracy for p in r.result("", "", 0.0).history] == [0.5]


def test_an_evaluation_that_overtakes_its_publication_is_dated_by_the_publication() -> None:
    r = recorder()
    r.evaluated(2.0, 1, {"accuracy": 0.4, "loss": 1.0})
    assert r.result("", "", 0.0).history[0].time_s == 2.0
    r.published(1.5, 1)
    assert r.result("", "", 0.0).history[0].time_s == 1.5


def test_what_a_rule_has_heard_of_a_device_is_the_mean_over_its_updates() -> None:
    r = recorder()
    r.published(1.0, 1, [("a", 0.5), ("b", 1.0), ("a", 0.0)])
    r.published(2.0, 2, [("a", 1.0)])
    r.granted(3.0, "c", "t1", 2)
    shares = r.result("", "", 0.0).clients
    assert {name: share.heard for name, share in shares.items()} == {"a": 0.5, "b": 1.0, "c": None}


def test_versions_that_are_taken_back_are_measured_no_more() -> None:
    """Their numbers come again, and then mean other models."""
    r = recorder()
    for version in (1, 2, 3):
        r.decided(float(version), "a", version, published(), 10, 1)
        r.published(float(version), version)
        r.evaluated(version + 0.5, version, {"accuracy": version / 10})
    r.taken_back(4.0, 1, 2, 5)
    got = r.result("", "", 0.0)
    assert [(p.version, p.time_s, p.accuracy) for p in got.history] == [(1, 1.0, 0.1)]
    assert (got.versions, got.updates_left_out) == (1, 2 + 5)
    r.decided(5.0, "a", 2, published(), 10, 1)
    r.published(5.0, 2)
    r.evaluated(5.5, 2, {"accuracy": 0.4})
    r.taken_back(6.0, 1, 1, 4)
    got = r.result("", "", 0.0)
    assert [p.version for p in got.history] == [1]
    assert got.updates_left_out == 2 + 1 + 4, "what is lost adds up; of those left out the newest word counts"


@pytest.mark.parametrize(("target", "reached"), [(0.0, None), (0.5, 1.0), (0.51, None)])
def test_the_target(target: float, reached: float | None) -> None:
    r = recorder(target)
    r.published(1.0, 1)
    r.evaluated(2.0, 1, {"accuracy": 0.5, "loss": 1.0})
    assert r.result("", "", 0.0).time_to_target_s == reached


def test_nothing_happened() -> None:
    got = recorder(kind="live").result("", "", 0.0)
    assert got.history == ()
    assert (got.final_accuracy, got.best_accuracy, got.time_to_target_s, got.virtual_s) == (None,) * 4
    assert got.staleness == Staleness(0.0, 0, 0, 0, {})
    assert (got.versions, got.events, got.clients) == (0, 0, {})


def test_what_is_not_finite_is_none_and_what_is_not_measured_is_not_there() -> None:
    r = recorder()
    r.evaluated(0.0, 0, {"accuracy": 0.1, "loss": float("nan")})
    assert r.result("", "", 0.0).history[0].loss is None
    r.evaluated(0.0, 3, {"accuracy": float("nan"), "loss": 0.1, "auc": 0.5, "f1": float("inf")})
    r.evaluated(0.0, 4, {"mae": 2})
    got = r.result("", "", 0.0)
    assert [(p.accuracy, p.loss, p.metrics) for p in got.history[1:]] == [
        (None, 0.1, {"auc": 0.5, "f1": None}),
        (None, None, {"mae": 2.0}),
    ]
    assert (got.final_accuracy, got.best_accuracy) == (None, 0.1)


def test_events_are_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    with recorder(path=path) as r:
        r.granted(0.5, "a", "t1", 0)
        r.downloaded(0.6, "a", 12)
        r.decided(1.0, "a", 1, published(2), 34, 5)
        r.published(1.0, 1)
        r.evaluated(2.0, 1, {"accuracy": 0.5, "loss": float("inf")})
        r.note(3.0, "lease expired", task="t2", count=np.int64(3), where=Path("x"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [
        {"time_s": 0.5, "kind": "granted", "client": "a", "task": "t1", "version": 0},
        {"time_s": 0.6, "kind": "downloaded", "client": "a", "bytes": 12},
        {
            "time_s": 1.0,
            "kind": "decided",
            "client": "a",
            "version": 1,
            "verdict": "published",
            "staleness": 2,
            "weight": 0.5,
            "reason": "",
            "detail": "",
            "uplink_bytes": 34,
            "examples": 5,
        },
        {"time_s": 1.0, "kind": "published", "version": 1},
        {"time_s": 2.0, "kind": "evaluated", "version": 1, "accuracy": 0.5, "loss": None},
        {"time_s": 3.0, "kind": "lease expired", "task": "t2", "count": 3, "where": "x"},
    ]
    assert r.result("", "", 0.0).events == len(rows)


def test_a_note_that_json_cannot_carry_is_named(tmp_path: Path) -> None:
    with recorder(path=tmp_path / "events.jsonl") as r, pytest.raises(DataError, match="'strange'"):
        r.note(0.0, "strange", value=float("nan"))


@given(st.dictionaries(st.integers(0, 10_000), st.integers(1, 50), min_size=1, max_size=30))
def test_staleness_agrees_with_numpy(counts: dict[int, int]) -> None:
    values = np.repeat(list(counts), list(counts.values()))
    got = summarise(counts)
    assert got.mean == pytest.approx(values.mean())
    assert got.p50 == np.quantile(values, 0.5, method="inverted_cdf")
    assert got.p90 == np.quantile(values, 0.9, method="inverted_cdf")
    assert got.max == values.max()


EVENTS = lists_up_to(
    60,
    st.tuples(
        st.sampled_from(["download", "apply", "publish", "reject", "evaluate"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 1000),
    ),
)


@given(EVENTS)
def test_counts_add_up(events: list[tuple[str, str, int]]) -> None:
    r, version = recorder(), 0
    for now, (what, client, n) in enumerate(events):
        if what == "download":
            r.downloaded(now, client, n)
        elif what == "apply":
            r.decided(now, client, version, held(n % 5), n, 1)
        elif what == "publish":
            version += 1
            r.decided(now, client, version, published(n % 5), n, 1)
            r.published(now, version)
        elif what == "reject":
            r.decided(now, client, version, Decision(Verdict.REJECTED, n, None, Reason.STALE), n, 1)
        else:
            r.evaluated(now, version, {"accuracy": n / 1000, "loss": 1.0})
    got = r.result("", "", 0.0)
    shares = list(got.clients.values())
    assert got.updates_applied == sum(s.updates for s in shares) == sum(got.staleness.histogram.values())
    assert got.updates_rejected == sum(s.rejected for s in shares) == sum(got.rejections.values())
    assert got.uplink_bytes == sum(s.uplink_bytes for s in shares)
    assert got.downlink_bytes == sum(s.downlink_bytes for s in shares)
    assert got.events == len(events) + version
    assert got.versions == version
    counts = [(p.time_s, p.version, p.updates, p.uplink_bytes, p.downlink_bytes) for p in got.history]
    assert all(x <= y for one, two in itertools.pairwise(counts) for x, y in zip(one, two, strict=True))


def test_the_kinds_of_events_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/files.md").read_text()
    table = page.partition("### `events.jsonl`")[2].partition("### ")[0]
    names = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(names))) == sorted(EVENT_KINDS)
