"""The forward pass of a stack of models under `torch.vmap`, whatever their module is.

| symbol | meaning                                                                        |
|--------|--------------------------------------------------------------------------------|
| x, c   | the examples of each model, (count, length, ...), and their classes            |
| m      | what an example counts in the loss of its model, (count, length); 0: nothing   |
| z      | the scores of its classes, (count, length, classes)                            |

    loss_i = sum m_i (log sum exp z_i - z_ic)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from anabranch.workloads.torch_loop import import_torch

if TYPE_CHECKING:
    import torch

    from anabranch.workloads.stacked_sgd import Stacked


def stacked_scores(
    module: torch.nn.Module, weights: Stacked, fixed: Stacked, x: torch.Tensor
) -> torch.Tensor:
    """The scores z of models of one module, each with its own tensors, (count, ...), by name."""
    library = import_torch()

    def scores(w: Any, f: Any, one_x: torch.Tensor) -> Any:
        return library.func.functional_call(module, (w, f), (one_x,))

    found: torch.Tensor = library.vmap(scores)(weights, fixed, x)
    return found


def stacked_losses(z: torch.Tensor, classes: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """The loss of each model, (count,)."""
    cross_entropy = import_torch().nn.functional.cross_entropy
    each = cross_entropy(z.flatten(0, 1), classes.flatten(), reduction="none")
    losses: torch.Tensor = (each.view(classes.shape) * m).sum(1)
    return losses


def written_out_attention() -> AbstractContextManager[None]:
    """Inside, torch's own attention is of operations that `vmap` can follow."""
    attention = import_torch().nn.attention
    found: AbstractContextManager[None] = attention.sdpa_kernel(attention.SDPBackend.MATH)
    return found
