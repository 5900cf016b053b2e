"""Which part of the model a task covers, and what belongs to it.

`UnitMap` keeps some units of each group (`units.py`) and everything that is in no group: a smaller model of
the same kind, whose tensors a device can build and train. `TensorSet` is some whole tensors: the model stays
as large as it is, and an update has these alone. `Coordinates` is any set of coordinates: it can be
aggregated, but only be trained as a whole model of which the rest is not sent.

Values go from the vector to the part and back by `blocks`: all coordinates of a large model at once are eight
bytes each, and slow to make.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from anabranch.core.errors import InvalidUpdate
from anabranch.core.model.arrays import BLOCK
from anabranch.core.model.blocks import Along, PartBlock, flat_places, tensor_blocks
from anabranch.core.model.params import (
    Delta,
    Indices,
    ParamSpec,
    SparseVector,
    TensorSpec,
    Vector,
    add_scaled,
)
from anabranch.core.model.units import places, units_at_most

Kept = tuple[tuple[int, ...], ...]
_NOTHING: Indices = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Coordinates:
    """The coordinates of the vector that a task covers, sorted and unique; the rest is not touched."""

    indices: Indices

    @property
    def size(self) -> int:
        """How many coordinates."""
        return int(self.indices.size)

    def blocks(self) -> Iterator[PartBlock]:
        """All covered coordinates, in order."""
        for start in range(0, self.size, BLOCK):
            at = slice(start, min(start + BLOCK, self.size))
            yield PartBlock(at, slice(None), 1, self.indices[at])

    def places(self, at: Indices) -> Indices:
        """Where the vector has these of the covered coordinates."""
        return self.indices[at]

    def check(self, spec: ParamSpec) -> None:
        """Raises `InvalidUpdate` unless the indices are sorted, unique and in range."""
        i = self.indices
        if i.ndim != 1 or i.size == 0:
            raise InvalidUpdate("submodel: indices must be one non-empty list of coordinates")
        if i[0] < 0 or i[-1] >= spec.size or bool(np.any(np.diff(i) <= 0)):
            raise InvalidUpdate(
                f"submodel: indices must be strictly increasing and within 0..{spec.size - 1}"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Coordinates) and np.array_equal(self.indices, other.indices)

    def __hash__(self) -> int:
        return hash(self.indices.tobytes())

    def to_json(self) -> list[int]:
        """The coordinates."""
        found: list[int] = self.indices.tolist()
        return found


@dataclass(frozen=True, eq=False)
class CoordinateRuns:
    """Coordinates as a message names them: run i is `lengths[i]` of them from `starts[i]` on.

    A few bytes may name all coordinates of a model, which are eight bytes each. So of what a device says a
    server compares the runs, and makes no coordinates.
    """

    starts: Indices
    lengths: Indices

    @classmethod
    def of(cls, part: Coordinates) -> CoordinateRuns:
        """Those of some coordinates."""
        i = part.indices
        first = np.flatnonzero(np.diff(i, prepend=i[0] - 2) != 1)
        return cls(i[first], np.diff(np.append(first, i.size)))

    def are(self, part: Submodel | None) -> bool:
        """Whether they are the coordinates of a part that was given by coordinates."""
        if not isinstance(part, Coordinates) or part.size != self.lengths.sum():
            return False
        own = CoordinateRuns.of(part)
        return np.array_equal(self.starts, own.starts) and np.array_equal(self.lengths, own.lengths)

    @property
    def coordinates(self) -> Coordinates:
        """All of them, made anew each time."""
        runs = zip(self.starts, self.lengths, strict=True)
        return Coordinates(np.concatenate([np.arange(start, start + length) for start, length in runs]))


@dataclass(frozen=True)
class UnitMap:
    """`kept[g]`: the numbers of the units that are kept of `spec.groups[g]`, increasing, at least one.

    Made by `unit_map`, which checks them and says so. The coordinates are not stored but computed.
    """

    spec: ParamSpec
    kept: Kept
    checked: bool = field(default=False, compare=False, repr=False)

    @property
    def indices(self) -> Indices:
        """The covered coordinates of the vector, increasing, shape (size,); not to be written to.

        They are eight bytes each and slow to make: for looks, not for what is done for each update.
        """
        return _coordinates(self.spec, self.kept)

    @cached_property
    def size(self) -> int:
        """How many coordinates."""
        return self.small.size

    def blocks(self) -> Iterator[PartBlock]:
        """All covered coordinates, in order."""
        cut, start = _cut(self.spec, self.kept), 0
        for t in self.spec.tensors:
            if t.aggregated:
                for block in tensor_blocks(_along(cut, t), t.shape, self.spec.slices[t.name], start):
                    start = block.at.stop
                    yield block

    def covered(self, names: Collection[str]) -> tuple[Indices, Indices]:
        """What is covered of some tensors: where the part has it, and where the vector; increasing."""
        cut, at, places = _cut(self.spec, self.kept), [_NOTHING], [_NOTHING]
        for t in self.spec.tensors:
            if t.aggregated and t.name in names:
                places.append(self.spec.slices[t.name].start + flat_places(_along(cut, t), t.shape))
                within = self.small.slices[t.name]
                at.append(np.arange(within.start, within.stop))
        return np.concatenate(at), np.concatenate(places)

    def places(self, at: Indices) -> Indices:
        """Where the vector has these of the covered coordinates."""
        cut, found = _cut(self.spec, self.kept), np.empty(at.size, np.int64)
        shapes = {t.name: t for t in self.spec.tensors}
        starts = np.array([where.start for where in self.small.slices.values()])
        owner = np.searchsorted(starts, at, side="right") - 1
        for n, name in enumerate(self.small.slices):
            inside = np.flatnonzero(owner == n)
            if inside.size:
                tensor, rest, step = shapes[name], at[inside] - starts[n], 1
                place = np.full(inside.size, self.spec.slices[name].start)
                for kept, length in reversed(list(zip(_along(cut, tensor), tensor.shape, strict=True))):
                    rest, digit = np.divmod(rest, length if kept is None else kept.size)
                    place += step * (digit if kept is None else kept[digit])
                    step *= length
                found[inside] = place
        return found

    @cached_property
    def small(self) -> ParamSpec:
        """The tensors of the smaller model: its vector is the covered part of the whole one."""
        cut = _cut(self.spec, self.kept)
        return ParamSpec(
            tuple(
                replace(t, shape=tuple(_length(cut, t.name, a, n) for a, n in enumerate(t.shape)))
                for t in self.spec.tensors
            ),
            buffers=self.spec.buffers,
        )

    def check(self, spec: ParamSpec) -> None:
        """Raises `InvalidUpdate` when it is of another model."""
        if spec.layout_hash != self.spec.layout_hash or spec.groups != self.spec.groups:
            raise InvalidUpdate("submodel: its units are those of another model")

    def to_json(self) -> dict[str, list[str]]:
        """The kept units as bits, in hexadecimal: unit u is bit u % 8 of byte u // 8."""
        return {"kept": [bits.hex() for bits in self.bits]}

    @property
    def bits(self) -> list[bytes]:
        """For each group ceil(units / 8) bytes: unit u is bit u % 8 of byte u // 8."""
        found = []
        for group, kept in zip(self.spec.groups, self.kept, strict=True):
            flags = np.zeros(group.size, np.bool_)
            flags[list(kept)] = True
            found.append(np.packbits(flags, bitorder="little").tobytes())
        return found


@dataclass(frozen=True)
class TensorSet:
    """`tensors`: places in `spec.tensors`, increasing, at least one, of such as are in the vector.

    Made by `tensor_set`, which checks them and says so.
    """

    spec: ParamSpec
    tensors: tuple[int, ...]
    checked: bool = field(default=False, compare=False, repr=False)

    @property
    def indices(self) -> Indices:
        """The covered coordinates of the vector, increasing, shape (size,); eight bytes each."""
        return np.concatenate([np.arange(run.start, run.stop) for run in self.runs])

    @cached_property
    def runs(self) -> tuple[slice, ...]:
        """Where the vector has them, neighbours joined."""
        found: list[slice] = []
        for name in self.names:
            where = self.spec.slices[name]
            joins = bool(found) and found[-1].stop == where.start
            start = found.pop().start if joins else where.start
            found.append(slice(start, where.stop))
        return tuple(found)

    @property
    def names(self) -> list[str]:
        """Of the tensors."""
        return [self.spec.tensors[i].name for i in self.tensors]

    @cached_property
    def size(self) -> int:
        """How many coordinates."""
        return sum(run.stop - run.start for run in self.runs)

    @cached_property
    def small(self) -> ParamSpec:
        """These tensors alone: its vector is the covered part of the whole one."""
        names = self.names
        buffers = tuple(name for name in self.spec.buffers if name in names)
        return ParamSpec(tuple(self.spec.tensors[i] for i in self.tensors), buffers=buffers)

    def blocks(self) -> Iterator[PartBlock]:
        """All covered coordinates, in order."""
        at = 0
        for run in self.runs:
            for start in range(run.start, run.stop, BLOCK):
                within = slice(start, min(start + BLOCK, run.stop))
                yield PartBlock(slice(at, at + within.stop - start), within, 1, None)
                at += within.stop - start

    def covered(self, names: Collection[str]) -> tuple[Indices, Indices]:
        """What is covered of some tensors: where the part has it, and where the vector; increasing."""
        at, places = [_NOTHING], [_NOTHING]
        for name in (name for name in self.names if name in names):
            within, where = self.small.slices[name], self.spec.slices[name]
            at.append(np.arange(within.start, within.stop))
            places.append(np.arange(where.start, where.stop))
        return np.concatenate(at), np.concatenate(places)

    def places(self, at: Indices) -> Indices:
        """Where the vector has these of the covered coordinates."""
        starts = np.array([run.start for run in self.runs])
        begins = np.cumsum([0, *(run.stop - run.start for run in self.runs)])[:-1]
        owner = np.searchsorted(begins, at, side="right") - 1
        found: Indices = at + (starts - begins)[owner]
        return found

    def check(self, spec: ParamSpec) -> None:
        """Raises `InvalidUpdate` when it is of another model."""
        if spec.layout_hash != self.spec.layout_hash:
            raise InvalidUpdate("submodel: its tensors are those of another model")

    def to_json(self) -> dict[str, list[str]]:
        """The tensors as bits, in hexadecimal."""
        return {"tensors": [self.bits.hex()]}

    @property
    def bits(self) -> bytes:
        """ceil(tensors / 8) bytes: tensor i of the manifest is bit i % 8 of byte i // 8."""
        flags = np.zeros(len(self.spec.tensors), np.bool_)
        flags[list(self.tensors)] = True
        return np.packbits(flags, bitorder="little").tobytes()


Submodel = Coordinates | UnitMap | TensorSet


def share_of(part: Submodel | None) -> float | None:
    """Which share of the model's numbers a part has, 0 to 1; None of the whole model and of `Coordinates`."""
    return part.size / part.spec.size if isinstance(part, UnitMap | TensorSet) else None


def is_borne(part: Submodel | None, width_max: float) -> bool:
    """Whether a device can train it whose memory bears that share of the units; None: the whole model."""
    if width_max >= 1:
        return True
    if not isinstance(part, UnitMap):  # of some tensors, the rest is needed to compute
        return False
    sizes = [group.size for group in part.spec.groups]
    return all(len(u) <= units_at_most(n, width_max) for u, n in zip(part.kept, sizes, strict=True))


def tensor_set(spec: ParamSpec, tensors: Iterable[int]) -> TensorSet:
    """The sub-model of these tensors of a model. Raises `InvalidUpdate`, naming the tensor."""
    found = tuple(int(i) for i in tensors)
    if not found or any(a >= b for a, b in itertools.pairwise(found)):
        raise InvalidUpdate("submodel: tensors must be strictly increasing, at least one")
    if found[0] < 0 or found[-1] >= len(spec.tensors):
        raise InvalidUpdate(f"submodel: tensors must be within 0..{len(spec.tensors) - 1}")
    for i in found:
        if not spec.tensors[i].aggregated:
            raise InvalidUpdate(f"submodel: tensor {spec.tensors[i].name!r} is not trained")
    return TensorSet(spec, found, checked=True)


def tensor_set_of_bits(spec: ParamSpec, bits: bytes) -> TensorSet:
    """The inverse of `TensorSet.bits`. Raises `InvalidUpdate`."""
    count = len(spec.tensors)
    if len(bits) != math.ceil(count / 8):
        raise InvalidUpdate(f"submodel: {count} tensors need {math.ceil(count / 8)} bytes, not {len(bits)}")
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return tensor_set(spec, np.flatnonzero(flags).tolist())


def unit_map(spec: ParamSpec, kept: Iterable[Iterable[int]]) -> UnitMap:
    """The sub-model of these units of each group. Raises `InvalidUpdate`, naming the group."""
    found = tuple(tuple(int(u) for u in units) for units in kept)
    if not spec.groups:
        raise InvalidUpdate("submodel: this model has no groups of units")
    if len(found) != len(spec.groups):
        raise InvalidUpdate(
            f"submodel: {len(found)} groups of units were given, the model has {len(spec.groups)}"
        )
    for group, units in zip(spec.groups, found, strict=True):
        increasing = all(a < b for a, b in itertools.pairwise(units))
        if not units or not increasing or units[0] < 0 or units[-1] >= group.size:
            raise InvalidUpdate(
                f"submodel, group {group.name!r}: units must be strictly increasing, at least one, "
                f"within 0..{group.size - 1}"
            )
    return UnitMap(spec, found, checked=True)


def unit_map_of_bits(spec: ParamSpec, bits: Sequence[bytes]) -> UnitMap:
    """The inverse of `UnitMap.bits`. Raises `InvalidUpdate`, naming the group."""
    if len(bits) != len(spec.groups):
        raise InvalidUpdate(
            f"submodel: {len(bits)} groups of units were given, the model has {len(spec.groups)}"
        )
    kept = []
    for group, packed in zip(spec.groups, bits, strict=True):
        if len(packed) != math.ceil(group.size / 8):
            raise InvalidUpdate(
                f"submodel, group {group.name!r}: {group.size} units need {math.ceil(group.size / 8)} bytes, "
                f"not {len(packed)}"
            )
        flags = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        kept.append(np.flatnonzero(flags).tolist())
    return unit_map(spec, kept)


SubmodelJson = dict[str, list[str]] | list[int]  # of a `UnitMap` or a `TensorSet`, of `Coordinates`


def submodel_json(submodel: Submodel | None) -> SubmodelJson | None:
    """What is kept of a sub-model; None for the whole model."""
    return None if submodel is None else submodel.to_json()


def submodel_from_json(data: SubmodelJson | None, spec: ParamSpec) -> Submodel | None:
    """The inverse of `submodel_json`. Raises `InvalidUpdate`."""
    if data is None:
        return None
    if isinstance(data, list):
        if not all(0 <= i < spec.size for i in data):
            raise InvalidUpdate(f"submodel: indices must be within 0..{spec.size - 1}")
        return Coordinates(np.asarray(data, np.int64))
    if data.keys() not in ({"kept"}, {"tensors"}):
        raise InvalidUpdate(f"submodel: the units that are kept, or tensors, are wanted, not {sorted(data)}")
    ((kind, texts),) = data.items()
    try:
        bits = [bytes.fromhex(text) for text in texts]
    except ValueError:
        raise InvalidUpdate(f"submodel: {kind} must be in hexadecimal") from None
    if kind == "kept":
        return unit_map_of_bits(spec, bits)
    if len(bits) != 1:
        raise InvalidUpdate(f"submodel: tensors must be one text, not {len(bits)}")
    return tensor_set_of_bits(spec, bits[0])


Cut = dict[tuple[str, int], Indices]


def _cut(spec: ParamSpec, kept: Kept) -> Cut:
    """By tensor and axis: the places that are kept. Axes that no group runs through are not in it."""
    return {
        (m.tensor, m.axis): places(m, group.size, units)
        for group, units in zip(spec.groups, kept, strict=True)
        for m in group.members
    }


def _along(cut: Cut, tensor: TensorSpec) -> Along:
    return [cut.get((tensor.name, axis)) for axis in range(len(tensor.shape))]


def _length(cut: Cut, name: str, axis: int, whole: int) -> int:
    found = cut.get((name, axis))
    return whole if found is None else int(found.size)


@lru_cache(maxsize=4)  # eight bytes a coordinate
def _coordinates(spec: ParamSpec, kept: Kept) -> Indices:
    cut = _cut(spec, kept)
    found = np.concatenate(
        [
            spec.slices[t.name].start + flat_places(_along(cut, t), t.shape)
            for t in spec.tensors
            if t.aggregated
        ]
    )
    found.flags.writeable = False
    return found


def part_blocks(submodel: Submodel | None, size: int) -> Iterator[PartBlock]:
    """What a sub-model covers of `size` coordinates; all without one."""
    if submodel is not None:
        yield from submodel.blocks()
        return
    for start in range(0, size, BLOCK):
        at = slice(start, min(start + BLOCK, size))
        yield PartBlock(at, at, 1, None)


def gathered(vector: Vector, submodel: Submodel | None) -> Vector:
    """What a sub-model covers of a vector, a copy; of the whole model the vector itself."""
    if submodel is None:
        return vector
    out = np.empty(submodel.size, vector.dtype)
    for block in submodel.blocks():
        out[block.at] = block.take(vector)
    return out


def scatter(values: Vector, vector: Vector, submodel: Submodel | None) -> None:
    """Write what a sub-model covers of a vector; the whole of it without one."""
    if submodel is None:
        vector[:] = values
        return
    for block in submodel.blocks():
        block.put(values[block.at], vector)


def add_to_part(out: Vector, scale: float, x: Delta, submodel: Submodel | None) -> None:
    """`out += scale * x` in place, on what a sub-model covers; x has a value for each of its coordinates."""
    if submodel is None:
        add_scaled(out, scale, x)
    elif isinstance(x, SparseVector):
        out[submodel.places(x.indices)] += out.dtype.type(scale) * x.values
    else:
        for block in submodel.blocks():
            values = block.take(out)
            add_scaled(values, scale, x[block.at])
            block.put(values, out)
