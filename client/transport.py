"""How a device reaches its server: the protocol of calls, and the one over gRPC.

Every call may be repeated without harm. Only errors of `core/errors.py` come out; `Overloaded` carries
the server's retry window. The agent calls from two threads: its own, and the one of the heartbeats.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, Protocol

from anabranch.client.answers import config_of, heartbeat_answer, masking_of, not_modified, push_answer
from anabranch.client.calls import Door
from anabranch.client.channel import CONTROL_S, RECONNECT_MAX_S
from anabranch.client.doors import Doors
from anabranch.client.history import SeenHistory
from anabranch.client.link import Link
from anabranch.client.messages import (
    Enrolment,
    FetchedModel,
    GrantedTask,
    HeartbeatAnswer,
    PushAnswer,
    UploadState,
)
from anabranch.client.outbox import UpdateEntry
from anabranch.client.transfer import (
    MEASURED_BYTES,
    IncomingModel,
    LinkPace,
    chunks_of,
    pace_after,
    signed_record,
    update_header,
)
from anabranch.client.windows import window_from_proto
from anabranch.compress.model import full_bytes
from anabranch.compress.registry import stages
from anabranch.core.config.caps import heard_by_device
from anabranch.core.config.ranges import BY_CALLS
from anabranch.core.effects import Refused
from anabranch.core.errors import (
    AnabranchError,
    InvalidUpdate,
    Overloaded,
    ProtocolError,
    TooLarge,
    Unavailable,
    outcome_of,
)
from anabranch.core.ids import checked_id
from anabranch.core.limits import CHUNK_BYTES, DEFAULT_LIMITS, KIB, Limits
from anabranch.core.model.holdings import Holdings
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import Submodel
from anabranch.core.model.updates import Ask, Capability, Reason, Task
from anabranch.host.first import FirstModel
from anabranch.identity.certificates import Kind
from anabranch.identity.signatures import update_message
from anabranch.identity.wallet import Wallet
from anabranch.protos import convert
from anabranch.protos.frames import Chunk
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub
from anabranch.support.forks import check_may_speak, speaking

REFUSED_S = (1.0, 5.0)  # until a device asks again, where a refusal says no window
# By no codec is a version so many times as long as it is as numbers, and so much in heads and tables besides.
LONGEST, HEADS_BYTES = 4, 1024 * KIB
FRESH_MAX = 64  # tasks of which it is remembered that nothing was sent; a device has few at a time


class Transport(Protocol):
    """How a device reaches its server. Every call may be repeated; what it raises is of `core/errors.py`.

    `manifest_sha256` is the layout hash of the model that this device has.

    A class of one has `of(address, client_id, wallet)` as well, for the address `name://...`, and `close()`;
    `wallet` is this device's papers, if it has any.
    """

    def enrol(self, capability: Capability) -> Enrolment:
        """Make this device known, and learn the run."""
        ...

    def ask(self, ask: Ask, spec: ParamSpec) -> Task | Refused:
        """Apply for a task. Raises `ManifestMismatch` when the run is of another model."""
        ...

    def fetch(
        self,
        manifest_sha256: str,
        version: int | None = None,
        newer_than: int | None = None,
        holds: Holdings = None,
        exact: bool = False,
        submodel: Submodel | None = None,
        part_id: int = 0,
    ) -> FetchedModel:
        """A version, or the newest one, or (`newer_than`) the newest if it is above that.

        For a device that holds a version, or parts, perhaps only what leads from there. `exact`: the server's
        own vector, which an observer wants. For a task of a `submodel` perhaps only that part. `part_id` 1:
        not a version, but the frozen tensors, asked for only where they travel apart. Raises
        `UnknownVersion`. A transfer that broke off goes on where it stopped.
        """
        ...

    def push(self, entry: UpdateEntry) -> PushAnswer:
        """Send an update; returns once the server has it for good. Raises `InvalidUpdate` and the like."""
        ...

    def push_and_ask(self, entry: UpdateEntry, ask: Ask, spec: ParamSpec) -> PushAnswer:
        """The same, and apply for a task from the version that the update leads to: see `PushAnswer.next`."""
        ...

    def query_upload(self, update_id: str) -> UploadState:
        """How much of an upload is there."""
        ...

    def heartbeat(self, task_id: str, progress: float) -> HeartbeatAnswer:
        """Renew the lease of a task; `progress` is any number that grows as the work does."""
        ...

    def drop(self, task_id: str, why: str, diverged: bool = False) -> None:
        """Give a task back; `diverged`: its training has led to values that are not finite."""
        ...


class GrpcTransport:
    """A `Transport` over gRPC, to the one of some servers that serves; connected at the first call.

    `address`: `host:port`, or several with commas between them. `stall_s`: see `StallGuard`. With a `wallet`
    it speaks mutual TLS, signs its updates, renews its certificate, and takes models only of a history that
    follows from what it has seen, whichever server they are of. `connection`: see `Doors`; None: calls, and
    from the enrolment on what the run says. Raises `ConfigError` as `check_may_speak` does.
    """

    def __init__(
        self,
        address: str,
        client_id: str,
        limits: Limits = DEFAULT_LIMITS,
        reconnect_max_s: float = RECONNECT_MAX_S,
        stall_s: float = DEFAULT_LIMITS.upload_idle_s,
        wallet: Wallet | None = None,
        connection: str | None = None,
    ) -> None:
        check_may_speak()
        self.client_id = checked_id(client_id, "client_id")
        self._own_limits, self._connection = limits, connection
        self._limits = heard_by_device(limits, {})  # and what the server has told of its own
        self._link = Link(address, limits, reconnect_max_s, wallet)
        self._doors = Doors(self._link, stall_s, connection or BY_CALLS)
        self._inside = ExitStack()
        self._enrolled: Enrolment | None = None
        self._session = ""  # of the last ask
        # An operator's papers serve several observers at a time: each has a memory of its own.
        folder = wallet.folder if wallet is not None and wallet.peer.kind is Kind.DEVICE else None
        self._history = None if wallet is None else SeenHistory(wallet.authority, folder)
        self._fresh: deque[str] = deque(maxlen=FRESH_MAX)  # tasks of which nothing has been sent
        # Whether a model may come with a task: not with the first, before which there may be others to fetch.
        self._with_model = False
        self._sends = self._receives = LinkPace.USUAL
        self._partial: IncomingModel | None = None
        self._partial_for: tuple[Holdings, Submodel | None, int] = (None, None, 0)

    def __enter__(self) -> GrpcTransport:
        self._inside.enter_context(speaking())
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._inside.close()

    def close(self) -> None:
        """Cut off whatever is under way."""
        self._doors.close()
        self._link.close()

    @property
    def address(self) -> str:
        """Where calls go."""
        return self._link.address

    def on_return(self, returned: Callable[[], None]) -> None:
        """Have `returned` called, in any thread, when a server can be reached after none could."""
        self._link.servers.returned = returned

    def enrol(self, capability: Capability) -> Enrolment:
        """See `Transport`."""
        request = devices.EnrolRequest(
            client_id=self.client_id,
            protocol_version=convert.PROTOCOL_VERSION,
            capability=convert.capability_to_proto(capability),
            buffers=True,
            frozen=True,
            tensors=True,
        )
        enrol = self._stub.Enrol
        with self._link.calling(first=True):
            answer = enrol(request, timeout=CONTROL_S)
        spec = convert.manifest_from_proto(answer.manifest)
        config = config_of(answer.config_json)
        self._limits = heard_by_device(self._own_limits, config)
        # A server of before the stream has no such key.
        self._doors.kind = self._connection or config.get("client", {}).get("connection", BY_CALLS)
        self._enrolled = Enrolment(
            run=answer.run,
            run_id=answer.run_id,
            spec=spec,
            config=config,
            version=answer.version,
            frozen_sha256=answer.manifest.frozen_sha256.hex(),
            first=_first(answer.first) if answer.HasField("first") else None,
            masking=masking_of(answer.masking) if answer.HasField("masking") else None,
        )
        return self._enrolled

    def ask(self, ask: Ask, spec: ParamSpec) -> Task | Refused:
        """See `Transport`."""
        return self._asked(self._answer(self._ask_request(ask, spec), opens=True), ask, spec)

    def _ask_request(self, ask: Ask, spec: ParamSpec) -> devices.AskTaskRequest:
        self._session = ask.session
        return devices.AskTaskRequest(
            client_id=self.client_id,
            task_id=ask.task_id,
            manifest_sha256=bytes.fromhex(spec.layout_hash),
            holds_version=ask.holds_version,
            session=ask.session,
            succeeds=ask.succeeds,
            with_model=self._with_model,
            chunk_bytes_max=self._wished_chunk_bytes,
            holds_parts=convert.held_parts_to_proto(ask.holds_parts),
        )

    def _asked(self, answer: devices.AskTaskResponse, ask: Ask, spec: ParamSpec) -> Task | Refused:
        if answer.WhichOneof("answer") == "task":
            if answer.task.task_id != ask.task_id:
                raise InvalidUpdate(f"asked for task {ask.task_id!r}, was given {answer.task.task_id!r}")
            if ask.task_id not in self._fresh:
                self._fresh.append(ask.task_id)
            task = convert.task_from_proto(answer.task, self.client_id, spec)
            return GrantedTask(**vars(task), base_head=answer.task.base_head.hex())
        refusal = answer.refusal
        known = refusal.reason in {r.value for r in Reason}
        return Refused(
            ask,
            Reason(refusal.reason) if known else Reason.NONE,
            refusal.detail,
            window_from_proto(refusal.retry_after, REFUSED_S),
            refusal.final,
        )

    def fetch(
        self,
        manifest_sha256: str,
        version: int | None = None,
        newer_than: int | None = None,
        holds: Holdings = None,
        exact: bool = False,
        submodel: Submodel | None = None,
        part_id: int = 0,
    ) -> FetchedModel:
        """See `Transport`. Goes on until two attempts in a row bring nothing."""
        wanted = holds, submodel, part_id
        if self._partial is not None and (self._partial_for != wanted or not self._is_of(version, part_id)):
            self._partial = None
        self._partial_for = wanted
        request = devices.FetchModelRequest(
            client_id=self.client_id,
            manifest_sha256=bytes.fromhex(manifest_sha256),
            holds_version=holds if isinstance(holds, int) else None,
            holds_parts=convert.held_parts_to_proto(holds),
            codecs=() if exact else stages(),
            exact=exact,
            submodel=convert.submodel_to_proto(submodel),
            part_id=part_id,
        )
        had, idle_attempts = -1, 0
        while True:
            before, pace = self._received, self._receives
            try:
                return self._doors.ask(lambda door: self._receive(door, request, version, newer_than))
            except AnabranchError as error:
                if not outcome_of(error).retryable:
                    self._partial = None
                has = self._received
                if _was_cut(error, pace) and has <= before:
                    self._receives = LinkPace.SLOW
                idle_attempts = 0 if has > had else idle_attempts + 1
                had = has
                if self._partial is None or idle_attempts > 1 or not isinstance(error, Unavailable):
                    raise

    @property
    def _received(self) -> int:
        return 0 if self._partial is None else self._partial.received

    def _is_of(self, version: int | None, part_id: int) -> bool:
        """Whether what came in part is of this version; what is frozen is of all."""
        return part_id > 0 or (self._partial is not None and self._partial.version == version)

    def push(self, entry: UpdateEntry) -> PushAnswer:
        """See `Transport`. Goes on as long as every attempt brings something."""
        return push_answer(self._pushed(entry, None))

    def push_and_ask(self, entry: UpdateEntry, ask: Ask, spec: ParamSpec) -> PushAnswer:
        """See `Transport`."""
        message = self._pushed(entry, self._ask_request(ask, spec))
        granted = self._asked(message.next, ask, spec) if message.HasField("next") else None
        return replace(push_answer(message), next=granted)

    def _pushed(
        self, entry: UpdateEntry, next_ask: devices.AskTaskRequest | None
    ) -> devices.PushUpdateResponse:
        has = self._begun(entry)
        while True:
            pace = self._sends
            try:
                return self._send(entry, has, next_ask)
            except (Unavailable, Overloaded, TooLarge) as error:
                smaller = not isinstance(error, Unavailable) and self._takes_smaller(entry, pace)
                if not (smaller or isinstance(error, Unavailable)):
                    raise
                usual = self._sends
                if _was_cut(error, pace):  # as long as nobody says that something came
                    self._sends = LinkPace.SLOW
                now_has = _has(self._state_after_a_break(entry.update_id), entry)
                if now_has > has:
                    self._sends = usual
                if now_has <= has and not smaller:  # smaller ones are tried once, also from the beginning
                    raise
                has = now_has

    def _takes_smaller(self, entry: UpdateEntry, pace: LinkPace) -> bool:
        """Whether this may be of a chunk that is too large for this server: from now on they are small.

        One of before, or with other caps, may have taken the place of the one that this device enrolled with.
        `pace`: of a quick one the chunks were large from the first on.
        """
        small_bytes = CHUNK_BYTES if pace is LinkPace.QUICK else MEASURED_BYTES
        if len(entry.payload) <= small_bytes or self._limits.chunk_bytes_max <= CHUNK_BYTES:
            return False
        self._limits = replace(self._limits, chunk_bytes_max=CHUNK_BYTES)
        return True

    def _begun(self, entry: UpdateEntry) -> int:
        """How much of an update is there: nothing before the first attempt for a task that was granted here.

        Were it otherwise, it would be sent once more from its beginning.
        """
        if entry.task_id in self._fresh:
            self._fresh.remove(entry.task_id)
            return 0
        limits = self._limits
        chunk_bytes = limits.slow_chunk_bytes if self._sends is LinkPace.SLOW else limits.sent_chunk_bytes
        is_small = len(entry.payload) <= chunk_bytes
        return 0 if is_small else _has(self.query_upload(entry.update_id), entry)

    def query_upload(self, update_id: str) -> UploadState:
        """See `Transport`."""
        request = devices.QueryUploadRequest(client_id=self.client_id, update_id=update_id)
        answer = self._answer(request)
        decided = push_answer(answer.verdict) if answer.HasField("verdict") else None
        return UploadState(answer.received_bytes, decided)

    def heartbeat(self, task_id: str, progress: float) -> HeartbeatAnswer:
        """See `Transport`."""
        request = devices.HeartbeatRequest(
            client_id=self.client_id, task_id=task_id, progress=progress, session=self._session
        )
        return heartbeat_answer(self._answer(request))

    def drop(self, task_id: str, why: str, diverged: bool = False) -> None:
        """See `Transport`."""
        request = devices.DropTaskRequest(
            client_id=self.client_id, task_id=task_id, why=why, diverged=diverged
        )
        self._answer(request)

    def _state_after_a_break(self, update_id: str) -> UploadState:
        try:
            return self.query_upload(update_id)
        except Unavailable:  # gRPC had not noticed yet that this connection is dead, too
            return self.query_upload(update_id)

    # --- gRPC --------------------------------------------------------------------------------

    @property
    def _stub(self) -> DevicesStub:
        return self._link.stub()

    def _signature(self, entry: UpdateEntry) -> bytes:
        """The device's signature of an update; empty without a wallet. Signed anew at every attempt."""
        wallet, enrolled = self._link.wallet, self._enrolled
        if wallet is None:
            return b""
        if enrolled is None:
            raise ProtocolError("enrol first: a signature names the run")
        record = signed_record(entry, self.client_id, enrolled.spec)
        return wallet.sign(update_message(enrolled.run_id, record))

    def _answer(self, request: Any, opens: bool = False) -> Any:
        return self._doors.ask(lambda door: door.answer(request, CONTROL_S), opens)

    def _receive(
        self, door: Door, wanted: devices.FetchModelRequest, version: int | None, newer_than: int | None
    ) -> FetchedModel:
        """One attempt; what came of it stays in `_partial`."""
        partial = self._partial
        request = devices.FetchModelRequest(
            version=partial.version if partial else version,
            offset=partial.received if partial else 0,
            newer_than=None if partial else newer_than,
        )
        request.MergeFrom(wanted)
        request.chunk_bytes_max = self._wished_chunk_bytes
        pace, began_at, came_bytes = self._receives, time.monotonic(), 0
        self._receives = min(pace, LinkPace.USUAL)  # after a failure chunks are small
        with closing(door.model(request)) as chunks:
            for header, chunk in chunks:
                if header is not None:
                    if header.not_modified:
                        self._receives = pace
                        return not_modified(header)
                    self._begin(header)
                self._take(chunk)
                came_bytes += len(chunk.data)
        took_s = time.monotonic() - began_at
        # Of a small model larger chunks save the server nothing, and cost the device.
        self._receives = pace_after(came_bytes, took_s, pace, MEASURED_BYTES)
        return self._finished()

    @property
    def _wished_chunk_bytes(self) -> int:
        """Of a model's chunks; 0: what the server sends anyhow."""
        match self._receives:
            case LinkPace.QUICK:
                return self._limits.chunk_bytes_max
            case LinkPace.SLOW:
                return self._limits.slow_chunk_bytes
            case _:
                return 0

    def _begin(self, header: devices.ModelHeader) -> None:
        sha256 = convert.checked_digest(header.part.sha256, "part.sha256")
        if self._partial is not None and self._partial.sha256 != sha256:
            self._partial = None
            raise Unavailable(f"version {header.version} changed while it was fetched: fetch it anew")
        if self._partial is None:
            self._partial = IncomingModel(header, sha256, self._limits, self._most(header))
        self._partial.header = header

    def _most(self, header: devices.ModelHeader) -> int | None:
        """How many bytes a version of the run may need by any codec; None where its model is not known."""
        if self._enrolled is None or header.part.part_id:
            return None
        return LONGEST * full_bytes(self._enrolled.spec) + HEADS_BYTES

    def _take(self, chunk: Chunk) -> None:
        if self._partial is None:
            raise InvalidUpdate("the model stream began without a header")
        self._partial.take(*chunk)

    def _finished(self) -> FetchedModel:
        done, self._partial = self._partial, None
        if done is None or done.received < len(done.data):
            self._partial = done
            raise Unavailable("the model stream ended early")
        model = done.finished()
        if not done.header.part.part_id:
            self._with_model = True
            if self._history is not None:
                self._history.check(done.header, self._links)
        return model

    def _links(self, after: int, to: int) -> bytes:
        request = devices.GetLinksRequest(after_version=after, to_version=to)
        stub = self._stub
        with self._link.calling():
            return stub.GetLinks(request, timeout=CONTROL_S).links

    def _send(
        self, entry: UpdateEntry, offset: int, next_ask: devices.AskTaskRequest | None
    ) -> devices.PushUpdateResponse:
        header = update_header(entry, self.client_id, self._signature(entry), next_ask)
        most = self._limits.chunk_bytes_max
        pace, began_at = self._sends, time.monotonic()
        self._sends = min(pace, LinkPace.USUAL)  # after a failure they are small
        answer = self._doors.ask(
            lambda door: door.push(header, chunks_of(entry.payload, offset, most, pace=pace))
        )
        sent_bytes = max(0, len(entry.payload) - offset)
        self._sends = pace_after(sent_bytes, time.monotonic() - began_at, pace)
        return answer


def _was_cut(error: AnabranchError, pace: LinkPace) -> bool:
    """Whether a transfer failed on its way, as on a link that is too slow for chunks of the usual size."""
    return isinstance(error, Unavailable) and error.reached and pace is not LinkPace.QUICK


def _has(state: UploadState, entry: UpdateEntry) -> int:
    """From where to send. Of a decided update the header alone gets the answer again, and the ask's."""
    return len(entry.payload) + 1 if state.answer is not None else state.received_bytes


def _first(said: devices.FirstModel) -> FirstModel:
    return FirstModel(said.seed, said.codec, said.sha256.hex(), said.head.hex())
