"""How a delta is cut into groups, from the manifest alone: what is large is compressed, what is small is not.

Two groups, in the order of the vector: `main` has the float tensors of more than one dimension that are
large for their model; `small` has the rest (biases, norms), which would be lost among the large ones
and costs next to nothing. Frozen tensors (integers, booleans) never travel in a delta. Buffers are in no
group: they travel as they are, behind the bytes of a codec that rounds (`tail`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from anabranch.core.errors import InvalidUpdate
from anabranch.core.model.arrays import from_bytes, to_bytes
from anabranch.core.model.params import Indices, ParamSpec, Vector
from anabranch.core.model.submodels import Coordinates, Submodel

MAIN, SMALL, EXACT = "main", "small", "exact"
# A tensor is large from 1/256 of its model on, and from this many elements in any case.
LARGE_SHARE, LARGE_SIZE = 256, 4096


@dataclass(frozen=True)
class Group:
    """One group: the (start, stop) runs of the covered vector that it consists of, in order."""

    name: str
    runs: tuple[tuple[int, int], ...]

    @cached_property
    def size(self) -> int:
        """Elements."""
        return sum(stop - start for start, stop in self.runs)

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """The place of each run's first element within the group."""
        lengths = [stop - start for start, stop in self.runs]
        return tuple(itertools.accumulate([0, *lengths][:-1]))

    def pieces(self, start: int, stop: int) -> Iterator[slice]:
        """Where the group's elements `start` to `stop - 1` lie in the covered vector, run by run."""
        i = bisect_right(self.begins, start) - 1
        while start < stop:
            first = self.runs[i][0] + start - self.begins[i]
            last = min(first + stop - start, self.runs[i][1])
            yield slice(first, last)
            start, i = start + last - first, i + 1

    def parts(self, x: Vector) -> list[Vector]:
        """The group's elements of x, as views, run by run; at least one."""
        return [x[start:stop] for start, stop in self.runs] or [x[:0]]

    def cut(self, values: Vector) -> list[Vector]:
        """The group's elements, shape (size,), as views, run by run; at least one."""
        ends = [begin + stop - start for begin, (start, stop) in zip(self.begins, self.runs, strict=True)]
        return [values[begin:end] for begin, end in zip(self.begins, ends, strict=True)] or [values[:0]]

    def gather(self, x: Vector) -> Vector:
        """The group's elements of x, shape (size,); a view where the group is one run."""
        parts = self.parts(x)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def scatter(self, values: Vector, out: Vector) -> None:
        """Write the group's elements, shape (size,), where they belong in `out`."""
        at = 0
        for start, stop in self.runs:
            out[start:stop] = values[at : at + stop - start]
            at += stop - start

    def places(self, indices: Indices) -> Indices:
        """Where the group's elements `indices`, increasing, lie in the covered vector; a new array."""
        if len(self.runs) == 1:
            return indices + self.runs[0][0]
        places = indices.copy()
        bounds = [*indices.searchsorted(self._begins).tolist(), indices.size]
        for (start, _), begin, own in zip(self.runs, self.begins, itertools.pairwise(bounds), strict=True):
            places[slice(*own)] += start - begin
        return places

    @cached_property
    def all_places(self) -> Indices:
        """Where all its elements lie: for a small group."""
        return self.places(np.arange(self.size))

    @cached_property
    def _begins(self) -> Indices:
        return np.array(self.begins, np.int64)


@dataclass(frozen=True, eq=False)
class Layout:
    """The groups of the covered coordinates of a model, `size` of them; empty groups are left out.

    `exact`: those of buffers, which are not rounded; empty where there are none.
    """

    dtype: np.dtype[Any]
    size: int
    groups: tuple[Group, ...]
    fingerprint: bytes  # 8 bytes: names, shapes, dtypes, what is covered and which are buffers
    exact: Group

    @classmethod
    def of(cls, spec: ParamSpec, submodel: Submodel | None = None) -> Layout:
        """The layout of a whole model, or of the coordinates that a sub-model covers."""
        return _whole(spec) if submodel is None else _layout(spec, submodel)

    @property
    def tail_bytes(self) -> int:
        """How long a tail is."""
        return self.exact.size * self.dtype.itemsize

    @cached_property
    def _no_tail(self) -> Vector:
        return np.empty(0, self.dtype)

    def tail(self, x: Vector) -> memoryview:
        """The bytes of the values that travel as they are."""
        return to_bytes(self.exact.gather(x).astype(self.dtype, copy=False))

    def split(self, data: bytes | memoryview) -> tuple[memoryview, Vector]:
        """What is before the tail, and the values in it. Raises `InvalidUpdate` where it is missing."""
        view, length = memoryview(data), self.tail_bytes
        if not length:
            return view, self._no_tail
        if len(view) < length:
            raise InvalidUpdate(f"payload has {len(view)} bytes, its buffers alone need {length}")
        at = len(view) - length
        return view[:at], from_bytes(view[at:], self.dtype.name, (self.exact.size,))


@lru_cache(maxsize=8)
def _whole(spec: ParamSpec) -> Layout:
    return _layout(spec, None)


def _layout(spec: ParamSpec, submodel: Submodel | None) -> Layout:
    runs: dict[str, list[tuple[int, int]]] = {MAIN: [], SMALL: [], EXACT: []}
    sizes = _sizes(spec, submodel)
    start = 0
    for tensor in spec.tensors:
        if not tensor.aggregated:
            continue
        stop = start + sizes.get(tensor.name, 0)
        name = MAIN if len(tensor.shape) > 1 and _is_large(tensor.size, spec.size) else SMALL
        name = EXACT if tensor.name in spec.buffers else name
        if start < stop:
            _append(runs[name], start, stop)
        start = stop
    exact = Group(EXACT, tuple(runs.pop(EXACT)))
    groups = tuple(Group(name, tuple(found)) for name, found in runs.items() if found)
    return Layout(spec.vector_dtype, start, groups, _fingerprint(spec, submodel), exact)


def _sizes(spec: ParamSpec, submodel: Submodel | None) -> dict[str, int]:
    """How many coordinates of each tensor are covered; of those that are not named none."""
    if isinstance(submodel, Coordinates):
        bounds = ((n, np.searchsorted(submodel.indices, (s.start, s.stop))) for n, s in spec.slices.items())
        return {name: int(stop - start) for name, (start, stop) in bounds}
    # Of a map of units these are known without its coordinates, which are many.
    covered = spec if submodel is None else submodel.small
    return {t.name: t.size for t in covered.tensors}


def _fingerprint(spec: ParamSpec, submodel: Submodel | None) -> bytes:
    hashed = hashlib.blake2b(bytes.fromhex(spec.layout_hash), digest_size=8)
    if isinstance(submodel, Coordinates):
        hashed.update(submodel.indices.astype("<i8").tobytes())
    elif submodel is not None:
        hashed.update(json.dumps([[g.to_json() for g in spec.groups], submodel.to_json()]).encode())
    if spec.buffers:
        hashed.update(json.dumps(spec.buffers).encode())
    return hashed.digest()


def _is_large(size: int, model_size: int) -> bool:
    return size >= LARGE_SIZE or size * LARGE_SHARE >= model_size


def _append(runs: list[tuple[int, int]], start: int, stop: int) -> None:
    if runs and runs[-1][1] == start:
        runs[-1] = (runs[-1][0], stop)
    else:
        runs.append((start, stop))
