"""Which examples each local step sees: the same for every kind of model, fixed by the task's seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.errors import ConfigError
from anabranch.core.model.updates import LocalPlan
from anabranch.core.rng import permutation

_each_step: ContextVar[Callable[[], None] | None] = ContextVar("each_step", default=None)


class _Raised(BaseException):
    """What a hook has raised, on its way out through an App's code, which is not where it comes from."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def watched(hook: Callable[[], None]) -> Iterator[None]:
    """Inside, `hook` is called before every local step; what it raises ends the training and comes out."""
    token = _each_step.set(hook)
    try:
        yield
    except _Raised as raised:
        raise raised.error from None
    finally:
        _each_step.reset(token)


def each_step() -> None:
    """A local step begins: whoever trains calls this before it. Raises what ends the training."""
    hook = _each_step.get()
    if hook is None:
        return
    try:
        hook()
    except Exception as error:  # noqa: BLE001 - no `except` of an App may eat it, nor is it the App's error
        raise _Raised(error) from None


def batches_per_epoch(count: int, batch_size: int) -> int:
    """Batches in one pass over `count` examples. Raises `ConfigError` for a batch size below 1."""
    if batch_size < 1:
        raise ConfigError(f"client.batch_size must be at least 1, not {batch_size}")
    return -(-count // batch_size)


def planned_steps(plan: LocalPlan, count: int) -> int:
    """Local steps of a plan on `count` examples; `plan.steps` > 0 overrides the epochs."""
    return plan.steps or plan.epochs * batches_per_epoch(count, plan.batch_size)


def batches(count: int, plan: LocalPlan, seed: int) -> Iterator[npt.NDArray[Any]]:
    """Row numbers of each step, drawn without replacement within an epoch.

    An epoch is cut into near-equal batches of at most `batch_size` rows: a remainder of one example
    would be a noisy gradient, and batch normalisation refuses it.
    """
    per_epoch = batches_per_epoch(count, plan.batch_size)
    left, epoch = planned_steps(plan, count), 0
    while left > 0:
        order = permutation(seed, "shuffle", epoch, count=count)
        least, larger = divmod(count, per_epoch)
        for batch in range(min(left, per_epoch)):
            start = batch * least + min(batch, larger)
            each_step()
            yield order[start : start + least + (batch < larger)]
        left, epoch = left - per_epoch, epoch + 1


@contextmanager
def every_generator(seed: int) -> Iterator[None]:
    """Inside, the global generators of Python and numpy, which augmentation draws from, have this seed."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
