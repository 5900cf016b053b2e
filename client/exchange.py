"""The other door to the service for devices: one stream for one request after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from anabranch.client.calls import ModelChunks
from anabranch.client.pulse import Pulse
from anabranch.core.config.caps import HEADER_BYTES
from anabranch.core.errors import ERROR_KEY, ProtocolError, Unavailable
from anabranch.protos.frames import Chunk, ExchangeFrame, frame_bytes, response_frame
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.support.tracing import is_tracing, traceparent

METHOD = f"/{devices.DESCRIPTOR.services_by_name['Devices'].full_name}/Exchange"
NAMES = {
    devices.AskTaskRequest: "ask",
    devices.QueryUploadRequest: "query",
    devices.HeartbeatRequest: "heartbeat",
    devices.DropTaskRequest: "drop",
}
Messages = Iterable[bytes]


class NotAnsweredError(Exception):
    """The stream says nothing of the request: it may be made again, as a call."""


class StreamDoor:
    """A `Door`, for one request at a time; opened at once. After anything that is raised it must be closed.

    Raises `NotAnsweredError` where the server has ended the stream in good order, and where one that has
    never brought an answer breaks: a server may not know it, or what is between may not let it through.
    """

    def __init__(self, channel: grpc.Channel, stall_s: float) -> None:
        self._stall_s = stall_s
        # Whether an answer has come.
        self.proven = False
        self._follows = False
        self._coming: devices.FetchModelRequest | None = None  # of which the answer comes unasked
        self._due = math.inf
        self._outgoing: SimpleQueue[Messages | None] = SimpleQueue()
        begin: Any = channel.stream_stream(METHOD)  # bytes go out and come in as they are
        self._call = begin(_joined(self._outgoing))
        self._pulse = Pulse(self._look, time.monotonic)
        self._pulse_at = math.inf
        self._pulse.start()

    @property
    def is_open(self) -> bool:
        """Whether the server has not ended it."""
        return bool(self._call.is_active())

    def close(self) -> None:
        """Cut off whatever is under way."""
        self._outgoing.put(None)
        self._call.cancel()
        self._pulse.stop()

    def answer(self, request: Any, timeout_s: float) -> Any:
        """See `Door`."""
        name = NAMES[type(request)]
        self._say([frame_bytes(_head(**{name: request}))], timeout_s)
        answer = self._heard(name)
        if isinstance(request, devices.AskTaskRequest):
            self._note_model(request, answer)
        return answer

    def model(self, request: devices.FetchModelRequest) -> ModelChunks:
        """See `Door`."""
        if self._is_coming(request):
            self._expect(self._stalled_at())
            self._coming = None
        else:
            self._say([frame_bytes(_head(fetch=request))], self._stall_s)
        name: str | None = "fetch"
        while True:
            head, data = self._next(name)
            yield head.fetch if name else None, Chunk(head.offset, data)
            if not head.more:
                return
            self._expect(self._stalled_at())
            name = None

    def push(self, header: devices.UpdateHeader, chunks: Iterable[Chunk]) -> devices.PushUpdateResponse:
        """See `Door`."""
        first = _head(push=header)

        def messages() -> Iterator[bytes]:
            # With a large map the header has a message for itself.
            head, chunk, rest = first, Chunk(0, b""), iter(chunks)
            if first.ByteSize() <= HEADER_BYTES:
                chunk = next(rest, chunk)
            while True:
                following = next(rest, None)
                head.offset, head.more = chunk.offset, following is not None
                yield frame_bytes(head, chunk.data)
                self._expect(self._stalled_at())
                if following is None:
                    return
                head, chunk = devices.RequestHead(), following

        self._say(messages(), self._stall_s)
        answer: devices.PushUpdateResponse = self._heard("push")
        self._note_model(header.next, answer.next)
        return answer

    def _heard(self, name: str) -> Any:
        """The answer of this name; `_follows`: whether a model comes behind it, for which nobody asked."""
        head = self._next(name).head
        self._follows = head.more
        return getattr(head, name)

    def _note_model(self, ask: devices.AskTaskRequest, answer: devices.AskTaskResponse) -> None:
        """Remember of which fetch the answer is on its way."""
        if self._follows:
            self._coming = devices.FetchModelRequest(
                version=answer.task.base_version,
                holds_version=ask.holds_version if ask.HasField("holds_version") else None,
                submodel=answer.task.submodel if answer.task.HasField("submodel") else None,
                holds_parts=ask.holds_parts,
            )

    def _is_coming(self, request: devices.FetchModelRequest) -> bool:
        """Whether what is asked for is on its way already, from its first byte."""
        return self._coming is not None and self._coming == devices.FetchModelRequest(
            version=request.version if request.HasField("version") else None,
            holds_version=request.holds_version if request.HasField("holds_version") else None,
            submodel=request.submodel if request.HasField("submodel") else None,
            holds_parts=request.holds_parts,
            offset=request.offset,
            part_id=request.part_id,
            exact=request.exact,
        )

    def _say(self, messages: Messages, timeout_s: float) -> None:
        if self._coming is not None:
            raise NotAnsweredError("a model is on its way, and something else was asked for")
        self._expect(time.monotonic() + timeout_s)
        self._outgoing.put(messages)

    def _next(self, name: str | None) -> ExchangeFrame[devices.ResponseHead]:
        """The next message, which must be the answer of this name; None: more of the model before."""
        try:
            frame = response_frame(next(self._call))
        except StopIteration:
            raise NotAnsweredError("the server has ended the stream") from None
        except grpc.RpcError as error:
            told: Any = error
            if self.proven or ERROR_KEY in dict(told.trailing_metadata() or ()):
                raise
            raise NotAnsweredError("the stream broke before its first answer") from error
        except DecodeError:
            if self.proven:
                raise Unavailable("the server sent what is no answer") from None
            raise NotAnsweredError("the first answer was none") from None
        self._due, self.proven = math.inf, True
        if (said := frame.head.WhichOneof("answer")) != name:
            raise ProtocolError(f"the server answers {said} where {name} was due: install the same version")
        return frame

    def _stalled_at(self) -> float:
        """When a transfer of which nothing moves from now on is cut."""
        return time.monotonic() + self._stall_s

    def _expect(self, at: float) -> None:
        """Cut the stream off unless something moves until then."""
        self._due = at
        if at < self._pulse_at:
            self._pulse_at = at
            self._pulse.set(at)

    def _look(self) -> None:
        """In the pulse's thread, seldom: a moment that was put off is looked at again when it has come."""
        self._pulse_at = math.inf
        due = self._due
        if due <= time.monotonic():
            self._call.cancel()
        elif due < math.inf:
            self._expect(due)


def _head(**request: Any) -> devices.RequestHead:
    return devices.RequestHead(**request, traceparent=traceparent() if is_tracing() else "")


def _joined(outgoing: SimpleQueue[Messages | None]) -> Iterator[bytes]:
    take: Callable[[], Messages | None] = outgoing.get
    for messages in iter(take, None):
        yield from messages
