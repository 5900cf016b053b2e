"""The messages that carry payloads: what protobuf reads of them, and bytes beside it that it never touches.

On the wire they are `ExchangeRequest`, `ExchangeResponse` and `PushUpdateRequest`, as any protobuf writes and
reads them. In Python gRPC copies a message once each way, between its own memory and a `bytes`. Protobuf
would copy what it carries twice more, into a memory of its own and out of it: here it is copied once to
write, never to read.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from anabranch.protos.v1 import devices_pb2 as devices

HEAD, DATA = b"\x0a", b"\x12"  # the fields 1 and 2, with a length and so many bytes
# Of a push: its chunk, and in that the offset, a number, and the bytes.
CHUNK, OFFSET, CHUNK_DATA = b"\x12", b"\x10", b"\x1a"
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


def push_content(message: bytes) -> devices.UpdateHeader | Chunk | None:
    """What is in a `PushUpdateRequest`; None for what is neither, or of another part. Raises `DecodeError`.

    The bytes of a chunk lie in the message as it came.
    """
    if (chunk := _chunk(message)) is not None:
        return chunk
    whole = devices.PushUpdateRequest.FromString(message)
    if whole.HasField("header"):
        return whole.header
    is_chunk = whole.HasField("chunk") and not whole.chunk.part_id  # there is no other part of an update
    return Chunk(whole.chunk.offset, whole.chunk.data) if is_chunk else None


def _chunk(message: bytes) -> Chunk | None:
    """A chunk that is written as protobuf writes it; None for anything else."""
    if not message.startswith(CHUNK) or (found := _length(message, 1)) is None:
        return None
    size, at = found
    if at + size != len(message):
        return None
    offset = 0
    if message[at : at + 1] == OFFSET:
        if (found := _length(message, at + 1)) is None or found[0] >> 64:
            return None
        offset, at = found
    if message[at : at + 1] != CHUNK_DATA or (found := _length(message, at + 1)) is None:
        return None
    size, at = found
    return Chunk(offset, memoryview(message)[at:]) if at + size == len(message) else None


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
