"""A hostile client in a process of its own: messages of every malformed kind at a live server.

    python attacker.py ADDRESS MESSAGES SEED

It speaks the protocol well enough to break every part of it: real messages that are cut short, mutated or
out of range, streams in the wrong order, and bytes on the port that are not even HTTP/2 (`frames.py`). It
prints, as JSON, how often each kind was sent and how often each status came back, with samples.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from frames import RAW_KINDS, raw_bytes, throw
from google.protobuf.message import Message
from grpc import aio

from anabranch.protos.convert import PROTOCOL_VERSION
from anabranch.protos.v1 import devices_pb2 as devices

SERVICE = "/anabranch.v1.Devices/"
UNARY: dict[str, type[Message]] = {
    "Enrol": devices.EnrolRequest,
    "AskTask": devices.AskTaskRequest,
    "QueryUpload": devices.QueryUploadRequest,
    "Heartbeat": devices.HeartbeatRequest,
    "DropTask": devices.DropTaskRequest,
}
AT_A_TIME = 48
RAW_EVERY = 50  # one connection of raw bytes for so many messages
CALL_S = 120.0
CUT_OFF = "Internal error from Core"  # of this side: the server had answered before all was sent
NUMBERS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1]
FLOATS = [0.0, -1.0, 1e308, float("inf"), float("-inf"), float("nan")]
TEXTS = [
    "",
    "..",
    "../../etc/passwd",
    "a" * 65,
    "\x00",
    "é",
    "a b",
    "'; drop table updates; --",
    "x" * 10_000,
]


class Attacker:
    """Draws and sends. `manifest`: the real one's digest, without which every message fails at once."""

    def __init__(self, channel: aio.Channel, address: str, manifest: bytes, seed: int) -> None:
        self._channel, self._address, self._manifest = channel, address, manifest
        self._random = random.Random(seed)
        self.kinds: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.samples: list[str] = []  # of what was answered

    async def attack(self, messages: int) -> None:
        """So many messages, many at a time."""
        left = iter(range(messages))

        async def work() -> None:
            for number in left:
                await (self._raw() if number % RAW_EVERY == 0 else self._call())

        await asyncio.gather(*(work() for _ in range(AT_A_TIME)))

    async def _call(self) -> None:
        kinds: list[Callable[[], Any]] = [self._unary] * 6 + [self._push] * 3 + [self._fetch, self._no_such]
        try:
            await self._random.choice(kinds)()
            self.statuses["OK"] += 1
        except aio.AioRpcError as error:
            cut_off = error.details() == CUT_OFF
            status = "CUT_OFF" if cut_off else error.code().name
            self.statuses[status] += 1
            if self.statuses[status] <= 3:
                self.samples.append(f"{status}: {str(error.details())[:200]}")

    async def _raw(self) -> None:
        kind = self._random.choice(RAW_KINDS)
        self.kinds[f"raw {kind}"] += 1
        await throw(self._address, raw_bytes(kind, self._random))

    # --- the calls ---------------------------------------------------------------------------

    async def _unary(self) -> None:
        name = self._random.choice(list(UNARY))
        call: Any = self._channel.unary_unary(SERVICE + name)
        await call(self._broken(self._filled(UNARY[name])), timeout=CALL_S)

    async def _fetch(self) -> None:
        call: Any = self._channel.unary_stream(SERVICE + "FetchModel")
        async for _ in call(self._broken(self._filled(devices.FetchModelRequest)), timeout=CALL_S):
            pass

    async def _no_such(self) -> None:
        self.kinds["unknown method"] += 1
        path = self._random.choice(
            ["/", "/anabranch.v1.Devices/Nope", "/x/y", "/anabranch.v9.Devices/Enrol", "//"]
        )
        call: Any = self._channel.unary_unary(path)
        await call(self._noise(100), timeout=CALL_S)

    async def _push(self) -> None:
        """Messages of a push in some wrong order, or broken ones."""
        header = devices.PushUpdateRequest(header=self._filled(devices.UpdateHeader))
        chunk = devices.PushUpdateRequest(chunk=devices.UpdateChunk(offset=0, data=self._noise(500)))
        order = self._random.choice(["", "h", "c", "hh", "ch", "hcc", "x", "hx", "hcx", "bc", "b"])
        self.kinds[f"push of {order or 'nothing'}"] += 1
        parts = {"h": header.SerializeToString, "c": chunk.SerializeToString, "x": lambda: self._noise(200)}
        messages = [self._broken(header) if part == "b" else parts[part]() for part in order]

        async def stream() -> AsyncIterator[bytes]:
            for message in messages:
                yield message

        call: Any = self._channel.stream_unary(SERVICE + "PushUpdate")
        await call(stream(), timeout=CALL_S)

    # --- the messages ------------------------------------------------------------------------

    def _filled(self, kind: type[Message], deep: int = 2) -> Any:
        """What a device might send, perhaps with fields out of range."""
        message: Any = kind()
        for field in message.DESCRIPTOR.fields:
            if self._random.random() < 0.2:
                continue
            if field.is_repeated:
                if field.message_type is None:
                    getattr(message, field.name).extend(self._value(field) for _ in range(self._count()))
            elif field.message_type is not None:
                if deep:
                    sub = self._filled(field.message_type._concrete_class, deep - 1)
                    getattr(message, field.name).CopyFrom(sub)
            else:
                setattr(message, field.name, self._value(field))
        return message

    def _count(self) -> int:
        return self._random.choice([0, 1, 2, 65, 2000])

    def _value(self, field: Any) -> Any:
        if field.name == "manifest_sha256":
            return self._manifest if self._random.random() < 0.9 else self._noise(32)
        if field.name == "protocol_version":
            return self._random.choice([PROTOCOL_VERSION] * 5 + [0, 2**32 - 1])
        kinds: dict[int, Callable[[], Any]] = {
            field.CPPTYPE_STRING: self._text,
            field.CPPTYPE_DOUBLE: lambda: self._random.choice(FLOATS),
            field.CPPTYPE_FLOAT: lambda: self._random.choice(FLOATS),
            field.CPPTYPE_BOOL: lambda: self._random.random() < 0.5,
            field.CPPTYPE_ENUM: lambda: self._random.choice([0, 1, 77]),
            field.CPPTYPE_UINT32: lambda: self._random.choice(NUMBERS[:5]),
            field.CPPTYPE_INT32: lambda: self._random.choice(NUMBERS[:3]),
        }
        if field.type == field.TYPE_BYTES:
            return self._noise(40)
        return kinds.get(field.cpp_type, lambda: self._random.choice(NUMBERS))()

    def _text(self) -> str:
        known = [f"mallory-{self._random.randrange(50)}", str(uuid.UUID(int=self._random.getrandbits(128)))]
        return self._random.choice([*known * 4, *TEXTS])

    def _broken(self, message: Message) -> bytes:
        """The bytes of a message, in one of many ways not as they should be."""
        data, r = message.SerializeToString(), self._random
        ways: dict[str, Callable[[], bytes]] = {
            "fields out of range": lambda: data,
            "random bytes": lambda: self._noise(300),
            "cut short": lambda: data[: r.randrange(len(data) + 1)],
            "bits flipped": lambda: self._flipped(data),
            "wrong wire types": lambda: bytes(
                (b & 0xF8) | r.randrange(8) if r.random() < 0.1 else b for b in data
            ),
            "a length beyond the end": lambda: b"\x0a\xff\xff\xff\xff\x0f" + data,
            "a varint without end": lambda: b"\xff" * r.choice([9, 10, 11, 1000]),
            "groups in groups": lambda: b"\x0b" * r.choice([10, 99, 101, 20_000]),
            "text that is no UTF-8": lambda: b"\x0a\x04\xff\xfe\xfd\xfc" + data,
            "many unknown fields": lambda: b"\xf8\x07\x01" * r.choice([10, 30_000]) + data,
            "two in one": lambda: data + self._flipped(data),
        }
        if r.random() < 0.002:
            self.kinds["over the size of a message"] += 1
            return bytes((1 << 20) + r.randrange(1 << 18))
        kind = r.choice(list(ways))
        self.kinds[kind] += 1
        return ways[kind]()

    def _flipped(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(min(len(changed), self._random.randrange(1, 6))):
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _noise(self, most: int) -> bytes:
        return self._random.randbytes(self._random.randrange(most + 1))


async def main(address: str, messages: str, seed: str) -> None:
    """Attack, and say what came of it."""
    async with aio.insecure_channel(address, [("grpc.max_metadata_size", 1 << 20)]) as channel:
        enrol = channel.unary_unary(
            SERVICE + "Enrol", devices.EnrolRequest.SerializeToString, devices.EnrolResponse.FromString
        )
        request = devices.EnrolRequest(client_id="mallory", protocol_version=PROTOCOL_VERSION)
        seen = await enrol(request, timeout=CALL_S)
        attacker = Attacker(channel, address, seen.manifest.sha256, int(seed))
        await attacker.attack(int(messages))
    found = {"kinds": attacker.kinds, "statuses": attacker.statuses, "samples": attacker.samples}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
