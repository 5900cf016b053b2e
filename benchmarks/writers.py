"""Writers for the throughput benchmark: processes of threads that push updates as devices do.

The bare stream and the durable server are driven by the same code and the same messages, in chunks as a
device makes them; only the durable one asks for a task before each push.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import numpy as np

from anabranch.client.transfer import LinkPace, chunks_of
from anabranch.core.content import SHA256, content_digest
from anabranch.core.limits import CHUNK_BYTES, DEFAULT_LIMITS
from anabranch.protos.convert import PROTOCOL_VERSION, set_payload_digest
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import model_pb2 as model
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub
from benchmarks.crew import Crew

PROCESSES, THREADS = 2, 4
CHUNK = CHUNK_BYTES - 1024  # room for the message around it


@dataclass(frozen=True)
class Load:
    """`updates` of `values` float32 numbers each, against `address`; `durable`: with tasks.

    `name` is that of the writers: two loads on one server need two. `rate`: updates a second of all of them
    together, 0 for as many as go. `algorithm`: of the payloads' digests.
    """

    address: str
    values: int
    updates: int
    durable: bool
    name: str = "writer"
    rate: float = 0.0
    algorithm: str = SHA256


def drive(load: Load) -> float:
    """Push the whole load; returns the seconds from the first push to the last answer."""
    crew = Crew(_process, [(load, i) for i in range(PROCESSES)])
    crew.meet()
    started = time.perf_counter()
    crew.meet()
    elapsed = time.perf_counter() - started
    crew.end()
    return elapsed


def push_one(load: Load) -> None:
    """Push one update, made here, and wait for its answer."""
    writer = _Writer(load, load.name, 1)
    writer.prepare()
    writer.push_all()
    writer.channel.close()


def _process(load: Load, number: int, barrier: threading.Barrier) -> None:
    """Prepare everything that a device has at hand when it pushes, then push with some threads."""
    each = load.updates // (PROCESSES * THREADS)
    writers = [_Writer(load, f"{load.name}-{number}-{i}", each) for i in range(THREADS)]
    for writer in writers:
        writer.prepare()
    barrier.wait()
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(_Writer.push_all, writers):
            pass  # what a thread raised is raised here
    barrier.wait()


class _Writer:
    """One device: every update has bytes of its own, made and hashed beforehand."""

    def __init__(self, load: Load, name: str, updates: int) -> None:
        self.load, self.name, self.updates = load, name, updates
        self.manifest = b""
        self.payloads: list[tuple[bytes, str]] = []
        self.channel = grpc.insecure_channel(load.address, [("grpc.use_local_subchannel_pool", 1)])
        self.stub = DevicesStub(self.channel)

    def prepare(self) -> None:
        values = np.zeros(self.load.values, np.float32)
        for i in range(self.updates):
            values[:4] = np.frombuffer(hashlib.sha256(f"{self.name}{i}".encode()).digest()[:8], np.uint16)[:4]
            data = values.tobytes()
            self.payloads.append((data, content_digest(data, self.load.algorithm)))
        if self.load.durable:
            request = devices.EnrolRequest(client_id=self.name, protocol_version=PROTOCOL_VERSION)
            self.manifest = self.stub.Enrol(request).manifest.sha256

    def push_all(self) -> None:
        began, each_s = time.perf_counter(), PROCESSES * THREADS / self.load.rate if self.load.rate else 0.0
        for i, (data, digest) in enumerate(self.payloads):
            time.sleep(max(0.0, began + i * each_s - time.perf_counter()))
            base = self._ask(f"{self.name}-task-{i}") if self.load.durable else 0
            answer = self.stub.PushUpdate(self._messages(i, base, data, digest))
            if self.load.durable and answer.decision.verdict == "rejected":
                raise RuntimeError(f"rejected: {answer.decision.detail}")

    def _ask(self, task_id: str) -> int:
        request = devices.AskTaskRequest(client_id=self.name, task_id=task_id, manifest_sha256=self.manifest)
        answer = self.stub.AskTask(request)
        if not answer.HasField("task"):
            raise RuntimeError(f"refused: {answer.refusal.detail}")
        return answer.task.base_version

    def _messages(self, i: int, base: int, data: bytes, digest: str) -> Iterator[devices.PushUpdateRequest]:
        part = model.Part(base_version=base, size_bytes=len(data), encoding=model.Encoding(codec="raw"))
        set_payload_digest(part, digest)
        header = devices.UpdateHeader(
            client_id=self.name,
            task_id=f"{self.name}-task-{i}",
            update_id=f"{self.name}-update-{i}",
            manifest_sha256=self.manifest,
            base_version=base,
            base_kind=model.BASE_KIND_VERSION,
            examples=1,
            parts=[part],
        )
        yield devices.PushUpdateRequest(header=header)
        pace = LinkPace.QUICK if i else LinkPace.USUAL
        for offset, piece in chunks_of(data, 0, DEFAULT_LIMITS.chunk_bytes_max, pace=pace):
            chunk = devices.UpdateChunk(offset=offset, data=bytes(piece))
            yield devices.PushUpdateRequest(chunk=chunk)
