"""The losses and gradients of a stack of models by programs that torch compiles, in float32.

Torch's own rules for an embedding and for a layer norm under `vmap` fix the sizes that they are compiled for,
so a program is of one count of models and one length of their batches. There shall be few: both are filled
up, with examples that count nothing and with models like the first, whose gradients nobody looks at. What was
compiled is kept by torch, on the disk (`TORCHINDUCTOR_CACHE_DIR`) for the next process, and in this one for
all modules of one kind.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from anabranch.workloads.stacked_module import stacked_losses, stacked_scores, written_out_attention
from anabranch.workloads.torch_loop import import_torch

if TYPE_CHECKING:
    import torch

    from anabranch.workloads.stacked_sgd import Stacked

PROGRAMS_MAX = 256  # of a process: for each kind of model, count and length


class NotCompiledError(RuntimeError):
    """Torch cannot compile a module, or finds no compiler of C++, or no place for what it has made."""


class CompiledGradients:
    """Those of modules of one kind, of which the loss reaches the same tensors in every one."""

    def __init__(self) -> None:
        self._reached: frozenset[str] | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        length_max: int,
        weights: Stacked,
        fixed: Stacked,
        x: torch.Tensor,
        classes: torch.Tensor,
        m: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The losses (count,), and the gradients (count, ...) at those of `weights` that they depend on.

        For x, `classes` and m see `stacked_module.py`; no batch is longer than `length_max`. Raises
        `NotCompiledError`.
        """
        library = import_torch()
        if self._reached is None:
            self._reached = _reached(module, weights, fixed, x, classes, m)
        count, length = classes.shape
        long = min(filled(length), length_max)
        many = filled(count)
        x, classes = (_filled_up(_filled_up(tensor, 1, long), 0, many) for tensor in (x, classes))
        m = _filled_up(library.nn.functional.pad(m, (0, long - length)), 0, many)
        given = module, _stack_of(many, weights), _stack_of(many, fixed), x, classes, m
        compiler = _compiler()
        if isinstance(compiler, OSError):
            raise NotCompiledError(_said(compiler)) from compiler
        known = compiler.exc
        try:
            with compiler.config.patch(recompile_limit=PROGRAMS_MAX), written_out_attention():
                losses, gradients = _program()(*given)
        except (OSError, known.TorchDynamoException, known.FailOnRecompileLimitHit) as error:
            raise NotCompiledError(_said(error)) from error
        return losses[:count], {name: gradients[name][:count] for name in weights if name in self._reached}


def filled(size: int) -> int:
    """The least of 2, 3, 4, 6, 8, 12, 16 ... that is no less: a size of 1 is another kind to torch."""
    power = 2
    while 3 * power // 2 < size:
        power *= 2
    return power if power >= size else 3 * power // 2


def _filled_up(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """A tensor with its first along an axis again, until it is as long; in one piece of memory.

    Programs are of strides, too, and a step's examples are a view of those of many steps.
    """
    more = size - tensor.shape[axis]
    if not more:
        return tensor.contiguous()
    first = tensor.narrow(axis, 0, 1)
    again = [more if i == axis else -1 for i in range(tensor.ndim)]
    found: torch.Tensor = import_torch().cat([tensor, first.expand(again)], axis)
    return found


def _stack_of(count: int, tensors: Stacked) -> dict[str, torch.Tensor]:
    """Tensors of as many models, by name."""
    return {name: _filled_up(tensor.detach(), 0, count) for name, tensor in tensors.items()}


@cache
def _program() -> Any:
    """What torch makes of `_gradients`: it finds by itself which of its programs fits a module and sizes."""
    return import_torch().compile(_gradients, fullgraph=True, dynamic=False)


@cache
def _compiler() -> Any:
    """Torch's, or the `OSError` of its import, which makes its place on the disk.

    After that it must not be imported again: what it had registered by then it would refuse, with an error
    that tells nothing.
    """
    try:
        return import_torch()._dynamo
    except OSError as error:
        return error


def _said(error: Exception) -> str:
    said = str(error).partition("\n\n")[0].split() or [type(error).__name__]
    return f"torch cannot compile it: {' '.join(said)}"


def _gradients(
    module: torch.nn.Module,
    weights: Stacked,
    fixed: Stacked,
    x: torch.Tensor,
    classes: torch.Tensor,
    m: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The losses, and the gradients at all weights: zeros where the losses do not depend on them."""

    def loss(w: Stacked) -> tuple[torch.Tensor, torch.Tensor]:
        each = stacked_losses(stacked_scores(module, w, fixed, x), classes, m)
        return each.sum(), each

    gradients, each = import_torch().func.grad(loss, has_aux=True)(weights)
    return each, gradients


def _reached(
    module: torch.nn.Module,
    weights: Stacked,
    fixed: Stacked,
    x: torch.Tensor,
    classes: torch.Tensor,
    m: torch.Tensor,
) -> frozenset[str]:
    """The names of the weights that the loss depends on, as autograd knows: others are not to decay."""
    library = import_torch()
    own = {name: tensor[:1].detach().requires_grad_() for name, tensor in weights.items()}
    with library.enable_grad(), written_out_attention():
        scores = stacked_scores(module, own, {name: tensor[:1] for name, tensor in fixed.items()}, x[:1])
        loss = stacked_losses(scores, classes[:1], m[:1]).sum()
        found = library.autograd.grad(loss, list(own.values()), allow_unused=True)
    return frozenset(name for name, gradient in zip(own, found, strict=True) if gradient is not None)
