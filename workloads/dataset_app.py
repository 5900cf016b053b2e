"""`app`: an App from a model and a dataset, in one call.

    app = ab.app(make_model, (x, y))                          # arrays or tensors
    app = ab.app(make_model, torch_dataset, test=another)
    app = ab.app(make_model, load_from_disk("digits"))        # a Dataset or DatasetDict of `datasets`
    app = ab.app(make_model, partitioner, test=held_out)      # of `flwr-datasets`: its own parts
    app = ab.app(make_model, federated_dataset)

Libraries are known by what their objects can do, and none is imported for it. Whatever the data are, they are
split as those of the built-in Apps are (`splits.py`), but for a partitioner, which has parts of its own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from anabranch.core.errors import AppError, DataError
from anabranch.core.rng import stream
from anabranch.core.spelling import spelled
from anabranch.workloads.app import App, Array, Examples, Model, Shard
from anabranch.workloads.splits import Rows, class_numbers, count_pool, take, train_validation

TEST_FRACTION = 0.2  # of data without a test part
OF_TABLES = ("column_names", "load_partition", "iloc")  # one of these has what has columns
LABELS = ("label", "labels")  # what a table's column of class numbers is called, where nobody says it
TESTS = ("test", "validation", "valid")  # the part of a mapping that tests, the first that is there
IID = "iid"


class Table(Protocol):
    """Examples that can be had by their numbers."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def labels(self) -> Array:
        """The class number of each, (count,)."""
        ...

    def part(self, rows: Rows) -> Any:
        """Those of these numbers, as an App's `data` returns them."""
        ...


@spelled()
def app(
    model: Any,
    data: Any,
    *,
    test: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Any = None,
    metrics: Any = None,
    label: str = "",
    inputs: Sequence[str] | str = (),
    name: str = "",
    own_data: bool = False,
) -> App:
    """An App of a torch model and of data.

    Args:
        model: A function or class that makes a torch module (it may take a `seed`), or a module: each device
            starts from a copy of it.
        data: A pair (x, y) of arrays or tensors; a torch `Dataset` of pairs; a `Dataset` of Hugging Face's
            `datasets`; a mapping with `train` and `test`, such as a `DatasetDict`; or a partitioner or a
            `FederatedDataset` of `flwr-datasets`, whose part i is device i's.
        test: What measures, in any of the first three forms. Without it a fifth of the data, always the same.
        loss: Of (output, y) the mean; None: the cross entropy.
        optimizer: A class of `torch.optim`, or a function of (parameters, plan); None: SGD.
        metrics: A mapping of functions of (output, y), or a function that gives such a mapping.
        label: The column of a table that is y; not needed where it is called `label` or `labels`.
        inputs: The columns of a table that are x: one is given to the model as it is, several by their names.
            Without it, all columns of numbers.
        name: What runs of it are called; without it, as the model is.
        own_data: On each machine the data are that device's own: it trains on all of them but what `test`
            holds out, whatever the number in its name. A simulated fleet goes on splitting them.

    Where the loss is the cross entropy, a model may return an object with `logits`, as those of Hugging Face
    do. Raises `AppError` and `DataError`, with the fix.
    """
    if own_data and hasattr(data, "load_partition"):
        raise AppError("app(own_data=True): a partitioner has a part for each device; leave one of them out")
    if not isinstance(name, str):
        raise AppError(f"app(name={name!r}): give it as text")
    columns = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    found = DatasetApp(model, _Source(data, test, label, columns), loss, optimizer, metrics, name)
    found.own_data = own_data
    return found


class DatasetApp(App):
    """What `app` returns."""

    def __init__(
        self, model: Any, source: _Source, loss: Any, optimizer: Any, metrics: Any, name: str
    ) -> None:
        super().__init__()
        if not callable(model):
            raise AppError(
                f"app(model=...) is a {type(model).__name__}: give a function that makes a torch module"
            )
        self.name = name or getattr(model, "__name__", type(model).__name__)
        self.loss, self.optimizer, self.metrics = loss, optimizer, metrics
        self._model, self._source = model, source

    def model(self, seed: int = 0) -> Model:
        """A new one, or a copy."""
        if not inspect.isclass(self._model) and hasattr(self._model, "load_state_dict"):
            return copy.deepcopy(self._model)
        takes_seed = "seed" in inspect.signature(self._model).parameters
        return self._model(seed=seed) if takes_seed else self._model()

    def data(self, shard: Shard) -> Any:
        """A device's part, or what is held out."""
        return self._source.data(shard)


class _Source:
    """The data, opened when they are first asked for."""

    def __init__(self, data: Any, test: Any, label: str, inputs: tuple[str, ...]) -> None:
        if isinstance(data, Mapping):
            data, test = _parts_of(data, test)
        if (label or inputs) and not any(hasattr(data, mark) for mark in OF_TABLES):
            raise AppError(
                f"app(label=..., inputs=...): data is a {type(data).__name__}, which has no columns: leave "
                "them out, or give a Dataset of Hugging Face's"
            )
        self._data, self._test, self._columns = data, test, (label, inputs)

    def data(self, shard: Shard) -> Any:
        """See `App.data`."""
        if shard.role == "test":
            table, rows = self._held_out
            return table.part(rows)
        if hasattr(self._data, "load_partition"):
            return self._of_partitioner(shard)
        count_pool(len(self._pool))
        return self._pool.part(self._rows[take(self._numbered(shard), shard).x])

    @cached_property
    def _pool(self) -> Table:
        return table_of(self._data, *self._columns)

    @cached_property
    def _rows(self) -> Rows:
        """The numbers of the examples that are not for tests."""
        return self._cut[0]

    @cached_property
    def _cut(self) -> tuple[Rows, Rows]:
        order = stream(0, "app", "test").permutation(len(self._pool))
        held_out = round(len(order) * TEST_FRACTION) if self._test is None else 0
        return np.sort(order[held_out:]), np.sort(order[:held_out])

    @cached_property
    def _held_out(self) -> tuple[Table, Rows]:
        federated = self._test is None and hasattr(self._data, "load_split")
        test = self._data.load_split(TESTS[0]) if federated else self._test
        if test is not None:
            table = table_of(test, *self._columns)
            return table, np.arange(len(table))
        if hasattr(self._data, "load_partition"):
            raise DataError("a partitioner has no test data: give app(..., test=...)")
        return self._pool, self._cut[1]

    @cached_property
    def _by_label(self) -> Examples:
        """Each example's number, and its label: what the splits go by."""
        labels = class_numbers(self._pool.labels())
        return Examples(np.arange(len(self._rows)), labels[self._rows])

    @cached_property
    def _unlabelled(self) -> Examples:
        count = len(self._rows)
        return Examples(np.arange(count), np.zeros(count, np.int8))

    def _numbered(self, shard: Shard) -> Examples:
        # Labels may take a pass over all data: only where a split goes by them.
        return self._unlabelled if shard.own or shard.fleet.split == IID else self._by_label

    def _of_partitioner(self, shard: Shard) -> Any:
        """The partitioner's part of a device, less the tenth of each part that validates."""
        parts = getattr(self._data, "num_partitions", shard.count)
        if shard.role == "train" and shard.count > parts:
            raise DataError(
                f"fleet.clients is {shard.count}, and the partitioner has {parts} parts: set one to the other"
            )
        if shard.role == "train":
            table = table_of(self._data.load_partition(shard.index), *self._columns)
            return table.part(train_validation(len(table), shard.seed)[0])
        tables = [table_of(self._data.load_partition(i), *self._columns) for i in range(parts)]
        return _joined([t.part(train_validation(len(t), shard.seed)[1]) for t in tables])


def _parts_of(data: Mapping[str, Any], test: Any) -> tuple[Any, Any]:
    """What trains and what tests. Raises `DataError`."""
    if "train" not in data:
        raise DataError(
            f"a mapping of data has the parts {', '.join(data)}: one must be 'train', or give a pair (x, y)"
        )
    found = next((data[name] for name in TESTS if name in data), None)
    return data["train"], found if test is None else test


def table_of(data: Any, label: str = "", inputs: Sequence[str] = ()) -> Table:
    """Data of any of the forms of `app` as a table. Raises `DataError`."""
    if isinstance(data, Examples):
        return _Arrays(data)
    if isinstance(data, tuple | list) and len(data) == 2:
        return _Arrays(Examples(*data))
    if hasattr(data, "column_names") and hasattr(data, "with_format"):
        if not hasattr(data, "__len__"):
            raise DataError(
                f"data is a {type(data).__name__} of Hugging Face's, which is read as it comes and has no "
                "rows to split: load it with streaming=False, or keep what there is room for, "
                "datasets.Dataset.from_list(list(data.take(10_000)))"
            )
        return _of_columns(data, label, inputs)
    if isinstance(data, tuple | list) and data and not isinstance(data[0], tuple | list):
        raise DataError(
            f"data is a {type(data).__name__} of {len(data)}, each a {type(data[0]).__name__}: give a pair "
            "(x, y); give test data as app(..., test=(x, y)); for several inputs give a torch Dataset of "
            "pairs whose x is a dict"
        )
    no_pairs = isinstance(data, str | bytes | np.ndarray) or hasattr(data, "iloc")  # a path, x alone, a frame
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not no_pairs:
        from anabranch.workloads.dataset_rows import TorchTable

        return TorchTable.of(data)
    raise DataError(
        f"data is a {type(data).__name__}: give a pair (x, y), of a pandas frame "
        "(frame[[...]].to_numpy(), frame[...].to_numpy()), a torch Dataset with a length, a Dataset of "
        "Hugging Face's, a mapping with 'train' and 'test', or a partitioner"
    )


class _Arrays:
    """In memory."""

    def __init__(self, examples: Examples) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def labels(self) -> Array:
        return self._examples.y

    def part(self, rows: Rows) -> Examples:
        return Examples(self._examples.x[rows], self._examples.y[rows])


def _of_columns(data: Any, label: str, inputs: Sequence[str]) -> Table:
    """A table of Hugging Face's: in memory where x is one column of arrays of one shape, else as it is."""
    names = list(data.column_names)
    y = label or next((name for name in LABELS if name in names), "")
    if y not in names:
        raise DataError(
            f"no column {y or ' or '.join(LABELS)!r} among {', '.join(names)}: say app(..., label=...)"
        )
    missing = [name for name in inputs if name not in names]
    if missing:
        raise DataError(f"inputs: no column {missing[0]!r} among {', '.join(names)}")
    x = list(inputs) or [name for name in names if name != y and not _is_text(data, name)]
    if not x:
        raise DataError(f"no column of {', '.join(names)} has numbers: tokenise text first, data.map(...)")
    if len(x) == 1 and data.format["type"] is None:
        columns = data.with_format("numpy")
        found = np.asarray(columns[x[0]][:])
        if found.dtype.kind in "iufb":
            return _Arrays(Examples(found, np.asarray(columns[y][:])))
    from anabranch.workloads.dataset_rows import ColumnTable

    return ColumnTable(data, x, y)


def _is_text(data: Any, name: str) -> bool:
    return getattr(data.features[name], "dtype", "") in ("string", "large_string")


def _joined(parts: Sequence[Any]) -> Any:
    """Several parts as one."""
    if all(isinstance(part, Examples) for part in parts):
        return Examples(np.concatenate([p.x for p in parts]), np.concatenate([p.y for p in parts]))
    from torch.utils.data import ConcatDataset

    return ConcatDataset(parts)
