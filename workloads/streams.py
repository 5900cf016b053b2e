"""A torch `Dataset` or `DataLoader` in the place of arrays: for augmentation, and more than fits in memory.

Of a Dataset, batches are drawn like those of arrays, as the server planned them. A DataLoader's batches are
its own: size, sampler, collation and workers; an epoch is one pass over it. Only its generators are set, by
the task's seed, so that a training still depends on nothing but the task.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.errors import DataError
from anabranch.core.model.updates import LocalPlan
from anabranch.core.rng import seed_of
from anabranch.workloads.app import Examples
from anabranch.workloads.batches import batches, each_step, planned_steps

Batch = tuple[Any, Any]
WRAPPED = ("generator", "sampler", "batch_sampler")  # by which names others' samplers have them


class Streamed(Examples):
    """Examples that are made as they are asked for. `source` is the Dataset or the DataLoader.

    Raises `DataError` where it does not say how many it has, or has none.
    """

    source: Any

    def __init__(self, source: Any) -> None:
        object.__setattr__(self, "source", source)
        dataset = source.dataset if self.is_loader else source
        torch = sys.modules.get("torch.utils.data")
        if torch is not None and not self.is_loader and isinstance(source, torch.IterableDataset):
            raise DataError(
                f"data returned a {type(source).__name__}, an IterableDataset, which has no rows to draw: "
                "give a DataLoader of it, and it a __len__"
            )
        try:
            count = len(dataset)
        except TypeError as error:
            raise DataError(
                f"data returned a {type(source).__name__} that does not say how many examples it has: "
                f"give {type(dataset).__name__} a __len__"
            ) from error
        if count == 0:
            raise DataError("examples: there are none; give every device at least one")
        object.__setattr__(self, "_count", count)

    def __len__(self) -> int:
        return int(vars(self)["_count"])

    def __getattr__(self, name: str) -> Any:
        if name in ("x", "y"):
            raise DataError(f"examples of a {type(self.source).__name__} are no arrays: there is no {name}")
        raise AttributeError(name)

    @property
    def is_loader(self) -> bool:
        """Whether batches are the user's own."""
        return hasattr(self.source, "dataset") and hasattr(self.source, "__iter__")

    @property
    def kind(self) -> tuple[Any, ...]:
        """See `Examples`."""
        return ("streamed",)

    def not_finite(self) -> list[str]:
        """Nothing: nobody makes all of them to look at their values."""
        return []

    def rows(self, rows: npt.NDArray[Any]) -> Batch:
        """The examples of these rows, collated. Raises `DataError` where they are not pairs."""
        from torch.utils.data import default_collate

        dataset = self.source.dataset if self.is_loader else self.source
        if hasattr(dataset, "__getitems__"):
            items = dataset.__getitems__(rows.tolist())
        else:
            items = [dataset[i] for i in rows.tolist()]
        return _pair((self.source.collate_fn if self.is_loader else default_collate)(items))

    def planned(self, plan: LocalPlan, seed: int) -> Iterator[Batch]:
        """The batch of each local step."""
        if not self.is_loader:
            for drawn in batches(len(self), plan, seed):
                yield self.rows(drawn)
            return
        if len(self.source) == 0:
            raise self._no_batch()
        left, epoch = self.steps(plan), 0
        while left > 0:
            reseed(self.source, seed_of(seed, "shuffle", epoch))
            for batch in self._epoch(left):
                each_step()
                yield batch
            left, epoch = left - len(self.source), epoch + 1

    def steps(self, plan: LocalPlan) -> int:
        """Local steps of a plan."""
        if self.is_loader:
            return plan.steps or plan.epochs * len(self.source)
        return planned_steps(plan, len(self))

    def in_order(self, size: int) -> Iterator[Batch]:
        """Every example once: in batches of this size, or as the DataLoader has them."""
        if self.is_loader:
            reseed(self.source, 0)
            yield from self._epoch()
            return
        for start in range(0, len(self), size):
            yield self.rows(np.arange(start, min(start + size, len(self))))

    def _epoch(self, most: int | None = None) -> Iterator[Batch]:
        """So many batches of a DataLoader's, or all. Raises `DataError` where there is none."""
        found = False
        for batch in islice(self.source, most):
            found = True
            yield _pair(batch)
        if not found:
            raise self._no_batch()

    def _no_batch(self) -> DataError:
        with suppress(TypeError):  # a sampler that has none need not say how many
            if len(self.source) == 0:
                return DataError("the DataLoader gives no batch: with drop_last it needs a whole one")
        return DataError(
            "the DataLoader gave no batch: its iterator, or its sampler's, is used up; make a new one in "
            "`__iter__`"
        )


def is_stream(found: Any) -> bool:
    """Whether it is a torch Dataset or DataLoader."""
    torch = sys.modules.get("torch.utils.data")
    return torch is not None and isinstance(found, torch.Dataset | torch.DataLoader)


def reseed(loader: Any, seed: int) -> None:
    """Set the generators that a DataLoader brings along; others are torch's own, which the trainer seeds."""
    for generator in _generators(loader):
        generator.manual_seed(seed % 2**63)


def _generators(loader: Any) -> Iterator[Any]:
    """Each of a DataLoader, of its samplers and of those that they wrap, whatever its name there."""
    from torch import Generator
    from torch.utils.data import DataLoader, Sampler

    kinds, waiting, seen = (Generator, Sampler, DataLoader), [loader], dict[int, Any]()
    while waiting:
        holder = waiting.pop()
        if id(holder) in seen:
            continue
        seen[id(holder)] = holder
        if isinstance(holder, Generator):
            yield holder
            continue
        waiting += [found for name in WRAPPED if (found := getattr(holder, name, None)) is not None]
        for found in getattr(holder, "__dict__", {}).values():
            several = isinstance(found, list | tuple) and isinstance(next(iter(found), None), kinds)
            waiting += [one for one in (found if several else [found]) if isinstance(one, kinds)]


def _pair(batch: Any) -> Batch:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        what = type(batch).__name__ + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
        raise DataError(f"an example of the Dataset is a {what}: give pairs (x, y); without labels, (x, x)")
    x, y = batch
    return x, y
