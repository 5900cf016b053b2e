"""One pushed update, from its stream to its verdict: checked for form, received, decoded, logged.

Whatever has no flaw but its values is on record, flaw included, so that the task is closed and a
resend gets the same answer.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from anabranch.core import events as ev
from anabranch.core.config.tables import Config
from anabranch.core.effects import Effect
from anabranch.core.errors import (
    IdTaken,
    InvalidSignature,
    InvalidUpdate,
    NotAuthenticated,
    StoreFull,
    Unavailable,
)
from anabranch.core.ids import checked_id
from anabranch.core.journal import to_record
from anabranch.core.limits import DEFAULT_LIMITS, MIB, Limits
from anabranch.core.model.params import ParamSpec, lasting_delta
from anabranch.core.model.submodels import CoordinateRuns, Submodel
from anabranch.core.model.updates import Ask, Receipt, Task, Update
from anabranch.core.privacy.mechanism import SALT_BYTES
from anabranch.host.private import salted
from anabranch.host.submission import (
    Submission,
    announced,
    answered,
    arrived,
    check_offered,
    check_seals,
    check_size,
    check_task,
    checked_metrics,
    examined,
)
from anabranch.identity.signatures import check_signature, make_proof, update_message
from anabranch.protos.convert import (
    check_manifest,
    check_payload_size,
    checked_count,
    checked_digest,
    checked_payload_digest,
    holdings_from_proto,
    part_from_proto,
    seals_from_proto,
)
from anabranch.protos.frames import Chunk
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import model_pb2 as model
from anabranch.server.books import Answer
from anabranch.server.calls import Calls
from anabranch.server.deadline import Deadline
from anabranch.server.failpoints import reach
from anabranch.server.gate import Caller
from anabranch.server.spool import UploadKey
from anabranch.server.uploads import Upload, Uploads
from anabranch.server.writer import Writer
from anabranch.support.tracing import span

# Vectors decoded at a time, in bytes: what is received may be large, what is worked on is bounded.
DECODED_BYTES_MAX = 64 * MIB
# What comes of a push, by whichever door: its header, then its bytes; None for what is neither.
Contents = AsyncIterator[devices.UpdateHeader | Chunk | None]


@dataclass(frozen=True)
class Header:
    """A header whose form was checked, with its signature if one is due. `ask`: for the next task.

    `is_open`: its device had the task when it came. Of another nothing is taken, and where its part is named
    by runs, what these are of is not known and its signature not looked at.
    """

    submission: Submission
    is_open: bool = False
    proof: ev.Proof | None = None
    ask: Ask | None = None

    @property
    def update(self) -> Update:
        """The update, which has no values yet."""
        return self.submission.update

    @property
    def payload(self) -> ev.Payload:
        """What its values are in."""
        return self.submission.payload


@dataclass(frozen=True)
class CheckedUpdate:
    """An update with its values and, if it is small, its bytes; or with its flaw and neither."""

    update: Update
    flaw: str = ""
    inline: bytes | None = None


@dataclass(frozen=True)
class PushVerdict:
    """What the caller is told. `seq` is the update's place in the log, 0 for a duplicate.

    `ask`: what it applies for in the same call, and `asked`: what came of that, unless it is still open.
    """

    receipt: Receipt
    duplicate: bool
    seq: int
    ask: Ask | None = None
    asked: Sequence[Effect] = ()


def read_header(
    message: devices.UpdateHeader, spec: ParamSpec, limits: Limits = DEFAULT_LIMITS, task: Task | None = None
) -> Header:
    """The update that a header announces. Raises the errors of a malformed one. `task`: the one, if open."""
    check_manifest(message.manifest_sha256, spec)
    if message.base_kind != model.BASE_KIND_VERSION or len(message.parts) != 1:
        raise InvalidUpdate("an update of this run has one part, and a published version as its base")
    part = message.parts[0]
    submodel = _covered(message, spec, task)
    codec, size_bytes = part.encoding.codec, part.size_bytes
    check_size(size_bytes, codec, spec, submodel)
    submission = announced(
        spec,
        update_id=checked_id(message.update_id, "update_id", limits),
        task_id=checked_id(message.task_id, "task_id", limits),
        client_id=checked_id(message.client_id, "client_id", limits),
        base_version=checked_count(message.base_version, "base_version"),
        examples=checked_count(message.examples, "examples", limits.examples_max),
        local_steps=checked_count(message.local_steps, "local_steps"),
        metrics=checked_metrics(message.metrics),
        sha256=checked_payload_digest(part, "parts[0]"),
        size_bytes=check_payload_size(size_bytes, limits),
        codec=codec,
        submodel=submodel,
        base_head=checked_digest(message.base_head, "base_head") if message.base_head else "",
        seals=seals_from_proto(message.seals),
    )
    return Header(submission, task is not None, ask=_read_ask(message, spec, limits))


def _covered(message: devices.UpdateHeader, spec: ParamSpec, task: Task | None) -> Submodel | None:
    """The part that an update says to cover. Raises `InvalidUpdate` for coordinates that are not its task's.

    Those would be judged and kept as any other part is, in a multiple of what the device has sent.
    """
    if not message.HasField("submodel"):
        return None
    part = part_from_proto(message.submodel, spec)
    if not isinstance(part, CoordinateRuns):
        return part
    if task is None:
        return None
    if not part.are(task.submodel):
        raise InvalidUpdate(
            f"submodel: the runs are not the coordinates of task {task.task_id!r}: send the task's own map"
        )
    return task.submodel


def _read_ask(message: devices.UpdateHeader, spec: ParamSpec, limits: Limits) -> Ask | None:
    """The ask for the next task, if the push has one. Raises `InvalidUpdate` and `ManifestMismatch`."""
    if not message.HasField("next"):
        return None
    if message.next.client_id != message.client_id:
        raise InvalidUpdate("next.client_id must be the update's client_id: nobody asks for another")
    return read_ask(message.next, spec, limits)


def read_ask(message: devices.AskTaskRequest, spec: ParamSpec, limits: Limits = DEFAULT_LIMITS) -> Ask:
    """An ask whose form was checked. Raises `InvalidUpdate` and `ManifestMismatch`."""
    check_manifest(message.manifest_sha256, spec)
    holds = holdings_from_proto(message, spec)
    whole, parts = (None, holds) if isinstance(holds, tuple) else (holds, ())
    client_id = checked_id(message.client_id, "client_id", limits)
    task_id = checked_id(message.task_id, "task_id", limits)
    session, succeeds = (
        checked_id(text, name, limits) if text else ""
        for text, name in ((message.session, "session"), (message.succeeds, "succeeds"))
    )
    return Ask(client_id, task_id, whole, session, succeeds, parts)


def _chunk(content: devices.UpdateHeader | Chunk | None) -> Chunk:
    if not isinstance(content, Chunk):
        raise InvalidUpdate("after the header of a push come chunks only, of part 0")
    return content


@contextmanager
def _in_time() -> Iterator[None]:
    """Inside is what comes of an upload. Raises `Unavailable` where that is too slow."""
    try:
        yield
    except TimeoutError:
        raise Unavailable("the upload came too slowly and was cut: query it and go on") from None


class Intake:
    """Takes in the pushes of one run."""

    def __init__(
        self,
        spec: ParamSpec,
        run_id: str,
        writer: Writer,
        uploads: Uploads,
        calls: Calls,
        config: Config,
    ) -> None:
        self.spec, self.run_id, self.writer, self.uploads = spec, run_id, writer, uploads
        self.calls, self._payload_digest = calls, config.run.payload_digest
        self._salted = salted(config)
        # Whom updates are masked for.
        self.keepers: Sequence[str] = ()
        # Whether the strategy keeps updates: large ones are copied for it before the writer has them.
        self._keeps_updates = writer.keeps_updates
        self._limits = uploads.limits
        # What the updates that were decided would have been without compression, since the start.
        self.bytes_raw = 0
        self.repeated = 0  # updates that came again and were told their old verdict, since the start
        vector_bytes = max(1, self._raw_bytes(spec.size))
        self._decoding = asyncio.Semaphore(max(2, DECODED_BYTES_MAX // vector_bytes))

    async def push(self, contents: Contents, caller: Caller) -> PushVerdict:
        """Receive an update and have it decided. Raises the errors of the tree.

        A caller with a certificate must have signed it: `InvalidSignature`, before a byte of it is taken.
        """
        verdict = await self._push(contents, caller)
        if verdict.duplicate:
            self.repeated += 1
            self.writer.metrics.repeated()
        return verdict

    async def _push(self, contents: Contents, caller: Caller) -> PushVerdict:
        with closing(Deadline()) as deadline:
            with _in_time(), deadline.until(self._idle_until()):
                header = await self._header(contents, caller)
            who = header.update.client_id
            await self.calls.hold("PushUpdate", who)
            with self.calls.heeding("PushUpdate", who), span("receive", header.update.task_id, caller.trace):
                return await self._pushed(header, contents, caller, deadline)

    async def _pushed(
        self, header: Header, contents: Contents, caller: Caller, deadline: Deadline
    ) -> PushVerdict:
        with _in_time(), deadline.until(self._idle_until()):
            if (known := await self._known(header)) is not None:
                return replace(known, ask=header.ask)
            with self._heard_of_room(header):
                upload = await self._receive(header, contents, deadline)
        try:
            await caller.check_still()  # an upload may take long
            async with self._decoding:
                with self._heard_of_room(header):
                    verdict = await self._decide(header, upload)
        finally:
            await self.uploads.done(upload)
        self.writer.room.took(header.payload.size_bytes)
        return verdict

    @contextmanager
    def _heard_of_room(self, header: Header) -> Iterator[None]:
        """Inside an update finds no room, or it does."""
        try:
            yield
        except StoreFull as full:
            self.writer.room.lacks(full, header.payload.size_bytes)
            raise

    async def verdict(
        self, client_id: str, update_id: str, task_id: str = "", sha256: str = ""
    ) -> PushVerdict | None:
        """What was decided of an update, however long ago; `task_id` and `sha256` where they are known.

        Raises `IdTaken` where another update has the id.
        """
        known = self.writer.glance.receipts.get(update_id)
        if known is None or not known.sha256:
            known = await self.writer.look_store(lambda store: store.receipt(update_id)) or known
        if known is None:
            return None
        if why := known.conflict(client_id, task_id, sha256):
            raise IdTaken(why)
        return PushVerdict(known, duplicate=True, seq=0)

    async def _header(self, contents: Contents, caller: Caller) -> Header:
        async for first in contents:
            if not isinstance(first, devices.UpdateHeader):
                break
            task = self.writer.glance.tasks.get(first.task_id)
            task = None if task is None or task.client_id != first.client_id else task
            header = read_header(first, self.spec, self._limits, task)
            caller.check_name(header.update.client_id)
            self.calls.take("PushUpdate", header.update.client_id, caller)
            check_seals(header.submission.seals, self.keepers)
            # What its runs are of is known of an open task alone; of no other is anything taken.
            unread = first.HasField("submodel") and header.update.submodel is None
            proof = None if unread else self._proof(header, first.signature, caller)
            return header if proof is None else replace(header, proof=proof)
        raise InvalidUpdate("the first message of a push must be its header")

    def _proof(self, header: Header, signature: bytes, caller: Caller) -> ev.Proof | None:
        """What is kept of the device's signature, checked. Raises `InvalidSignature`, `NotAuthenticated`."""
        if caller.peer is None or caller.members is None:
            if self.keepers:
                raise NotAuthenticated("keepers check who has signed: this port has to ask for certificates")
            return None
        seals = header.submission.seals
        record = to_record(ev.UpdateArrived(0.0, header.update, header.payload, seals=seals))
        try:
            check_signature(caller.peer.key, signature, update_message(self.run_id, record))
        except InvalidSignature as error:
            raise InvalidSignature(
                f"{error}: it was changed, or signed for another run than {self.run_id}"
            ) from None
        return make_proof(caller.peer.certificate, signature, caller.members.authority.now())

    async def _known(self, header: Header) -> PushVerdict | None:
        """The verdict if there is one already. Raises `UnknownTask` where there can never be one.

        The task is looked up before the payload comes, so that only who holds a task fills the disk, and
        only with what the task asked for. Raises `InvalidUpdate` for another codec than that, or a digest
        that is not offered, and `IdTaken`.
        """
        update, glance = header.update, self.writer.glance
        if not header.is_open or update.update_id in glance.receipts:
            ids = update.client_id, update.update_id, update.task_id
            if (known := await self.verdict(*ids, header.payload.sha256)) is not None:
                return known
        task = self.writer.glance.tasks.get(update.task_id)  # it may have had its end meanwhile
        check_task(task if header.is_open else None, update.client_id, update.task_id, header.payload.codec)
        check_offered(header.payload.sha256, self._payload_digest)
        return None

    def _idle_until(self) -> float:
        """When something must have come of an upload."""
        return self.uploads.now() + self._limits.upload_idle_s

    async def _receive(self, header: Header, contents: Contents, deadline: Deadline) -> Upload:
        payload, clock = header.payload, self.uploads.now
        update = header.update
        key = UploadKey(update.client_id, update.task_id, update.update_id)
        upload = await self.uploads.open(key, payload.size_bytes, payload.sha256)
        reach("upload_begun")
        upload.on_cut = lambda: deadline.move(clock())
        try:
            async for content in contents:
                before = upload.received
                await upload.add(*_chunk(content))
                del content  # the next one may be long in coming
                if upload.received != before:  # nothing has come in a chunk of nothing
                    deadline.move(self._idle_until())
        except BaseException:
            await self.uploads.done(upload)
            raise
        finally:
            upload.on_cut = None
        return upload

    async def _decide(self, header: Header, upload: Upload) -> PushVerdict:
        await upload.complete()
        self.writer.metrics.push_bytes.add(upload.size_bytes)
        reach("upload_whole")
        raw_bytes = self._raw_bytes(header.payload.values or self.spec.size)
        self.writer.coming += 1
        try:
            # A few compressed bytes may be many values: what comes out tells how long it takes.
            if upload.inline and raw_bytes <= self._limits.inline_bytes_max:
                checked = self._checked(header, upload)
            else:
                checked = await self.uploads.in_thread(lambda: self._checked(header, upload))
        finally:
            self.writer.coming -= 1
        head = await self._head_of_base(header.submission)
        found = checked.update, checked.flaw
        salt = secrets.token_hex(SALT_BYTES) if self._salted else ""
        event = arrived(header.submission, found, self.writer.now(), head, header.proof, salt)
        reach("update_checked")
        answer, asked = await self._submitted(event, checked, header.ask)
        decided = answered(event, answer.effects)
        if not decided.duplicate:
            self.bytes_raw += decided.raw_bytes
        return PushVerdict(decided.receipt, decided.duplicate, answer.seq or 0, header.ask, asked)

    async def _head_of_base(self, submission: Submission) -> str | None:
        """The head of the version that it was trained from, where its device says which that was."""
        if not submission.base_head:
            return None
        return await self.writer.head_of(submission.update.base_version)

    async def _submitted(
        self, event: ev.UpdateArrived, checked: CheckedUpdate, ask: Ask | None
    ) -> tuple[Answer, Sequence[Effect]]:
        """What came of an update, and of the ask that goes right behind it."""
        if ask is None or checked.flaw:
            return await self.writer.submit(event, checked.inline), ()
        answer, asked = await self.writer.submit_both(event, checked.inline, ev.TaskAsked(event.now, ask))
        return answer, asked.effects

    def _raw_bytes(self, values: int) -> int:
        return values * self.spec.vector_dtype.itemsize

    def _checked(self, header: Header, upload: Upload) -> CheckedUpdate:
        """Decode and check; a large update without a flaw becomes durable."""
        data = upload.data()
        update, flaw = examined(header.submission, data, self.spec, self._limits)
        if flaw:
            upload.drop()
            return CheckedUpdate(update, flaw)
        if self._keeps_updates and not upload.inline:
            update = replace(update, delta=lasting_delta(update.delta))
        upload.adopt()
        return CheckedUpdate(update, inline=bytes(data) if upload.inline else None)
