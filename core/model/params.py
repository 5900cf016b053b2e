"""The shape of a model, and its values as one flat vector.

`ParamSpec` names every tensor. Float tensors that are trained are *aggregated*: laid end to end, in the
order of the spec, they are the vector `w` that strategies compute on. Integer and boolean tensors (counters
such as `num_batches_tracked`) are *frozen*: they keep the values the model started with, whatever the
devices send, because an average of counters means nothing. So are float tensors that an App does not train
(`App.trained`); where there are such, all that is frozen travels *apart*, once, and not with each version.
Float tensors that are no parameters, such as running statistics, are *buffers*: in the vector, with a policy
of their own (`buffers.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import numpy as np

from anabranch.core.errors import ConfigError, InvalidUpdate, ManifestMismatch
from anabranch.core.kernels.chosen import loops
from anabranch.core.model.arrays import Array, lasting, pieces, shape_of, to_bytes
from anabranch.core.model.arrays import Indices as Indices
from anabranch.core.model.arrays import Tensors as Tensors
from anabranch.core.model.arrays import Vector as Vector
from anabranch.core.model.mapped import PASS_VALUES, passes
from anabranch.core.model.stages import ModelStage, check_stages
from anabranch.core.model.units import UnitGroup, check_groups

FROZEN = "frozen"  # in a layout, of a float tensor that is not trained
NOTES = "__metadata__"  # in the head of a file of safetensors: what is said of it, and so no tensor's name


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype (numpy's name, little-endian on the wire) of one tensor.

    `trained`: of a float tensor, that it is part of the vector; another is never, whatever this says.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool = True

    @property
    def size(self) -> int:
        """Number of elements; 1 for a scalar."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def aggregated(self) -> bool:
        """Whether the tensor is part of the vector."""
        return self.trained and self.is_float

    @property
    def is_float(self) -> bool:
        """Whether its values are floats, so that it could be trained."""
        return np.dtype(self.dtype).kind == "f"

    def to_json(self) -> list[Any]:
        """[name, shape, dtype], and `FROZEN` behind these of a float tensor that is not trained."""
        marks = [FROZEN] if self.is_float and not self.trained else []
        return [self.name, list(self.shape), self.dtype, *marks]

    @classmethod
    def from_json(cls, data: Any) -> TensorSpec:
        """The inverse of `to_json`. Raises `ValueError` and `TypeError`."""
        name, shape, dtype, *marks = data
        if marks not in ([], [FROZEN]):
            raise ValueError(f"tensor {name!r} is marked {marks}: only {FROZEN!r} is known")
        return cls(str(name), tuple(int(n) for n in shape), str(dtype), not marks)


@dataclass(frozen=True)
class ParamSpec:
    """Every tensor of a model, in the order in which the vector holds them.

    `groups`: the units that a sub-model may leave out (`units.py`); none where that is not known.
    `buffers`: the names of the tensors that are some (`buffers.py`). `stages`: of a model that may grow
    (`stages.py`). All three are no part of the layout: models with the same tensors can be averaged.
    """

    tensors: tuple[TensorSpec, ...]
    groups: tuple[UnitGroup, ...] = ()
    buffers: tuple[str, ...] = ()
    stages: tuple[ModelStage, ...] = ()

    def __post_init__(self) -> None:
        if self.groups:
            self._check_units()
        for name in self.buffers:
            if name not in self.slices or self.buffers.count(name) > 1:
                raise ConfigError(f"buffers: {name!r} is not the name of one float tensor of the model")
        check_stages(self.stages, self.slices, self.buffers)

    def _check_units(self) -> None:
        fixed = {t.name for t in self.tensors if t.is_float and not t.trained}
        for group in self.groups:
            if through := [m.tensor for m in group.members if m.tensor in fixed]:
                raise ConfigError(
                    f"units: those of group {group.name!r} run through {through[0]!r}, which is frozen: "
                    "cut what is trained, or train what is cut"
                )
        check_groups(self.groups, {t.name: t.shape for t in self.tensors if t.aggregated})

    @cached_property
    def _hash(self) -> int:
        return hash((self.tensors, self.groups, self.buffers, self.stages))

    def __hash__(self) -> int:
        return self._hash  # it keys caches, and a large model has many tensors

    @classmethod
    def of(
        cls,
        tensors: Tensors,
        groups: Iterable[UnitGroup] = (),
        buffers: Iterable[str] = (),
        trained: Collection[str] | None = None,
        stages: Iterable[ModelStage] = (),
    ) -> ParamSpec:
        """The spec of named arrays, of which the floats in `trained` are; None: all.

        `stages` may name modules, too. Raises `InvalidUpdate` for a dtype that cannot travel, `ConfigError`
        for groups of units, buffers, trained tensors or stages that do not fit the arrays.
        """
        for name in trained or ():
            if name not in tensors or tensors[name].dtype.kind != "f":
                raise ConfigError(f"trained: {name!r} is not the name of a float tensor of the model")
        specs = []
        for name, array in tensors.items():
            _check_name(name)
            if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
                raise InvalidUpdate(
                    f"tensor {name!r} is {array.dtype}: use floats, integers or booleans of at most 64 bits"
                )
            learns = trained is None or name in trained or array.dtype.kind != "f"
            specs.append(TensorSpec(name, tuple(int(n) for n in array.shape), array.dtype.name, learns))
        known = {t.name: t.aggregated for t in specs}
        grown = (stage.resolved(known, number) for number, stage in enumerate(stages, 1))
        return _first_equal(cls(tuple(specs), tuple(groups), tuple(buffers), tuple(grown)))

    @cached_property
    def vector_dtype(self) -> np.dtype[Any]:
        """float64 where any aggregated tensor is float64, float32 otherwise."""
        wide = any(t.dtype == "float64" for t in self.tensors if t.aggregated)
        return np.dtype(np.float64 if wide else np.float32)

    @cached_property
    def rounds(self) -> bool:
        """Whether an aggregated tensor has fewer digits than the vector: it rounds what it is given."""
        return any(np.dtype(t.dtype) != self.vector_dtype for t in self.tensors if t.aggregated)

    @cached_property
    def size(self) -> int:
        """Elements of the vector."""
        return sum(t.size for t in self.tensors if t.aggregated)

    @cached_property
    def apart(self) -> bool:
        """Whether what is frozen travels once, on its own: a float tensor is. Otherwise with each model."""
        return any(t.is_float and not t.trained for t in self.tensors)

    @cached_property
    def elements(self) -> int:
        """Elements of all tensors, those that are not aggregated included."""
        return sum(t.size for t in self.tensors)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all tensors as they are."""
        return sum(t.size * np.dtype(t.dtype).itemsize for t in self.tensors)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each aggregated tensor lies in the vector."""
        found, start = {}, 0
        for t in self.tensors:
            if t.aggregated:
                found[t.name] = slice(start, start + t.size)
                start += t.size
        return found

    @cached_property
    def buffer_places(self) -> Indices:
        """The coordinates of the vector that are buffers', increasing."""
        flags = np.zeros(self.size, np.bool_)
        for name in self.buffers:
            flags[self.slices[name]] = True
        return np.flatnonzero(flags)

    @cached_property
    def layout_hash(self) -> str:
        """SHA-256 over names, shapes, dtypes and what is trained: models with one hash can be averaged."""
        return hashlib.sha256(json.dumps(self._layout, sort_keys=True).encode()).hexdigest()

    @property
    def _layout(self) -> list[list[Any]]:
        return [t.to_json() for t in self.tensors]

    def to_json(self) -> Any:
        """A list of the tensors; a dict of `tensors` and what else there is, if there is."""
        groups = {"groups": [group.to_json() for group in self.groups]} if self.groups else {}
        buffers = {"buffers": list(self.buffers)} if self.buffers else {}
        stages = {"stages": [stage.to_json() for stage in self.stages]} if self.stages else {}
        more = {**groups, **buffers, **stages}
        return {"tensors": self._layout, **more} if more else self._layout

    @classmethod
    def from_json(cls, data: Any) -> ParamSpec:
        """The inverse of `to_json`. Raises `ConfigError` for groups, buffers or stages that do not fit."""
        found = data if isinstance(data, dict) else {"tensors": data}
        tensors = tuple(TensorSpec.from_json(tensor) for tensor in found["tensors"])
        groups = tuple(UnitGroup.from_json(group) for group in found.get("groups", ()))
        buffers = tuple(str(name) for name in found.get("buffers", ()))
        return cls(tensors, groups, buffers, tuple(ModelStage.from_json(s) for s in found.get("stages", ())))

    def flatten(self, tensors: Tensors) -> Vector:
        """The vector of named arrays. Raises `ManifestMismatch` on other names or shapes."""
        self.check(tensors)
        out = np.empty(self.size, self.vector_dtype)
        for name, where in self.slices.items():
            at = where.start
            for piece in pieces(tensors, name):
                out[at : at + piece.size] = piece
                at += piece.size
        return out

    def unflatten(self, vector: Vector, frozen: Tensors | None = None, copy: bool = True) -> dict[str, Array]:
        """Named arrays in the dtypes of the spec; frozen tensors come from `frozen` or are zero.

        Without `copy` those that have the vector's dtype are views of it.
        """
        frozen, slices = frozen or {}, self.slices
        out: dict[str, Array] = {}
        for t in self.tensors:
            if (at := slices.get(t.name)) is not None:
                out[t.name] = vector[at].reshape(t.shape).astype(t.dtype, copy=copy)
            else:
                out[t.name] = frozen[t.name] if t.name in frozen else np.zeros(t.shape, t.dtype)
        return out

    def frozen(self, tensors: Tensors) -> dict[str, Array]:
        """The tensors that are not aggregated."""
        return {t.name: tensors[t.name] for t in self.tensors if not t.aggregated}

    def check(self, tensors: Tensors) -> None:
        """Raises `ManifestMismatch`, naming the first tensor that does not fit the spec."""
        shapes = self._shapes
        if tensors.keys() != shapes.keys():
            _check_names(tensors, shapes)
        for name, wanted in shapes.items():
            if (shape := shape_of(tensors, name)) != wanted:
                raise ManifestMismatch(f"tensor {name!r} has shape {shape}, the manifest says {wanted}")

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {t.name: t.shape for t in self.tensors}

    def not_finite(self, tensors: Tensors) -> str:
        """The first tensor of the vector with a value that is not finite; empty where all are."""
        flawed = (n for n in self.slices if not all(np.isfinite(piece).all() for piece in pieces(tensors, n)))
        return next(flawed, "")

    def name_at(self, index: int) -> str:
        """The tensor that holds coordinate `index` of the vector."""
        return next(name for name, where in self.slices.items() if where.start <= index < where.stop)


@lru_cache(maxsize=8)
def _first_equal(spec: ParamSpec) -> ParamSpec:
    """The first one: what is kept by spec is then found by identity, which a look at all tensors is not.

    Each run of a process has a trainer of its own, and asks several times for each task.
    """
    return spec


def _check_names(tensors: Tensors, names: Collection[str]) -> None:
    """Raises `ManifestMismatch`, naming the first tensor that is missing, or is no model's."""
    if missing := [n for n in names if n not in tensors]:
        raise ManifestMismatch(f"tensor {missing[0]!r} is missing: send every tensor of the manifest")
    if foreign := sorted(set(tensors) - set(names)):
        known = ", ".join(islice(names, 8))
        raise ManifestMismatch(f"tensor {foreign[0]!r} is not in the manifest: it has {known}")


def _check_name(name: object) -> None:
    """Raises `InvalidUpdate` for what no file of tensors can call one."""
    if not isinstance(name, str):
        raise InvalidUpdate(
            f"the model has a tensor called {name!r}, a {type(name).__name__}: name it by a str"
        )
    if name == NOTES or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise InvalidUpdate(f"no tensor can be called {name!r} in a file of safetensors: rename it")


@dataclass(frozen=True, eq=False)
class SparseVector:
    """A vector of `size` coordinates of which all but k are zero.

    `indices` (k,) int64, each once, in any order, within 0..size-1; `values` (k,) in the vector's dtype.
    """

    indices: Indices
    values: Vector
    size: int

    def dense(self) -> Vector:
        """All coordinates, shape (size,); a new array."""
        out = np.zeros(self.size, self.values.dtype)
        out[self.indices] = self.values
        return out


Delta = Vector | SparseVector


def lasting_delta(delta: Delta) -> Delta:
    """A delta for a strategy's state: `lasting` where it is the whole vector."""
    return delta if isinstance(delta, SparseVector) else lasting(delta)


def dense(x: Delta) -> Vector:
    """All coordinates of x, shape (size,); x itself if it has them."""
    return x.dense() if isinstance(x, SparseVector) else x


def add_scaled(out: Vector, scale: float, x: Delta) -> None:
    """`out += scale * x`, in place, of equal shapes, without a temporary of the model's size.

    A sparse x costs its own length only.
    """
    if isinstance(x, SparseVector):
        loops.add_sparse(out, scale, x.indices, x.values)
    else:
        add_dense(out, scale, x)


def add_dense(out: Vector, scale: float, x: Vector) -> None:
    """`out += scale * x`, in place, of equal shapes; a large `x` in a mapped file is read block by block."""
    if x.size <= PASS_VALUES or x.shape != out.shape:  # other shapes are refused, or broadcast, by the loop
        loops.add_dense(out, scale, x)
    else:
        for span in passes(x):
            loops.add_dense(out[span], scale, x[span])


def digest(vector: Array) -> str:
    """SHA-256 over the little-endian bytes of an array."""
    return hashlib.sha256(to_bytes(vector)).hexdigest()
