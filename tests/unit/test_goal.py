"""What a run is judged by: any metric of the App's, which way is better, and a target."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.config.goal import Goal
from anabranch.core.config.tables import Config, merge
from anabranch.core.errors import ConfigError
from anabranch.core.model.metrics import by_group, names_flaw, ungrouped

NAN = math.nan
FIGURES = st.floats(-1e6, 1e6)


def goal(**run: Any) -> Goal:
    return Goal.of(merge([("test", {"run": run})]).run)


def test_without_a_word_the_accuracy_counts_and_the_loss_where_there_is_none() -> None:
    nothing = goal()
    assert nothing.value({"loss": 3.0, "accuracy": 0.5}) == 0.5
    assert nothing.value({"mae": 1.0, "loss": 3.0}) == 3.0
    assert nothing.value({"mae": 1.0}) is None
    assert (nothing.rank({"loss": 0.001}) or ()) < (nothing.rank({"accuracy": 0.0}) or ())
    assert nothing.rank({"accuracy": NAN, "loss": 1.0}) is None, "a loss stands for no accuracy"


def test_what_says_nothing_is_not_in_the_configuration() -> None:
    assert {"metric", "mode", "target"}.isdisjoint(Config().to_json()["run"])
    named = merge([("test", {"run": {"metric": "mse", "mode": "min", "target": 0.5}})])
    assert Config.from_json(named.to_json()) == named
    assert Goal.of_json(named.to_json()) == Goal("mse", "min", 0.5)
    assert Goal.of_json({"run": {"target_accuracy": 0.7, "workload": "x"}}) == Goal(target=0.7)
    assert Goal.of_json({}) == Goal()


@given(FIGURES, FIGURES, st.sampled_from(["max", "min"]))
def test_more_is_better_or_less(a: float, b: float, mode: str) -> None:
    named = goal(metric="score", mode=mode)
    ranks = [named.rank({"score": v, "accuracy": 1.0}) for v in (a, b)]
    better = a > b if mode == "max" else a < b
    assert (ranks[0] > ranks[1]) == better  # type: ignore[operator]


@given(FIGURES, FIGURES)
def test_a_target_is_reached_from_its_own_side(value: float, target: float) -> None:
    assert goal(metric="mse", mode="min", target=target).reached({"mse": value}) == (value <= target)
    assert goal(metric="gain", mode="max", target=target).reached({"gain": value}) == (value >= target)


def test_a_target_of_accuracy_is_none_of_the_loss() -> None:
    asked = goal(target_accuracy=0.8)
    assert asked.reached({"accuracy": 0.8, "loss": 9.0})
    assert not asked.reached({"loss": 0.0}), "a small loss is no accuracy"
    assert not goal().reached({"accuracy": 1.0}), "there is no target"
    assert goal(metric="accuracy", target=0.8).reached({"accuracy": 0.8})


def test_everybody_knows_which_way_accuracy_and_loss_go() -> None:
    assert (goal(metric="accuracy").mode, goal(metric="loss").mode) == ("max", "min")
    assert goal(metric="loss", mode="max").mode == "max", "a log likelihood may be called so"


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"metric": "mse"}, "run.metric = 'mse' needs run.mode: 'max'"),
        ({"metric": "mse", "mode": "down"}, "run.mode must be one of auto, max, min"),
        ({"mode": "min"}, "run.mode = 'min' is of a metric that is named: set run.metric"),
        ({"metric": "", "mode": "min"}, "run.metric, '', must have 1 to 64"),
        ({"metric": "m\nse", "mode": "min"}, "must be printable"),
        ({"metric": "version", "mode": "min"}, "must be another one"),
        ({"target": 0.5}, "run.target is of a metric that is named"),
        ({"metric": "mse", "mode": "min", "target": "low"}, "run.target must be a number or 'none'"),
        ({"metric": "mse", "mode": "min", "target": NAN}, "run.target must be a finite number"),
        ({"metric": "mse", "mode": "min", "target": True}, "run.target must be float or str"),
        ({"metric": "mse", "mode": "min", "target_accuracy": 0.5}, "no target of 'mse'.*set run.target"),
        ({"metric": "accuracy", "target": 0.5, "target_accuracy": 0.5}, "set one of them"),
    ],
)
def test_a_goal_that_says_nothing_clear_is_an_error(run: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        goal(**run)


def test_a_metric_that_was_named_must_be_measured() -> None:
    named = goal(metric="mse", mode="min")
    assert named.lacking(["mse", "mae"]) == ""
    assert named.lacking(["mae", "loss"]).startswith(
        "run.metric is 'mse', and evaluate returns no such metric, but mae, loss: set run.metric"
    )
    assert goal().lacking(["mae"]) == "", "nobody has named one"


def test_a_target_of_an_accuracy_that_nobody_measures_is_said() -> None:
    assert (
        goal(target_accuracy=0.9)
        .idle(["mae"])
        .startswith("the target is of the accuracy, and evaluate returns none, but mae")
    )
    assert goal(target_accuracy=0.9).idle(["accuracy", "mae"]) == ""
    assert goal().idle(["mae"]) == ""
    assert goal(metric="mae", mode="min", target=0.1).idle(["mae"]) == ""


def test_which_way_of_a_metric_is_better_is_known_of_some() -> None:
    named = goal(metric="mse", mode="min")
    assert [named.way(name) for name in ("mse", "accuracy", "loss", "mae")] == ["min", "max", "min", None]
    assert [goal().way(name) for name in ("auto", "accuracy")] == [None, "max"]


def test_metrics_of_groups_are_told_from_those_of_all() -> None:
    measured = {"mse": 1.0, "mse[old]": 2.0, "mse[young]": 0.5, "mae[old]": None, "a]b[": 3.0, "x[]": 4.0}
    assert by_group(measured) == {"mse": {"old": 2.0, "young": 0.5}}
    assert ungrouped(measured) == ["mse", "a]b[", "x[]"]


def test_names_that_cannot_be_kept_are_named() -> None:
    assert names_flaw(["mse", "recall@10", "val/loss", "größe", "mse[65+ years]"], 64) == ""
    assert "'kind' must be another" in names_flaw(["mse", "kind"], 64)
    assert "65 metrics, and 64 is the most" in names_flaw([f"m{i}" for i in range(65)], 64)
