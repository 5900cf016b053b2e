"""The passes of a stack of models without `torch.vmap`, where the model is a chain of known layers.

| symbol | meaning                                                                               |
|--------|---------------------------------------------------------------------------------------|
| x, y   | what goes into a layer and comes out of it, (count, features, length): a column of    |
|        | x_i for every example of model i                                                      |
| W, b   | the weights of a linear layer, (count, out, in) and (count, out)                      |
| f      | a function of single numbers, as the layer itself has it                              |
| g      | the gradient at what comes out of a layer                                             |
| m      | what an example counts in the loss of its model, (count, length)                      |
| z, c   | what comes out in the end, a score for every class; the class of an example           |

    y = b_i 1^T + W_i x_i                   of all i in one batched product, and y = f(x)
    dW_i = g_i x_i^T,   db_i = g_i 1,   g <- W_i^T g_i,   and g <- f'(x) g, which is torch's own
    loss_i = sum m_i (log sum exp z_i - z_ic),   g_i = m_i (softmax z_i - 1 at c)

Each gradient is added where `stacked_sgd.py` wants it, after g has gone back through the weights that it
changes. With columns for examples the softmax runs along them, an example in a lane of the processor; with
rows torch takes twenty times as long for the few scores of one. What is no such chain is left to `vmap`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from copy import copy
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from anabranch.workloads.stacked_sgd import StackedSgd
from anabranch.workloads.torch_loop import import_torch

if TYPE_CHECKING:
    import torch

    Weights = Mapping[str, torch.Tensor]

# Of torch.nn; each takes one number to one number, whatever stands round it.
ELEMENTWISE = ("Identity", "ReLU", "ReLU6", "LeakyReLU", "ELU", "Tanh", "Sigmoid", "SiLU", "GELU", "Softplus")


class LayerChain:
    """A module whose layers take all models of a stack at once."""

    def __init__(self, layers: list[_Linear | _Elementwise], flattens: bool) -> None:
        self._layers, self._flattens = layers, flattens
        self._first = next(i for i, layer in enumerate(layers) if isinstance(layer, _Linear))
        self._names = [name for layer in layers if isinstance(layer, _Linear) for name in layer.names]

    @classmethod
    def of(cls, module: torch.nn.Module, trained: Container[str]) -> LayerChain | None:
        """That of a module of which the tensors in `trained` are; None where it is no such chain."""
        found = _layers(module, "", trained) or []
        layers = [layer for layer in found if not isinstance(layer, _Flatten)]  # columns are flat
        for before, layer in pairwise(layers):
            if isinstance(before, _Linear) and isinstance(layer, _Relu):
                layer.follows_linear = True
        if not any(isinstance(layer, _Linear) for layer in layers):
            return None
        if any(isinstance(layer, _Flatten) for layer in found[1:]):  # before it are rows of rows
            return None
        return cls(layers, isinstance(found[0], _Flatten))

    def takes(self, dimensions: int) -> bool:
        """Whether the first product of a batch with so many, (length, ...), is of rows of numbers."""
        return dimensions == 2 or (self._flattens and dimensions > 2)

    def __call__(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        """The outputs, (count, length, features), of x (count, length, ...)."""
        x = _columns(x)
        for layer in self._layers:
            x = layer(weights, x)
        return x.transpose(1, 2)

    def descend(
        self, sgd: StackedSgd, x: torch.Tensor, classes: torch.Tensor, m: torch.Tensor
    ) -> torch.Tensor:
        """A step of the stack; the losses (count,) before it.

        x (count, length, ...), `classes` and m (count, length). m is 0 at examples that are passed over.
        """
        with import_torch().no_grad():
            reached = [_columns(x)]  # what goes into each layer, and what comes out of the last
            for layer in self._layers:
                reached.append(layer(sgd.weights, reached[-1]))
            losses, g = _cross_entropy(reached[-1], classes, m)
            for i in range(len(self._layers) - 1, self._first - 1, -1):
                layer, above = self._layers[i], g
                if i > self._first:  # nobody wants that of the examples
                    g = layer.pulled(sgd.weights, reached[i], g)
                layer.weigh(sgd, reached[i], above)
            sgd.step(self._names)
        return losses


class _Linear:
    """`torch.nn.Linear` with a bias."""

    def __init__(self, prefix: str) -> None:
        self._weight, self._bias = self.names = f"{prefix}weight", f"{prefix}bias"
        self._torch = import_torch()

    def __call__(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._torch.baddbmm(weights[self._bias].unsqueeze(2), weights[self._weight], x)
        return found

    def weigh(self, sgd: StackedSgd, x: torch.Tensor, g: torch.Tensor) -> None:
        """Add the gradients at the layer's weights."""
        sgd.add_product(self._weight, g, x.transpose(1, 2))
        sgd.add(self._bias, g.sum(2))

    def pulled(self, weights: Weights, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """The gradient at what goes into the layer."""
        found: torch.Tensor = self._torch.bmm(weights[self._weight].transpose(1, 2), g)
        return found


class _Flatten:
    """`torch.nn.Flatten` of all but the batch: columns are flat."""


class _Elementwise:
    """A function of single numbers."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._torch = import_torch()
        function: Any = copy(module)
        if hasattr(function, "inplace"):
            function.inplace = False  # what goes in is still wanted
        self._function = function.forward

    def __call__(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        found: torch.Tensor = self._function(x)
        return found

    def weigh(self, sgd: StackedSgd, x: torch.Tensor, g: torch.Tensor) -> None:
        """It has no weights."""

    def pulled(self, weights: Weights, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """See `_Linear`."""
        with self._torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (found,) = self._torch.autograd.grad(self._function(leaf), leaf, g)
        pulled: torch.Tensor = found
        return pulled


class _Relu(_Elementwise):
    """max(x, 0), which most have: its gradient needs no record of the pass, and a sixth of the time.

    `follows_linear`: nobody else wants x, and f(x) takes its place; where one is above 0 the other is, too.
    """

    follows_linear = False

    def __call__(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        """See `_Linear`."""
        return x.relu_() if self.follows_linear else super().__call__(weights, x)

    def pulled(self, weights: Weights, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """See `_Linear`; it is what autograd calls, here in the place of g."""
        found: torch.Tensor = self._torch.ops.aten.threshold_backward.grad_input(g, x, 0.0, grad_input=g)
        return found


Layer = _Linear | _Elementwise | _Flatten


def _columns(x: torch.Tensor) -> torch.Tensor:
    """The examples x (count, length, ...) as columns, (count, features, length)."""
    return x.flatten(2).transpose(1, 2)


def _cross_entropy(
    z: torch.Tensor, classes: torch.Tensor, m: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses (count,) of the scores z (count, classes, length), and their gradient, as z."""
    at, m = classes.unsqueeze(1), -m.unsqueeze(1)
    g = z.log_softmax(1)
    losses = (g.gather(1, at) * m).sum((1, 2))
    g.exp_().mul_(-m).scatter_add_(1, at, m)
    return losses, g


def _layers(module: torch.nn.Module, prefix: str, trained: Container[str]) -> list[Layer] | None:
    """The layers of a module, or None. Only torch's own classes, to which nobody has added anything."""
    nn = import_torch().nn
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    if any(hooks) or module._backward_pre_hooks or "forward" in vars(module):
        return None
    kind = type(module)
    if kind is nn.Sequential:
        named = module._modules.items()  # a layer in two places is in `named_children` once
        parts = [None if part is None else _layers(part, f"{prefix}{name}.", trained) for name, part in named]
        return None if None in parts else [layer for part in parts for layer in part or ()]
    if kind is nn.Linear:
        has_both = f"{prefix}weight" in trained and f"{prefix}bias" in trained
        return [_Linear(prefix)] if has_both else None
    if kind is nn.Flatten:
        return [_Flatten()] if module.start_dim == 1 and module.end_dim == -1 else None
    if kind is nn.ReLU:
        return [_Relu(module)]
    return [_Elementwise(module)] if kind in {getattr(nn, name) for name in ELEMENTWISE} else None
