"""A server process under fire: what hostile clients do to it, and how honest ones fare meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from attacker import CUT_OFF
from grpc import aio
from server_process import Plan, ServerProcess
from wire import CHUNK, QUICK, Device

from anabranch.core.model.params import ParamSpec, digest
from anabranch.protos.convert import PROTOCOL_VERSION
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server.manifest import write_manifest
from anabranch.server.verify import verify

SUPPORT = Path(__file__).parent
MIB = 1024 * 1024
CONNECTIONS = 8  # of uploads that stall
# In a server's memory of each update, of the newest 100,000: its receipt, with the indices.
RECEIPT_BYTES = 900
# gRPC cancels calls that a busy server has not begun.
WAITING = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@dataclass
class Attack:
    """What an attacker sent, by kind, and what came back, by status."""

    kinds: dict[str, int]
    statuses: dict[str, int]
    samples: list[str]


class Target:
    """A server of a model of `values` zeros that adds deltas up, and what its process holds in memory.

    `server` makes another one of its folder.
    """

    def __init__(
        self,
        folder: Path,
        values: int,
        limits: Mapping[str, float] | None = None,
        server: Callable[[Path], ServerProcess] | None = None,
    ) -> None:
        rows = {"w": np.zeros((values // 100, 100), np.float32)}
        self.spec: ParamSpec = write_manifest(folder / "model", "fire", rows).spec
        self._server = ServerProcess(folder, Plan(), limits) if server is None else server(folder)
        self._server.start()
        self.address, self._process = self._server.address, psutil.Process(self._server.pid)

    def restart(self) -> float:
        """SIGKILL, and again; returns the seconds until it serves."""
        self._server.kill()
        took_s = self._server.start()
        self._process = psutil.Process(self._server.pid)
        return took_s

    @property
    def disk_bytes(self) -> int:
        """Of its data."""
        return sum(path.stat().st_size for path in self._server.data_dir.rglob("*") if path.is_file())

    @property
    def rss_bytes(self) -> int:
        """Of the process, now."""
        rss: int = self._process.memory_info().rss
        return rss

    @property
    def connections(self) -> int:
        """Open to the process, now."""
        return len(self._process.net_connections("tcp"))

    @property
    def is_alive(self) -> bool:
        """Whether the process is still the one that was started."""
        return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE

    @property
    def log(self) -> str:
        """What the server wrote."""
        return self._server.log()

    def close(self, applied: int) -> None:
        """Drain; then whatever was acknowledged is there, and nothing else: `applied` updates of ones."""
        assert self._server.drain() == 0, self.log[-3000:]
        found = verify(self._server.data_dir, "")
        assert found.problems == ()
        assert (found.version, found.model_sha256) == (
            applied,
            digest(np.full(self.spec.size, applied, np.float32)),
        )

    def kill(self) -> None:
        """Whatever it does."""
        if self.is_alive:
            self._server.kill()

    def channel(self) -> grpc.Channel:
        """A connection of its own."""
        return grpc.insecure_channel(self.address, options=QUICK)

    def attack(self, messages: int, seed: int) -> Attack:
        """Malformed messages, from a process of their own."""
        command = [sys.executable, str(SUPPORT / "attacker.py"), self.address, str(messages), str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return Attack(**json.loads(done.stdout))


@contextmanager
def target(
    folder: Path,
    values: int,
    limits: Mapping[str, float] | None = None,
    server: Callable[[Path], ServerProcess] | None = None,
) -> Iterator[Target]:
    """A server that is killed at the end, if it was not drained."""
    made = Target(folder, values, limits, server)
    try:
        yield made
    finally:
        made.kill()


class Peak:
    """The largest `rss_bytes` of a server while it is looked at."""

    def __init__(self, server: Target) -> None:
        self._server, self._over = server, threading.Event()
        self.before = self.bytes = server.rss_bytes
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def grown_mib(self) -> float:
        """Over what it was at the beginning."""
        return (self.bytes - self.before) / MIB

    def _look(self) -> None:
        while not self._over.wait(0.05) and self._server.is_alive:
            self.bytes = max(self.bytes, self._server.rss_bytes)


@dataclass
class Healthy:
    """Honest devices that work one task after the other, each on a connection of its own; they may rest."""

    server: Target
    devices: int
    rest_s: float = 0.0
    took_s: list[float] = field(default_factory=list)
    waits: int = 0
    problems: list[str] = field(default_factory=list)

    def __enter__(self) -> Healthy:
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(n,), daemon=True) for n in range(self.devices)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    @property
    def applied(self) -> int:
        """Updates that were acknowledged."""
        return len(self.took_s)

    def quantile_s(self, q: float) -> float:
        """Of the times from ask to acknowledgement."""
        return float(np.quantile(self.took_s, q)) if self.took_s else float("inf")

    def _work(self, number: int) -> None:
        try:
            with self.server.channel() as channel:
                device = Device(channel, self.server.spec, f"healthy-{number}")
                device.enrol()
                while not self._over.is_set():
                    began = time.monotonic()
                    self._one(device)
                    self.took_s.append(time.monotonic() - began)
                    self._over.wait(self.rest_s)
        except Exception as error:  # noqa: BLE001 - a thread's error must not be lost
            self.problems.append(repr(error)[:500])

    def _one(self, device: Device) -> None:
        task, update_id, delta = device.task(), str(uuid.uuid4()), np.ones(device.spec.size, np.float32)
        while True:
            try:
                verdict = device.push(task, delta, update_id).decision.verdict
            except grpc.RpcError as error:
                if error.code() not in WAITING:
                    raise
                self.waits += 1
                time.sleep(0.2)
                continue
            assert verdict == "published", verdict
            return


class Stalled:
    """Devices with a task each that send a part of an update and then nothing; who is shed tries again."""

    def __init__(self, server: Target, uploads: int, share: float) -> None:
        self._server, self._uploads, self._share = server, uploads, share
        self._data = bytes(4 * server.spec.size)
        self._sha256 = hashlib.sha256(self._data).digest()
        self.statuses: Counter[str] = Counter()
        self.begun = 0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()), daemon=True)
        self._ready = threading.Event()

    def __enter__(self) -> Stalled:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _all(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        options = [*QUICK, ("grpc.http2.bdp_probe", 0)]
        channels = [aio.insecure_channel(self._server.address, options) for _ in range(CONNECTIONS)]
        works = [self._one(n, channels[n % len(channels)]) for n in range(self._uploads)]
        await asyncio.gather(*works)
        for channel in channels:
            await channel.close()

    async def _one(self, number: int, channel: Any) -> None:
        device = Device(channel, self._server.spec, f"stalled-{number}")
        stub: Any = device.stub  # of asyncio, as the channel is
        enrolment = devices.EnrolRequest(client_id=device.client_id, protocol_version=PROTOCOL_VERSION)
        await _answer(lambda: stub.Enrol(enrolment))
        ask = devices.AskTaskRequest(
            client_id=device.client_id, task_id=str(uuid.uuid4()), manifest_sha256=device.manifest_sha256
        )
        task = (await _answer(lambda: stub.AskTask(ask))).task
        while not self._end.is_set():
            call = stub.PushUpdate(self._messages(device, task))
            watch = asyncio.create_task(self._cancel_at_the_end(call))
            try:
                await call
            except aio.AioRpcError as error:
                self.statuses["CUT_OFF" if error.details() == CUT_OFF else error.code().name] += 1
            except asyncio.CancelledError:
                self.statuses["cancelled"] += 1
            watch.cancel()
            await asyncio.sleep(1.0)

    async def _messages(self, device: Device, task: Any) -> AsyncIterator[Any]:
        data = self._data
        yield devices.PushUpdateRequest(header=device.header(task, data, sha256=self._sha256))
        sent, most = 0, int(self._share * len(data))
        while sent < most:
            chunk = devices.UpdateChunk(offset=sent, data=data[sent : min(most, sent + CHUNK)])
            yield devices.PushUpdateRequest(chunk=chunk)
            sent += CHUNK
        self.begun += 1
        await self._end.wait()

    async def _cancel_at_the_end(self, call: Any) -> None:
        await self._end.wait()
        call.cancel()


async def _answer(call: Callable[[], Awaitable[Any]]) -> Any:
    """What comes of a call that may be repeated: a server that is slow sheds some, and devices try again."""
    while True:
        try:
            return await call()
        except aio.AioRpcError as error:
            if error.code() not in WAITING:
                raise
        await asyncio.sleep(1.0)
