"""The service for devices: converts, checks form, asks the writer, converts back. It decides nothing."""

# ruff: noqa: N802 - the names and the parameters of the calls are gRPC's

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from anabranch.compress.model import full_bytes
from anabranch.compress.registry import BOUND_MASKING, MASKING, known_stages
from anabranch.core import events as ev
from anabranch.core.effects import Effect, Granted, LeaseEnd, LeaseEnded, Refused
from anabranch.core.engine.engine import Engine
from anabranch.core.errors import ConfigError, InvalidUpdate, Overloaded, UnknownVersion
from anabranch.core.ids import checked_id
from anabranch.core.model.chains import AUTO, lacks
from anabranch.core.model.holdings import Holdings
from anabranch.core.model.submodels import CoordinateRuns, TensorSet, UnitMap
from anabranch.core.model.updates import Ask, Reason, Task
from anabranch.host.build import device_tables
from anabranch.host.first import FirstModel
from anabranch.host.run import BEATS_PER_LEASE, AdviceKind, advice
from anabranch.identity.certificates import certificate_der
from anabranch.identity.heads import head_message
from anabranch.protos.convert import (
    PROTOCOL_VERSION,
    capability_from_proto,
    check_manifest,
    checked_codecs,
    decision_to_proto,
    holdings_from_proto,
    manifest_to_proto,
    part_from_proto,
    task_to_proto,
)
from anabranch.protos.frames import Chunk
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import model_pb2 as model
from anabranch.protos.v1.devices_pb2_grpc import DevicesServicer
from anabranch.server.calls import USELESS_S, Calls, in_turn
from anabranch.server.gate import Caller, Gate
from anabranch.server.intake import Contents, PushVerdict, read_ask
from anabranch.server.models import ModelFile, ModelRequest
from anabranch.server.rpc_errors import Guarded, answers, streams
from anabranch.server.run import LiveRun
from anabranch.server.tls import ServerIdentity

log = logging.getLogger(__name__)

E = TypeVar("E", Granted, LeaseEnded, Refused)
ModelChunk = tuple[devices.ModelHeader | None, Chunk]  # the header comes with the first
NO_CHUNK = Chunk(0, b"")

LINKS_MAX = 4096  # in one answer: 128 KiB
WHY_CHARS_MAX = 200
LARGE_CHUNKS_MAX = 48  # models on their way in chunks of more than 256 KiB
NOTICES = {
    AdviceKind.NONE: devices.NOTICE_KIND_UNSPECIFIED,
    AdviceKind.CANCEL: devices.NOTICE_KIND_CANCEL,
    AdviceKind.UPLOAD_NOW: devices.NOTICE_KIND_UPLOAD_NOW,
    AdviceKind.FINISHED: devices.NOTICE_KIND_FINISHED,
}


class Devices(Guarded, DevicesServicer):
    """See protos/v1/devices.proto for what each call means."""

    def __init__(self, run: LiveRun, gate: Gate) -> None:
        self.run, self.gate, self.calls, self.outage = run, gate, run.calls, run.outage

    @answers
    @in_turn
    async def Enrol(self, request: devices.EnrolRequest, caller: Caller) -> devices.EnrolResponse:
        """Make a device known."""
        run, client_id = self.run, self._client("Enrol", request.client_id, caller)
        _check_program(request, run)
        masking = _masking_for(request, run)
        known = run.writer.glance
        if client_id not in known.clients and known.clients_enrolled >= run.limits.clients_max:
            raise Overloaded(f"{known.clients_enrolled} clients are enrolled, as many as the server takes")
        said = capability_from_proto(request.capability)
        capability = replace(said, codecs=known_stages(said.codecs))  # of others nothing is ever asked
        await run.writer.submit(ev.Enrolled(run.writer.now(), client_id, capability))
        self.calls.told("Enrol", client_id, USELESS_S)  # once a start is enough
        self._say_what_is_lacking(client_id, capability.codecs)
        return devices.EnrolResponse(
            run=run.info.name,
            run_id=run.info.run_id,
            manifest=manifest_to_proto(run.spec, run.models.frozen_sha256),
            config_json=json.dumps(device_tables(run.config)),
            version=run.writer.glance.version,
            server_time_s=run.writer.now(),
            first=_first(run.first),
            masking=masking,
        )

    def _say_what_is_lacking(self, client_id: str, codecs: Sequence[str]) -> None:
        """A device without a stage of the uplink's codec sends raw: somebody should know why."""
        text = self.run.config.uplink.codec
        if text != AUTO and (missing := lacks(codecs, text)):
            log.warning(
                "client=%s has no codec stage %s of uplink.codec and sends raw: install what brings it, "
                "or start the device with --part stage=PATH.PY:CLASS",
                client_id,
                ", ".join(missing),
            )

    @answers
    @in_turn
    async def AskTask(self, request: devices.AskTaskRequest, caller: Caller) -> devices.AskTaskResponse:
        """Grant or refuse a task."""
        ask = read_ask(request, self.run.spec, self.run.limits)
        caller.check_name(ask.client_id)
        self.calls.take("AskTask", ask.client_id, caller)
        return await self._answer_to(ask)

    @streams
    async def FetchModel(
        self, request: devices.FetchModelRequest, caller: Caller
    ) -> AsyncIterator[devices.FetchModelResponse]:
        """Stream a model from an offset on, to a device or an observer."""
        async for header, chunk in self.model(request, caller):
            yield devices.FetchModelResponse(header=header, offset=chunk.offset, data=bytes(chunk.data))

    async def model(self, request: devices.FetchModelRequest, caller: Caller) -> AsyncIterator[ModelChunk]:
        """The answer to a fetch, by whichever door."""
        caller.check_observer(request.client_id)
        self.calls.take("FetchModel", request.client_id, caller)
        check_manifest(request.manifest_sha256, self.run.spec)
        checked_codecs(request.codecs, "codecs")  # before the writer's thread looks at them
        if request.part_id:
            async for header_or_not, chunk in self._frozen_part(request):
                yield header_or_not, chunk
            return
        part, holds = None, holdings_from_proto(request, self.run.spec)
        if request.HasField("submodel"):
            part = part_from_proto(request.submodel, self.run.spec)
        wanted, finished = await self.run.writer.look(
            lambda engine: self._wanted(engine, request, holds, part)
        )
        version = wanted.version
        header = devices.ModelHeader(
            version=version,
            manifest_sha256=request.manifest_sha256,
            published_at_s=self.run.models.published_at(version),
            final=finished,
        )
        if not request.HasField("version") and request.HasField("newer_than"):
            header.not_modified = version <= request.newer_than
        if header.not_modified:
            yield header, NO_CHUNK
            return
        file = await self.run.models.get(wanted)
        header.part.CopyFrom(_part(file))
        if file.from_version is not None:
            header.from_version = file.from_version
        header.vector_sha256 = bytes.fromhex(file.vector_sha256)
        header.part_only = file.part_only
        await self._sign(header, caller)
        for header_or_not, chunk in self._sent(request, file, header, full_bytes(self.run.spec)):
            yield header_or_not, chunk

    async def _frozen_part(self, request: devices.FetchModelRequest) -> AsyncIterator[ModelChunk]:
        """What is the same in all versions. Its digest is in the manifest, so nothing vouches for it here."""
        file = await self.run.models.part(request.part_id)
        header = devices.ModelHeader(
            version=self.run.writer.glance.version, part=_part(file), manifest_sha256=request.manifest_sha256
        )
        header.part.part_id = request.part_id
        for header_or_not, chunk in self._sent(request, file, header, file.size_bytes):
            yield header_or_not, chunk

    def _sent(
        self, request: devices.FetchModelRequest, file: ModelFile, header: devices.ModelHeader, whole: int
    ) -> Iterator[ModelChunk]:
        """A file from the offset on, counted; `whole`: the bytes that it stands for, as they are."""
        first: devices.ModelHeader | None = header
        offset = request.offset
        if offset > file.size_bytes:
            raise InvalidUpdate(f"offset {offset} is past the model's {file.size_bytes} bytes")
        sent = self.run.sent_to_observers if request.exact else self.run.sent_to_devices
        if not offset:
            sent.full_bytes += whole
        self.run.sending += 1
        try:
            with file.open() as read:
                while data := read(self._chunk_bytes(request), offset):
                    sent.bytes += len(data)
                    yield first, Chunk(offset, data)
                    first, offset = None, offset + len(data)
            if first is not None:  # it was here already, to its last byte
                yield first, Chunk(offset, b"")
        finally:
            self.run.sending -= 1

    @answers
    async def PushUpdate(  # type: ignore[override] # `protos.frames` reads its messages
        self, contents: Contents, caller: Caller
    ) -> devices.PushUpdateResponse:
        """Receive an update; the answer leaves after it is durable."""
        return await self.verdict(contents, caller)

    async def verdict(self, contents: Contents, caller: Caller) -> devices.PushUpdateResponse:
        """The answer to a push, by whichever door."""
        verdict = await self.run.intake.push(contents, caller)
        response = _push_response(verdict)
        if verdict.ask is not None:
            response.next.CopyFrom(await self._answer_to(verdict.ask, verdict.asked))
        return response

    @answers
    @in_turn
    async def QueryUpload(
        self, request: devices.QueryUploadRequest, caller: Caller
    ) -> devices.QueryUploadResponse:
        """Where an upload stands."""
        client_id = self._client("QueryUpload", request.client_id, caller)
        update_id = self._id(request.update_id, "update_id")
        if (verdict := await self.run.intake.verdict(client_id, update_id)) is not None:
            return devices.QueryUploadResponse(verdict=_push_response(verdict))
        return devices.QueryUploadResponse(
            received_bytes=await self.run.uploads.received(client_id, update_id)
        )

    @answers
    @in_turn
    async def Heartbeat(self, request: devices.HeartbeatRequest, caller: Caller) -> devices.HeartbeatResponse:
        """Renew a lease and tell the device what it should know."""
        writer = self.run.writer
        client_id = self._client("Heartbeat", request.client_id, caller)
        task_id = self._id(request.task_id, "task_id")
        if not 0 <= request.progress < float("inf"):
            raise InvalidUpdate(f"progress must be a finite number, 0 or more, not {request.progress!r}")
        session = self._id(request.session, "session") if request.session else ""
        if (task := writer.glance.tasks.get(task_id)) is not None:
            self.calls.told("Heartbeat", client_id, task.lease_s / BEATS_PER_LEASE)
        await writer.submit(ev.LeaseRenewed(writer.now(), client_id, task_id, request.progress, session))
        said = await writer.look(lambda engine: advice(engine, client_id, task_id))
        about = "" if said.notice is AdviceKind.FINISHED else task_id
        notices = [devices.Notice(kind=NOTICES[said.notice], task_id=about, detail=said.detail)]
        return devices.HeartbeatResponse(
            expires_at_s=said.expires_at,
            server_time_s=writer.now(),
            notices=notices if said.notice else [],
            version=said.version,
        )

    @answers
    @in_turn
    async def DropTask(self, request: devices.DropTaskRequest, caller: Caller) -> devices.DropTaskResponse:
        """Take a task back."""
        client_id = self._client("DropTask", request.client_id, caller)
        task_id = self._id(request.task_id, "task_id")
        why = request.why[:WHY_CHARS_MAX]
        now, diverged = self.run.writer.now(), request.diverged
        await self.run.writer.submit(ev.TaskDropped(now, client_id, task_id, why, diverged))
        return devices.DropTaskResponse()

    @answers
    async def GetLinks(self, request: devices.GetLinksRequest, caller: Caller) -> devices.GetLinksResponse:
        """Links of the chain of versions, in order."""
        self.calls.take("GetLinks", "", caller)
        after = request.after_version
        last = min(request.to_version, self.run.writer.glance.version)  # it may be any number
        limit = min(max(0, last - after), LINKS_MAX)
        links = await self.run.writer.look_store(lambda store: store.links(after, limit)) if limit else []
        return devices.GetLinksResponse(links=bytes.fromhex("".join(links)))

    @answers
    async def RenewCertificate(
        self, request: devices.RenewCertificateRequest, caller: Caller
    ) -> devices.RenewCertificateResponse:
        """A newer certificate for the device that calls."""
        return await renewed(self.run.identity, self.calls, request, caller)

    # --- parts of answers --------------------------------------------------------------------

    def _id(self, text: str, name: str) -> str:
        return checked_id(text, name, self.run.limits)

    def _client(self, call: str, client_id: str, caller: Caller) -> str:
        """The id of the device that calls. Raises `InvalidUpdate`, `NotPermitted`, `Overloaded`."""
        caller.check_name(self._id(client_id, "client_id"))
        self.calls.take(call, client_id, caller)
        self._seen(client_id)
        return client_id

    def _seen(self, client_id: str) -> None:
        if client_id in self.run.writer.glance.clients:
            self.run.presence.seen(client_id, self.run.writer.now())

    async def _sign(self, header: devices.ModelHeader, caller: Caller) -> None:
        """Name a model by its head. To who has a certificate, vouch for it and the history that led to it."""
        run, version = self.run, header.version
        if run.restored is not None:
            header.restored.CopyFrom(run.restored.to_proto())
        header.head = bytes.fromhex(await run.writer.head_of(version) or "")
        if caller.peer is None:
            return
        assert run.identity is not None, "a caller with a certificate came through a guarded port"
        head = await self._head(version)
        header.run_id, header.head = run.info.run_id, bytes.fromhex(head)
        message = head_message(
            run.info.run_id,
            version,
            head,
            header.manifest_sha256.hex(),
            header.part.sha256.hex(),
            header.vector_sha256.hex(),
        )
        header.signature, header.certificate = run.identity.sign(message)

    async def _head(self, version: int) -> str:
        """A version's head, hex. Raises `UnknownVersion`."""
        head = await self.run.writer.head_of(version)
        if head is None:
            raise UnknownVersion(f"version {version} is of before its history was kept: fetch the newest")
        return head

    def _retry_s(self) -> tuple[float, float]:
        return self.run.writer.glance.settings.retry_after_s

    def _refusal(self, refused: Refused) -> devices.AskTaskResponse:
        earliest_s, latest_s = refused.retry_after_s
        self.calls.told("AskTask", refused.ask.client_id, earliest_s)
        refusal = devices.Refusal(
            reason=refused.reason,
            detail=refused.detail,
            retry_after=model.RetryWindow(earliest_s=earliest_s, latest_s=latest_s),
            final=refused.final,
        )
        return devices.AskTaskResponse(refusal=refusal, server_time_s=self.run.writer.now())

    async def _answer_to(self, ask: Ask, asked: Sequence[Effect] = ()) -> devices.AskTaskResponse:
        """The answer to an ask; `asked`: what came of it, if it has had its turn."""
        self._seen(ask.client_id)
        if self.run.draining:
            return self._refusal(Refused(ask, Reason.PAUSED, "the server is going down", self._retry_s()))
        if not asked:
            writer = self.run.writer
            asked = (await writer.submit(ev.TaskAsked(writer.now(), ask))).effects
        ended = _find(asked, LeaseEnded)
        if ended is not None and ended.end is LeaseEnd.SUPERSEDED:  # for another, of which may come as little
            self.calls.told("AskTask", ask.client_id, USELESS_S)
        granted = _find(asked, Granted)
        if granted is not None:
            return await self._grant(granted.task, ask.holds)
        refused = _find(asked, Refused)
        assert refused is not None, "an ask is granted or refused"
        return self._refusal(refused)

    async def _grant(self, task: Task, holds: Holdings) -> devices.AskTaskResponse:
        capability = self.run.writer.glance.clients.get(task.client_id)
        assert capability is not None, "who has a task is enrolled"
        try:
            wanted = self.run.models.for_device(task.base_version, holds, capability.codecs, task.submodel)
            file = await self.run.models.get(wanted)
        except UnknownVersion as gone:  # lost with a crash: give the task back, the device asks anew
            now, ask = self.run.writer.now(), Ask(task.client_id, task.task_id)
            await self.run.writer.submit(ev.TaskDropped(now, task.client_id, task.task_id, str(gone)))
            return self._refusal(Refused(ask, Reason.BASE_GONE, str(gone), self._retry_s()))
        proto = task_to_proto(task, _part(file))
        proto.base_head = bytes.fromhex(await self.run.writer.head_of(task.base_version) or "")
        return devices.AskTaskResponse(task=proto, server_time_s=self.run.writer.now())

    def _wanted(
        self,
        engine: Engine,
        request: devices.FetchModelRequest,
        holds: Holdings,
        part: UnitMap | TensorSet | CoordinateRuns | None,
    ) -> tuple[ModelRequest, bool]:
        """What to serve, made if need be, and whether it is the last version. In the writer's thread."""
        newest = engine.version if request.exact else engine.offered
        version = request.version if request.HasField("version") else newest
        has_task = _has_task(engine, request.client_id, version, part)
        # A part is a file of its own, and what leads from parts: they are made for tasks alone.
        submodel = part if has_task and not isinstance(part, CoordinateRuns) else None
        holds = holds if has_task or isinstance(holds, int) else None
        wanted = self.run.models.for_device(version, holds, request.codecs, submodel)
        if request.exact:
            wanted = ModelRequest(version, "exact")
            self.run.models.looked_at(version)
        is_known = request.HasField("newer_than") and version <= request.newer_than
        if not is_known or request.HasField("version"):
            self.run.models.keep(engine, wanted, for_long=request.exact)
            self.run.models.retain_parts(engine.ledger.tasks)  # a fetch is no event, and there may be many
        return wanted, bool(engine.finished) and version == newest

    def _chunk_bytes(self, request: devices.FetchModelRequest) -> int:
        """Of a chunk of an answer. Each that is on its way is in memory: large ones are for a few."""
        limits = self.run.limits
        wished = request.chunk_bytes_max or limits.sent_chunk_bytes
        most = limits.sent_chunk_bytes if self.run.sending > LARGE_CHUNKS_MAX else limits.chunk_bytes_max
        return min(max(wished, limits.slow_chunk_bytes), most)


def _first(first: FirstModel | None) -> devices.FirstModel | None:
    if first is None:
        return None
    sha256, head = bytes.fromhex(first.sha256), bytes.fromhex(first.head)
    return devices.FirstModel(seed=first.seed, codec=first.codec, sha256=sha256, head=head)


def _check_program(request: devices.EnrolRequest, run: LiveRun) -> None:
    """Raises `ConfigError` where a device's program does not know what the run's model or tasks have."""
    same = "install the same version of anabranch on both sides"
    if request.protocol_version != PROTOCOL_VERSION:
        raise ConfigError(
            f"protocol_version {request.protocol_version} is not spoken here, {PROTOCOL_VERSION} is: {same}"
        )
    if run.spec.buffers and not request.buffers:
        raise ConfigError(
            "this run's model has buffers, of which an update has the values reached, and this device's "
            f"program does not know them: {same}"
        )
    if run.spec.apart and not request.frozen:
        raise ConfigError(
            "of this run's model a part is frozen, which is in no update, and this device's program does "
            f"not know that: {same}"
        )
    if run.in_parts and not request.tensors:
        raise ConfigError(
            "this run's tasks are of some of the model's tensors (submodel.name), and this device's "
            f"program does not know such tasks: {same}"
        )


def _masking_for(request: devices.EnrolRequest, run: LiveRun) -> model.Masking | None:
    """What a device is told of masks, if the run has them.

    Raises `Unavailable` until every keeper has been reached, `ConfigError` for a device without keepers.
    """
    if run.unmasking is None:
        return None
    masking = run.unmasking.masking()
    if MASKING not in request.capability.codecs:
        raise ConfigError(
            "this run's updates are masked, and this device was told no keepers: say each with --keeper, "
            "by the name that whoever runs it has given you"
        )
    if masking.terms.plan and BOUND_MASKING not in request.capability.codecs:
        raise ConfigError(
            "this run's boxes say what an update was trained from, which this device's program does not "
            "know: install the same version of anabranch on both sides"
        )
    keys = [
        model.KeeperKey(certificate=k.certificate, public_key=k.public_key, signature=k.signature)
        for k in masking.keys
    ]
    return model.Masking(terms_json=json.dumps(masking.terms.to_json()), keepers=keys)


async def renewed(
    identity: ServerIdentity | None,
    calls: Calls,
    request: devices.RenewCertificateRequest,
    caller: Caller,
) -> devices.RenewCertificateResponse:
    """A newer certificate for the device that calls. Raises `ConfigError` where nobody has one."""
    if identity is None or caller.peer is None:
        raise ConfigError("nobody has a certificate on this port: there is none to renew")
    calls.take("RenewCertificate", "", caller)
    made = await identity.members.renew(caller.peer, request.signing_request, identity.life_s)
    return devices.RenewCertificateResponse(certificate=certificate_der(made))


def _find(effects: Sequence[Effect], kind: type[E]) -> E | None:
    return next((e for e in effects if isinstance(e, kind)), None)


def _has_task(
    engine: Engine, client_id: str, version: int, part: UnitMap | TensorSet | CoordinateRuns | None
) -> bool:
    """Whether the client has a task of this part of this version."""
    tasks = [*engine.ledger.live_of(client_id), *engine.ledger.expired_of(client_id)]
    parts = [task.submodel for task in tasks if task.base_version == version]
    return any(part.are(own) for own in parts) if isinstance(part, CoordinateRuns) else part in parts


def _part(file: ModelFile) -> model.Part:
    return model.Part(
        base_version=file.version,
        size_bytes=file.size_bytes,
        sha256=bytes.fromhex(file.sha256),
        encoding=model.Encoding(codec=file.codec),
    )


def _push_response(verdict: PushVerdict) -> devices.PushUpdateResponse:
    duplicate = verdict.duplicate
    return devices.PushUpdateResponse(
        status=devices.PUSH_STATUS_DUPLICATE if duplicate else devices.PUSH_STATUS_ACCEPTED,
        decision=decision_to_proto(verdict.receipt.decision),
        version=verdict.receipt.version,
        receive_seq=verdict.seq,
    )
