"""Many devices in a closed loop: each asks, pushes 1 KB, and asks again as soon as it has its answer.

    python -m benchmarks.closed_loop [DEVICES ...]

A server process (SQLite, FedBuff, K = 10) and one process with all the devices share this machine. Fifty
devices share a connection. A call that is shed comes again within the window that it was told.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
from grpc import aio

from anabranch.protos.convert import PROTOCOL_VERSION
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import model_pb2 as model
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub
from benchmarks.throughput import RUNS, durable_server

Answer = TypeVar("Answer")

VALUES = 256
DATA = np.full(VALUES, 1e-6, np.float32).tobytes()
FLEETS = (1_000,)
DEVICES_PER_CONNECTION = 50
RUNS_S = 15.0
AGAIN = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
WINDOW_S = (0.5, 2.0)  # where the answer names none


@dataclass
class Measured:
    """Of one fleet: seconds of every ask and push that was answered, and the calls that were shed."""

    devices: int
    ask_s: list[float] = field(default_factory=list)
    push_s: list[float] = field(default_factory=list)
    shed: int = 0

    @property
    def row(self) -> str:
        """A row of the table."""
        calls = len(self.ask_s) + len(self.push_s) + self.shed
        quantiles_s = [np.percentile(of, q) for of in (self.ask_s, self.push_s) for q in (50, 99)]
        figures = [f"{1000 * s:.0f} ms" for s in quantiles_s]
        cells = [f"{self.devices:,}", f"{len(self.push_s) / RUNS_S:.0f}", *figures]
        cells.append(f"{self.shed / calls:.1%}")
        return "| " + " | ".join(cells) + " |"


class Device:
    """One of them."""

    def __init__(self, stub: Any, number: int, measured: Measured) -> None:
        self.stub, self.name, self.measured = stub, f"device-{number}", measured
        self.manifest = b""

    async def enrol(self) -> None:
        """Make itself known."""
        request = devices.EnrolRequest(client_id=self.name, protocol_version=PROTOCOL_VERSION)
        self.manifest = (await self._answered(partial(self.stub.Enrol, request), [])).manifest.sha256

    async def work(self, until: float) -> None:
        """Ask and push until this moment."""
        n = 0
        while time.perf_counter() < until:
            n += 1
            ask = devices.AskTaskRequest(
                client_id=self.name, task_id=f"{self.name}-{n}", manifest_sha256=self.manifest
            )
            answer = await self._answered(partial(self.stub.AskTask, ask), self.measured.ask_s)
            if not answer.HasField("task"):
                raise RuntimeError(f"refused: {answer.refusal.detail}")
            update = list(self._messages(answer.task))
            await self._answered(partial(self._push, update), self.measured.push_s)

    def _push(self, messages: list[devices.PushUpdateRequest]) -> Any:
        return self.stub.PushUpdate(iter(messages))

    async def _answered(self, call: Callable[[], Awaitable[Answer]], took_s: list[float]) -> Answer:
        """The answer to a call that is made until it is not shed; how long the last attempt took."""
        while True:
            began = time.perf_counter()
            try:
                answer = await call()
            except aio.AioRpcError as error:
                if error.code() not in AGAIN:
                    raise
                self.measured.shed += 1
                told = dict(error.trailing_metadata() or ()).get("retry-after-s")
                window_s = tuple(map(float, str(told).split(","))) if told else WINDOW_S
                await asyncio.sleep(random.uniform(*window_s))
            else:
                took_s.append(time.perf_counter() - began)
                return answer

    def _messages(self, task: devices.Task) -> Iterator[devices.PushUpdateRequest]:
        part = model.Part(
            base_version=task.base_version,
            size_bytes=len(DATA),
            sha256=hashlib.sha256(DATA).digest(),
            encoding=model.Encoding(codec="raw"),
        )
        header = devices.UpdateHeader(
            client_id=self.name,
            task_id=task.task_id,
            update_id=f"update-{task.task_id}",
            manifest_sha256=self.manifest,
            base_version=task.base_version,
            base_kind=model.BASE_KIND_VERSION,
            examples=1,
            parts=[part],
        )
        yield devices.PushUpdateRequest(header=header)
        yield devices.PushUpdateRequest(chunk=devices.UpdateChunk(offset=0, data=DATA))


async def drive(address: str, count: int) -> Measured:
    """So many devices, for `RUNS_S` seconds once all are enrolled."""
    measured = Measured(count)
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [aio.insecure_channel(address, options) for _ in range(-(-count // DEVICES_PER_CONNECTION))]
    fleet = [Device(DevicesStub(channels[n // DEVICES_PER_CONNECTION]), n, measured) for n in range(count)]
    await asyncio.gather(*(device.enrol() for device in fleet))
    measured.shed = 0
    until = time.perf_counter() + RUNS_S
    await asyncio.gather(*(device.work(until) for device in fleet))
    await asyncio.gather(*(channel.close() for channel in channels))
    return measured


def measure(count: int) -> Measured:
    """A server of its own for each fleet."""
    RUNS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RUNS) as folder, durable_server(Path(folder), VALUES) as served:
        return asyncio.run(drive(served[0], count))


def table(rows: list[Measured]) -> str:
    """The figures as a Markdown table."""
    head = ("devices", "updates, 1/s", "ask, median", "ask, 99 %", "push, median", "push, 99 %", "calls shed")
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *(m.row for m in rows)])


def main() -> None:
    """Measure and print."""
    print(table([measure(count) for count in map(int, sys.argv[1:] or FLEETS)]))


if __name__ == "__main__":
    main()
