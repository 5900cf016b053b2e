"""The messages of an exchange: a small head that protobuf reads, and bytes beside it that it never touches.

On the wire they are `ExchangeRequest` and `ExchangeResponse`, as any protobuf writes and reads them. In
Python gRPC copies a message once each way, between its own memory and a `bytes`. Protobuf would copy what it
carries twice more, into a memory of its own and out of it: here it is copied once to write, never to read.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from anabranch.protos.v1 import devices_pb2 as devices

HEAD, DATA = b"\x0a", b"\x12"  # the fields 1 and 2, with a length and so many bytes
VARINT_BYTES_MAX = 10
EMPTY = memoryview(b"")

Head = TypeVar("Head", devices.RequestHead, devices.ResponseHead)


class ExchangeFrame(NamedTuple, Generic[Head]):
    """One message of an exchange; `data` lies in the message as it came."""

    head: Head
    data: memoryview = EMPTY


class Chunk(NamedTuple):
    """Bytes of a payload, and where they lie in it."""

    offset: int
    data: bytes | memoryview


def frame_bytes(head: devices.RequestHead | devices.ResponseHead, data: bytes | memoryview = b"") -> bytes:
    """The message as it travels."""
    said = head.SerializeToString()
    parts: list[bytes | memoryview] = [HEAD, _varint(len(said)), said]
    if data:
        parts += (DATA, _varint(len(data)), data)
    return b"".join(parts)


def request_frame(message: bytes) -> ExchangeFrame[devices.RequestHead]:
    """The inverse, at the server. Raises `DecodeError` for what is no `ExchangeRequest`."""
    head, data = _parts(message, devices.ExchangeRequest)
    return ExchangeFrame(devices.RequestHead.FromString(head), data)


def response_frame(message: bytes) -> ExchangeFrame[devices.ResponseHead]:
    """The inverse, at a device. Raises `DecodeError` for what is no `ExchangeResponse`."""
    head, data = _parts(message, devices.ExchangeResponse)
    return ExchangeFrame(devices.ResponseHead.FromString(head), data)


def _parts(message: bytes, kind: Any) -> tuple[bytes, memoryview]:
    """The head and the data, where they lie as `frame_bytes` puts them; else as protobuf finds them."""
    if message.startswith(HEAD) and (found := _length(message, 1)) is not None:
        size, at = found
        end = at + size
        if end == len(message):
            return message[at:end], EMPTY
        if message[end : end + 1] == DATA and (found := _length(message, end + 1)) is not None:
            size, start = found
            if start + size == len(message):
                return message[at:end], memoryview(message)[start:]
    whole = kind.FromString(message)
    return whole.head.SerializeToString(), memoryview(whole.data)


def _varint(number: int) -> bytes:
    coded = bytearray()
    while number > 0x7F:
        coded.append(0x80 | number & 0x7F)
        number >>= 7
    coded.append(number)
    return bytes(coded)


def _length(message: bytes, at: int) -> tuple[int, int] | None:
    """A length that is coded there, and where what follows it begins; None where there is none."""
    number = 0
    for place, byte in enumerate(message[at : at + VARINT_BYTES_MAX]):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, at + place + 1
    return None
