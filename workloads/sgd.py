"""What `torch.optim.SGD` does, to the bit, without what that class brings along.

The first optimizer of torch's own classes imports torch's compiler: a second or two, and memory that no
device has a use for. The function that the class steps by does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anabranch.core.model.updates import LocalPlan

if TYPE_CHECKING:
    import torch


class LocalSgd:
    """SGD with the momentum and the weight decay of a plan; it is to a loop what a torch optimizer is."""

    def __init__(self, params: list[torch.nn.Parameter], plan: LocalPlan) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": params}]  # where loss scaling looks
        self._params, self._plan = params, plan
        self._velocities: dict[torch.Tensor, torch.Tensor | None] = {}

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Forget the gradients, or make zeros of them."""
        for param in self._params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def step(self) -> None:
        """One step; parameters without a gradient stay as they are."""
        import torch
        from torch.optim.sgd import sgd

        gradients = {p: p.grad for p in self._params if p.grad is not None}
        if self._plan.weight_decay:  # of all rows of an embedding that is sparse
            gradients = {p: g.to_dense() for p, g in gradients.items()}
        moved: list[torch.Tensor] = list(gradients)
        velocities = [self._velocities.get(p) for p in moved]
        with torch.no_grad():
            sgd(
                moved,
                list(gradients.values()),
                velocities,
                has_sparse_grad=any(g.is_sparse for g in gradients.values()),
                lr=self._plan.learning_rate,
                momentum=self._plan.momentum,
                weight_decay=self._plan.weight_decay,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
        self._velocities.update(zip(moved, velocities, strict=True))
