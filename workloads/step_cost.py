"""Floating-point operations of a training step, counted by torch itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from anabranch.workloads.app import Examples
from anabranch.workloads.torch_loop import TorchRuntime, examples_dtype, import_torch

if TYPE_CHECKING:
    import torch

COUNTED_EXAMPLES = 4


def operations(
    module: torch.nn.Module, examples: Examples, runtime: TorchRuntime, backward: bool = True
) -> int:
    """Operations of one forward and `backward` pass over a few examples; 0 where they cannot be counted.

    The pass changes buffers such as running statistics; weights and torch's generators stay. Recurrent
    layers cannot be counted: torch hides their products in one operation.
    """
    torch_module = import_torch()
    from torch.utils.flop_counter import FlopCounterMode

    if any(isinstance(part, torch_module.nn.RNNBase) for part in module.modules()):
        return 0
    dtype = examples_dtype(module)
    x, _ = runtime.batch(examples, np.arange(min(COUNTED_EXAMPLES, len(examples))), dtype)
    module.train()
    with (
        runtime.seeded(0),
        torch_module.set_grad_enabled(backward),
        FlopCounterMode(display=False) as counter,
    ):
        try:
            output = module(x)
            if backward:
                _summed(torch_module.utils._pytree.tree_leaves(output)).backward()
        except (RuntimeError, TypeError, ValueError):
            return 0  # the App calls its model in a way of its own
    module.zero_grad(set_to_none=True)
    return int(counter.get_total_flops())


def _summed(outputs: list[Any]) -> Any:
    return sum(o.sum() for o in outputs if getattr(o, "requires_grad", False))
