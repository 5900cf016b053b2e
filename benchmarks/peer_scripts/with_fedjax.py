"""FedAvg by FedJAX (Haiku, a jitted step for one client after the other), as its examples set one up.

PEER/bin/python benchmarks/peer_scripts/with_fedjax.py TASK.npz
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import fedjax
import haiku as hk
import jax
import numpy as np
from turn import CLASSES, DIGITS, HIDDEN, SharedWork, take_turn

NORMAL = hk.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")  # as torch's layers begin


def digits(batch: Mapping[str, Any]) -> Any:
    """The perceptron of `anabranch.workloads.digits`."""
    layers = [hk.Linear(HIDDEN, w_init=NORMAL), jax.nn.relu, hk.Linear(CLASSES, w_init=NORMAL)]
    return hk.Sequential(layers)(batch["x"])


def pictures(batch: Mapping[str, Any]) -> Any:
    """The CNN of `anabranch.workloads.fashion_mnist`, channels last, as convolutions of JAX are quickest."""
    two, three = (2, 2), [(1, 1), (1, 1)]
    layers = [
        hk.Conv2D(16, 5, stride=2, padding=[two, two], w_init=NORMAL),
        jax.nn.relu,
        hk.MaxPool((2, 2, 1), (2, 2, 1), "VALID"),
        hk.Conv2D(32, 3, padding=three, w_init=NORMAL),
        jax.nn.relu,
        hk.Flatten(),
        hk.Linear(60, w_init=NORMAL),
        jax.nn.relu,
        hk.Linear(CLASSES, w_init=NORMAL),
    ]
    return hk.Sequential(layers)(batch["x"])


@lru_cache(maxsize=1)
def algorithm(
    problem: str, shape: tuple[int, ...], epochs: int, batch_size: int, learning_rate: float
) -> tuple[Any, Any]:
    """A model and its FedAvg, built once: what they compile is kept with them."""
    sample = {"x": np.zeros((1, *shape), np.float32), "y": np.zeros(1, np.int64)}
    model = fedjax.create_model_from_haiku(
        hk.transform(digits if problem == DIGITS else pictures),
        sample,
        lambda batch, out: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], out),
        {"accuracy": fedjax.metrics.Accuracy()},
    )
    fed_avg = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(learning_rate),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=batch_size, num_epochs=epochs, seed=0),
    )
    return model, fed_avg


def train(task: SharedWork, rounds: int) -> float:
    """Every client in every round."""
    last = (0, *range(2, task.test_x.ndim), 1) if task.test_x.ndim == 4 else range(task.test_x.ndim)
    test_x = task.test_x.transpose(last)
    model, fed_avg = algorithm(
        task.problem, test_x.shape[1:], task.epochs, task.batch_size, task.learning_rate
    )
    clients = {
        f"{device:04d}": {"x": task.x[device].transpose(last).copy(), "y": task.y[device]}
        for device in range(task.devices)
    }
    data = fedjax.InMemoryFederatedData(clients)
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, num_clients=task.devices, seed=0)
    state = fed_avg.init(model.init(jax.random.PRNGKey(0)))
    for number in range(rounds):
        sampler.set_round_num(number)
        state, _ = fed_avg.apply(state, sampler.sample())
    jax.block_until_ready(state.params)
    test = fedjax.ClientDataset({"x": test_x, "y": task.test_y}).padded_batch(batch_size=256)
    return float(fedjax.evaluate_model(model, state.params, test)["accuracy"])


if __name__ == "__main__":
    take_turn(train)
