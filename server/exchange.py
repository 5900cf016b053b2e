"""The other door of the service for devices: one stream a device, with its requests one after the other.

Each request is answered by the handler of the call of that name, with the same bounds and the same refusals.
An error ends the stream with the status that the call would have had. A stream on which nothing comes for a
while is ended, as is one that has grown old, and with OK: nothing is lost with it, its device makes a call or
opens another. So whoever is silent holds nothing, and a server that drains need not wait for anybody.
"""

# ruff: noqa: N802 - the names of the calls are gRPC's

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
from grpc import aio

from anabranch.core.errors import InvalidUpdate, StoreError
from anabranch.core.model.growing import needed_for
from anabranch.core.model.holdings import has
from anabranch.core.model.params import ParamSpec
from anabranch.protos.convert import holdings_from_proto, part_from_proto
from anabranch.protos.frames import Chunk, ExchangeFrame, frame_bytes, push_content, request_frame
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server.counting import counting
from anabranch.server.gate import Caller
from anabranch.server.rpc import Devices, ModelChunk
from anabranch.server.rpc_errors import Context, behind, converses

SERVICE = devices.DESCRIPTOR.services_by_name["Devices"].full_name
CALLS: dict[str, tuple[str, Callable[[Any, Any, Caller], Awaitable[Any]]]] = {
    "query": ("QueryUpload", behind(Devices.QueryUpload)),
    "heartbeat": ("Heartbeat", behind(Devices.Heartbeat)),
    "drop": ("DropTask", behind(Devices.DropTask)),
}
Request = ExchangeFrame[devices.RequestHead]
ask_task = behind(Devices.AskTask)


class DevicesAndExchange(Devices):
    """See protos/v1/devices.proto; `Exchange` reads and writes messages by `protos.frames`."""

    @converses
    async def Exchange(  # type: ignore[override] # it writes for itself, by the context
        self, context: Context, caller: Caller
    ) -> None:
        """Answer one request after the other."""
        with self.run.streams.opened() as waiting:
            if waiting is None:
                return  # there are as many as the server takes: this device makes calls
            stream = _Stream(context)
            while (request := await waiting.wait(stream.read)) is not None:
                await caller.check_still()
                trace = request.head.traceparent
                # Not the trace that the stream was opened in.
                said = caller if trace == caller.trace else replace(caller, trace=trace)
                await self._answer(request, stream, said)
                if stream.more:
                    return  # it was answered before its end: the rest is nobody's

    async def _answer(self, request: Request, stream: _Stream, caller: Caller) -> None:
        head = request.head
        kind = head.WhichOneof("request")
        stream.more = head.more and kind == "push"
        if kind == "fetch":
            with self._counted("FetchModel", stream):
                await self._send_model(self.model(head.fetch, caller), stream, caller)
        elif kind == "push":
            with self._counted("PushUpdate", stream):
                verdict = await self.verdict(stream.contents(request), caller)
            said = devices.ResponseHead(push=verdict)
            following = _following(head.push.next, verdict.next, self.run.spec)
            await self._send_with_model(said, following, stream, caller)
        elif kind == "ask":
            with self._counted("AskTask", stream):
                answer = await ask_task(self, head.ask, caller)
            said = devices.ResponseHead(ask=answer)
            following = _following(head.ask, answer, self.run.spec)
            await self._send_with_model(said, following, stream, caller)
        elif kind in CALLS:
            name, method = CALLS[kind]
            with self._counted(name, stream):
                said = await method(self, getattr(head, kind), caller)
            await stream.write(frame_bytes(devices.ResponseHead(**{kind: said})))
        else:
            raise InvalidUpdate("an exchange goes on with a request: install the same version on both sides")

    @contextmanager
    def _counted(self, call: str, stream: _Stream) -> Iterator[None]:
        """Inside is a request that stands for a call, which is counted by what its device is told."""
        with counting(self.run.writer.metrics, call, stream.context):
            try:
                yield
            except StoreError as error:
                if (told := self.run.outage.told(error)) is error:
                    raise
                raise told from error

    async def _send_with_model(
        self,
        said: devices.ResponseHead,
        fetch: devices.FetchModelRequest | None,
        stream: _Stream,
        caller: Caller,
    ) -> None:
        """An answer, and behind it the model that its device would ask for next, unless it is None."""
        said.more = fetch is not None and not stream.more
        await stream.write(frame_bytes(said))
        if fetch is not None and said.more:
            capability = self.run.writer.glance.clients.get(fetch.client_id)
            fetch.codecs.extend(() if capability is None else capability.codecs)
            with self._counted("FetchModel", stream):
                await self._send_model(self.model(fetch, caller), stream, caller)

    async def _send_model(self, chunks: AsyncIterator[ModelChunk], stream: _Stream, caller: Caller) -> None:
        size_bytes = 0
        async for header, (offset, data) in chunks:
            await caller.check_still()
            size_bytes = size_bytes if header is None else header.part.size_bytes
            more = offset + len(data) < size_bytes
            head = devices.ResponseHead(fetch=header, offset=offset, more=more)
            await stream.write(frame_bytes(head, data))


def _following(
    ask: devices.AskTaskRequest, answer: devices.AskTaskResponse, spec: ParamSpec
) -> devices.FetchModelRequest | None:
    """What the device would ask for next and wants unasked: the model of its task, where it has another."""
    task = answer.task
    if not (ask.with_model and answer.HasField("task")):
        return None
    part = part_from_proto(task.submodel, spec) if task.HasField("submodel") else None
    if has(holdings_from_proto(ask, spec), task.base_version, needed_for(part)):
        return None
    return devices.FetchModelRequest(
        client_id=ask.client_id,
        version=task.base_version,
        manifest_sha256=ask.manifest_sha256,
        holds_version=ask.holds_version if ask.HasField("holds_version") else None,
        submodel=task.submodel if task.HasField("submodel") else None,
        holds_parts=ask.holds_parts,
        chunk_bytes_max=ask.chunk_bytes_max,
    )


class _Stream:
    """The messages of one exchange. `more`: those of the push at hand are not all here."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.more = False

    async def read(self) -> Request | None:
        """The next message, None at the end."""
        frame: Any = await self.context.read()
        return None if frame is aio.EOF else frame

    async def write(self, message: bytes) -> None:
        """Send a message; while the device does not read, neither does the server."""
        await self.context.write(message)

    async def contents(self, first: Request) -> AsyncIterator[devices.UpdateHeader | Chunk | None]:
        """What comes of the push that begins with this message."""
        yield first.head.push
        if first.data:
            yield Chunk(first.head.offset, first.data)
        del first
        while self.more:
            frame = await self.read()
            if frame is None:
                return
            self.more = frame.head.more
            yield None if frame.head.WhichOneof("request") else Chunk(frame.head.offset, frame.data)
            del frame


def add_exchange(servicer: Any, server: aio.Server) -> None:
    """Have what carries payloads read and written by `protos.frames`, in the place of the generated code."""
    exchange: Any = grpc.stream_stream_rpc_method_handler(servicer.Exchange, request_frame, None)
    answer = devices.PushUpdateResponse.SerializeToString
    push: Any = grpc.stream_unary_rpc_method_handler(servicer.PushUpdate, push_content, answer)
    server.add_registered_method_handlers(SERVICE, {"Exchange": exchange, "PushUpdate": push})
