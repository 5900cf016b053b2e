"""The graph of a torch module, as torch.fx traces it."""

from __future__ import annotations

import inspect
import random
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from anabranch.core.errors import AppError
from anabranch.workloads.small_attention import SmallAttention

ROOT = "model"
ONE_AT_A_TIME = threading.Lock()  # of two at a time the second would leave what the first has patched


class _Tracer(fx.Tracer):
    """Remembers the innermost module in which tracing failed.

    While it traces, torch.fx has patched the calls of all modules of the process: those of other threads,
    which train, pass it by.
    """

    failed: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, SmallAttention) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or self.path_of_module(m)
            raise


def trace(module: nn.Module) -> fx.Graph:
    """The graph; a module that is a single layer of torch's is called `ROOT` in it.

    `forward` runs, which may change the module's buffers; what it draws at random is drawn again by the next
    who draws. Raises `AppError`, naming the place, for what torch.fx cannot trace.
    """
    tracer = _Tracer()
    root = module
    if tracer.is_leaf_module(module, ""):
        root = nn.Sequential(OrderedDict({ROOT: module}))
    try:
        with ONE_AT_A_TIME, _draws_undone():
            return tracer.trace(root, _defaults(root))
    except Exception as error:
        place = f"module {tracer.failed!r}" if tracer.failed else f"forward of {type(module).__name__}"
        raise AppError(
            f"torch.fx cannot trace the model, in {place}: {type(error).__name__}: {error}; "
            "write units(self, model) in the App, which returns the groups of units"
        ) from error


def _defaults(module: nn.Module) -> dict[str, Any]:
    """Arguments of `forward` that are not given in training, where the model is called with x alone."""
    named = inspect.signature(module.forward).parameters.values()
    return {p.name: p.default for p in named if p.default is not p.empty}


@contextmanager
def _draws_undone() -> Iterator[None]:
    """Two graphs of one module are to differ in nothing that was drawn."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
