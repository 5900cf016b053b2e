"""Tables of examples that are made as they are asked for: torch `Dataset`s, and columns of Hugging Face's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from anabranch.core.errors import DataError
from anabranch.workloads.app import Array, Examples
from anabranch.workloads.splits import Rows

LABELS = ("targets", "labels")  # where datasets of torchvision and others have them


class TorchTable:
    """A torch `Dataset` of pairs, whose items are made anew each time."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    @classmethod
    def of(cls, dataset: Any) -> TorchTable:
        """Raises `DataError` where it is empty, or has no rows."""
        if isinstance(dataset, IterableDataset):
            raise DataError(
                f"data is a {type(dataset).__name__}, an IterableDataset, which has no rows to split: give a "
                "Dataset with a __getitem__, or write an App, whose data returns a device's DataLoader"
            )
        if len(dataset) == 0:
            raise DataError("the Dataset is empty: give every device at least one example")
        return cls(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def labels(self) -> Array:
        """By its `targets`, or else by a pass over all items."""
        return labels_of(self._dataset)

    def part(self, rows: Rows) -> Any:
        """Arrays of a `TensorDataset`, which are in memory; else a `Subset`."""
        if isinstance(self._dataset, TensorDataset) and len(self._dataset.tensors) == 2:
            x, y = self._dataset.tensors
            return Examples(x[rows].numpy(), y[rows].numpy())
        return Subset(self._dataset, rows.tolist())


def labels_of(dataset: Any) -> Array:
    """The label of each item, (count,)."""
    if isinstance(dataset, Subset):
        return labels_of(dataset.dataset).take(np.asarray(dataset.indices), 0)
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([labels_of(part) for part in dataset.datasets])
    if isinstance(dataset, TensorDataset):
        return np.asarray(dataset.tensors[-1])
    for name in LABELS:
        found = getattr(dataset, name, None)
        if found is not None and len(found) == len(dataset):
            return np.asarray(found)
    try:
        return np.asarray([np.asarray(dataset[i][1]) for i in range(len(dataset))])
    except (TypeError, IndexError, KeyError) as error:
        raise DataError(f"an item of the Dataset is no pair (x, y): {error}") from error


class ColumnTable:
    """Columns of a `Dataset` of Hugging Face's, as their owner has formatted them, or as tensors."""

    def __init__(self, data: Any, x: Sequence[str], y: str) -> None:
        self._data, self._x, self._y = data, tuple(x), y

    def __len__(self) -> int:
        return len(self._data)

    def labels(self) -> Array:
        """The column, without a transformation."""
        return np.asarray(self._data.with_format("numpy")[self._y][:])

    def part(self, rows: Rows) -> ColumnRows:
        """Read when it is needed."""
        return ColumnRows(self._data.select(rows.tolist()), self._x, self._y)


class ColumnRows(Dataset[Any]):
    """Pairs (x, y): x is the one column, or a mapping of several, which give a model its arguments."""

    def __init__(self, data: Any, x: tuple[str, ...], y: str) -> None:
        self._data = data.with_format("torch") if data.format["type"] is None else data
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self._pair(self._data[int(row)])

    def __getitems__(self, rows: list[int]) -> list[tuple[Any, Any]]:
        found = self._data[rows]
        return [self._pair({name: column[i] for name, column in found.items()}) for i in range(len(rows))]

    def _pair(self, item: Any) -> tuple[Any, Any]:
        x = item[self._x[0]] if len(self._x) == 1 else {name: item[name] for name in self._x}
        return x, item[self._y]
