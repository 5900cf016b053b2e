"""A device that is written from docs/protocol.md: gRPC, the code of the messages, and nothing of anabranch.

It takes part in the run of examples/foreign.toml: a line y = x . weight + bias, by gradient descent.

PYTHONPATH=generated python examples/foreign_client.py 127.0.0.1:7070 device-1
"""

import hashlib
import random
import struct
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import grpc

from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import model_pb2 as model
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub

CALL_S, CHUNK_BYTES = 10.0, 256 * 1024
PASSING = {
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "ABORTED",
    "CANCELLED",
    "INTERNAL",
    "UNKNOWN",
}
AGAIN = {"Overloaded", "Unavailable", "StoreFull", "LeadershipLost"}
NOT_AGAIN = {
    "ConfigError",
    "AppError",
    "DataError",
    "InvalidUpdate",
    "ManifestMismatch",
    "TooLarge",
    "UnknownCodec",
}
NOT_AGAIN |= {"InvalidSignature", "UnknownTask", "UnknownVersion", "RunClosed", "StoreCorrupt", "StoreNewer"}
NOT_AGAIN |= {
    "StoreLocked",
    "PortInUse",
    "ReplayMismatch",
    "NotAuthenticated",
    "NotPermitted",
    "HistoryMismatch",
}
EXAMPLES = [
    ([x / 4, y / 4, (x + y) / 8], x / 4 + y / 2 - (x + y) / 8 + 0.5) for x in range(3) for y in range(2)
]
T = TypeVar("T")


class Over(Exception):
    """The run has ended."""


class Gone(Exception):
    """The task is not wanted, or cannot be answered: ask anew. The text is the class of the error."""


def main(address: str, client_id: str) -> None:
    """Take part until the run ends."""
    with grpc.insecure_channel(address) as channel:
        device = Device(DevicesStub(channel), client_id)
        device.enrol()
        try:
            while True:
                task = device.ask()
                try:
                    print(f"pushed: {device.work(task)}")
                except Gone as error:
                    print(f"task dropped: {error}")
        except Over as error:
            print(f"the run has ended: {error}")


class Device:
    """One device: what it holds is in memory, so it does not survive a crash."""

    def __init__(self, stub: DevicesStub, client_id: str) -> None:
        self.stub, self.client_id = stub, client_id
        self.manifest = model.Manifest()

    def enrol(self) -> None:
        """Become known, and learn the model's layout. With no codecs named, all payloads are raw."""
        capability = devices.Capability(examples=len(EXAMPLES))
        request = devices.EnrolRequest(client_id=self.client_id, protocol_version=1, capability=capability)
        self.manifest = repeated(partial(self.stub.Enrol, request, timeout=CALL_S)).manifest

    def work(self, task: devices.Task) -> str:
        """A task, from its model to its acknowledgement; the verdict. Raises `Gone` and `Over`."""
        start = self.fetch(task.base_version)
        began = time.monotonic()
        trained, steps = self.train(task, start)
        delta = struct.pack(f"<{len(start)}f", *(b - a for a, b in zip(start, trained, strict=True)))
        part = model.Part(size_bytes=len(delta), sha256=hashlib.sha256(delta).digest())
        part.encoding.codec = "raw"
        header = devices.UpdateHeader(
            client_id=self.client_id,
            task_id=task.task_id,
            update_id=str(uuid.uuid4()),
            manifest_sha256=self.manifest.sha256,
            base_version=task.base_version,
            base_kind=model.BASE_KIND_VERSION,
            examples=len(EXAMPLES),
            local_steps=steps,
            parts=[part],
            metrics={"train_s": time.monotonic() - began},
        )
        return self.push(header, delta)

    def ask(self) -> devices.Task:
        """Ask until there is a task."""
        while True:
            request = devices.AskTaskRequest(
                client_id=self.client_id, task_id=str(uuid.uuid4()), manifest_sha256=self.manifest.sha256
            )
            try:
                answer = repeated(partial(self.stub.AskTask, request, timeout=CALL_S))
            except Gone as error:
                if str(error) != "ManifestMismatch":
                    raise
                self.enrol()  # the run is of another model by now
                continue
            if answer.HasField("task"):
                return answer.task
            refusal = answer.refusal
            if refusal.final:
                raise Over(refusal.detail)
            if refusal.reason == "unknown_client":
                self.enrol()
            time.sleep(random.uniform(refusal.retry_after.earliest_s, refusal.retry_after.latest_s))

    def fetch(self, version: int) -> list[float]:
        """The vector of a version: the float tensors, in the order of the manifest."""
        data, header = bytearray(), devices.ModelHeader()

        def go_on() -> None:
            request = devices.FetchModelRequest(
                client_id=self.client_id,
                version=version,
                manifest_sha256=self.manifest.sha256,
                offset=len(data),
            )
            for message in self.stub.FetchModel(request, timeout=60 * CALL_S):
                if message.HasField("header"):
                    header.CopyFrom(message.header)
                data.extend(message.data)

        repeated(go_on)
        assert hashlib.sha256(data).digest() == header.part.sha256, "the model was damaged on the way"
        sizes = [tensor_size(t) for t in self.manifest.tensors if t.dtype.startswith("float")]
        assert all(t.dtype != "float64" for t in self.manifest.tensors), (
            "this client knows float32 vectors only"
        )
        return list(struct.unpack_from(f"<{sum(sizes)}f", data))

    def train(self, task: devices.Task, start: list[float]) -> tuple[list[float], int]:
        """Gradient descent as planned, and the number of steps. Raises `Gone` and `Over`."""
        plan, (*weight, bias) = task.local, start
        per_epoch = -(-len(EXAMPLES) // plan.batch_size)
        steps = plan.steps or plan.epochs * per_epoch
        beat_at = time.monotonic() + task.lease_s / 3
        for step in range(steps):
            first = step % per_epoch * plan.batch_size
            batch = EXAMPLES[first : first + plan.batch_size]
            errors = [sum(w * x for w, x in zip(weight, xs, strict=True)) + bias - y for xs, y in batch]
            slopes = [
                sum(e * xs[i] for e, (xs, _) in zip(errors, batch, strict=True)) for i in range(len(weight))
            ]
            rate = plan.learning_rate / len(batch)
            weight = [w - rate * slope for w, slope in zip(weight, slopes, strict=True)]
            bias -= rate * sum(errors)
            if time.monotonic() >= beat_at:
                self.heartbeat(task.task_id, step + 1)
                beat_at = time.monotonic() + task.lease_s / 3
        return [*weight, bias], steps

    def heartbeat(self, task_id: str, progress: float) -> None:
        """Renew the lease."""
        request = devices.HeartbeatRequest(client_id=self.client_id, task_id=task_id, progress=progress)
        try:
            answer = self.stub.Heartbeat(request, timeout=CALL_S)
        except grpc.RpcError:
            return  # one in three is enough
        for notice in answer.notices:
            if notice.kind == devices.NOTICE_KIND_FINISHED:
                raise Over(notice.detail)
            if notice.kind == devices.NOTICE_KIND_CANCEL and notice.task_id == task_id:
                raise Gone(notice.detail)

    def push(self, header: devices.UpdateHeader, data: bytes) -> str:
        """Send an update until it is acknowledged."""
        asked = devices.QueryUploadRequest(client_id=self.client_id, update_id=header.update_id)

        def messages(offset: int) -> Iterator[devices.PushUpdateRequest]:
            yield devices.PushUpdateRequest(header=header)
            for at in range(offset, len(data), CHUNK_BYTES):
                chunk = devices.UpdateChunk(offset=at, data=data[at : at + CHUNK_BYTES])
                yield devices.PushUpdateRequest(chunk=chunk)

        def attempt() -> devices.PushUpdateResponse:
            here = self.stub.QueryUpload(asked, timeout=CALL_S)
            if here.HasField("verdict"):
                return here.verdict
            return self.stub.PushUpdate(messages(here.received_bytes), timeout=60 * CALL_S)

        answer: devices.PushUpdateResponse = repeated(attempt)
        return f"{answer.decision.verdict} {answer.decision.reason}, version {answer.version}"


def tensor_size(tensor: model.Tensor) -> int:
    """Elements; 1 for an empty shape."""
    size = 1
    for length in tensor.shape:
        size *= length
    return size


def repeated(call: Callable[[], T]) -> T:
    """Call until it succeeds, with pauses; raises `Gone` for an error that is not worth repeating."""
    failures = 0
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            failed: Any = error
            metadata = dict(failed.trailing_metadata() or ())
            name, status = metadata.get("anabranch-error", ""), failed.code().name
            if name in NOT_AGAIN or (name not in AGAIN and status not in PASSING):
                raise Gone(name or status) from error
            failures += 1
            earliest, latest = 0.0, min(60.0, 0.5 * 2.0 ** min(failures, 10))
            if window := metadata.get("retry-after-s"):
                earliest, latest = map(float, window.split(","))
            time.sleep(random.uniform(earliest, latest))


if __name__ == "__main__":
    main(*sys.argv[1:])
