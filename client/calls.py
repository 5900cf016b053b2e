"""One door to the service for devices: a call for each request."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any, Protocol

from anabranch.client.channel import StallGuard
from anabranch.protos.frames import Chunk
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub

METHODS = {
    devices.AskTaskRequest: "AskTask",
    devices.QueryUploadRequest: "QueryUpload",
    devices.HeartbeatRequest: "Heartbeat",
    devices.DropTaskRequest: "DropTask",
}
ModelChunks = Generator[tuple[devices.ModelHeader | None, Chunk], None, None]


class Door(Protocol):
    """A way in which requests are answered. What fails is raised as gRPC raises it."""

    def answer(self, request: Any, timeout_s: float) -> Any:
        """The answer to a small request."""
        ...

    def model(self, request: devices.FetchModelRequest) -> ModelChunks:
        """A model as it comes, its header with the first chunk."""
        ...

    def push(self, header: devices.UpdateHeader, chunks: Iterable[Chunk]) -> devices.PushUpdateResponse:
        """Send an update."""
        ...


class CallDoor:
    """A `Door`. `stall_s`: a transfer on which nothing moves for so long is cut."""

    def __init__(self, stub: DevicesStub, stall_s: float) -> None:
        self._stub, self._stall_s = stub, stall_s

    def answer(self, request: Any, timeout_s: float) -> Any:
        """See `Door`."""
        return getattr(self._stub, METHODS[type(request)])(request, timeout=timeout_s)

    def model(self, request: devices.FetchModelRequest) -> ModelChunks:
        """See `Door`."""
        stream = self._stub.FetchModel(request)
        with StallGuard(stream.cancel, self._stall_s) as guard:
            try:
                for message in stream:
                    guard.moved()
                    header = message.header if message.HasField("header") else None
                    yield header, Chunk(message.offset, message.data)
            finally:
                stream.cancel()

    def push(self, header: devices.UpdateHeader, chunks: Iterable[Chunk]) -> devices.PushUpdateResponse:
        """See `Door`."""
        # The guard is made first: gRPC takes messages from a thread of its own.
        guard = StallGuard(lambda: call.cancel(), self._stall_s)  # noqa: PLW0108

        def messages() -> Iterator[devices.PushUpdateRequest]:
            yield devices.PushUpdateRequest(header=header)
            for offset, data in chunks:
                guard.moved()
                yield devices.PushUpdateRequest(chunk=devices.UpdateChunk(offset=offset, data=bytes(data)))

        call = self._stub.PushUpdate.future(messages())
        with guard:
            return call.result()
