"""Floating-point operations of a training step, counted by torch itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from anabranch.core.errors import AppError
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
    if any(isinstance(part, torch_module.nn.RNNBase) for part in module.modules()):
        return 0
    dtype = examples_dtype(module)
    x, _ = runtime.batch(examples, np.arange(min(COUNTED_EXAMPLES, len(examples))), dtype)
    module.train()
    with (
        runtime.seeded(0),
        torch_module.set_grad_enabled(backward),
        _counter() as counter,
    ):
        try:
            output = module(x)
            if backward:
                _summed(torch_module.utils._pytree.tree_leaves(output)).backward()
        except (AppError, RuntimeError, TypeError, ValueError):
            return 0  # the App calls its model in a way of its own, or tells it more before it does
    module.zero_grad(set_to_none=True)
    return int(counter.found)


def _counter() -> Any:
    """Counts by torch's own formulas, inside it. `FlopCounterMode` would load torch's compiler for that."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        found = 0

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            """Without it each operation is wrapped for the compiler, which is loaded to do so."""
            return False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if (formula := flop_registry.get(func.overloadpacket)) is not None:
                self.found += formula(*args, **(kwargs or {}), out_val=out)
            return out

    return Counter()  # type: ignore[no-untyped-call]


def _summed(outputs: list[Any]) -> Any:
    return sum(o.sum() for o in outputs if getattr(o, "requires_grad", False))
