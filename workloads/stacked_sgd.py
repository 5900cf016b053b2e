"""SGD of a stack of models, in place: a product that is a gradient goes straight to where it counts.

| symbol | meaning                                                                              |
|--------|--------------------------------------------------------------------------------------|
| w, w_0 | weights, by name (count, ...), and what they were before the first step              |
| v      | velocities, as w; 0 before the first step                                            |
| g      | gradients, as w                                                                      |

    v <- beta v + g,   v <- v + mu (w - w_0) + lambda w,   w <- w - eta v

Without beta and mu there is no need of v, which takes as long to write as w:

    w <- (1 - eta lambda) w - eta g
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.torch_loop import import_torch

if TYPE_CHECKING:
    import torch

    Stacked = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class StackedSgd:
    """The steps of a plan. Gradients are added to `_into`: the velocities, or else the weights themselves."""

    plan: LocalPlan
    weights: Stacked
    _into: Stacked
    _start: Stacked

    @classmethod
    def of(cls, plan: LocalPlan, weights: Stacked) -> StackedSgd:
        """That of these weights, which it changes."""
        torch = import_torch()
        start = {name: w.clone() for name, w in weights.items()} if plan.proximal_mu else {}
        if not plan.momentum and not plan.proximal_mu:
            return cls(plan, weights, weights, start)
        return cls(plan, weights, {name: torch.zeros_like(w) for name, w in weights.items()}, start)

    def first(self, count: int) -> StackedSgd:
        """The same of the first models alone; autograd can go back to its weights."""
        weights = {name: w[:count].detach().requires_grad_() for name, w in self.weights.items()}
        into = weights if self._moves_weights else {name: v[:count] for name, v in self._into.items()}
        return replace(
            self, weights=weights, _into=into, _start={n: w[:count] for n, w in self._start.items()}
        )

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add the gradients at the weights of a name, (count, ...), once a step."""
        into = self._into[name]
        if self._keep != 1.0:
            into.mul_(self._keep)
        into.add_(gradient, alpha=self._scale)

    def add_product(self, name: str, left: torch.Tensor, right: torch.Tensor) -> None:
        """The same of gradients that are left_i right_i, (count, rows, any) and (count, any, columns).

        Of kernels, which have more axes, the columns are all but the first of a model's.
        """
        into = self._into[name]
        into.view(*into.shape[:2], -1).baddbmm_(left, right, beta=self._keep, alpha=self._scale)

    def step(self, names: Iterable[str]) -> None:
        """Move the weights of these names, to which gradients were added."""
        if self._moves_weights:
            return
        for name in names:
            w, v = self.weights[name], self._into[name]
            if self.plan.proximal_mu:
                v.add_(w - self._start[name], alpha=self.plan.proximal_mu)
            if self.plan.weight_decay:
                v.add_(w, alpha=self.plan.weight_decay)
            w.add_(v, alpha=-self.plan.learning_rate)

    @property
    def _moves_weights(self) -> bool:
        return self._into is self.weights

    @property
    def _keep(self) -> float:
        """What is left of what the gradients are added to."""
        plan = self.plan
        return 1.0 - plan.learning_rate * plan.weight_decay if self._moves_weights else plan.momentum

    @property
    def _scale(self) -> float:
        return -self.plan.learning_rate if self._moves_weights else 1.0
