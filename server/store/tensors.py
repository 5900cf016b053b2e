"""Safetensors files that are written and read without a copy of what is in them.

The library's own functions hold each tensor once or twice more, as bytes: a large model in memory three times
where one would do. The files are the same to the byte.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import safe_open

from anabranch.core.errors import StoreCorrupt
from anabranch.core.limits import MIB
from anabranch.core.model.arrays import Array, StoredTensors, dtype_of, little, pieces, shape_of, to_bytes
from anabranch.core.model.params import NOTES, Tensors
from anabranch.server.store.files import write_all

# In the order of the format's writer: the widest first, in a file of several.
DTYPES = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {code: name for name, code in DTYPES.items()}
_PLACES = {name: place for place, name in enumerate(DTYPES)}
LENGTH_BYTES = 8  # of the header, before it


class TensorFile(StoredTensors):
    """The tensors of a file, read from it at each look. The file is open as long as this lives.

    `notes`: what its writer has said of it.

    Raises `SafetensorError` for what is no such file, `ValueError` for a type that numpy has not, `OSError`;
    `StoreCorrupt` at a look if it was written to meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._written = self._when_written()
        # First: the library has other names for what the system refuses, and no number of it.
        length = int.from_bytes(os.pread(self._descriptor, LENGTH_BYTES, 0), "little")
        with safe_open(path, framework="numpy"):  # it checks the header: offsets, sizes, overlaps
            pass
        self._start = LENGTH_BYTES + length
        head = json.loads(os.pread(self._descriptor, length, LENGTH_BYTES))
        self.notes: dict[str, str] = head.pop(NOTES, {})
        self._head = head
        if unknown := [told["dtype"] for told in self._head.values() if told["dtype"] not in _NAMES]:
            raise ValueError(f"{path.name} has values of the type {unknown[0]}, which cannot be read")

    def __getitem__(self, name: str) -> Array:
        shape, dtype = self.shape(name), self.dtype(name)
        out = np.empty(shape, little(dtype))
        self._read(name, 0, to_bytes(out))
        return out.astype(dtype, copy=False)

    def __contains__(self, name: object) -> bool:
        return name in self._head

    def __iter__(self) -> Iterator[str]:
        return iter(self._head)

    def __len__(self) -> int:
        return len(self._head)

    def arrange(self, names: Iterable[str]) -> None:
        """Keep these, in this order. Raises `KeyError`."""
        self._head = {name: self._head[name] for name in names}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        return tuple(self._head[name]["shape"])

    def dtype(self, name: str) -> np.dtype[Any]:
        """Of one tensor."""
        return np.dtype(_NAMES[self._head[name]["dtype"]])

    def pieces(self, name: str) -> Iterator[Array]:
        """See `StoredTensors`: of a mebibyte."""
        dtype, (begin, end) = little(self.dtype(name)), self._head[name]["data_offsets"]
        for at in range(0, end - begin, MIB):
            piece = np.empty(min(MIB, end - begin - at) // dtype.itemsize, dtype)
            self._read(name, at, to_bytes(piece))
            yield piece.astype(self.dtype(name), copy=False)

    def _read(self, name: str, at: int, out: memoryview) -> None:
        """The bytes of a tensor from its byte `at` on."""
        at += self._start + self._head[name]["data_offsets"][0]
        while out:
            try:
                got = os.preadv(self._descriptor, [out], at)
            except OSError as error:
                raise StoreCorrupt(f"{self._path} cannot be read ({error.strerror})") from error
            if not got:
                raise self._changed()
            out, at = out[got:], at + got
        if self._when_written() != self._written:
            raise self._changed()

    def _when_written(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_mtime_ns, status.st_size

    def _changed(self) -> StoreCorrupt:
        return StoreCorrupt(f"{self._path} was written to while it was read: start again")


def notes_of(beginning: bytes) -> dict[str, str]:
    """What a file's writer has said of it, where the beginning of the file has all of its header."""
    length = int.from_bytes(beginning[:LENGTH_BYTES], "little")
    head = beginning[LENGTH_BYTES : LENGTH_BYTES + length]
    with suppress(ValueError, AttributeError):
        found: dict[str, str] = json.loads(head).get(NOTES, {})
        return found
    return {}


def placed(tensors: Tensors, names: Iterable[str]) -> dict[str, Any]:
    """What a header says of tensors whose values lie one behind the other in this order."""
    head: dict[str, Any] = {}
    end = 0
    for name in names:
        dtype, shape = dtype_of(tensors, name), shape_of(tensors, name)
        start, end = end, end + dtype.itemsize * math.prod(shape)
        head[name] = {"dtype": DTYPES[dtype.name], "shape": list(shape), "data_offsets": [start, end]}
    return head


def beginning_of(head: str) -> bytes:
    """A header's JSON as a file has it before the values, which begin at a multiple of eight bytes."""
    text = head.encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def write_tensors(file: IO[bytes], tensors: Tensors) -> None:
    """What `safetensors.numpy.save` makes of `tensors`, written to an unbuffered file."""
    names = sorted(tensors, key=lambda name: (_PLACES[dtype_of(tensors, name).name], name.encode()))
    text = json.dumps(placed(tensors, names), separators=(",", ":"), ensure_ascii=False)
    write_all(file, beginning_of(text))
    for name in names:
        for piece in pieces(tensors, name):
            write_all(file, to_bytes(piece))
