"""A regression on numpy arrays that measures one thing, its mean squared error, of all and of two groups."""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.batches import batches

WEIGHTS = np.array([3.0, -2.0, 1.0])
HELD_OUT = 60


class Prices(App):
    """A line through noise; the second half of what is held out is noisier, and called so."""

    def model(self) -> dict[str, Any]:
        return {"w": np.zeros(3)}

    def data(self, shard: Shard) -> Examples:
        index = shard.index if shard.role == "train" else 1000
        draws = np.random.default_rng([shard.seed, index])
        count = 30 if shard.role == "train" else HELD_OUT
        x = draws.normal(size=(count, 3))
        spread = np.where(np.arange(count) < count // 2, 0.05, 0.5)
        return Examples(x, x @ WEIGHTS + spread * draws.normal(size=count))

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        for rows in batches(len(examples), plan, seed):
            x, y = examples.x[rows], examples.y[rows]
            model["w"] -= plan.learning_rate * x.T @ (x @ model["w"] - y) / len(rows)
        return {"mse": float(_squares(model, examples).mean())}

    def evaluate(self, model: Any, examples: Examples) -> dict[str, float]:
        squares = _squares(model, examples)
        half = len(squares) // 2
        return {
            "mse": squares.mean(),
            "mse[calm]": squares[:half].mean(),
            "mse[noisy]": squares[half:].mean(),
        }


def _squares(model: Any, examples: Examples) -> Any:
    return (examples.x @ model["w"] - examples.y) ** 2
