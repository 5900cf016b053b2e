"""An App with a trainer of its own: numpy alone, least squares by gradient descent."""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch import App, Examples, LocalPlan, Shard


class Line(App):
    def model(self) -> Any:
        return {"w": np.zeros(4, np.float32)}

    def data(self, shard: Shard) -> Examples:
        draws = np.random.default_rng([shard.seed, shard.index, len(shard.role)])
        x = draws.standard_normal((64, 4)).astype(np.float32)
        return Examples(x, x @ np.array([1, -2, 3, 0.5], np.float32))

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        steps = plan.steps or plan.epochs
        for _ in range(steps):
            error = examples.x @ model["w"] - examples.y
            model["w"] -= plan.learning_rate * examples.x.T @ error / len(examples)
        return {"loss": float(np.mean(error**2)), "steps": steps}

    def evaluate(self, model: Any, examples: Examples) -> dict[str, float]:
        return {"loss": float(np.mean((examples.x @ model["w"] - examples.y) ** 2))}
