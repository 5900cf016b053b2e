"""A server in the same process: the real engine and what stands round it, and no network.

For tests of Apps, strategies and transports, and for notebooks: real devices (`client.agent.Agent`) work for
it through a `LocalTransport`. What they are told, and what is logged, is what a live server says and logs
(tests/conformance/test_drivers.py); what it does not have is a disk, so it ends with its process.

    server = LocalServer.of(app, config)
    agent = Agent(app, LocalTransport(server, "a"), "a", Shard("train", 0, 1), Path("a"), tasks_max=10)
    agent.run()
    server.model()
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

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
from anabranch.compress.downloads import Download, Downloads
from anabranch.compress.model import PART, encode_model, frozen_apart, frozen_sha256, unknown_part
from anabranch.compress.registry import make_codec, stages
from anabranch.core import events as ev
from anabranch.core.config.ranges import OWN, SERVED
from anabranch.core.config.tables import Config
from anabranch.core.effects import Effect, Granted, Refused
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.waiting import WaitingLine
from anabranch.core.errors import ManifestMismatch, UnknownVersion
from anabranch.core.journal import Record, to_record
from anabranch.core.model.chains import RAW
from anabranch.core.model.growing import needed_for
from anabranch.core.model.holdings import Holdings
from anabranch.core.model.params import ParamSpec, Tensors
from anabranch.core.model.stages import ModelStage
from anabranch.core.model.submodels import Submodel, TensorSet, UnitMap
from anabranch.core.model.units import UnitGroup
from anabranch.core.model.updates import Ask, Capability, Receipt, Task
from anabranch.core.rng import seed_of
from anabranch.host.build import Blueprint, device_tables
from anabranch.host.first import first_model
from anabranch.host.run import AdviceKind, Run, advice
from anabranch.host.submission import (
    Submission,
    announced,
    answered,
    arrived,
    check_coming,
    check_offered,
    check_size,
    checked_metrics,
    examined,
)
from anabranch.protos.convert import submodel_from_proto
from anabranch.support.shelf import ScratchShelf
from anabranch.workloads.app import App
from anabranch.workloads.trainer import trainer_for


class LocalServer:
    """A run of the weights `tensors`, by name, whose devices are in this process: see `LocalTransport`.

    `clock` gives seconds; leases end by it, looked at before each call. `groups`, `buffers`, `trained` and
    `stages` are the model's, as `ParamSpec.of` takes them; `seed`: the App builds `tensors` from it. Any
    thread may call: one call at a time is worked on. Held are the newest version, those that open tasks start
    from, the `journal`, and with `[run] keep_payloads` all `payloads`, by SHA-256. Raises `ConfigError` as a
    server does at its start.
    """

    def __init__(
        self,
        tensors: Tensors,
        config: Config,
        clock: Callable[[], float] = time.time,
        run_id: str = "run-1",
        groups: Iterable[UnitGroup] = (),
        buffers: Iterable[str] = (),
        trained: Collection[str] | None = None,
        seed: int | None = None,
        stages: Iterable[ModelStage] = (),
    ) -> None:
        self.spec = ParamSpec.of(tensors, groups, buffers, trained, stages)
        self.config, self.clock, self.run_id = config, clock, run_id
        self.journal: list[Record] = []
        self.payloads: dict[str, bytes] = {}
        self.turn = threading.RLock()  # of the calls
        self._frozen = self.spec.frozen(tensors)
        blueprint = Blueprint.of(config, self.spec, shelf=ScratchShelf())
        engine = blueprint.engine(tensors)
        # What devices may build version 0 from; None where they fetch it.
        self.first = first_model(blueprint, tensors, seed)
        self._run = Run(engine, WaitingLine(config.limits), config.limits)
        self._downloads = Downloads(self.spec, self._frozen, config.downlink.parts == OWN)
        self._encoded: dict[int, bytes] = {}  # by version
        self._encode()

    @classmethod
    def of(cls, app: App, config: Config) -> LocalServer:
        """A run of an App's model: its first weights are those of `[run] seed`.

        Raises `AppError` and `ConfigError` as `trainer_for` does.
        """
        trainer, seed = trainer_for(app, "cpu"), seed_of(config.run.seed, "initial")
        spec = trainer.spec
        tensors, parts = trainer.initial(seed), (spec.groups, spec.buffers, spec.slices)
        return cls(tensors, config, time.time, "run-1", *parts, seed, spec.stages)

    @property
    def engine(self) -> Engine:
        """The run as it is; to be read only."""
        return self._run.engine

    def model(self) -> Tensors:
        """The newest version, a copy: arrays by name."""
        with self.turn:
            return self.spec.unflatten(self.engine.vector.copy(), self._frozen)

    def take(self, event: ev.Event) -> list[Effect]:
        """A device's message or an operator's order, such as `Paused(server.clock())`: what comes of it.

        Raises the error that it comes to, such as `Overloaded`.
        """
        with self.turn:
            self.tick()
            effects = self._take(event)
            self._encode()
        return effects

    def tick(self) -> None:
        """What is due by the clock happens now, such as the end of a lease."""
        with self.turn:
            if (ticked := self._run.tick(self.clock())) is not None:
                self._take(ticked)

    def receipt(self, update_id: str) -> Receipt | None:
        """What was decided of an update; None: nothing yet."""
        return self.engine.ledger.receipts.get(update_id)

    def encoded(self, version: int) -> bytes:
        """A version as it is, encoded by `raw`. Raises `UnknownVersion`."""
        if version not in self._encoded:
            raise UnknownVersion(f"version {version} is not held")
        return self._encoded[version]

    def download(self, version: int, holds: Holdings, part: UnitMap | TensorSet | None) -> Download:
        """The cheapest payload that leads to a version, or to a part of it. Raises `UnknownVersion`."""
        make = self._downloads.offer(self.engine, version, holds, stages(), part)
        if make is None:
            raise UnknownVersion(f"version {version} is not held")
        return make()

    def frozen_part(self, part_id: int) -> bytes:
        """What travels apart from the versions. Raises `UnknownVersion` where there is no such part."""
        if part_id != PART or not self.spec.apart or self.config.run.frozen != SERVED:
            raise unknown_part(part_id, self.spec, self.config.run.frozen)
        return frozen_apart(self.spec, self._frozen)

    @property
    def frozen_sha256(self) -> str:
        """See `Enrolment`."""
        return frozen_sha256(self.spec, self._frozen)

    def _take(self, event: ev.Event) -> list[Effect]:
        return self._run.take(event, lambda logged: self.journal.append(to_record(logged))).effects

    def _encode(self) -> None:
        engine, bases = self.engine, self.engine.ledger.bases
        kept = {v: data for v, data in self._encoded.items() if v == engine.version or bases.get(v)}
        if engine.version not in kept:
            kept[engine.version] = encode_model(make_codec(RAW), self.spec, engine.vector, self._frozen)
        self._encoded = kept


class LocalTransport:
    """A `Transport` to a server in this process, for one device: `client_id`."""

    def __init__(self, server: LocalServer, client_id: str) -> None:
        self.server, self.client_id = server, client_id

    def enrol(self, capability: Capability) -> Enrolment:
        """See `Transport`, here and below."""
        s = self.server
        s.take(ev.Enrolled(s.clock(), self.client_id, capability))
        return Enrolment(
            run=s.config.run.name,
            run_id=s.run_id,
            spec=s.spec,
            config=device_tables(s.config),
            version=s.engine.version,
            frozen_sha256=s.frozen_sha256,
            first=s.first,
        )

    def ask(self, ask: Ask, spec: ParamSpec) -> Task | Refused:
        """Raises `ManifestMismatch`."""
        self._check_manifest(spec.layout_hash)
        effects = self.server.take(ev.TaskAsked(self.server.clock(), ask))
        found = next(e for e in effects if isinstance(e, Granted | Refused))
        return found.task if isinstance(found, Granted) else found

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
        """Raises `ManifestMismatch`, and `UnknownVersion` where no open task starts from the version."""
        self._check_manifest(manifest_sha256)
        if part_id:
            return FetchedModel(self.server.engine.version, RAW, self.server.frozen_part(part_id))
        with self.server.turn:
            return self._fetch(version, newer_than, holds, exact, submodel)

    def push(self, entry: UpdateEntry) -> PushAnswer:
        """Raises `ManifestMismatch`, `IdTaken`, `UnknownTask`, `InvalidUpdate`, `TooLarge`."""
        self._check_manifest(entry.manifest_sha256)
        with self.server.turn:
            return self._push(entry)

    def push_and_ask(self, entry: UpdateEntry, ask: Ask, spec: ParamSpec) -> PushAnswer:
        """Nothing comes in between."""
        with self.server.turn:
            return replace(self.push(entry), next=self.ask(ask, spec))

    def query_upload(self, update_id: str) -> UploadState:
        """An upload is here whole or not at all."""
        known = self.server.receipt(update_id)
        return UploadState(0, None if known is None else PushAnswer(known.decision, known.version, True))

    def heartbeat(self, task_id: str, progress: float) -> HeartbeatAnswer:
        """As the server's own clock has it."""
        s = self.server
        with s.turn:
            s.take(ev.LeaseRenewed(s.clock(), self.client_id, task_id, progress))
            said = advice(s.engine, self.client_id, task_id)
        about = "" if said.notice is AdviceKind.FINISHED else task_id
        notices = (Notice(NoticeKind(said.notice), about, said.detail),) if said.notice else ()
        return HeartbeatAnswer(said.expires_at, said.version, notices)

    def drop(self, task_id: str, why: str, diverged: bool = False) -> None:
        """Another device may have it."""
        self.server.take(ev.TaskDropped(self.server.clock(), self.client_id, task_id, why, diverged))

    def _fetch(
        self,
        version: int | None,
        newer_than: int | None,
        holds: Holdings,
        exact: bool,
        submodel: Submodel | None,
    ) -> FetchedModel:
        engine = self.server.engine
        newest = engine.version if exact else engine.offered
        wanted = newest if version is None else version
        final = bool(engine.finished) and wanted == newest
        if version is None and newer_than is not None and wanted <= newer_than:
            return FetchedModel(wanted, "", b"", final=final, modified=False)
        part = needed_for(submodel)
        if exact or (engine.broadcast is None and part is None):
            return FetchedModel(wanted, RAW, self.server.encoded(wanted), final=final)
        made = self.server.download(wanted, holds, part)
        return FetchedModel(
            wanted,
            made.codec,
            made.data,
            final=final,
            from_version=made.from_version,
            vector_sha256=made.vector_sha256,
            part_only=made.part_only,
        )

    def _push(self, entry: UpdateEntry) -> PushAnswer:
        s, codec = self.server, entry.codec
        submission = self._announced(entry)
        check_size(len(entry.payload), codec, s.spec, submission.update.submodel)
        check_coming(s.engine, self.client_id, entry.task_id, entry.update_id, codec)
        if s.engine.ledger.receipts.get(entry.update_id) is None:
            check_offered(entry.digest, s.config.run.payload_digest)
        if s.config.run.keep_payloads:
            s.payloads[entry.digest] = bytes(entry.payload)
        found = examined(submission, entry.payload, s.spec, s.config.limits)
        event = arrived(submission, found, s.clock())
        decided = answered(event, s.take(event))
        return PushAnswer(decided.receipt.decision, decided.receipt.version, decided.duplicate)

    def _check_manifest(self, sha256: str) -> None:
        if sha256 != self.server.spec.layout_hash:
            raise ManifestMismatch("this run is of another model")

    def _announced(self, entry: UpdateEntry) -> Submission:
        spec = self.server.spec
        return announced(
            spec,
            update_id=entry.update_id,
            task_id=entry.task_id,
            client_id=self.client_id,
            base_version=entry.base_version,
            examples=entry.examples,
            local_steps=entry.local_steps,
            metrics=checked_metrics(entry.metrics),
            sha256=entry.digest,
            size_bytes=len(entry.payload),
            codec=entry.codec,
            submodel=None if entry.submodel is None else submodel_from_proto(entry.submodel, spec),
        )
