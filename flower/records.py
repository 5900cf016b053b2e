"""Flower's records: those of a message as plain data, and a whole `RecordDict` as bytes and back.

The bytes are a line of JSON (the records in their order, without the values of arrays), then the arrays'
data, one after the other. No code is in them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from anabranch.core.errors import AppError
from anabranch.flower.installed import flwr_version

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, RecordDict

FORMAT = 1
NPY = "numpy.ndarray"  # Flower's name for an array as the bytes of a .npy file
NPY_LENGTH_AT = 8  # of the header: two bytes, after the magic and the version
Arrays = Mapping[str, npt.NDArray[Any]]
Plain = dict[str, dict[str, Any]]  # the records without arrays, by name


def array_record(arrays: Arrays) -> ArrayRecord:
    """Named numpy arrays as Flower's record, names and order kept."""
    flwr_version()
    from flwr.app import Array, ArrayRecord

    found = ArrayRecord()
    for name, array in arrays.items():
        dtype, head = _npy_head(array.dtype, array.shape)
        data = b"".join((head, array.ravel().view(np.uint8).data))  # in C order, copied once
        found[name] = Array(dtype, tuple(array.shape), NPY, data)
    return found


def arrays_of(record: ArrayRecord) -> dict[str, npt.NDArray[Any]]:
    """The numpy arrays of a record, by name, read-only. Raises `AppError` for one that is no numpy array."""
    found = {}
    for name, array in record.items():
        if array.stype != NPY:
            raise AppError(f"array {name!r} of a Flower message is no numpy array but {array.stype!r}")
        try:
            found[name] = _npy_values(array.data)
        except (TypeError, ValueError) as error:
            raise AppError(f"array {name!r} of a Flower message cannot be read: {error}") from error
    return found


# An array travels as the bytes of a .npy file. Its header is text, whose parsing and printing costs more than
# the values of a small array: models of many tensors have the same headers in every message.


@lru_cache(maxsize=4096)
def _npy_head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[str, bytes]:
    """The dtype's name, which numpy composes at each look, and the header."""
    head = BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, described)
    return str(dtype), head.getvalue()


@lru_cache(maxsize=4096)
def _npy_form(head: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"]]:
    """What a header says. Raises `ValueError` for objects, which would be pickled."""
    text = BytesIO(head)
    if np.lib.format.read_magic(text) != (1, 0):
        raise ValueError("its header is not of version 1.0")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(text)
    if dtype.hasobject:
        raise ValueError("it has Python objects")
    return dtype, shape, "F" if fortran else "C"


def _npy_values(data: bytes) -> npt.NDArray[Any]:
    size = NPY_LENGTH_AT + 2 + int.from_bytes(data[NPY_LENGTH_AT : NPY_LENGTH_AT + 2], "little")
    dtype, shape, order = _npy_form(data[:size])
    return np.frombuffer(data, dtype, offset=size).reshape(shape, order=order)


def plain(records: RecordDict) -> Plain:
    """The config and metric records of a message. Raises `AppError` for bytes, which JSON has not."""
    found: Plain = {}
    for name, record in [*records.config_records.items(), *records.metric_records.items()]:
        found[name] = dict(record)
        for key, value in record.items():
            if isinstance(value, bytes) or (
                isinstance(value, list) and any(isinstance(v, bytes) for v in value)
            ):
                raise AppError(
                    f"the ServerApp sends bytes as {name}.{key}: settings are numbers and texts here"
                )
    return found


def to_bytes(records: RecordDict) -> bytes:
    """A `RecordDict` as bytes; b"" for an empty one."""
    if not records:
        return b""
    rows: list[Any] = []
    data: list[bytes] = []
    for name, record in records.items():
        kind = type(record).__name__
        if kind == "ArrayRecord":
            arrays = [[key, a.dtype, list(a.shape), a.stype, len(a.data)] for key, a in record.items()]
            rows.append([name, kind, arrays])
            data += [a.data for a in record.values()]
        else:
            rows.append([name, kind, [[key, _json(value)] for key, value in record.items()]])
    head = json.dumps({"format": FORMAT, "records": rows}).encode()
    return b"\n".join([head, b"".join(data)])


def from_bytes(data: bytes) -> RecordDict:
    """The inverse of `to_bytes`. Raises `AppError` for bytes that are not its."""
    flwr_version()
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

    found = RecordDict()
    if not data:
        return found
    head, _, body = data.partition(b"\n")
    try:
        said = json.loads(head)
        if said["format"] != FORMAT:
            raise ValueError(f"format {said['format']!r}")  # noqa: TRY301 - one way out for all that is wrong
        at = 0
        for name, kind, values in said["records"]:
            if kind == "ArrayRecord":
                record = ArrayRecord()
                for key, dtype, shape, stype, length in values:
                    record[key] = Array(dtype, tuple(shape), stype, body[at : at + length])
                    at += length
                found[name] = record
            else:
                made = ConfigRecord if kind == "ConfigRecord" else MetricRecord
                found[name] = made({key: _value(value) for key, value in values})
    except (KeyError, TypeError, ValueError) as error:
        raise AppError(f"the state that a ClientApp has left cannot be read: {error}") from error
    return found


def _json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    return [_json(v) for v in value] if isinstance(value, list) else value


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return base64.b64decode(value["bytes"])
    return [_value(v) for v in value] if isinstance(value, list) else value
