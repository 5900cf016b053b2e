"""A whole model as bytes: the vector by a codec or a message, then the frozen tensors, raw, in order."""

from __future__ import annotations

import numpy as np

from anabranch.compress.codec import Codec
from anabranch.compress.layout import Layout
from anabranch.core.errors import InvalidUpdate
from anabranch.core.model.arrays import Array, from_bytes, to_bytes
from anabranch.core.model.params import ParamSpec, Tensors, TensorSpec, Vector, dense


def encode_model(codec: Codec, spec: ParamSpec, vector: Vector, frozen: Tensors) -> bytes:
    """The bytes of a model; `vector` has shape (spec.size,)."""
    return codec.encode(vector, Layout.of(spec)) + frozen_tail(spec, frozen)


def decode_model(codec: Codec, spec: ParamSpec, data: bytes | memoryview) -> tuple[Vector, dict[str, Array]]:
    """The vector and the frozen tensors. Raises `InvalidUpdate` on a wrong length."""
    head, frozen = split_tail(spec, data)
    return dense(codec.decode(head, Layout.of(spec))), frozen


def full_bytes(spec: ParamSpec) -> int:
    """What a model costs on the wire as it is."""
    return spec.size * spec.vector_dtype.itemsize + _tail_bytes(spec)


def frozen_tail(spec: ParamSpec, frozen: Tensors) -> bytes:
    """The frozen tensors' bytes."""
    return b"".join(to_bytes(frozen[t.name].astype(t.dtype, copy=False)) for t in _frozen(spec))


def split_tail(spec: ParamSpec, data: bytes | memoryview) -> tuple[memoryview, dict[str, Array]]:
    """The bytes before the frozen tensors, and these. Raises `InvalidUpdate` where they are missing."""
    tail = _tail_bytes(spec)
    view = memoryview(data)
    if len(view) < tail:
        raise InvalidUpdate(f"model has {len(view)} bytes, its frozen tensors alone need {tail}")
    split = len(view) - tail
    frozen, start = {}, split
    for t in _frozen(spec):
        stop = start + _size_bytes(t)
        frozen[t.name] = from_bytes(view[start:stop], t.dtype, t.shape)
        start = stop
    return view[:split], frozen


def _tail_bytes(spec: ParamSpec) -> int:
    return sum(_size_bytes(t) for t in _frozen(spec))


def _frozen(spec: ParamSpec) -> list[TensorSpec]:
    return [t for t in spec.tensors if not t.aggregated]


def _size_bytes(tensor: TensorSpec) -> int:
    return tensor.size * np.dtype(tensor.dtype).itemsize
