"""The synthetic App with a fixed hidden layer: as frozen tensors, and as a small model beside a constant."""

from __future__ import annotations

from typing import Any

from anabranch.core.model.units import UnitGroup
from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.app import Array, Examples
from anabranch.workloads.batches import batches, planned_steps
from anabranch.workloads.synthetic import Synthetic, loss_and_gradient

Arrays = dict[str, Array]
HEAD = ("output.weight", "output.bias")
HEAD_SIZE = 32 * 10 + 10
BASE_BYTES = 4 * (20 * 32 + 32)


def base(seed: int = 5) -> Arrays:
    """The hidden layer, as somebody has trained it before."""
    return {name: a for name, a in Synthetic().model(seed).items() if name not in HEAD}


def train_head(
    fixed: Arrays, head: Arrays, examples: Examples, plan: LocalPlan, seed: int
) -> dict[str, float]:
    """SGD on the output layer, in place."""
    for rows in batches(len(examples), plan, seed):
        _, gradient = loss_and_gradient(fixed | head, examples.x[rows], examples.y[rows])
        for name in HEAD:
            head[name] -= plan.learning_rate * gradient[name]
    return {"steps": float(planned_steps(plan, len(examples)))}


class Head(Synthetic):
    """Trains the output layer alone: the hidden one is frozen. `seed`: of its own hidden layer."""

    name = "head"

    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        self._seed = seed

    def model(self, seed: int = 0) -> Arrays:
        return super().model(seed) | base(self._seed)

    def units(self, model: Arrays) -> list[UnitGroup]:
        return []

    def trained(self, model: Arrays) -> Any:
        return HEAD

    def train(self, model: Arrays, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        head = {name: model[name] for name in HEAD}
        return train_head({n: a for n, a in model.items() if n not in HEAD}, head, examples, plan, seed)


class Small(Head):
    """The same learning problem, of which nothing is frozen: the hidden layer is no part of the model."""

    name = "small"

    def model(self, seed: int = 0) -> Arrays:
        return {name: array for name, array in super().model(seed).items() if name in HEAD}

    def trained(self, model: Arrays) -> None:
        return None

    def train(self, model: Arrays, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        return train_head(base(self._seed), model, examples, plan, seed)

    def evaluate(self, model: Arrays, examples: Examples) -> dict[str, float]:
        return super().evaluate(base(self._seed) | model, examples)
