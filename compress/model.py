"""A whole model as bytes: the vector by a codec or a message, then the frozen tensors, raw, in order.

Where float tensors are frozen, what is frozen comes *apart* (`ParamSpec.apart`): in bytes of its own, which
travel once, and there is nothing behind the vector.
"""

from __future__ import annotations

import hashlib

import numpy as np

from anabranch.compress.codec import Codec
from anabranch.compress.layout import Layout
from anabranch.core.config.ranges import SERVED
from anabranch.core.errors import InvalidUpdate, UnknownVersion
from anabranch.core.model.arrays import Array, from_bytes, pieces, to_bytes
from anabranch.core.model.params import ParamSpec, Tensors, TensorSpec, Vector, dense

PART = 1  # of a model: what travels apart. Its versions are part 0


def encode_model(codec: Codec, spec: ParamSpec, vector: Vector, frozen: Tensors) -> bytes:
    """The bytes of a model; `vector` has shape (spec.size,)."""
    return codec.encode(vector, Layout.of(spec)) + frozen_tail(spec, frozen)


def decode_model(codec: Codec, spec: ParamSpec, data: bytes | memoryview) -> tuple[Vector, dict[str, Array]]:
    """The vector, and the frozen tensors that come with it. Raises `InvalidUpdate` on a wrong length."""
    head, frozen = split_tail(spec, data)
    return dense(codec.decode(head, Layout.of(spec))), frozen


def full_bytes(spec: ParamSpec) -> int:
    """What a version costs on the wire as it is."""
    return spec.size * spec.vector_dtype.itemsize + _tail_bytes(spec)


def frozen_tail(spec: ParamSpec, frozen: Tensors) -> bytes:
    """The frozen tensors' bytes that travel with each version."""
    return b"" if spec.apart else frozen_bytes(spec, frozen)


def frozen_apart(spec: ParamSpec, frozen: Tensors) -> bytes:
    """The frozen tensors' bytes that travel once, apart from the versions."""
    return frozen_bytes(spec, frozen) if spec.apart else b""


def frozen_sha256(spec: ParamSpec, frozen: Tensors) -> str:
    """SHA-256 (hex) of what travels apart; empty where nothing does."""
    return hashlib.sha256(frozen_bytes(spec, frozen)).hexdigest() if spec.apart else ""


def frozen_bytes(spec: ParamSpec, frozen: Tensors) -> bytes:
    """The frozen tensors' bytes, in the order of the spec."""
    return b"".join(to_bytes(frozen[t.name].astype(t.dtype, copy=False)) for t in _frozen(spec))


def model_sha256(spec: ParamSpec, tensors: Tensors) -> str:
    """SHA-256 (hex) of a model's bytes, raw, and of what travels apart; none of it is copied as a whole.

    Raises `ManifestMismatch` on other names or shapes.
    """
    spec.check(tensors)
    found = hashlib.sha256()
    for t in [*(t for t in spec.tensors if t.aggregated), *_frozen(spec)]:
        dtype = spec.vector_dtype if t.aggregated else t.dtype
        for piece in pieces(tensors, t.name):
            found.update(to_bytes(piece.astype(dtype, copy=False)))
    return found.hexdigest()


def unknown_part(part_id: int, spec: ParamSpec, frozen: str = SERVED) -> UnknownVersion:
    """The error of who asks for a part that a model has not, or that is not sent (`run.frozen`)."""
    if part_id == PART and spec.apart and frozen != SERVED:
        return UnknownVersion(
            f"what is frozen is not sent in this run (run.frozen = {frozen!r}): every device builds it"
        )
    parts = "two, 0 and 1" if spec.apart else "one, 0"
    return UnknownVersion(f"part {part_id} is not there: the parts of this run's model are {parts}")


def frozen_size_bytes(spec: ParamSpec, frozen: str = SERVED) -> int:
    """How long what travels apart is; 0 where nothing does (`frozen`: the run's `run.frozen`)."""
    return _frozen_size_bytes(spec) if spec.apart and frozen == SERVED else 0


def read_frozen(spec: ParamSpec, data: bytes | memoryview) -> dict[str, Array]:
    """The inverse of `frozen_bytes`: new arrays. Raises `InvalidUpdate` on a wrong length."""
    size = _frozen_size_bytes(spec)
    if len(data) != size:
        raise InvalidUpdate(f"the frozen tensors have {len(data)} bytes, the manifest needs {size}")
    frozen, start, view = {}, 0, memoryview(data)
    for t in _frozen(spec):
        stop = start + _size_bytes(t)
        frozen[t.name] = from_bytes(view[start:stop], t.dtype, t.shape)
        start = stop
    return frozen


def split_tail(spec: ParamSpec, data: bytes | memoryview) -> tuple[memoryview, dict[str, Array]]:
    """The bytes before the frozen tensors, and these. Raises `InvalidUpdate` where they are missing."""
    tail = _tail_bytes(spec)
    view = memoryview(data)
    if len(view) < tail:
        raise InvalidUpdate(f"model has {len(view)} bytes, its frozen tensors alone need {tail}")
    split = len(view) - tail
    return view[:split], {} if spec.apart else read_frozen(spec, view[split:])


def _tail_bytes(spec: ParamSpec) -> int:
    return 0 if spec.apart else _frozen_size_bytes(spec)


def _frozen_size_bytes(spec: ParamSpec) -> int:
    return sum(_size_bytes(t) for t in _frozen(spec))


def _frozen(spec: ParamSpec) -> list[TensorSpec]:
    return [t for t in spec.tensors if not t.aggregated]


def _size_bytes(tensor: TensorSpec) -> int:
    return tensor.size * np.dtype(tensor.dtype).itemsize
