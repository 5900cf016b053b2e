"""Devices that cost next to nothing, hundreds of them in one event loop: they ask, wait and push, no more."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import grpc
import numpy as np
from grpc import aio

from anabranch.compress.layout import Layout
from anabranch.compress.registry import STAGES, make_codec
from anabranch.core.config.tables import ClientTable
from anabranch.core.model.chains import RAW
from anabranch.core.model.params import ParamSpec
from anabranch.protos.convert import PROTOCOL_VERSION
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import model_pb2 as model
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub
from benchmarks.writers import CHUNK

Answer = TypeVar("Answer")

DEVICES_PER_CONNECTION = 50
Code = grpc.StatusCode
# The last: gRPC's own word for an upload that was answered before all of it was sent.
AGAIN = (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE, Code.CANCELLED, Code.INTERNAL)


@dataclass(frozen=True)
class Payload:
    """An update's bytes by a codec; made once, sent again and again."""

    data: bytes
    codec: str = RAW

    @classmethod
    def of(cls, shape: tuple[int, ...], codec: str, value: float) -> Payload:
        """A model of one tensor, each number of it moved by as much."""
        layout = Layout.of(ParamSpec.of({"w": np.zeros(shape, np.float32)}))
        return cls(bytes(make_codec(codec).encode(np.full(layout.size, value, np.float32), layout)), codec)

    @property
    def part(self) -> model.Part:
        """As a header declares it."""
        return model.Part(
            size_bytes=len(self.data),
            sha256=hashlib.sha256(self.data).digest(),
            encoding=model.Encoding(codec=self.codec),
        )

    def chunks(self, until: float = 1.0) -> Iterator[devices.PushUpdateRequest]:
        """The messages after the header, up to this share of the bytes."""
        for offset in range(0, int(until * len(self.data)), CHUNK):
            chunk = devices.UpdateChunk(offset=offset, data=self.data[offset : offset + CHUNK])
            yield devices.PushUpdateRequest(chunk=chunk)


SMALL = Payload(np.full(256, 1e-6, np.float32).tobytes())


@dataclass
class Heard:
    """Of a fleet: seconds of every ask and push that was answered, the calls that were shed, and verdicts."""

    ask_s: list[float] = field(default_factory=list)
    push_s: list[float] = field(default_factory=list)
    shed: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)


class Device:
    """One of them: it trains for `train_s` on average, which costs nothing, and sends the same `payload`."""

    def __init__(
        self, stub: Any, name: str, heard: Heard, payload: Payload = SMALL, train_s: float = 0.0
    ) -> None:
        self.stub, self.name, self.heard, self.payload, self.train_s = stub, name, heard, payload, train_s
        self.manifest, self.accepted = b"", 0

    async def enrol(self) -> None:
        """Make itself known."""
        answer = await self._answered(partial(self.stub.Enrol, self.enrolment()), [])
        self.manifest = answer.manifest.sha256

    async def work(self, is_over: Callable[[], bool]) -> None:
        """Ask and push until it is over."""
        while not is_over():
            answer = await self._answered(partial(self.stub.AskTask, self.asking()), self.heard.ask_s)
            if not answer.HasField("task"):
                window = answer.refusal.retry_after
                await asyncio.sleep(random.uniform(window.earliest_s, window.latest_s))
                continue
            if self.train_s:
                await asyncio.sleep(random.uniform(0.5, 1.5) * self.train_s)
            header = self.header(answer.task)
            try:
                pushed = await self._answered(partial(self.push, header, self.payload), self.heard.push_s)
            except aio.AioRpcError as error:
                if error.code() is not Code.NOT_FOUND:
                    raise
                self.heard.verdicts["task gone"] += 1
                continue
            self.heard.verdicts[pushed.decision.verdict] += 1
            self.accepted += pushed.decision.verdict != "rejected"

    # --- its messages ------------------------------------------------------------------------

    def enrolment(self, **capability: Any) -> devices.EnrolRequest:
        """An enrolment that announces the stages of the payload, or what is given."""
        capability = {"codecs": STAGES, **capability}
        return devices.EnrolRequest(
            client_id=self.name,
            protocol_version=PROTOCOL_VERSION,
            capability=devices.Capability(**capability),
        )

    def asking(self, **more: Any) -> devices.AskTaskRequest:
        """An ask under a new id."""
        return devices.AskTaskRequest(
            client_id=self.name, task_id=str(uuid.uuid4()), manifest_sha256=self.manifest, **more
        )

    def header(self, task: devices.Task, payload: Payload | None = None, **more: Any) -> devices.UpdateHeader:
        """The header of an update for a task; `more` has other fields than an honest one."""
        fields = {
            "client_id": self.name,
            "task_id": task.task_id,
            "update_id": str(uuid.uuid4()),
            "manifest_sha256": self.manifest,
            "base_version": task.base_version,
            "base_kind": model.BASE_KIND_VERSION,
            "examples": 1,
            "parts": [(payload or self.payload).part],
        }
        return devices.UpdateHeader(**{**fields, **more})

    def push(self, header: devices.UpdateHeader, payload: Payload) -> Any:
        """The call that sends an update."""
        return self.stub.PushUpdate(chain([devices.PushUpdateRequest(header=header)], payload.chunks()))

    async def _answered(self, call: Callable[[], Awaitable[Answer]], took_s: list[float]) -> Answer:
        """The answer to a call that is made until it is not shed; how long the last attempt took."""
        failures = 0
        while True:
            began = time.perf_counter()
            try:
                answer = await call()
            except aio.AioRpcError as error:
                if error.code() not in AGAIN:
                    raise
                failures += 1
                self.heard.shed += 1
                await asyncio.sleep(random.uniform(*window_s(error, failures)))
            else:
                took_s.append(time.perf_counter() - began)
                return answer


def window_s(error: aio.AioRpcError, failures: int) -> tuple[float, float]:
    """When to call again: as the answer says, else after a device's own backing off."""
    if told := dict(error.trailing_metadata() or ()).get("retry-after-s"):
        earliest_s, latest_s = map(float, str(told).split(","))
        return earliest_s, latest_s
    return 0.0, min(ClientTable.retry_cap_s, ClientTable.retry_base_s * 2.0**failures)


@asynccontextmanager
async def connected(address: str, count: int) -> AsyncIterator[list[Any]]:
    """A stub for each of so many devices, fifty on a connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [aio.insecure_channel(address, options) for _ in range(-(-count // DEVICES_PER_CONNECTION))]
    try:
        yield [DevicesStub(channels[n // DEVICES_PER_CONNECTION]) for n in range(count)]
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))
