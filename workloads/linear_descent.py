"""Trainings of a chain of linear layers, one after the other by a compiled loop, instead of steps of a stack.

A small model and its batch stay in the nearest caches for all steps of a training, no batch is copied into a
stack, and nothing is called between the steps. They are the steps of `torch_loop.sgd`, in float32, with sums
in another order; unlike those of a stack they are the same whoever else is trained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anabranch.core.kernels.descent import descend
from anabranch.core.model.arrays import Indices, plain
from anabranch.core.model.params import Vector
from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.batches import DrawnTogether, each_step
from anabranch.workloads.resident import Resident
from anabranch.workloads.stacked_layers import LayerChain
from anabranch.workloads.trainer import Training

STEPS_AT_ONCE = 64  # whose row numbers are drawn beforehand
PRODUCTS_MAX = 10_000_000  # of a batch with the weights: with more, torch's fused ones take less time


@dataclass(frozen=True)
class LinearDescent:
    """Of models whose layers have these widths, from what goes in to the scores."""

    widths: Indices

    @classmethod
    def of(cls, resident: Resident, chain: LayerChain) -> LinearDescent | None:
        """That of a module which is this chain; None unless all of it is linear layers with ReLU between."""
        spec = resident.spec
        if not chain.linear or [tensor.name for tensor in spec.tensors] != chain.linear:
            return None
        if spec.rounds or spec.vector_dtype != np.float32:
            return None
        shapes = [tensor.shape for tensor in spec.tensors[::2]]
        return cls(np.array([shapes[0][1], *(out for out, _ in shapes)]))

    def train(self, trainings: Sequence[Training]) -> list[tuple[Vector, float]] | None:
        """The delta of each and the sum of its losses; None where one of them is nothing for the loop."""
        if not all(_is_plain(training) and self._is_small(training) for training in trainings):
            return None
        weights, losses = [training.vector.copy() for training in trainings], [0.0] * len(trainings)
        for places, draws in drawn_together(trainings):
            for first in range(0, draws.steps, STEPS_AT_ONCE):
                rows, lengths = _drawn(draws, range(first, min(first + STEPS_AT_ONCE, draws.steps)))
                for place, own in zip(np.arange(len(trainings))[places].tolist(), rows, strict=True):
                    loss = self._descended(trainings[place], weights[place], own, lengths)
                    if loss is None:
                        return None
                    losses[place] += loss
        deltas = [np.subtract(w, t.vector, out=w) for w, t in zip(weights, trainings, strict=True)]
        return list(zip(deltas, losses, strict=True))

    def _is_small(self, training: Training) -> bool:
        """Whether a step has so few products that what else a step of a stack costs is more."""
        batch = min(len(training.examples), training.plan.batch_size)
        return batch * int(self.widths[:-1] @ self.widths[1:]) <= PRODUCTS_MAX

    def _descended(self, given: Training, weights: Vector, rows: Indices, lengths: Indices) -> float | None:
        x, y = given.examples.x, plain(given.examples.y).astype(np.int64, copy=False)
        if not x.flags.c_contiguous and len(rows) < len(x):  # of many examples, those that are wanted
            x, y, rows = x[rows], y[rows], np.arange(len(rows))
        x = plain(x)
        return descend(weights, self.widths, x, y, rows, lengths, given.plan.learning_rate)


def drawn_together(trainings: Sequence[Training]) -> list[tuple[slice | Indices, DrawnTogether]]:
    """The draws of those that are drawn alike, each with their places."""
    alike: dict[tuple[int, LocalPlan], list[int]] = defaultdict(list)
    for place, training in enumerate(trainings):
        alike[len(training.examples), training.plan].append(place)
    found: list[tuple[slice | Indices, DrawnTogether]] = []
    for (count, plan), places in alike.items():
        draws = DrawnTogether(count, plan, [trainings[place].seed for place in places])
        every = len(places) == len(trainings)  # a slice is no copy
        found.append((slice(None) if every else np.array(places), draws))
    return found


def _is_plain(training: Training) -> bool:
    """Whether it is SGD without anything else, on float32."""
    plan = training.plan
    more = plan.momentum or plan.weight_decay or plan.proximal_mu
    return training.examples.x.dtype == np.float32 and not more


def _drawn(draws: DrawnTogether, steps: range) -> tuple[Indices, Indices]:
    """The rows of some steps, (trainings, any), and how many of them each step has."""
    found = []
    for step in steps:
        each_step()
        found.append(draws.of(step))
    return np.concatenate(found, 1), np.array([rows.shape[1] for rows in found])
