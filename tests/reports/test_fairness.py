"""How evenly a metric falls out, against the definitions in exact numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from math import sqrt
from pathlib import Path

import pytest
from page_tables import cells_of

from anabranch.core.config.goal import AUTO_GOAL, Goal
from anabranch.core.model.updates import Decision, Reason, Verdict
from anabranch.reports.compare import compare, compare_html
from anabranch.reports.fairness import jain, worst_tenth
from anabranch.reports.html import report_html
from anabranch.reports.recorder import Recorder
from anabranch.reports.result import Fairness, Result

Trained = dict[str, list[dict[str, float]]]  # the metrics of each update, by device

HELD = Decision(Verdict.HELD, 0, 1.0)
REFUSED = Decision(Verdict.REJECTED, 0, None, Reason.STALE)


def recorded(
    trained: dict[str, list[dict[str, float]]],
    measured: Sequence[dict[str, float]] = (),
    goal: Goal = AUTO_GOAL,
) -> Result:
    """A run whose devices sent updates with these metrics, and whose versions were measured so."""
    recorder = Recorder("fedbuff", "synthetic", 0, goal, {}, "simulated")
    for client, updates in trained.items():
        for metrics in updates:
            recorder.decided(1.0, client, 0, HELD, 100, 10, metrics=metrics)
    for version, metrics in enumerate(measured):
        recorder.evaluated(2.0 + version, version, metrics)
    return recorder.result("0" * 64, "f" * 64, 1.5)


def exact(values: Sequence[float], best_is_least: bool) -> tuple[float, float, float, float]:
    """Mean, deviation, worst tenth and Jain's index, of fractions."""
    known = [Fraction(v) for v in values]
    mean = sum(known) / len(known)
    variance = sum((x - mean) ** 2 for x in known) / len(known)
    tenth = sorted(known, reverse=best_is_least)[: max(1, -(-len(known) // 10))]
    index = sum(known) ** 2 / (len(known) * sum(x * x for x in known))
    return float(mean), sqrt(variance), float(sum(tenth) / len(tenth)), float(index)


def figures(f: Fairness) -> tuple[float | None, ...]:
    return f.mean, f.deviation, f.worst_tenth, f.jain


@pytest.mark.parametrize("count", [2, 9, 10, 11, 25, 400])
def test_over_devices_the_last_applied_update_of_each_counts(count: int) -> None:
    losses = {f"d{i}": 0.1 + (7 * i % 11) / 3 for i in range(count)}
    trained = {c: [{"loss": 99.0, "train_s": 5.0}, {"loss": v, "train_s": 1.0}] for c, v in losses.items()}
    (found,) = recorded(trained).fairness
    assert (found.metric, found.over, found.count) == ("loss", "devices", count)
    assert figures(found) == pytest.approx(exact(list(losses.values()), best_is_least=True), rel=1e-12)
    assert (found.least, found.greatest) == (min(losses.values()), max(losses.values()))


def test_a_rejected_update_says_nothing_of_its_device() -> None:
    recorder = Recorder("fedbuff", "synthetic", 0, Goal(), {}, "simulated")
    for client, loss in (("a", 1.0), ("b", 3.0)):
        recorder.decided(1.0, client, 0, HELD, 100, 10, metrics={"loss": loss})
    recorder.decided(2.0, "b", 0, REFUSED, 100, 10, metrics={"loss": 1e9})
    result = recorder.result("0" * 64, "f" * 64, 1.5)
    assert result.clients["b"].metrics == {"loss": 3.0}
    assert result.fairness[0].worst_tenth == 3.0


def test_over_groups_the_last_measurement_counts() -> None:
    measured = [
        {"mae": 9.0, "mae[day]": 8.0, "mae[night]": 10.0},
        {"mae": 2.0, "mae[day]": 1.0, "mae[night]": 3.0},
        {"mae": 1.5},  # without groups
    ]
    (found,) = recorded({}, measured, Goal("mae", "min")).fairness
    assert (found.metric, found.over, found.count) == ("mae", "groups", 2)
    assert figures(found) == pytest.approx((2.0, 1.0, 3.0, 0.8))


def test_without_a_way_nothing_is_worst() -> None:
    (found,) = recorded({"a": [{"depth": 1.0}], "b": [{"depth": 5.0}]}).fairness
    assert (found.worst_tenth, found.mean, found.deviation) == (None, 3.0, 2.0)
    goal = Goal("depth", "max")
    (judged,) = recorded({"a": [{"depth": 1.0}], "b": [{"depth": 5.0}]}, goal=goal).fairness
    assert judged.worst_tenth == 1.0


@pytest.mark.parametrize("trained", [{}, {"a": [{"loss": 1.0}]}, {"a": [{}], "b": [{}]}])
def test_of_one_alone_nothing_is_said(trained: Trained) -> None:
    result = recorded(trained)
    assert result.fairness == ()
    assert "Fairness" not in report_html(result)


@pytest.mark.parametrize("values", [[-1.0, 2.0], [0.0, 0.0]])
def test_where_jains_index_says_nothing(values: list[float]) -> None:
    assert jain(values) is None


def test_no_number_of_a_device_breaks_the_result(tmp_path: Path) -> None:
    """A device may send any finite number under any name; `result.json` has finite ones alone."""
    strange = {f"name-{i}": 1.0 for i in range(64)}
    trained = {c: [{"loss": v, **strange}] for c, v in (("a", 1.7e308), ("b", 1.7e308), ("c", 5e-324))}
    result = recorded(trained | {"d": [{f"other-{i}": 1.0 for i in range(64)}]})
    found = {f.metric: f for f in result.fairness}
    assert len(found) <= 64
    assert found["loss"].mean == pytest.approx(1.7e308 / 3 * 2)
    assert found["loss"].jain == pytest.approx(2 / 3)
    data = json.loads(result.write(tmp_path).read_text())
    assert Result.read(tmp_path) == result
    assert data["fairness"][0].keys() == Fairness.__annotations__.keys()


def test_the_pages_have_it() -> None:
    runs = [
        recorded({"a": [{"loss": 1.0 + i}], "b": [{"loss": 3.0 + i}]}, [{"loss": 1.0}], Goal())
        for i in (0, 2)
    ]
    page = report_html(runs[0])
    assert cells_of(page, "Fairness") == [
        ["metric", "over", "mean", "worst tenth", "deviation", "Jain's index", "least", "greatest"],
        ["Loss", "2 devices", "2.00", "3.00", "1.00", "0.800", "1.00", "3.00"],
    ]
    (row,) = compare(runs)
    assert row.worst_tenths["loss over devices"].mean == 4.0
    assert row.deviations["loss over devices"].mean == 1.0
    assert "worst tenth, loss over devices" in compare_html(runs)


def test_the_worst_tenth_is_one_at_least() -> None:
    assert worst_tenth([3.0, 1.0, 2.0], "max") == 1.0
    assert worst_tenth([3.0, 1.0, 2.0], "min") == 3.0
    assert worst_tenth([float(i) for i in range(20)], "max") == 0.5
