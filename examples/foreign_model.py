"""A line in three variables: the run of examples/foreign_client.py, which knows nothing of anabranch.

anabranch init examples/foreign_model.py:App --out model
anabranch server examples/foreign.toml --model model
"""

import numpy as np

import anabranch


class App(anabranch.App):
    """y = x . weight + bias, by gradient descent on half the mean squared error."""

    def model(self) -> dict[str, np.ndarray]:
        """`seen` is an integer, so it is frozen: it travels with the model and never with an update."""
        return {
            "weight": np.array([[0.5, -0.25, 1.0]], np.float32),
            "bias": np.array([0.125], np.float32),
            "seen": np.array([7], np.int64),
        }

    def data(self, shard: anabranch.Shard) -> anabranch.Examples:
        """Points of the line that is to be found."""
        x = np.random.default_rng(shard.index).uniform(-1, 1, (32, 3)).astype(np.float32)
        return anabranch.Examples(x, x @ np.array([1.0, 2.0, -1.0], np.float32) + 0.5)

    def train(
        self,
        model: dict[str, np.ndarray],
        examples: anabranch.Examples,
        plan: anabranch.LocalPlan,
        seed: int,
    ) -> dict[str, float]:
        """Whole passes, in order."""
        steps = 0
        for _ in range(plan.epochs):
            for start in range(0, len(examples), plan.batch_size):
                x, y = (
                    examples.x[start : start + plan.batch_size],
                    examples.y[start : start + plan.batch_size],
                )
                error = x @ model["weight"][0] + model["bias"] - y
                model["weight"] -= plan.learning_rate * error @ x / len(x)
                model["bias"] -= plan.learning_rate * error.mean()
                steps += 1
        return {"steps": steps}

    def evaluate(self, model: dict[str, np.ndarray], examples: anabranch.Examples) -> dict[str, float]:
        """The mean squared error, under the name that every App gives."""
        error = examples.x @ model["weight"][0] + model["bias"] - examples.y
        return {"loss": float(np.mean(error**2))}
