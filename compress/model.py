"""A whole model as bytes: the encoded vector, then the frozen tensors, raw, in the spec's order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.compress.codec import Codec
from anabranch.core.errors import InvalidUpdate
from anabranch.core.params import ParamSpec, Tensors, TensorSpec, Vector


def encode_model(codec: Codec, spec: ParamSpec, vector: Vector, frozen: Tensors) -> bytes:
    """The bytes of a model; `vector` has shape (spec.size,)."""
    tail = [np.ascontiguousarray(frozen[t.name]).astype(_little(t)).tobytes() for t in _frozen(spec)]
    return b"".join([codec.encode(vector), *tail])


def decode_model(
    codec: Codec, spec: ParamSpec, data: bytes | memoryview
) -> tuple[Vector, dict[str, npt.NDArray[Any]]]:
    """The vector and the frozen tensors. Raises `InvalidUpdate` on a wrong length."""
    tail = sum(t.size * _little(t).itemsize for t in _frozen(spec))
    view = memoryview(data)
    if len(view) < tail:
        raise InvalidUpdate(f"model has {len(view)} bytes, its frozen tensors alone need {tail}")
    split = len(view) - tail
    vector = codec.decode(view[:split], spec.size, spec.vector_dtype)
    frozen, start = {}, split
    for t in _frozen(spec):
        stop = start + t.size * _little(t).itemsize
        frozen[t.name] = np.frombuffer(view[start:stop], _little(t)).reshape(t.shape).astype(t.dtype)
        start = stop
    return vector, frozen


def _frozen(spec: ParamSpec) -> list[TensorSpec]:
    return [t for t in spec.tensors if not t.aggregated]


def _little(tensor: TensorSpec) -> np.dtype[Any]:
    return np.dtype(tensor.dtype).newbyteorder("<")
