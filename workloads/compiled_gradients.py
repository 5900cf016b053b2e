"""The losses and gradients of a stack of models by a program that torch compiles, as `vmap` has them.

| symbol | meaning                                                                                  |
|--------|------------------------------------------------------------------------------------------|
| x      | the examples of a step, (count, length, ...), of as many models, in batches of a length  |
| m      | what an example counts in the loss of its model, (count, length); 0: nothing             |

Torch's own rules for an embedding and for a layer norm under `vmap` fix the sizes that they are compiled for,
so a program is of one count and one length. There shall be few: both are filled up to the next power of 2 or
half-way between two, with examples that count nothing and with models like the first, whose gradients nobody
looks at. What was compiled is kept by torch, on the disk (`TORCHINDUCTOR_CACHE_DIR`) for the next process,
and in this one for all modules of one kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from anabranch.workloads.torch_loop import import_torch

if TYPE_CHECKING:
    import torch

    Stacked = Mapping[str, torch.Tensor]

PROGRAMS_MAX = 256  # of a process: sizes of stacks times kinds of models


class CompiledGradients:
    """Those of stacks of one module, in float32. No batch of them is longer than `length_max`.

    A call raises `RuntimeError` where torch cannot compile the module, or finds no compiler of C++.
    """

    def __init__(self, module: torch.nn.Module, length_max: int) -> None:
        self._module, self._length_max = module, length_max

    def __call__(
        self, weights: Stacked, fixed: Stacked, x: torch.Tensor, classes: torch.Tensor, m: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The losses (count,) and the gradients at each of `weights` (count, ...)."""
        library = import_torch()
        count, length = classes.shape
        long = max(length, min(filled(length), self._length_max))
        x, classes = (_longer(tensor, long) for tensor in (x, classes))
        m = library.nn.functional.pad(m, (0, long - length))
        many = filled(count)
        attention = library.nn.attention  # written out, `vmap` can follow it
        with (
            library.no_grad(),
            attention.sdpa_kernel(attention.SDPBackend.MATH),
            library._dynamo.config.patch(recompile_limit=PROGRAMS_MAX),
        ):
            losses, gradients = _program()(
                self._module,
                {name: _more(tensor.detach(), many) for name, tensor in weights.items()},
                {name: _more(tensor, many) for name, tensor in fixed.items()},
                *(_more(tensor, many) for tensor in (x, classes, m)),
            )
        return losses[:count], {name: gradient[:count] for name, gradient in gradients.items()}


def filled(size: int) -> int:
    """The least of 2, 3, 4, 6, 8, 12, 16 ... that is no less: a size of 1 is another kind to torch."""
    power = 2
    while 3 * power // 2 < size:
        power *= 2
    return power if power >= size else 3 * power // 2


def _longer(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Batches (count, any, ...) filled up with the first example of each."""
    more = length - tensor.shape[1]
    if not more:
        return tensor
    found: torch.Tensor = import_torch().cat([tensor, tensor[:, :1].expand(-1, more, *tensor.shape[2:])], 1)
    return found


def _more(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """A stack (any, ...) filled up with its first."""
    more = count - len(tensor)
    if not more:
        return tensor
    found: torch.Tensor = import_torch().cat([tensor, tensor[:1].expand(more, *tensor.shape[1:])])
    return found


@cache
def _program() -> Any:
    """What torch makes of `_gradients`: it finds by itself which of its programs fits a module and sizes."""
    return import_torch().compile(_gradients, fullgraph=True, dynamic=False)


def _gradients(
    module: torch.nn.Module,
    weights: dict[str, torch.Tensor],
    fixed: dict[str, torch.Tensor],
    x: torch.Tensor,
    classes: torch.Tensor,
    m: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    library = import_torch()

    def scores(w: Any, f: Any, one_x: torch.Tensor) -> Any:
        return library.func.functional_call(module, (w, f), (one_x,))

    def loss(w: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        found = library.vmap(scores)(w, fixed, x)
        flat = library.nn.functional.cross_entropy(found.flatten(0, 1), classes.flatten(), reduction="none")
        each = (flat.view(classes.shape) * m).sum(1)
        return each.sum(), each

    gradients, each = library.func.grad(loss, has_aux=True)(weights)
    return each, gradients
