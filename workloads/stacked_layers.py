"""The passes of a stack of models without `torch.vmap`, where the model is a chain of known layers.

| symbol | meaning                                                                               |
|--------|---------------------------------------------------------------------------------------|
| x, y   | what goes into a layer and comes out of it, (count, features, length): a column of    |
|        | x_i for every example of model i                                                      |
| W, b   | the weights of a linear layer, (count, out, in) and (count, out)                      |
| f      | a function of single numbers, as the layer itself has it                              |
| g      | the gradient at what comes out of a layer                                             |
| h      | of images: x is (count, channels, length, height, width); h the patches under the     |
|        | kernel wherever it lies, (count, channels x kernel, length x places)                  |
| m      | what an example counts in the loss of its model, (count, length)                      |
| z, c   | what comes out in the end, a score for every class; the class of an example           |

    y = b_i 1^T + W_i x_i                   of all i in one batched product, and y = f(x)
    dW_i = g_i x_i^T,   db_i = g_i 1,   g <- W_i^T g_i,   and g <- f'(x) g, which is torch's own
    of a convolution h is in the place of x, and what goes back to a pixel is the sum over its patches
    loss_i = sum m_i (log sum exp z_i - z_ic),   g_i = m_i (softmax z_i - 1 at c)

Each gradient is added where `stacked_sgd.py` wants it, after g has gone back through the weights that it
changes. With columns for examples the softmax runs along them, an example in a lane of the processor; with
rows torch takes twenty times as long for the few scores of one. What is no such chain is left to `vmap`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from anabranch.workloads.stacked_sgd import StackedSgd
from anabranch.workloads.torch_loop import import_torch

if TYPE_CHECKING:
    import torch

    Weights = Mapping[str, torch.Tensor]

# Of torch.nn; each takes one number to one number, whatever stands round it.
ELEMENTWISE = ("Identity", "ReLU", "ReLU6", "LeakyReLU", "ELU", "Tanh", "Sigmoid", "SiLU", "GELU", "Softplus")


# Numbers of an example: patches are copies of the image, and with more of them memory is what a stack lacks.
PATCHES_MAX = 1 << 15


class LayerChain:
    """A module whose layers take all models of a stack at once."""

    def __init__(self, layers: list[Layer], flattens: bool) -> None:
        self._layers, self._flattens = layers, flattens
        self._first = next(i for i, layer in enumerate(layers) if isinstance(layer, Weighted))
        self._names = [name for layer in layers if isinstance(layer, Weighted) for name in layer.names]
        self._of_images = any(isinstance(layer, OnImages) for layer in layers)

    @classmethod
    def of(cls, module: torch.nn.Module, trained: Container[str]) -> LayerChain | None:
        """That of a module of which the tensors in `trained` are; None where it is no such chain."""
        found = _layers(module, "", trained) or []
        if not any(isinstance(layer, Weighted) for layer in found) or not _follow(found):
            return None
        for before, layer in pairwise(found):
            if isinstance(before, Weighted) and isinstance(layer, _Relu):
                layer.follows_weights = True
        flattens = isinstance(found[0], _Flatten)
        return cls(found[flattens:], flattens)  # columns are flat

    @property
    def linear(self) -> list[str]:
        """The names of its tensors, where all of it is linear layers with ReLU between them; else none."""
        kinds: list[type] = [type(layer) for layer in self._layers]
        alternate = kinds == ([_Linear, _Relu] * len(kinds))[: len(kinds)] and kinds[-1] is _Linear
        return self._names if alternate else []

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether the first layer is one for such examples, (count, ...), and each patch has room."""
        if not self._of_images:
            return len(shape) == 2 or (self._flattens and len(shape) > 2)
        image = tuple(shape[1:])
        for layer in self._layers if len(image) == 3 else ():
            if isinstance(layer, OnImages):
                if layer.patches(image) > PATCHES_MAX:
                    return False
                image = layer.made(image)
        return len(image) == 3 and min(image) > 0

    def __call__(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        """The outputs, (count, length, features), of x (count, length, ...)."""
        x = self._features_first(x)
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
            reached = [self._features_first(x)]  # what goes into each layer, and what comes out of the last
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

    def _features_first(self, x: torch.Tensor) -> torch.Tensor:
        """The examples x (count, length, ...) as columns (count, features, length), or images likewise."""
        return (x if self._of_images else x.flatten(2)).transpose(1, 2)


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


@dataclass(frozen=True)
class _Window:
    """What a kernel sees of an image at a time: rows and columns of each."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @classmethod
    def of(cls, module: Any) -> _Window:
        """That of a convolution or a pool."""
        kernel, stride, padding = (
            (each, each) if isinstance(each, int) else (each[0], each[-1])  # one is for both, too
            for each in (module.kernel_size, module.stride, module.padding)
        )
        return cls(kernel, stride, padding)

    def places(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """Where it lies on an image of (channels, height, width): rows and columns."""
        sides = zip(image[1:], self.kernel, self.stride, self.padding, strict=True)
        return tuple((side + 2 * padding - kernel) // stride + 1 for side, kernel, stride, padding in sides)


class _Convolution:
    """`torch.nn.Conv2d` with a bias."""

    def __init__(self, prefix: str, module: Any) -> None:
        self._weight, self._bias = self.names = f"{prefix}weight", f"{prefix}bias"
        self._torch = import_torch()
        self._window, self._channels = _Window.of(module), module.out_channels

    def __call__(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        kernels = weights[self._weight].flatten(2)
        found: torch.Tensor = self._torch.baddbmm(weights[self._bias].unsqueeze(2), kernels, self._h(x))
        return found.view(*found.shape[:2], x.shape[2], *self._window.places(x.shape[2:]))

    def weigh(self, sgd: StackedSgd, x: torch.Tensor, g: torch.Tensor) -> None:
        """See `_Linear`."""
        sgd.add_product(self._weight, g.flatten(2), self._h(x).transpose(1, 2))
        sgd.add(self._bias, g.sum((2, 3, 4)))

    def pulled(self, weights: Weights, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """See `_Linear`."""
        count, _, length, *image = x.shape
        at_h = self._torch.bmm(weights[self._weight].flatten(2).transpose(1, 2), g.flatten(2))
        each = at_h.view(*at_h.shape[:2], length, -1).transpose(1, 2).flatten(0, 1)
        window = self._window
        found: torch.Tensor = self._torch.nn.functional.fold(
            each, image, window.kernel, padding=window.padding, stride=window.stride
        )
        return found.view(count, length, *found.shape[1:]).transpose(1, 2)

    def patches(self, image: tuple[int, ...]) -> int:
        """Numbers of h for one image of (channels, height, width)."""
        return image[0] * prod(self._window.kernel) * prod(self._window.places(image))

    def made(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what comes out, as that of what goes in."""
        return self._channels, *self._window.places(image)

    def _h(self, x: torch.Tensor) -> torch.Tensor:
        (rows, columns), (down, right) = self._window.kernel, self._window.stride
        up, left = self._window.padding
        padded = self._torch.nn.functional.pad(x, (left, left, up, up)) if up or left else x
        seen = padded.unfold(3, rows, down).unfold(4, columns, right)
        return seen.permute(0, 1, 5, 6, 2, 3, 4).flatten(4).flatten(1, 3)


class _Flatten:
    """`torch.nn.Flatten` of all but the batch: images become columns."""

    def __call__(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return x.movedim(2, 4).flatten(1, 3)

    def weigh(self, sgd: StackedSgd, x: torch.Tensor, g: torch.Tensor) -> None:
        """It has no weights."""

    def pulled(self, weights: Weights, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """See `_Linear`."""
        count, channels, length, height, width = x.shape
        return g.reshape(count, channels, height, width, length).movedim(4, 2)


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


class _Pooling(_Elementwise):
    """A pool over the two axes of images."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        each = self._function
        self._function = lambda x: (made := each(x.flatten(0, 1))).view(*x.shape[:2], *made.shape[1:])
        self._window = _Window.of(module)

    def patches(self, image: tuple[int, ...]) -> int:  # noqa: ARG002
        """None are made."""
        return 0

    def made(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """See `_Convolution`."""
        return image[0], *self._window.places(image)


class _Relu(_Elementwise):
    """max(x, 0), which most have: its gradient needs no record of the pass, and a sixth of the time.

    `follows_weights`: nobody else wants x, and f(x) takes its place; where one is above 0 the other is, too.
    """

    follows_weights = False

    def __call__(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        """See `_Linear`."""
        return x.relu_() if self.follows_weights else super().__call__(weights, x)

    def pulled(self, weights: Weights, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """See `_Linear`; it is what autograd calls, here in the place of g."""
        found: torch.Tensor = self._torch.ops.aten.threshold_backward.grad_input(g, x, 0.0, grad_input=g)
        return found


Weighted = _Linear | _Convolution
OnImages = _Convolution | _Pooling
Layer = Weighted | _Elementwise | _Flatten


def _follow(layers: Sequence[Layer]) -> bool:
    """Whether each layer has what it takes from those before it: images, until they are flat, or columns."""
    images = any(isinstance(layer, OnImages) for layer in layers)
    for i, layer in enumerate(layers):
        if isinstance(layer, _Flatten):
            if i and not images:  # before it are rows of rows
                return False
            images = False
        elif isinstance(layer, OnImages | _Linear) and isinstance(layer, OnImages) != images:
            return False
    return not images


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
    has_both = f"{prefix}weight" in trained and f"{prefix}bias" in trained
    if kind is nn.Linear:
        return [_Linear(prefix)] if has_both else None
    if kind is nn.Conv2d:
        return [_Convolution(prefix, module)] if has_both and _plain(module) else None
    if kind in (nn.MaxPool2d, nn.AvgPool2d):
        return [_Pooling(module)] if _plain(module) else None
    if kind is nn.Flatten:
        return [_Flatten()] if module.start_dim == 1 and module.end_dim == -1 else None
    if kind is nn.ReLU:
        return [_Relu(module)]
    return [_Elementwise(module)] if kind in {getattr(nn, name) for name in ELEMENTWISE} else None


def _plain(module: Any) -> bool:
    """Whether a convolution or pool has nothing that `_Window` does not know of."""
    said = {"groups": 1, "padding_mode": "zeros", "ceil_mode": False, "return_indices": False}
    if any(getattr(module, name, value) != value for name, value in said.items()):
        return False
    dilation = getattr(module, "dilation", 1)
    return dilation in (1, (1, 1)) and not isinstance(module.padding, str)
