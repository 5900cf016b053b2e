"""The other door by hand: a device whose requests go over one stream, and the stream itself, to misuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import grpc
from wire import CALL_S, CHUNK, Device

from anabranch.protos.frames import ExchangeFrame, frame_bytes, response_frame
from anabranch.protos.v1 import devices_pb2 as devices

METHOD = "/anabranch.v1.Devices/Exchange"
Answer = ExchangeFrame[devices.ResponseHead]


class Stream:
    """One exchange. What is said goes out as gRPC takes it; `over` says how it has ended."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        begin: Any = channel.stream_stream(METHOD)
        self.call = begin(iter(self._outgoing.get, None), timeout=CALL_S)

    def say(self, data: bytes | memoryview = b"", **head: Any) -> None:
        """A message: `head` has the fields of its head."""
        self.say_bytes(frame_bytes(devices.RequestHead(**head), data))

    def say_bytes(self, message: bytes) -> None:
        """A message, well made or not."""
        self._outgoing.put(message)

    def push(self, header: devices.UpdateHeader, data: bytes, offset: int = 0, size: int = CHUNK) -> None:
        """The messages of a push."""
        starts = list(range(offset, len(data), size)) or [offset]
        for n, start in enumerate(starts):
            head = {"push": header} if n == 0 else {}
            self.say(data[start : start + size], offset=start, more=start != starts[-1], **head)

    def hear(self) -> Answer:
        """The next message. Raises `grpc.RpcError`, and `StopIteration` after an end in good order."""
        return response_frame(next(self.call))

    def over(self) -> tuple[str, str]:
        """The status that it ends with, and the class of the error; whatever comes before is passed over."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError:
            metadata = dict(self.call.trailing_metadata() or ())
            return self.call.code().name, str(metadata.get("anabranch-error", ""))
        return "OK", ""

    def close(self) -> None:
        """Hang up, in the midst of whatever there is."""
        self._outgoing.put(None)
        self.call.cancel()

    def end(self) -> None:
        """Say nothing more."""
        self._outgoing.put(None)


@contextmanager
def stream(channel: grpc.Channel) -> Iterator[Stream]:
    """A stream, which is closed at the end."""
    made = Stream(channel)
    try:
        yield made
    finally:
        made.close()


class StreamDevice(Device):
    """A `Device` whose requests go over a stream, as long as it is good for them: then over another."""

    def __init__(self, channel: grpc.Channel, *more: Any) -> None:
        super().__init__(channel, *more)
        self._stream = Stream(channel)

    def _said(self, name: str, request: Any) -> Any:
        """The answer to a request. Raises `grpc.RpcError`."""
        return self._heard(name, lambda stream: stream.say(**{name: request}))

    def _heard(self, name: str, say: Any) -> Any:
        while True:
            say(self._stream)
            try:
                return getattr(self._stream.hear().head, name)
            except StopIteration:  # idle for too long: nothing was taken
                self._renew()
            except grpc.RpcError:
                self._renew()
                raise

    def _renew(self) -> None:
        self._stream.close()
        self._stream = Stream(self.channel)

    def ask(self, task_id: str = "") -> devices.AskTaskResponse:
        """Apply for a task."""
        answer: devices.AskTaskResponse = self._said("ask", self.asked(task_id))
        return answer

    def send(self, task: devices.Task, data: bytes, update_id: str = "", offset: int = 0, **more: Any) -> Any:
        """Send these very bytes."""
        header = self.header(task, data, update_id, **more)
        return self._heard("push", lambda stream: stream.push(header, data, offset))

    def query(self, update_id: str) -> devices.QueryUploadResponse:
        """Where an upload stands."""
        request = devices.QueryUploadRequest(client_id=self.client_id, update_id=update_id)
        answer: devices.QueryUploadResponse = self._said("query", request)
        return answer

    def heartbeat(self, task_id: str, progress: float = 1.0) -> devices.HeartbeatResponse:
        """Renew a lease."""
        request = devices.HeartbeatRequest(client_id=self.client_id, task_id=task_id, progress=progress)
        answer: devices.HeartbeatResponse = self._said("heartbeat", request)
        return answer

    def fetch(self, **fields: Any) -> tuple[devices.ModelHeader, bytes]:
        """A model from an offset on."""
        fields.setdefault("manifest_sha256", self.manifest_sha256)
        self._stream.say(fetch=devices.FetchModelRequest(client_id=self.client_id, **fields))
        try:
            return self._fetched(fields.get("offset", 0))
        except grpc.RpcError:
            self._renew()
            raise

    def _fetched(self, offset: int) -> tuple[devices.ModelHeader, bytes]:
        first = self._stream.hear()
        data, last = bytearray(first.data), first
        while last.head.more:
            last = self._stream.hear()
            assert last.head.offset == offset + len(data)
            data += last.data
        return first.head.fetch, bytes(data)

    def close(self) -> None:
        """Hang up."""
        self._stream.close()
