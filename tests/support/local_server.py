"""A server without a network: the real engine behind the calls of a `Transport`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from anabranch.client.messages import (
    Enrolment,
    FetchedModel,
    HeartbeatAnswer,
    Notice,
    NoticeKind,
    PushAnswer,
    UploadState,
)
from anabranch.client.outbox import UpdateEntry
from anabranch.compress.downloads import Downloads
from anabranch.compress.model import encode_model
from anabranch.compress.registry import STAGES, make_codec
from anabranch.core import events as ev
from anabranch.core.config.tables import Config
from anabranch.core.effects import Decided, Effect, Granted, Refused
from anabranch.core.engine.waiting import WaitingLine
from anabranch.core.errors import (
    IdTaken,
    InvalidUpdate,
    ManifestMismatch,
    Unavailable,
    UnknownVersion,
)
from anabranch.core.journal import Record, to_record
from anabranch.core.model.params import ParamSpec, Tensors
from anabranch.core.model.submodels import Submodel, UnitMap
from anabranch.core.model.units import UnitGroup
from anabranch.core.model.updates import Ask, Capability, Receipt, Task, Update
from anabranch.host.build import Blueprint
from anabranch.host.run import Run, advice
from anabranch.host.submission import check_open, examined
from anabranch.protos.convert import submodel_from_proto


class LocalServer:
    """Keeps every version it published. Leases end by `clock`, looked at before each call."""

    def __init__(
        self,
        tensors: Tensors,
        config: Config,
        clock: Callable[[], float],
        run_id: str = "run-1",
        groups: Iterable[UnitGroup] = (),
    ) -> None:
        self.spec = ParamSpec.of(tensors, groups)
        self.config, self.clock, self.run_id = config, clock, run_id
        self.frozen = self.spec.frozen(tensors)
        self.engine = Blueprint.of(config, self.spec).engine(tensors)
        self.host = Run(self.engine, WaitingLine())
        self.downloads = Downloads(self.spec, self.frozen)
        self.journal: list[Record] = []
        self.payloads: dict[str, bytes] = {}  # by SHA-256
        self.lock = threading.Lock()
        self.turn = threading.RLock()  # for two events with nothing in between
        self.models = {0: self._encoded()}

    def do(self, event: ev.Event) -> list[Effect]:
        """One event through the engine."""
        with self.turn, self.lock:
            self.tick()
            effects = self._handle(event)
            self.models.setdefault(self.engine.version, self._encoded())
        return effects

    def tick(self) -> None:
        """Leases may have ended since the last event."""
        now, deadline = self.clock(), self.engine.next_deadline()
        if deadline is not None and deadline <= now:
            self._handle(ev.Ticked(now))

    def _handle(self, event: ev.Event) -> list[Effect]:
        return self.host.take(event, lambda logged: self.journal.append(to_record(logged))).effects

    def receipt(self, update_id: str) -> Receipt | None:
        """The receipt of an update."""
        return self.engine.ledger.receipts.get(update_id)

    def _encoded(self) -> bytes:
        return encode_model(make_codec("raw"), self.spec, self.engine.vector, self.frozen)


class LocalTransport:
    """One device's calls."""

    def __init__(self, server: LocalServer, client_id: str) -> None:
        self.server, self.client_id = server, client_id

    def enrol(self, capability: Capability) -> Enrolment:
        s = self.server
        s.do(ev.Enrolled(s.clock(), self.client_id, capability))
        tables = {t: v for t, v in s.config.to_json().items() if t in ("run", "fleet", "client", "flower")}
        tables["server"] = {"tasks_per_client": s.config.server.tasks_per_client}
        return Enrolment(s.config.run.name, s.run_id, s.spec, tables, s.engine.version)

    def ask(self, ask: Ask, spec: ParamSpec) -> Task | Refused:
        self._check_manifest(spec.layout_hash)
        effects = self.server.do(ev.TaskAsked(self.server.clock(), ask))
        found = next(e for e in effects if isinstance(e, Granted | Refused))
        return found.task if isinstance(found, Granted) else found

    def fetch(
        self,
        manifest_sha256: str,
        version: int | None = None,
        newer_than: int | None = None,
        holds: int | None = None,
        exact: bool = False,
        submodel: Submodel | None = None,
    ) -> FetchedModel:
        self._check_manifest(manifest_sha256)
        engine = self.server.engine
        wanted = engine.version if version is None else version
        final = bool(engine.finished) and wanted == engine.version
        if version is None and newer_than is not None and wanted <= newer_than:
            return FetchedModel(wanted, "", b"", final=final, modified=False)
        part = submodel if isinstance(submodel, UnitMap) else None
        if (engine.broadcast is not None or part is not None) and not exact:
            with self.server.lock:
                make = self.server.downloads.offer(engine, wanted, holds, STAGES, part)
            if make is None:
                raise UnknownVersion(f"version {wanted} is not held")
            made = make()
            return FetchedModel(
                wanted,
                made.codec,
                made.data,
                final=final,
                from_version=made.from_version,
                vector_sha256=made.vector_sha256,
                part_only=made.part_only,
            )
        if wanted not in self.server.models:
            raise UnknownVersion(f"version {wanted} is not held")
        return FetchedModel(wanted, "raw", self.server.models[wanted], final=final)

    def push(self, entry: UpdateEntry) -> PushAnswer:
        self._check_manifest(entry.manifest_sha256)
        s = self.server
        if (known := s.receipt(entry.update_id)) is not None:
            if why := known.conflict(self.client_id, entry.task_id, entry.sha256):
                raise IdTaken(why)
            return PushAnswer(known.decision, known.version, duplicate=True)
        check_open(s.engine, self.client_id, entry.task_id, entry.codec)
        update = self._update(entry)
        values = 0 if update.submodel is None else update.submodel.size
        payload = ev.Payload(entry.sha256, len(entry.payload), entry.codec, values)
        update, flaw = examined(update, payload, entry.payload, s.spec)
        s.payloads[entry.sha256] = bytes(entry.payload)
        effects = s.do(ev.UpdateArrived(s.clock(), update, payload, flaw))
        decided = next(e for e in effects if isinstance(e, Decided))
        if flaw:
            raise InvalidUpdate(flaw)
        return PushAnswer(decided.receipt.decision, decided.receipt.version, decided.duplicate)

    def push_and_ask(self, entry: UpdateEntry, ask: Ask, spec: ParamSpec) -> PushAnswer:
        with self.server.turn:
            return replace(self.push(entry), next=self.ask(ask, spec))

    def query_upload(self, update_id: str) -> UploadState:
        known = self.server.receipt(update_id)
        return UploadState(0, None if known is None else PushAnswer(known.decision, known.version, True))

    def heartbeat(self, task_id: str, progress: float) -> HeartbeatAnswer:
        s = self.server
        s.do(ev.LeaseRenewed(s.clock(), self.client_id, task_id, progress))
        said = advice(s.engine, self.client_id, task_id)
        about = "" if s.engine.finished else task_id
        notices = (Notice(NoticeKind(said.notice), about, said.detail),) if said.notice else ()
        return HeartbeatAnswer(said.expires_at, said.version, notices)

    def drop(self, task_id: str, why: str, diverged: bool = False) -> None:
        self.server.do(ev.TaskDropped(self.server.clock(), self.client_id, task_id, why, diverged))

    def _check_manifest(self, sha256: str) -> None:
        if sha256 != self.server.spec.layout_hash:
            raise ManifestMismatch("this run is of another model")

    def _update(self, entry: UpdateEntry) -> Update:
        spec = self.server.spec
        map_ = None if entry.submodel is None else submodel_from_proto(entry.submodel, spec)
        return Update(
            entry.update_id,
            entry.task_id,
            self.client_id,
            entry.base_version,
            entry.examples,
            np.empty(0, spec.vector_dtype),
            map_,
            entry.local_steps,
            entry.metrics,
        )


class Unplugged(LocalTransport):
    """Reaches the server as long as it is plugged in."""

    is_plugged_in = True

    def _check_manifest(self, sha256: str) -> None:
        if not self.is_plugged_in:
            raise Unavailable("no route to the server")
        super()._check_manifest(sha256)
