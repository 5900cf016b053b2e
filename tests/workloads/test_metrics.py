"""What an App's `train` and `evaluate` return: any names, one number each; what is none is named."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from anabranch.core.errors import AppError
from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.trainer import TrainResult, trainer_for

ONES = Examples(np.ones((4, 2)), np.ones(4))


class Told(App):
    """Tells whatever it is given."""

    def __init__(self, trained: Any = None, measured: Any = None) -> None:
        super().__init__()
        self.told, self.measured = trained, measured

    def model(self) -> dict[str, Any]:
        return {"w": np.zeros(2)}

    def data(self, shard: Shard) -> Examples:
        return ONES

    def train(self, model: Any, examples: Any, plan: LocalPlan, seed: int) -> Any:
        return self.told

    def evaluate(self, model: Any, examples: Any) -> Any:
        return self.measured


def measured(found: Any) -> dict[str, float]:
    return trainer_for(Told(measured=found)).evaluate(np.zeros(2), {}, ONES)


def trained(found: Any) -> TrainResult:
    return trainer_for(Told(found)).train(np.zeros(2), {}, ONES, LocalPlan(), 0)


@pytest.mark.parametrize(
    "value",
    [
        0.25,
        np.float32(0.25),
        np.array(0.25),
        np.array([[0.25]]),
        torch.tensor(0.25, requires_grad=True),
        torch.tensor([0.25]),
        Fraction(1, 4),
        Decimal("0.25"),
    ],
)
def test_a_number_of_any_library_is_one(value: Any) -> None:
    assert measured({"mse": value}) == {"mse": 0.25}
    assert dict(trained({"mse": value}).metrics) == {"mse": 0.25}


def test_what_is_not_finite_is_a_measurement_too() -> None:
    found = measured({"mse": math.inf, "mae": float("nan"), "right": True, 7: 1})
    assert found["mse"] == math.inf
    assert math.isnan(found["mae"])
    assert (found["right"], found["7"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "Told.evaluate returned nothing: return a dict of metrics, each one number"),
        ({}, "Told.evaluate returned no metric: return some"),
        (0.3, "Told.evaluate returned a float: return a dict"),
        ({"mse": [0.1, 0.2]}, "Told.evaluate: metric 'mse' is a list: return one number"),
        ({"mse": np.ones(3)}, r"metric 'mse' is a ndarray of shape \(3,\): return one"),
        ({"mse": torch.ones(2, 2)}, r"metric 'mse' is a Tensor of shape \(2, 2\)"),
        ({"mse": "0.3"}, "metric 'mse' is a str"),
        ({"mse": None}, "metric 'mse' is nothing"),
        ({"mse": 1 + 2j}, "metric 'mse' is a complex"),
        ({"mse": {"old": 1.0}}, "metric 'mse' is a dict"),
        ({"": 1.0}, "the name of metric '' must have 1 to 64"),
        ({"x" * 65: 1.0}, "must have 1 to 64 characters"),
        ({" mse": 1.0}, "no blank at either end"),
        ({"version": 1.0}, "the name of metric 'version' must be another one"),
        ({f"m{i}": 1.0 for i in range(1025)}, "1025 metrics, and 1024 is the most"),
    ],
)
def test_what_is_no_metric_is_named(found: Any, words: str) -> None:
    with pytest.raises(AppError, match=words):
        measured(found)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (3, "Told.train returned an int: return a dict"),
        ({"loss": "low"}, "Told.train: metric 'loss' is a str"),
        ({"steps": math.nan}, "Told.train: metric 'steps' is nan: return how many there were"),
        ({"examples": -1}, "metric 'examples' is -1.0"),
        ({f"m{i}": 1.0 for i in range(64)}, "64 metrics, and 63 is the most"),
    ],
)
def test_what_training_may_not_tell_is_named(found: Any, words: str) -> None:
    with pytest.raises(AppError, match=words):
        trained(found)


def test_training_may_tell_nothing_and_its_counts_are_no_metrics() -> None:
    assert dict(trained(None).metrics) == {}
    result = trained({"steps": 3, "examples": 9, "perplexity": 4})
    assert (result.steps, result.examples, dict(result.metrics)) == (3, 9, {"perplexity": 4.0})
