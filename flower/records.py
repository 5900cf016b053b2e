"""Flower's records: those of a message as plain data, and a whole `RecordDict` as bytes and back.

The bytes are a line of JSON (the records in their order, without the values of arrays), then the arrays'
data, one after the other. No code is in them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from anabranch.core.errors import AppError
from anabranch.flower.installed import flwr_version

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, RecordDict

FORMAT = 1
Arrays = Mapping[str, npt.NDArray[Any]]
Plain = dict[str, dict[str, Any]]  # the records without arrays, by name


def array_record(arrays: Arrays) -> ArrayRecord:
    """Named numpy arrays as Flower's record, names and order kept."""
    flwr_version()
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({name: Array(np.asarray(array, order="C")) for name, array in arrays.items()})


def arrays_of(record: ArrayRecord) -> dict[str, npt.NDArray[Any]]:
    """The numpy arrays of a record, by name. Raises `AppError` for one that is no numpy array."""
    found = {}
    for name, array in record.items():
        try:
            found[name] = array.numpy()
        except (TypeError, ValueError) as error:
            raise AppError(f"array {name!r} of a Flower message is no numpy array: {error}") from error
    return found


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
