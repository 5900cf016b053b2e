"""A run that is judged by whatever the App measures: no accuracy, no loss, and less is better."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prices import Prices
from safetensors import safe_open

from anabranch.core.config.tables import Config, merge
from anabranch.core.errors import AppError
from anabranch.reports.compare import compare, compare_html
from anabranch.reports.fairness import worst_tenth
from anabranch.reports.html import report_html
from anabranch.reports.metrics import final_text
from anabranch.reports.models import BEST
from anabranch.reports.result import Result
from anabranch.simulation.run import RunProgress, simulate

BY_MSE: dict[str, Any] = {"metric": "mse", "mode": "min", "target": 0.5}


def config(seed: int = 1, **run: Any) -> Config:
    tables = {
        "run": {"updates_max": 24, "seed": seed, "workload": "prices", **run},
        "fleet": {"clients": 4},
        "client": {"steps": 5, "batch_size": 10, "learning_rate": 0.1},
        "strategy": {"name": "fedbuff", "buffer_size": 3},
    }
    return merge([("test", tables)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("run") / "mse"
    simulate(config(**BY_MSE), found, app=Prices())
    return found


@pytest.fixture(scope="module")
def result(folder: Path) -> Result:
    return Result.read(folder)


def test_the_result_is_by_the_metric_that_was_named(folder: Path, result: Result) -> None:
    values = [v for p in result.history if (v := p.metrics["mse"]) is not None]
    assert len(values) == len(result.history)
    assert (result.metric, result.mode, result.target) == ("mse", "min", 0.5)
    assert (result.final_value, result.best_value) == (values[-1], min(values))
    reached = next(p for p in result.history if p.metrics["mse"] <= 0.5)  # type: ignore[operator]
    assert result.time_to_target_s == reached.time_s > 0
    assert (result.final_accuracy, result.best_accuracy, result.target_accuracy) == (None, None, 0.0)
    assert json.loads((folder / "result.json").read_text())["best_value"] == min(values)


def test_the_best_model_is_the_one_with_the_least(folder: Path, result: Result) -> None:
    values = {p.version: p.metrics["mse"] or 0.0 for p in result.history}
    with safe_open(folder / BEST, "numpy") as file:
        about = file.metadata()
        weights = file.get_tensor("w")
    assert int(about["version"]) == min(values, key=values.__getitem__)
    assert np.abs(weights - [3, -2, 1]).max() < 0.5


def test_nothing_of_it_is_a_percentage(result: Result) -> None:
    page = report_html(result)
    figures = page.partition('<section class="tiles">')[2].partition("</section>")[0]
    assert "Final mse" in figures
    assert "Best mse" in figures
    assert "Time to mse 0.5" in figures
    rejected = figures.partition("Updates rejected")[2].partition("</div>")[0]  # a share, and no metric
    assert figures.replace(rejected, "").count(" %") == figures.replace(rejected, "").count("% less")
    assert final_text(result).startswith(f"mse {result.final_value:.3g}"[:7])
    assert "(best " in final_text(result)
    assert "%" not in final_text(result)


def test_the_page_shows_how_even_it_is_over_the_groups(result: Result) -> None:
    page, last = report_html(result), result.history[-1].metrics
    assert page.count("mse by group") == 1
    assert "mse[calm] over" not in page, "groups have no curves of their own"
    assert (last["mse[noisy]"] or 0.0) > (last["mse[calm]"] or 0.0)
    assert "2 groups; the band is from the least to the greatest. At the end: worst noisy, " in page
    assert "worst tenth of them" in page
    values = [float(i) for i in range(1, 26)]
    assert worst_tenth(values, "max") == 2.0, "three of 25"
    assert worst_tenth(values, "min") == 24.0
    assert worst_tenth([7.0], "min") == 7.0


def test_runs_are_compared_by_it(result: Result) -> None:
    other = simulate(config(seed=2, **BY_MSE), app=Prices())
    (row,) = compare([result, other])
    best = [result.best_value or 0.0, other.best_value or 0.0]
    assert (row.metric, row.mode, row.target, row.aimed) == ("mse", "min", 0.5, 2)
    assert row.best_value is not None
    assert (row.best_value.least, row.best_value.greatest) == (min(best), max(best))
    assert row.reached == 2
    assert row.uplink_to_target is not None
    page = compare_html([result, other])
    assert "<th>final mse</th><th>best mse</th>" in page
    assert "accuracy" not in page.partition("<main>")[2].partition("<script>")[0]


def test_a_metric_that_is_not_measured_ends_the_run_before_it_has_begun(tmp_path: Path) -> None:
    told: list[RunProgress] = []
    with pytest.raises(AppError, match=r"run.metric is 'rmse'.*but mse, .*set run.metric to one of them"):
        simulate(config(metric="rmse", mode="min"), app=Prices(), progress=told.append)
    assert [p.updates for p in told if p.updates] == []


def test_without_a_word_a_run_is_what_it_was(tmp_path: Path, result: Result) -> None:
    plain = simulate(config(), tmp_path / "plain", app=Prices())
    assert (plain.metric, plain.mode, plain.target, plain.best_value) == ("auto", "auto", None, None)
    assert not (tmp_path / "plain" / BEST).exists(), "nobody has said which way is better"
    assert plain.model_sha256 == result.model_sha256
    assert [p.metrics for p in plain.history] == [p.metrics for p in result.history]
    assert "Final mse" in report_html(plain)
    assert "metric" not in plain.config["run"]
    older = {k: v for k, v in result.to_json().items() if k not in ("metric", "mode", "target", "best_value")}
    assert Result.from_json(older).goal.metric == "auto"


def test_an_older_result_is_judged_as_it_was(result: Result) -> None:
    point = replace(result.history[0], accuracy=0.75, metrics={})
    older = replace(result, metric="auto", mode="auto", target=None, target_accuracy=0.7, history=(point,))
    assert (older.goal.metric, older.goal.mode, older.goal.target) == ("accuracy", "max", 0.7)
    assert final_text(older) == f"accuracy 75.00 % at version {point.version} (best 75.00 %)"
    assert final_text(replace(older, versions=point.version)) == "accuracy 75.00 % (best 75.00 %)"
