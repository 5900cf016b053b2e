"""A model that is trained to be sparse: of every four weights two are used. See docs/extending/app.md.

    W' = M * W,    M keeps the n largest |w| of every m along the inputs
    W <- W - eta (dL/dW' + lambda (1 - M) * W)

| symbol | meaning                                                  | here                         |
|--------|----------------------------------------------------------|------------------------------|
| W      | a layer's weight, dense: what is trained, and travels    | the parametrization's tensor |
| M      | the mask, found anew at each step                        | `mask`                       |
| W'     | what the layer computes with, and what is deployed       | the layer's `weight`         |
| lambda | draws to zero what is masked, so that few come and go    | `PULL`                       |

SR-STE, Zhou et al. 2021 (arXiv 2102.04010), section 4. Its gradient passes the mask as if there were none.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from anabranch.workloads.app import App
from anabranch.workloads.digits import Digits

KEPT, OF = 2, 4  # n, m: what tensor cores of GPUs compute with
PULL = 2e-4


def mask(weight: torch.Tensor) -> torch.Tensor:
    """M of a weight (out, in, ...): bool, true for the `KEPT` largest of every `OF` inputs, ties by order."""
    rows = weight.movedim(1, -1)
    groups = rows.reshape(-1, OF).abs()
    order = groups.sort(dim=1, descending=True, stable=True).indices[:, :KEPT]
    kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, order, True)
    return kept.view(rows.shape).movedim(-1, 1)


class _Masked(torch.autograd.Function):
    """W to W'; the gradient of W is that of W', and the pull."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        kept = mask(weight)
        ctx.save_for_backward(weight, kept)
        return weight * kept

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        weight, kept = ctx.saved_tensors
        found: torch.Tensor = gradients[0] + PULL * ~kept * weight
        return found


class Masked(nn.Module):
    """The mask as a parametrization of a layer's weight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """W', in the shape of W."""
        found: torch.Tensor = _Masked.apply(weight)  # type: ignore[no-untyped-call]
        return found


def sparse(module: nn.Module) -> nn.Module:
    """`module` with a mask in each linear layer and convolution that has inputs by fours."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd) and layer.weight.shape[1] % OF == 0:
            parametrize.register_parametrization(layer, "weight", Masked())
    return module


def without_masks(module: nn.Module, masked: bool) -> nn.Module:
    """`module` with plain layers again: with their W' (`masked`), or with W."""
    for layer in list(module.modules()):
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=masked)
    return module


class Sparse(App):
    """Before another App's name among a class's bases: `class Mine(Sparse, Yours)`."""

    def model(self) -> Any:
        """That of the other App, with masks."""
        return sparse(super().model())

    def merged(self, tensors: Any) -> Any:
        """The plain model with its weights masked: what is deployed."""
        module = self.model()
        module.load_state_dict({name: torch.from_numpy(array) for name, array in tensors.items()})
        return {name: tensor.numpy() for name, tensor in without_masks(module, True).state_dict().items()}


class SparseDigits(Sparse, Digits):
    """The digits with two weights of four."""
