"""Which examples each local step sees: the same for every kind of model, fixed by the task's seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.errors import ConfigError
from anabranch.core.model.arrays import Indices
from anabranch.core.model.updates import LocalPlan
from anabranch.core.rng import permutations

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
    drawn = DrawnTogether(count, plan, [seed])
    for step in range(drawn.steps):
        each_step()
        yield drawn.of(step)[0]


class DrawnTogether:
    """The `batches` of trainings with as many examples and the same plan, a step of all at a time."""

    def __init__(self, count: int, plan: LocalPlan, seeds: Sequence[int]) -> None:
        self._count, self._seeds = count, seeds
        self._per_epoch = batches_per_epoch(count, plan.batch_size)
        self.steps = planned_steps(plan, count)
        self._epoch = -1
        self._orders: Indices = np.empty((len(seeds), 0), np.int64)

    def of(self, step: int) -> Indices:
        """Row numbers of each training, (trainings, any)."""
        epoch, batch = divmod(step, self._per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._orders = permutations(self._seeds, "shuffle", epoch, count=self._count)
        least, larger = divmod(self._count, self._per_epoch)
        start = batch * least + min(batch, larger)
        return self._orders[:, start : start + least + (batch < larger)]


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
