"""How the training examples lie on the devices: pure numpy, every draw from a named stream.

| split          | each device has                                                          | disjoint |
|----------------|--------------------------------------------------------------------------|----------|
| `iid`          | an equal random part                                                     | yes      |
| `dirichlet`    | of every class a share drawn from Dirichlet(alpha): Hsu et al. 2019      | yes      |
| `shards`       | k equal runs of the examples sorted by label: McMahan et al. 2017        | yes      |
| `speed-shards` | a random half of the k runs that its speed group has: AsyncDrop, Dun et  | between  |
|                | al. 2023, section 6 (there: 8 groups of 13 devices, k = 2)               | groups   |
| `draws`        | as many as `examples_per_client` says, drawn from all, of classes in a   | no       |
|                | mix drawn from Dirichlet(alpha C p) (C classes of shares p): for fleets  |          |
|                | of more devices than there are examples                                  |          |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from anabranch.core.config.tables import FleetTable
from anabranch.core.errors import ConfigError, DataError
from anabranch.core.parts import PartKind, answer_text
from anabranch.core.rng import seed_of, stream
from anabranch.workloads.app import Examples, Shard
from anabranch.workloads.batches import every_generator

Labels = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

DRAWS = "draws"
EXAMPLES_MIN = 8  # of a device under `dirichlet`, where there are enough
VALIDATION_FRACTION = 0.1


_say: ContextVar[Callable[[str], None] | None] = ContextVar("say", default=None)


@contextmanager
def doubting(say: Callable[[str], None] | None) -> Iterator[None]:
    """Inside, `say` hears what whoever asked for a split should know of it; None: nobody does."""
    token = _say.set(say)
    try:
        yield
    finally:
        _say.reset(token)


_counts: ContextVar[list[int] | None] = ContextVar("counts", default=None)


@contextmanager
def counting() -> Iterator[list[int]]:
    """Inside, the list gets how many examples there were, of all devices, whenever a part is asked for."""
    counts: list[int] = []
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)


def count_pool(examples: int) -> None:
    """Tell whoever counts how many examples a part is taken from."""
    if (counts := _counts.get()) is not None:
        counts.append(examples)


class Split(Protocol):
    """A function of the labels, (rows,): the row numbers of each of `count` devices.

    Every device computes it for itself, so all draws are of `stream(seed, ...)`. `speed_groups[i]` is the
    speed group of device i.
    """

    def __call__(
        self, labels: Labels, count: int, fleet: FleetTable, seed: int, speed_groups: tuple[int, ...]
    ) -> list[Rows]:
        """Of each device, in any order; a row may be on several devices."""
        ...


def partition(
    labels: Labels, count: int, fleet: FleetTable, seed: int, speed_groups: tuple[int, ...] = ()
) -> list[Rows]:
    """Row numbers of each of `count` devices, sorted; `fleet.split` says how.

    `fleet.examples_per_client` > 0 caps each part by a draw of its own. Raises `DataError` when there
    are too few examples, or labels of several numbers each for a split by class, `ConfigError` for an
    unknown split or one that lacks what it needs.
    """
    split: Split = SPLITS.find(fleet.split)
    if split is _draws:
        return split(labels, count, fleet, seed, speed_groups)
    if count < 1 or len(labels) < count:
        raise DataError(f"cannot split {len(labels)} examples over {count} devices: each needs one at least")
    if fleet.split in BUILT_IN:
        parts = split(labels, count, fleet, seed, speed_groups)
    else:
        parts = _own_parts(split, labels, count, fleet, seed, speed_groups)
    return [_capped(rows, fleet.examples_per_client, seed, i) for i, rows in enumerate(parts)]


def _own_parts(
    split: Split, labels: Labels, count: int, fleet: FleetTable, seed: int, speed_groups: tuple[int, ...]
) -> list[Rows]:
    """What a split of one's own gives, looked at. Raises `DataError`.

    It is asked twice: of one that draws by itself each device would get a part of another division. What it
    draws from the global generators of Python and numpy is of the seed.
    """
    shown = np.asarray(labels).view()
    shown.flags.writeable = False  # they are the examples' own, of which all devices train
    found = []
    for _ in range(2):
        with every_generator(seed_of(seed, "split", "own")):
            parts = split(shown, count, fleet, seed, speed_groups)
        found.append(_looked_at(parts, len(labels), count, fleet.split))
    if not all(np.array_equal(one, other) for one, other in zip(*found, strict=True)):
        raise DataError(
            f"fleet.split {fleet.split!r} gave other rows when it was asked again, as each device asks for "
            "itself: draw of stream(seed, ...) of anabranch.core.rng"
        )
    return found[0]


def _looked_at(parts: Any, rows_count: int, count: int, split: str) -> list[Rows]:
    if not hasattr(parts, "__len__"):
        raise DataError(
            f"fleet.split {split!r} gave {answer_text(parts)}: give a list of row numbers for each device"
        )
    if len(parts) != count:
        raise DataError(f"fleet.split {split!r} gave {len(parts)} parts for {count} devices: one each")
    return [_rows_of(rows, rows_count, split, device) for device, rows in enumerate(parts)]


def class_numbers(labels: Any) -> Labels:
    """The label of each example as an array, (count,). Raises `DataError` for another shape."""
    found = np.asarray(labels)
    if found.ndim != 1:
        raise DataError(
            f"labels of shape {found.shape} cannot be split by class: set fleet.split = 'iid', or give one "
            "number for each example, y.ravel() of a column, y.argmax(1) of scores"
        )
    return found


def _rows_of(rows: Any, count: int, split: str, device: int) -> Rows:
    """What a split of one's own gives a device: row numbers, one at least. Raises `DataError`."""
    found = np.asarray(rows)
    said = f"fleet.split {split!r} gave device {device}"
    if not found.size:
        raise DataError(f"{said} no rows: each needs one at least")
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        shape = f"shape {found.shape} of {found.dtype}"
        raise DataError(f"{said} an array of {shape}: give row numbers, whole ones in one dimension")
    if found.min() < 0 or found.max() >= count:
        raise DataError(
            f"{said} rows from {found.min()} to {found.max()}: there are {count}, from 0 to {count - 1}"
        )
    return found


@lru_cache(maxsize=8)
def train_validation(count: int, seed: int) -> tuple[Rows, Rows]:
    """Training rows and validation rows (10 %) of `count` training examples, both sorted and read-only."""
    order = stream(seed, "split", "validation").permutation(count)
    held_out = round(count * VALIDATION_FRACTION)
    found = np.sort(order[held_out:]), np.sort(order[:held_out])
    for rows in found:
        rows.flags.writeable = False
    return found


def take(pool: Examples, shard: Shard) -> Examples:
    """The part of a training pool that a `train` or `validation` shard means."""
    count_pool(len(pool))
    if shard.own and shard.role == "train":
        return pool
    training, validation = train_validation(len(pool), shard.seed)
    if shard.role == "validation":
        rows = validation
    elif shard.fleet.split == DRAWS:  # one device's alone: there may be a million
        rows = training[_drawn(_classes(pool, shard.seed), shard.index, shard.fleet, shard.seed)]
    else:
        rows = training[_parts(pool, replace(shard, index=0))[shard.index]]
    return Examples(pool.x[rows], pool.y[rows])


@lru_cache(maxsize=8)
def _parts(pool: Examples, whole: Shard) -> list[Rows]:
    # Every device of a simulation asks for its own part of the same partition.
    training, _ = train_validation(len(pool), whole.seed)
    return partition(pool.y[training], whole.count, whole.fleet, whole.seed, whole.speed_groups)


@lru_cache(maxsize=8)
def _classes(pool: Examples, seed: int) -> _Classes:
    training, _ = train_validation(len(pool), seed)
    return _Classes.of(pool.y[training])


@dataclass(frozen=True)
class _Classes:
    """The rows of all classes, one class after the other, (count,); where each begins and its size, (C,).

    `fractions`: see `_fractions`.
    """

    rows: Rows
    starts: Rows
    sizes: Rows
    fractions: str

    @classmethod
    def of(cls, labels: Labels) -> _Classes:
        labels = class_numbers(labels)
        _, starts, sizes = np.unique(np.sort(labels), return_index=True, return_counts=True)
        return cls(np.argsort(labels, kind="stable"), starts, sizes, _fractions(labels))


def _drawn(classes: _Classes, device: int, fleet: FleetTable, seed: int) -> Rows:
    check_split(fleet)
    if len(classes.rows) < len(classes.sizes) * fleet.examples_per_client:  # a class alone comes to repeats
        _check_whole(classes.fractions, DRAWS)
    draws = stream(seed, "split", DRAWS, device)
    mix = draws.dirichlet(fleet.dirichlet_alpha * classes.sizes / classes.sizes.mean())
    of = np.repeat(np.arange(len(mix)), draws.multinomial(fleet.examples_per_client, mix))
    within = (draws.random(len(of)) * classes.sizes[of]).astype(np.int64)
    return np.sort(classes.rows[classes.starts[of] + within])


def _capped(rows: Rows, examples_max: int, seed: int, device: int) -> Rows:
    if 0 < examples_max < len(rows):
        rows = stream(seed, "split", "cap", device).choice(rows, examples_max, replace=False)
    return np.sort(rows)


def _draws(
    labels: Labels, count: int, fleet: FleetTable, seed: int, speed_groups: tuple[int, ...]
) -> list[Rows]:
    classes = _Classes.of(labels)
    return [_drawn(classes, device, fleet, seed) for device in range(count)]


def _iid(
    labels: Labels, count: int, fleet: FleetTable, seed: int, speed_groups: tuple[int, ...]
) -> list[Rows]:
    return np.array_split(stream(seed, "split", "iid").permutation(len(labels)), count)


def _label_shards(
    labels: Labels, count: int, fleet: FleetTable, seed: int, speed_groups: tuple[int, ...]
) -> list[Rows]:
    return _deal(_shards(labels, count * fleet.shards_per_client, seed), count, seed)


def _dirichlet(
    labels: Labels, count: int, fleet: FleetTable, seed: int, speed_groups: tuple[int, ...]
) -> list[Rows]:
    alpha = fleet.dirichlet_alpha
    pieces: list[list[Rows]] = [[] for _ in range(count)]
    labels = class_numbers(labels)
    classes, of = np.unique(labels, return_inverse=True)  # what is no number is a class, too
    if doubt := _doubt_of(len(labels), len(classes), count):
        _check_whole(_fractions(labels), fleet.split)
        if say := _say.get():
            say(doubt)
    for number, label in enumerate(classes.tolist()):
        draws = stream(seed, "split", "dirichlet", label)
        rows = draws.permutation(np.flatnonzero(of == number))
        cuts = np.cumsum(draws.dirichlet(np.full(count, alpha)))[:-1] * len(rows)
        for device, piece in enumerate(np.split(rows, np.rint(cuts).astype(np.int64))):
            pieces[device].append(piece)
    return _fed([np.concatenate(p) for p in pieces], min(EXAMPLES_MIN, len(labels) // count), seed)


def _fractions(labels: Labels) -> str:
    """The type of labels that have fractions, as a regression's; empty: they have none."""
    has = labels.dtype.kind == "f" and np.any(np.mod(labels[np.isfinite(labels)], 1))
    return str(labels.dtype) if has else ""


def _check_whole(fractions: str, split: str) -> None:
    """Raises `DataError` for labels with fractions, where there are too many for classes."""
    if fractions:
        raise DataError(
            f"fleet.split = {split!r} needs a class number for each example, not {fractions} with "
            "fractions, as of a regression: set fleet.split = 'iid', or 'shards', which goes by their order, "
            "or number them by np.unique(y, return_inverse=True)[1] where each is a class"
        )


def _doubt_of(rows: int, classes: int, count: int) -> str:
    """What to know of a Dirichlet split of as many rows and classes; empty: nothing."""
    if rows >= classes * count:
        return ""
    return (
        f"fleet.split = 'dirichlet': {classes} classes have {rows / classes:.3g} examples each on average, "
        f"fewer than there are devices ({count}), so parts are cruder than fleet.dirichlet_alpha says, and "
        "few devices may have most: for even parts set fleet.split = 'iid', for others take fewer devices"
    )


def _fed(parts: list[Rows], examples_min: int, seed: int) -> list[Rows]:
    """Moves examples from the largest parts to those below the minimum."""
    parts = [stream(seed, "split", "spare", i).permutation(rows) for i, rows in enumerate(parts)]
    sizes = np.array([len(rows) for rows in parts])
    for device in np.flatnonzero(sizes < examples_min).tolist():
        while (missing := examples_min - int(sizes[device])) > 0:
            giver = int(sizes.argmax())
            moved = min(missing, int(sizes[giver]) - examples_min)
            parts[device] = np.concatenate([parts[device], parts[giver][:moved]])
            parts[giver] = parts[giver][moved:]
            sizes[device] += moved
            sizes[giver] -= moved
    return parts


def _shards(labels: Labels, count: int, seed: int) -> list[Rows]:
    labels = class_numbers(labels)
    if len(labels) < count:
        raise DataError(
            f"cannot cut {len(labels)} examples into {count} shards: use fewer devices or shards_per_client"
        )
    shuffled = stream(seed, "split", "order").permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return np.array_split(by_label, count)


def _deal(shards: list[Rows], hands: int, seed: int) -> list[Rows]:
    order = stream(seed, "split", "deal").permutation(len(shards))
    return [np.concatenate([shards[s] for s in hand]) for hand in np.split(order, hands)]


def _speed_shards(
    labels: Labels, count: int, fleet: FleetTable, seed: int, speed_groups: tuple[int, ...]
) -> list[Rows]:
    if len(speed_groups) != count:
        raise ConfigError(
            f"fleet.split speed-shards needs the speed group of each of {count} devices, "
            f"not {len(speed_groups)} groups: take them from speed_profile"
        )
    shards_per_group = fleet.shards_per_client
    groups = sorted(set(speed_groups))
    hands = _deal(_shards(labels, len(groups) * shards_per_group, seed), len(groups), seed)
    owned = dict(zip(groups, hands, strict=True))
    return [_half(owned[g], seed, device) for device, g in enumerate(speed_groups)]


def _half(rows: Rows, seed: int, device: int) -> Rows:
    return stream(seed, "split", "half", device).choice(rows, max(1, len(rows) // 2), replace=False)


BUILT_IN: dict[str, Split] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "shards": _label_shards,
    "speed-shards": _speed_shards,
    DRAWS: _draws,
}


def _check(found: Any) -> None:
    if isinstance(found, type) or not callable(found):
        raise ConfigError("a split is a function of labels, count, fleet, seed and speed_groups")


SPLITS = PartKind("split", "splits", ("fleet.split",), BUILT_IN, (), _check, option="--part split=PATH")


def check_split(fleet: FleetTable) -> None:
    """Raises `ConfigError` where the settings lack what the split needs."""
    if fleet.split == DRAWS and not fleet.examples_per_client:
        raise ConfigError("fleet.split draws needs fleet.examples_per_client: how many a device has")
