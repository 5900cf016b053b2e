"""quickstart-numpy: the digits of scikit-learn, and a softmax regression on them."""

from functools import lru_cache

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

CLASSES = 10
Weights = dict[str, np.ndarray]


def new_model() -> Weights:
    """Weights to start from: 64 pixels in, 10 scores out."""
    return {"weight": np.zeros((64, CLASSES), np.float32), "bias": np.zeros(CLASSES, np.float32)}


@lru_cache(maxsize=1)
def _digits() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), y


def load_data(partition_id: int, num_partitions: int) -> tuple[np.ndarray, ...]:
    """x_train, x_test, y_train, y_test of one partition; neighbours by label, so that partitions differ."""
    x, y = _digits()
    rng = np.random.default_rng(42)
    by_label = np.argsort(y + rng.uniform(0, 4, len(y)), kind="stable")
    mine = np.array_split(by_label, num_partitions)[partition_id]
    return tuple(train_test_split(x[mine], y[mine], test_size=0.2, random_state=42))


def _scores(model: Weights, x: np.ndarray) -> np.ndarray:
    z = x @ model["weight"] + model["bias"]
    z -= z.max(1, keepdims=True)
    p = np.exp(z)
    return p / p.sum(1, keepdims=True)


def train(model: Weights, x: np.ndarray, y: np.ndarray, epochs: int, lr: float, batch_size: int) -> float:
    """Train in place; returns the mean loss."""
    losses = []
    for _ in range(epochs):
        for rows in np.array_split(np.random.permutation(len(y)), -(-len(y) // batch_size)):
            p = _scores(model, x[rows])
            losses.append(-np.log(p[np.arange(len(rows)), y[rows]] + 1e-12).mean())
            p[np.arange(len(rows)), y[rows]] -= 1
            model["weight"] -= lr * x[rows].T @ p / len(rows)
            model["bias"] -= lr * p.mean(0)
    return float(np.mean(losses))


def test(model: Weights, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Loss and accuracy."""
    p = _scores(model, x)
    loss = -np.log(p[np.arange(len(y)), y] + 1e-12).mean()
    return float(loss), float((p.argmax(1) == y).mean())
