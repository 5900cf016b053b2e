"""A module that an App keeps, whole or in part: it is copied, or one run would begin where another ended.

`self.net`, `lambda: net` and `Embedding.from_pretrained(VECTORS)` give the same memory at each call of
`model`, and a training writes to it. Parameters that require no gradient are not copied, unless the App says
what is trained: nobody writes to them, and a backbone may be large.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from threading import Lock
from typing import TYPE_CHECKING, Any

from anabranch.core.errors import AppError
from anabranch.workloads.app import App, has_own

if TYPE_CHECKING:
    import torch

_lock = Lock()
_given: set[Any] = set()  # weak references to the memory of all that was given and is still there


def own_module(module: torch.nn.Module, app: App) -> torch.nn.Module:
    """The module, or a copy where it shares memory with one that an App has returned before.

    Raises `AppError` where it cannot be copied.
    """
    memory = set(_memory(module))
    with _lock:
        _given.difference_update([held for held in _given if held.expired()])
        is_new = memory.isdisjoint(_given)
        _given.update(memory)
    if is_new:
        return module
    by_gradient = not has_own(app, "trained")
    still = {id(p): p for p in module.parameters() if by_gradient and not p.requires_grad}
    try:
        return copy.deepcopy(module, still)
    except Exception as error:
        raise AppError(
            f"{app.name}: model() returned what it had returned before, and it cannot be copied ({error}): "
            "make a new module each time, or one run begins where another ended"
        ) from error


def _memory(module: torch.nn.Module) -> Iterator[Any]:
    """Where the tensors lie that a training may write to."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    written = [p for p in module.parameters() if p.requires_grad]
    for tensor in (*written, *module.buffers()):
        if not torch.nn.parameter.is_lazy(tensor) and tensor.layout == torch.strided and tensor.numel():
            yield StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
