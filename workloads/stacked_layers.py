"""The forward pass of a stack of models without `torch.vmap`, where the model is a chain of known layers.

| symbol | meaning                                                                          |
|--------|----------------------------------------------------------------------------------|
| x      | what goes into a layer, (count, length, features): model i has batch x_i         |
| W, b   | the weights of a linear layer, (count, out, in) and (count, out)                 |

    x <- b_i + x_i W_i^T                of all i in one batched product
    x <- f(x)                           functions of single numbers, as the layer itself has them

The same products as `vmap` comes to, and on a CPU the same bits, without its bookkeeping for every operation
of every step. What is no such chain is left to `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from anabranch.workloads.torch_loop import import_torch

if TYPE_CHECKING:
    import torch

    Weights = Mapping[str, torch.Tensor]
    Layer = Callable[[Weights, torch.Tensor], torch.Tensor]

# Of torch.nn; each takes one number to one number, whatever stands round it.
ELEMENTWISE = ("Identity", "ReLU", "ReLU6", "LeakyReLU", "ELU", "Tanh", "Sigmoid", "SiLU", "GELU", "Softplus")


class LayerChain:
    """A module whose layers take all models of a stack at once."""

    def __init__(self, layers: list[Layer], flattens: bool) -> None:
        self._layers, self._flattens = layers, flattens

    @classmethod
    def of(cls, module: torch.nn.Module, trained: Mapping[str, Any]) -> LayerChain | None:
        """That of a module of which the tensors in `trained` are; None where it is no such chain."""
        layers = _layers(module, "", trained)
        if not layers or not any(isinstance(layer, _Linear) for layer in layers):
            return None
        return cls(layers, isinstance(layers[0], _Flatten))

    def takes(self, x: torch.Tensor) -> bool:
        """Whether the first product is of rows of numbers: x (count, length, features)."""
        return x.ndim == 3 or (self._flattens and x.ndim > 3)

    def __call__(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        """The outputs, (count, length, ...)."""
        for layer in self._layers:
            x = layer(weights, x)
        return x


class _Linear:
    """`torch.nn.Linear` with a bias."""

    def __init__(self, prefix: str) -> None:
        self._weight, self._bias = f"{prefix}weight", f"{prefix}bias"
        self._product = import_torch().baddbmm

    def __call__(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._product(
            weights[self._bias].unsqueeze(1), x, weights[self._weight].transpose(1, 2)
        )
        return found


class _Flatten:
    """`torch.nn.Flatten` of all but the batch."""

    def __call__(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return x.flatten(2)


class _Elementwise:
    """A function of single numbers."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._function = module.forward

    def __call__(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        found: torch.Tensor = self._function(x)
        return found


def _layers(module: torch.nn.Module, prefix: str, trained: Mapping[str, Any]) -> list[Layer] | None:
    """The layers of a module, or None. Only torch's own classes, to which nobody has added anything."""
    nn = import_torch().nn
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    if any(hooks) or module._backward_pre_hooks or "forward" in vars(module):
        return None
    kind = type(module)
    if kind is nn.Sequential:
        parts = [_layers(part, f"{prefix}{name}.", trained) for name, part in module.named_children()]
        return None if None in parts else [layer for part in parts for layer in part or ()]
    if kind is nn.Linear:
        has_both = f"{prefix}weight" in trained and f"{prefix}bias" in trained
        return [_Linear(prefix)] if has_both else None
    if kind is nn.Flatten:
        return [_Flatten()] if module.start_dim == 1 and module.end_dim == -1 else None
    return [_Elementwise(module)] if kind in {getattr(nn, name) for name in ELEMENTWISE} else None
