"""Bytes for a server's port that are no gRPC call: noise, other protocols, HTTP/2 against its rules."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 8, 9
END_STREAM, END_HEADERS = 0x1, 0x4
ANSWER_S = 0.5


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """An HTTP/2 frame (RFC 9113, section 4.1); `length` is what it declares, if that is not the truth."""
    size = len(payload) if length is None else length
    return size.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(name: str, value: str) -> bytes:
    """A header field, never indexed, no Huffman (RFC 7541, section 6.2.3)."""
    parts = [bytes([len(text)]) + text.encode() for text in (name, value)]
    return b"\x10" + b"".join(parts)


OPEN = PREFACE + frame(SETTINGS, 0, 0, b"")


def call_headers(path: str = "/anabranch.v1.Devices/Enrol", *more: tuple[str, str]) -> bytes:
    """The header block of a gRPC call."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
    fields += [("te", "trailers"), ("content-type", "application/grpc"), *more]
    return b"".join(literal(name, value) for name, value in fields)


def _call(stream: int, body: bytes, *more: tuple[str, str]) -> bytes:
    headers = frame(HEADERS, END_HEADERS, stream, call_headers("/anabranch.v1.Devices/Enrol", *more))
    return headers + frame(DATA, END_STREAM, stream, body)


def _rapid_reset(r: random.Random) -> bytes:
    calls = range(1, 2 * r.choice([50, 500]), 2)
    block = call_headers("/anabranch.v1.Devices/AskTask")
    pairs = (
        frame(HEADERS, END_HEADERS, s, block) + frame(RST_STREAM, 0, s, (8).to_bytes(4, "big")) for s in calls
    )
    return OPEN + b"".join(pairs)


KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "noise": lambda r: r.randbytes(r.choice([1, 24, 1000, 100_000])),
    "HTTP/1.1": lambda _: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a TLS hello": lambda r: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + r.randbytes(508),
    "nothing": lambda _: b"",
    "half a preface": lambda _: PREFACE[:11],
    "a preface and noise": lambda r: PREFACE + r.randbytes(500),
    "random frames": lambda r: (
        OPEN
        + b"".join(
            frame(r.randrange(12), r.randrange(256), r.randrange(9), r.randbytes(r.randrange(40)))
            for _ in range(50)
        )
    ),
    "a frame of 16 MB announced": lambda r: OPEN + frame(DATA, 0, 1, r.randbytes(100), (1 << 24) - 1),
    "settings cut short": lambda _: PREFACE + frame(SETTINGS, 0, 0, b"\x00\x03\x00", 6),
    "headers that are no HPACK": lambda r: OPEN + frame(HEADERS, END_HEADERS, 1, r.randbytes(200)),
    "data on a stream that is not open": lambda r: OPEN + frame(DATA, END_STREAM, 7, r.randbytes(50)),
    "a message of 4 GB announced": lambda _: OPEN + _call(1, b"\x00\xff\xff\xff\xff" + b"x" * 100),
    "a message without its end": lambda _: OPEN + _call(1, b"\x00\x00\x00\x01\x00" + b"x" * 3),
    "an unknown compression": lambda _: (
        OPEN + _call(1, b"\x01\x00\x00\x00\x03xyz", ("grpc-encoding", "lzma"))
    ),
    "a gzip that is none": lambda r: (
        OPEN + _call(1, b"\x01\x00\x00\x00\x20" + r.randbytes(32), ("grpc-encoding", "gzip"))
    ),
    "streams reset at once": _rapid_reset,
    "pings without end": lambda r: OPEN + frame(PING, 0, 0, r.randbytes(8)) * 2000,
    "settings without end": lambda _: OPEN + frame(SETTINGS, 0, 0, b"") * 2000,
    "headers without end": lambda r: (
        OPEN
        + frame(HEADERS, 0, 1, literal("a", "b"))
        + frame(CONTINUATION, 0, 1, literal("a", "b" * 100)) * 2000
    ),
    "a window beyond its limit": lambda _: OPEN + frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff") * 3,
    "a promise of a client": lambda r: OPEN + frame(PUSH_PROMISE, END_HEADERS, 1, r.randbytes(30)),
}
RAW_KINDS = list(KINDS)


def raw_bytes(kind: str, draws: random.Random) -> bytes:
    """Bytes of a kind of `RAW_KINDS`."""
    return KINDS[kind](draws)


async def throw(address: str, data: bytes) -> None:
    """Connect, send, read a little of the answer, hang up."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(data)
            async with asyncio.timeout(ANSWER_S):
                await writer.drain()
                await reader.read(4096)
        except TimeoutError:
            pass
        finally:
            writer.transport.abort()
