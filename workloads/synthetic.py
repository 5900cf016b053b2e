"""A learning problem in numpy alone: a random teacher network labels random points.

The student has one hidden layer and a gradient written by hand:

    h = tanh(x W1 + b1),  s = h W2 + b2,  loss = mean cross entropy of softmax(s) with y
    ds = (softmax(s) - onehot(y)) / n,  dW2 = h' ds,  dh = (ds W2') (1 - h^2),  dW1 = x' dh
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from anabranch.core.model.units import Member, UnitGroup
from anabranch.core.model.updates import LocalPlan
from anabranch.core.rng import stream
from anabranch.workloads.app import App, Array, Examples, Shard
from anabranch.workloads.batches import batches, planned_steps
from anabranch.workloads.splits import take

INPUTS, HIDDEN, CLASSES = 20, 32, 10
TRAIN_EXAMPLES, TEST_EXAMPLES = 10_000, 2_000

Arrays = dict[str, Array]


class Synthetic(App):
    """20 inputs, 32 hidden units, 10 classes: 1,002 parameters, some 50 microseconds a step, no torch."""

    name = "synthetic"

    def model(self, seed: int = 0) -> Arrays:
        """Glorot-scaled normal weights and zero biases, float32."""
        draws = stream(seed, "synthetic", "model")
        return {
            "hidden.weight": _normal(draws, INPUTS, HIDDEN),
            "hidden.bias": np.zeros(HIDDEN, np.float32),
            "output.weight": _normal(draws, HIDDEN, CLASSES),
            "output.bias": np.zeros(CLASSES, np.float32),
        }

    def units(self, model: Arrays) -> list[UnitGroup]:
        """The hidden units."""
        members = Member("hidden.weight", 1), Member("hidden.bias", 0), Member("output.weight", 0)
        return [UnitGroup("hidden", len(model["hidden.bias"]), members)]

    def data(self, shard: Shard) -> Examples:
        """`x` float32 (count, 20) standard normal, `y` int64: the teacher's largest output."""
        pool, test = _load()
        return test if shard.role == "test" else take(pool, shard)

    def train(self, model: Arrays, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        """SGD with momentum, weight decay and the proximal term, in place."""
        start = {name: array.copy() for name, array in model.items()}
        velocity = {name: np.zeros_like(array) for name, array in model.items()}
        total = 0.0
        for rows in batches(len(examples), plan, seed):
            loss, gradient = loss_and_gradient(model, examples.x[rows], examples.y[rows])
            total += loss
            for name, g in gradient.items():  # in place: a device may push and merge between two steps
                w, v = model[name], velocity[name]
                v *= plan.momentum
                v += g + plan.weight_decay * w + plan.proximal_mu * (w - start[name])
                w -= plan.learning_rate * v
        steps = planned_steps(plan, len(examples))
        return {"loss": total / max(1, steps), "steps": float(steps)}

    def batch_loss(self, model: Arrays, x: Array, y: Array) -> float:
        """The mean cross entropy of a batch."""
        return _cross_entropy(_forward(model, x)[1], y)[0]

    def evaluate(self, model: Arrays, examples: Examples) -> dict[str, float]:
        """Accuracy and mean cross entropy."""
        _, scores = _forward(model, examples.x)
        loss, _ = _cross_entropy(scores, examples.y)
        return {"accuracy": float(np.mean(scores.argmax(1) == examples.y)), "loss": loss}


def loss_and_gradient(model: Arrays, x: Array, y: Array) -> tuple[float, Arrays]:
    """Mean cross entropy on a batch, and its gradient with respect to each array of the model."""
    hidden, scores = _forward(model, x)
    loss, d_scores = _cross_entropy(scores, y)
    d_hidden = (d_scores @ model["output.weight"].T) * (1.0 - hidden**2)
    return loss, {
        "hidden.weight": x.T @ d_hidden,
        "hidden.bias": d_hidden.sum(0),
        "output.weight": hidden.T @ d_scores,
        "output.bias": d_scores.sum(0),
    }


def _forward(model: Arrays, x: Array) -> tuple[Array, Array]:
    hidden = np.tanh(x @ model["hidden.weight"] + model["hidden.bias"])
    return hidden, hidden @ model["output.weight"] + model["output.bias"]


def _cross_entropy(scores: Array, y: Array) -> tuple[float, Array]:
    """The mean loss, and its gradient with respect to the scores."""
    log_p = scores - scores.max(1, keepdims=True)
    gradient = np.exp(log_p)
    log_p -= np.log(gradient.sum(1, keepdims=True))
    at = np.arange(len(y))
    loss = -log_p[at, y].sum() / len(y)
    np.exp(log_p, out=gradient)
    gradient[at, y] -= 1.0
    gradient /= len(y)
    return float(loss), gradient


def _normal(draws: np.random.Generator, rows: int, columns: int) -> Array:
    scale = math.sqrt(2.0 / (rows + columns))
    return (scale * draws.standard_normal((rows, columns))).astype(np.float32)


@lru_cache(maxsize=1)
def _load() -> tuple[Examples, Examples]:
    draws = stream(0, "synthetic", "teacher")
    teacher = {"hidden.weight": _normal(draws, INPUTS, CLASSES), "hidden.bias": np.zeros(CLASSES)}
    teacher |= {"output.weight": _normal(draws, CLASSES, CLASSES), "output.bias": np.zeros(CLASSES)}
    x = draws.standard_normal((TRAIN_EXAMPLES + TEST_EXAMPLES, INPUTS)).astype(np.float32)
    y = _forward(teacher, x)[1].argmax(1)
    return Examples(x[:TRAIN_EXAMPLES], y[:TRAIN_EXAMPLES]), Examples(x[TRAIN_EXAMPLES:], y[TRAIN_EXAMPLES:])
