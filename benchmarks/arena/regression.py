"""A generated regression: a random network's output at random points, with noise, learned by a smaller one.

| symbol   | meaning                                                               |
|----------|-----------------------------------------------------------------------|
| m_k      | (D,) the centre of region k, normal with deviation `SPREAD`           |
| x        | (D,) normal about the centre of its region                            |
| f        | the teacher, tanh(x U / sqrt(D)) v, scaled to variance 1 over all x   |
| y        | f(x) + e, e normal with deviation `NOISE`                             |

The student has H hidden units, and weights that begin with deviation 1: in every layer what goes in is
divided by the root of how many it is of, so that learning rates below 1 do here as in the other workloads.
Its gradient is written by hand:

    h = tanh(x W1 / sqrt(D) + b1),  o = h W2 / sqrt(H) + b2,  loss = mean (o - y)^2 / 2
    do = (o - y) / n,  dW2 = h' do / sqrt(H),  dh = (do W2') (1 - h^2) / sqrt(H),  dW1 = x' dh / sqrt(D)

Regions are what devices differ in: each sees its own stretch of one function, and fits it by what is wrong
elsewhere. Numpy alone. All draws are of one named stream: everybody has the same points, and nothing is
downloaded.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from anabranch.core.model.updates import LocalPlan
from anabranch.core.rng import stream
from anabranch.workloads.app import Array, Examples
from anabranch.workloads.batches import batches, planned_steps
from benchmarks.arena.pools import Pool, PoolApp

INPUTS, REGIONS, TEACHER, HIDDEN = 12, 10, 24, 64
DEEP, WIDE = math.sqrt(INPUTS), math.sqrt(HIDDEN)
SPREAD, NOISE = 1.0, 0.3
TRAIN_POINTS, TEST_POINTS = 10_000, 2_000
SCORE = "r2"

Arrays = dict[str, Array]


class Regression(PoolApp):
    """12 inputs, 64 hidden units, one output: 897 parameters. `x` float32 (count, 12), `y` float32."""

    name = "regression"

    def model(self, seed: int = 0) -> Arrays:
        """Standard normal weights and zero biases, float32."""
        draws = stream(seed, "arena", "regression", "model")
        return {
            "hidden.weight": draws.standard_normal((INPUTS, HIDDEN)).astype(np.float32),
            "hidden.bias": np.zeros(HIDDEN, np.float32),
            "output.weight": draws.standard_normal((HIDDEN, 1)).astype(np.float32),
            "output.bias": np.zeros(1, np.float32),
        }

    def pools(self) -> tuple[Pool, Pool]:
        """The points; a kind is a region."""
        return _pools()

    def train(self, model: Arrays, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        """Plain SGD, in place."""
        total = 0.0
        for rows in batches(len(examples), plan, seed):
            loss, gradient = loss_and_gradient(model, examples.x[rows], examples.y[rows])
            total += loss
            for name, g in gradient.items():
                model[name] -= plan.learning_rate * g
        steps = planned_steps(plan, len(examples))
        return {"loss": total / max(1, steps), "steps": float(steps)}

    def evaluate(self, model: Arrays, examples: Examples) -> dict[str, float]:
        """`r2`: 1 - mean squared error over the variance of all labels of the test; `loss`: half the error.

        By one variance for all, so that the mean over parts of the examples is that of all of them.
        """
        error = float(np.mean((_forward(model, examples.x)[1] - examples.y) ** 2))
        return {SCORE: 1.0 - error / float(np.var(self.pools()[1].y)), "loss": error / 2}


def loss_and_gradient(model: Arrays, x: Array, y: Array) -> tuple[float, Arrays]:
    """Half the mean squared error on a batch, and its gradient with respect to each array of the model."""
    hidden, output = _forward(model, x)
    off = (output - y)[:, np.newaxis]
    d_output = off / len(y)
    d_hidden = (d_output @ model["output.weight"].T) * (1.0 - hidden**2) / WIDE
    return float(np.mean(off**2)) / 2, {
        "hidden.weight": x.T @ d_hidden / DEEP,
        "hidden.bias": d_hidden.sum(0),
        "output.weight": hidden.T @ d_output / WIDE,
        "output.bias": d_output.sum(0),
    }


def _forward(model: Arrays, x: Array) -> tuple[Array, Array]:
    """The hidden layer (count, 64) and the outputs (count,)."""
    hidden = np.tanh(x @ model["hidden.weight"] / DEEP + model["hidden.bias"])
    return hidden, (hidden @ model["output.weight"] / WIDE + model["output.bias"])[:, 0]


@lru_cache(maxsize=1)
def _pools() -> tuple[Pool, Pool]:
    draws = stream(0, "arena", "regression")
    count = TRAIN_POINTS + TEST_POINTS
    regions = draws.integers(REGIONS, size=count)
    centres = SPREAD * draws.standard_normal((REGIONS, INPUTS))
    x = centres[regions] + draws.standard_normal((count, INPUTS))
    inner, outer = draws.standard_normal((INPUTS, TEACHER)), draws.standard_normal(TEACHER)
    f = np.tanh(x @ inner / math.sqrt(INPUTS)) @ outer
    y = (f - f.mean()) / f.std() + NOISE * draws.standard_normal(count)
    return Pool(x.astype(np.float32), y.astype(np.float32), regions).cut(TRAIN_POINTS)
