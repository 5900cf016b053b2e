"""The service for operators: looks, pauses, exports, watches. On the admin port only."""

# ruff: noqa: N802, ARG002 - the names and the parameters of the calls are gRPC's

from __future__ import annotations

import asyncio
import heapq
import json
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

from safetensors.numpy import save

from anabranch.compress.model import decode_model
from anabranch.compress.registry import make_codec
from anabranch.core import events as ev
from anabranch.core.config.goal import Goal
from anabranch.core.effects import CohortLost, Effect, Reopened, RolledBackTo, SettingsSet
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.ledger import ClientRecord
from anabranch.core.engine.settable import otherwise, with_values
from anabranch.core.errors import ConfigError, Unavailable, UnknownVersion
from anabranch.core.ids import typed_id
from anabranch.core.model.arrays import plain_tensors
from anabranch.core.model.growing import stage_set
from anabranch.core.model.metrics import ACCURACY, MEASURED_MAX
from anabranch.host.submission import checked_metrics
from anabranch.protos.convert import manifest_to_proto
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.protos.v1.operators_pb2_grpc import OperatorsServicer
from anabranch.server.books import Answer
from anabranch.server.feed import Happening
from anabranch.server.figures import RunFigures
from anabranch.server.gate import Caller, Gate
from anabranch.server.glance import Glance
from anabranch.server.history import row_of
from anabranch.server.models import ModelRequest
from anabranch.server.rpc_errors import Guarded, answers, streams
from anabranch.server.run import LiveRun
from anabranch.server.setting import change_to_proto, doubts_of_change, read_settings
from anabranch.server.store.base import Store, VersionRow

log = logging.getLogger(__name__)

T = TypeVar("T")

VERSIONS_MAX = 1000
CLIENTS_MAX = 1000
PAGE_MAX = 5000  # clients in a page by name
WHY_CHARS_MAX = 200
TAGS_MAX = 32  # of one client


class Operators(Guarded, OperatorsServicer):
    """See protos/v1/operators.proto for what each call means."""

    def __init__(self, run: LiveRun, gate: Gate) -> None:
        self.run, self.gate = run, gate

    @answers
    async def GetStatus(
        self, request: operators.GetStatusRequest, caller: Caller
    ) -> operators.GetStatusResponse:
        """How the run stands."""
        writer = self.run.writer
        lost, barred, twice, sums = await self._look(
            lambda engine: (
                engine.updates_lost,
                dict(engine.guard.quarantined),
                writer.run_twice,
                self._masked_sums(engine),
            )
        )
        return self._status(writer.glance, lost, barred, twice, sums)

    @answers
    async def ListVersions(
        self, request: operators.ListVersionsRequest, caller: Caller
    ) -> operators.ListVersionsResponse:
        """Published versions in order, or of them those that are held."""
        limit = min(request.limit or VERSIONS_MAX, VERSIONS_MAX)
        after = min(request.after, self.run.writer.glance.version)  # it may be any number

        held = await self._look(lambda engine: {engine.version, *self.run.models.exact()})

        def rows(store: Store) -> list[VersionRow]:
            if not request.held:
                return [row for row in store.versions(after, limit) if row.version <= max(held)]
            wanted = sorted(version for version in held if version > after)
            # One that is held longer than the log goes back has no row any more.
            found = (row for v in wanted if (row := row_of(store, v)) is not None)
            return list(islice(found, limit))

        found = await self._look_store(rows)
        return operators.ListVersionsResponse(versions=[_version(row, row.version in held) for row in found])

    @answers
    async def Pause(self, request: operators.PauseRequest, caller: Caller) -> operators.PauseResponse:
        """Stop handing out tasks."""
        await self._submit(ev.Paused(self.run.writer.now()))
        log.info("paused by %s", caller)
        return operators.PauseResponse()

    @answers
    async def Resume(self, request: operators.ResumeRequest, caller: Caller) -> operators.ResumeResponse:
        """Hand out tasks again."""
        await self._submit(ev.Resumed(self.run.writer.now()))
        log.info("resumed by %s", caller)
        return operators.ResumeResponse()

    @answers
    async def ListClients(
        self,
        request: operators.ListClientsRequest,
        caller: Caller,
    ) -> operators.ListClientsResponse:
        """The clients, the most suspicious first; or a page of them, in the order of their names."""
        after = request.after if request.HasField("after") else None
        most = CLIENTS_MAX if after is None else PAGE_MAX
        limit = min(request.limit or most, most)
        tags = await self._look_store(lambda store: store.tags())
        among = {c for c, its in tags.items() if request.tag in its} if request.tag else None
        found = await self._look(lambda engine: _clients(engine, limit, among, after))
        presence, now, version = self.run.presence, self.run.writer.now(), self.run.writer.glance.version
        for client in found:
            client.tags.extend(tags.get(client.client_id, ()))
            client.last_seen_s = presence.seen_at(client.client_id)
            client.online = presence.is_online(client.client_id, now)
            if (behind := presence.behind(client.client_id, version)) is not None:
                client.versions_behind = behind
        return operators.ListClientsResponse(clients=found)

    @answers
    async def Quarantine(
        self, request: operators.QuarantineRequest, caller: Caller
    ) -> operators.QuarantineResponse:
        """Bar a client, or those of a tag."""
        named = await self._meant(request.client_id, request.tag)
        why = request.why[:WHY_CHARS_MAX] or "by an operator"
        for client_id in named:
            await self._submit(ev.Quarantined(self.run.writer.now(), client_id, why))
            log.info("%s was quarantined by %s", client_id, caller)
        known = self.run.writer.glance.clients
        return operators.QuarantineResponse(client_ids=named, unknown=[c for c in named if c not in known])

    @answers
    async def Release(self, request: operators.ReleaseRequest, caller: Caller) -> operators.ReleaseResponse:
        """Let a client out of quarantine, or those of a tag."""
        released = []
        for client_id in await self._meant(request.client_id, request.tag):
            answer = await self._submit(ev.Released(self.run.writer.now(), client_id))
            released += [client_id] if answer.effects else []
            log.info("%s was released by %s", client_id, caller)
        return operators.ReleaseResponse(released=bool(released), client_ids=released)

    @answers
    async def TagClients(
        self, request: operators.TagClientsRequest, caller: Caller
    ) -> operators.TagClientsResponse:
        """Give clients notes, and take others away."""
        limits = self.run.limits
        named = sorted({typed_id(c, "client_id", limits) for c in request.client_ids})
        add, remove = ([typed_id(t, "tag", limits) for t in tags] for tags in (request.add, request.remove))
        if not 0 < len(named) <= CLIENTS_MAX:
            raise ConfigError(f"{len(named)} clients are to be tagged: name 1 to {CLIENTS_MAX}")

        def keep(store: Store) -> dict[str, tuple[str, ...]]:
            before = store.tags()
            after = {c: ({*before.get(c, ()), *add}) - {*remove} for c in named}
            if full := [c for c in named if len(after[c]) > TAGS_MAX]:
                raise ConfigError(f"{full[0]} would have {len(after[full[0]])} tags: {TAGS_MAX} at most")
            if any(tuple(sorted(after[c])) != before.get(c, ()) for c in named):
                store.tag(named, add, remove)
            return store.tags()

        found = await self._look_store(keep)
        if add or remove:
            log.info("tags of %s: +%s -%s by %s", ",".join(named), ",".join(add), ",".join(remove), caller)
        known = self.run.writer.glance.clients
        return operators.TagClientsResponse(
            tags={c: " ".join(found.get(c, ())) for c in named}, unknown=[c for c in named if c not in known]
        )

    # --- ahead of the devices, whose calls may be what an operator steers out of ---------------

    async def _submit(self, event: ev.Event) -> Answer:
        return await self.run.writer.submit(event, ahead=True)

    async def _look(self, question: Callable[[Engine], T]) -> T:
        return await self.run.writer.look(question, ahead=True)

    async def _look_store(self, question: Callable[[Store], T]) -> T:
        return await self.run.writer.look_store(question, ahead=True)

    async def _meant(self, client_id: str, tag: str) -> list[str]:
        """One client, or those that have a tag now. Raises `ConfigError` where nobody has it."""
        if bool(client_id) and bool(tag):
            raise ConfigError("name a client or a tag, not both")
        if not tag:
            return [typed_id(client_id, "client_id", self.run.limits)]
        tags = await self._look_store(lambda store: store.tags())
        if not (found := [c for c, its in tags.items() if tag in its]):
            raise ConfigError(f"no client has the tag {tag!r}: see `anabranch admin clients`")
        return found

    @answers
    async def Rollback(
        self, request: operators.RollbackRequest, caller: Caller
    ) -> operators.RollbackResponse:
        """Publish what the log gives without some clients' updates."""
        without = tuple(sorted({typed_id(c, "without", self.run.limits) for c in request.without}))
        event = ev.RolledBack(self.run.writer.now(), request.to_version, 0, without, request.everyone)
        answer = await self.run.writer.roll_back(event)
        done = next(e for e in answer.effects if isinstance(e, RolledBackTo))
        log.info("rolled back to version %d by %s", request.to_version, caller)
        return operators.RollbackResponse(version=done.version, updates_left_out=done.left_out)

    @answers
    async def DropSum(self, request: operators.DropSumRequest, caller: Caller) -> operators.DropSumResponse:
        """Give up a sum that a keeper will not unmask, or all that have an update of one client."""
        if self.run.unmasking is None:
            raise ConfigError("this run has no masked sums")
        why = request.why[:WHY_CHARS_MAX]
        if request.client_id:
            if request.number:
                raise ConfigError("name a sum or a client, not both")
            numbers = await self._barred_sums(request.client_id, why, caller)
        else:
            numbers = [request.number]
            if not await self._look(partial(_waits, number=request.number)):
                raise ConfigError(
                    f"no sum {request.number} waits: `anabranch admin status` has those that do"
                )
        lost = []
        for number in numbers:
            event = ev.CohortDropped(self.run.writer.now(), number, why or "by an operator")
            lost += [e for e in (await self._submit(event)).effects if isinstance(e, CohortLost)]
        if request.number and not lost:  # the keepers' answer came between the look and the order
            raise ConfigError(f"sum {request.number} waits no more: see `anabranch admin status`")
        for one in lost:
            log.info("sum %d of %d updates was dropped by %s", one.number, len(one.update_ids), caller)
        updates = sum(len(one.update_ids) for one in lost)
        return operators.DropSumResponse(updates_lost=updates, numbers=[one.number for one in lost])

    async def _barred_sums(self, client_id: str, why: str, caller: Caller) -> list[int]:
        """The sums that have an update of a client, which gives no more: it is quarantined first."""
        typed_id(client_id, "client_id", self.run.limits)
        if client_id not in self.run.writer.glance.clients:
            raise ConfigError(f"no client is {client_id!r}: see `anabranch admin clients`")
        barred = ev.Quarantined(
            self.run.writer.now(), client_id, why or "its masked sums could not be unmasked"
        )
        await self._submit(barred)
        log.info("%s was quarantined by %s, for its masked sums", client_id, caller)
        return await self._look(partial(_sums_of, client_id=client_id))

    @answers
    async def SetSettings(
        self, request: operators.SetSettingsRequest, caller: Caller
    ) -> operators.SetSettingsResponse:
        """Change settings of the run."""
        async with self.run.setting:
            changed, settings, enrolled = await self._look(
                lambda engine: (engine.changes.values, engine.settings, len(engine.ledger.clients))
            )
            values = read_settings(request.values_json, with_values(self.run.given, changed))
            # What is so already is no change: what was before it, and who set it, are not to be written over.
            news = otherwise(settings, values)
            effects: Sequence[Effect] = ()
            if news:
                event = ev.SettingsChanged(self.run.writer.now(), news, str(caller))
                effects = (await self._submit(event)).effects
            changes = [c for e in effects if isinstance(e, SettingsSet) for c in e.changes]
            return operators.SetSettingsResponse(
                changes=[change_to_proto(change) for change in changes],
                finished=self.run.writer.glance.finished,
                reopened=any(isinstance(e, Reopened) for e in effects),
                warnings=doubts_of_change(news, self.run.config, enrolled),
            )

    @streams
    async def Export(
        self, request: operators.ExportRequest, caller: Caller
    ) -> AsyncIterator[operators.ExportResponse]:
        """A version as a safetensors file."""
        wanted = request.version if request.HasField("version") else None
        if request.best:
            wanted = self._best()
        names = self._names_of(request.stage)
        version = await self._look(lambda engine: self._keep(engine, wanted))
        data = await self._safetensors(ModelRequest(version, "exact"), names)
        step = self.run.limits.sent_chunk_bytes
        for offset in range(0, len(data), step):
            chunk = data[offset : offset + step]
            yield operators.ExportResponse(version=version, offset=offset, size_bytes=len(data), data=chunk)

    @streams
    async def Watch(
        self, request: operators.WatchRequest, caller: Caller
    ) -> AsyncIterator[operators.WatchResponse]:
        """What happens, as it happens."""
        all_kept = request.all_kept or request.after_seq > 0
        async for happening in self.run.feed.follow(request.after_seq if all_kept else None):
            yield operators.WatchResponse(
                seq=happening.seq,
                at_s=happening.at_s,
                kind=happening.kind,
                client_id=happening.client_id,
                version=happening.version,
                data_json=json.dumps(happening.data),
            )
        if self.run.writer.failure is not None:
            raise Unavailable("the server has stopped by itself: its own log says why")

    @answers
    async def ReportMetrics(
        self, request: operators.ReportMetricsRequest, caller: Caller
    ) -> operators.ReportMetricsResponse:
        """Keep the metrics of a version."""
        metrics, version = checked_metrics(request.metrics, MEASURED_MAX), request.version
        now = self.run.writer.now()
        if version > self.run.writer.glance.version:
            raise UnknownVersion(f"version {version} is not published yet")

        def keep(store: Store) -> Mapping[str, float]:
            store.add_metrics(version, metrics, now)
            return store.metrics(version)

        known = await self._look_store(keep)
        await self._look(lambda _: self.run.models.rate(version, known))
        self.run.feed.add(Happening(self.run.writer.seq, now, "evaluated", "", version, metrics))
        await self._stop_at_target(known)
        return operators.ReportMetricsResponse()

    @answers
    async def GetMetrics(
        self, request: operators.GetMetricsRequest, caller: Caller
    ) -> operators.GetMetricsResponse:
        """How the server itself does. Answered without the writer, which may be what is stuck."""
        return await asyncio.to_thread(RunFigures(self.run).to_proto)

    async def _stop_at_target(self, metrics: Mapping[str, float]) -> None:
        """The run ends where its own settings want it to: its budget is what it has used."""
        table, writer = self.run.config.run, self.run.writer
        if table.stop_at_target and not writer.glance.finished and Goal.of(table).reached(metrics):
            async with self.run.setting:
                used = {"run.updates_max": max(1, writer.glance.counters.applied)}
                await self._submit(ev.SettingsChanged(writer.now(), used, "the target, which was reached"))

    def _masked_sums(self, engine: Engine) -> operators.MaskedSums | None:
        """How they stand, where there are any."""
        if engine.cohorts is None or self.run.unmasking is None:
            return None
        waiting = [
            operators.WaitingSum(
                number=cohort.number,
                version=cohort.version,
                updates=len(cohort.members),
                answered=cohort.answered,
            )
            for cohort in engine.cohorts.waiting
        ]
        keepers = [operators.KeeperStanding(**vars(one)) for one in self.run.unmasking.standings]
        gathered = len(engine.cohorts.members)
        lost = engine.sums_lost
        return operators.MaskedSums(gathered=gathered, waiting=waiting, keepers=keepers, lost=lost)

    def _status(
        self,
        glance: Glance,
        lost: int,
        quarantined: Mapping[str, str],
        twice: Sequence[str],
        masked_sums: operators.MaskedSums | None,
    ) -> operators.GetStatusResponse:
        run, counters, best = self.run, glance.counters, self.run.models.best
        best_metric, best_value = run.models.best_value
        return operators.GetStatusResponse(
            clients_online=run.presence.online(glance.clients, run.writer.now()),
            tasks_granted=counters.granted,
            rollbacks=counters.rollbacks,
            updates_left_out=counters.left_out,
            created_at_s=run.info.created_at,
            now_s=run.writer.now(),
            best_version=None if best is None else best[0],
            best_accuracy=best_value if best_metric == ACCURACY else 0.0,
            best_metric=best_metric,
            best_value=best_value,
            run=run.info.name,
            run_id=run.info.run_id,
            strategy=glance.strategy,
            version=glance.version,
            updates_applied=counters.applied - lost,
            updates_rejected=counters.rejected,
            updates_duplicate=run.intake.repeated,
            clients=glance.clients_enrolled,
            live_tasks=glance.live_tasks,
            leases_lost=counters.leases_lost,
            paused=glance.paused,
            finished=glance.finished,
            given_up=glance.given_up,
            uplink_bytes=run.uploads.bytes_total,
            downlink_bytes=run.sent_to_devices.bytes,
            uplink_bytes_raw=run.intake.bytes_raw,
            downlink_bytes_full_equivalent=run.sent_to_devices.full_bytes,
            observer_bytes=run.sent_to_observers.bytes,
            uptime_s=run.writer.now() - run.started_at,
            manifest=manifest_to_proto(run.spec, run.models.frozen_sha256),
            config_json=json.dumps(run.config.to_json()),
            quarantined=quarantined,
            settings_changed=[change_to_proto(change) for _, change in sorted(glance.changes.made.items())],
            run_twice=twice,
            masked_sums=masked_sums,
            phase=glance.phase,
            disk_full=run.writer.room.lack,
        )

    def _best(self) -> int:
        best = self.run.models.best
        if best is None:
            raise UnknownVersion(
                "no version that is held was measured by what the run is judged by: "
                "`anabranch evaluate APP --admin ...` does it; of all that were ever measured, as before a "
                "backup was put back, `anabranch report` of the stopped server's data has the best"
            )
        return best[0]

    def _keep(self, engine: Engine, wanted: int | None) -> int:
        version = engine.version if wanted is None else wanted
        self.run.models.keep(engine, ModelRequest(version, "exact"), for_long=True)
        return version

    def _names_of(self, stage: int) -> frozenset[str]:
        """The tensors that a stage needs, and those that nobody trains; of 0 all there are."""
        spec = self.run.spec
        if not stage:
            return frozenset(tensor.name for tensor in spec.tensors)
        if stage > len(spec.stages):
            has = f"{len(spec.stages)} stages" if spec.stages else "no stages"
            raise ConfigError(f"there is no stage {stage}: this run's model has {has}")
        still = (tensor.name for tensor in spec.tensors if not tensor.aggregated)
        return frozenset([*stage_set(spec, stage).names, *still])

    async def _safetensors(self, wanted: ModelRequest, names: Collection[str]) -> bytes:
        file, run = await self.run.models.get(wanted), self.run

        def convert() -> bytes:
            vector, frozen = decode_model(make_codec(file.codec), run.spec, file.data())
            found = run.spec.unflatten(vector, frozen or run.models.frozen)
            return save(plain_tensors({name: array for name, array in found.items() if name in names}))

        return await asyncio.to_thread(convert)


def _version(row: VersionRow, held: bool) -> operators.Version:
    return operators.Version(
        version=row.version,
        sha256=bytes.fromhex(row.sha256 or ""),
        updates=row.updates,
        published_at_s=row.published_at,
        snapshot=row.snapshot,
        metrics=row.metrics,
        held=held,
    )


def _clients(
    engine: Engine, limit: int, among: Collection[str] | None = None, after: str | None = None
) -> list[operators.Client]:
    """So many of them: the most suspicious, or the next `after` a name."""
    guard, known = engine.guard, engine.ledger.clients.items()
    clients = (of for of in known if (among is None or of[0] in among) and (after is None or of[0] > after))

    def rank(of: tuple[str, ClientRecord]) -> tuple[int, int, str]:
        client_id, client = of
        if after is not None:
            return 0, 0, client_id
        return -guard.suspicion(client_id), -client.rejected, client_id

    return [
        operators.Client(
            client_id=client_id,
            updates_taken=c.accepted,
            updates_rejected=c.rejected,
            flaws=guard.flaws.get(client_id, 0),
            shortened=guard.shortened.get(client_id, 0),
            quarantined=guard.quarantined.get(client_id, ""),
            width_max=c.capability.width_max if c.capability.width_max < 1 else None,
            memory_bytes=c.capability.memory_bytes,
        )
        for client_id, c in heapq.nsmallest(limit, clients, rank)
    ]


def _waits(engine: Engine, number: int) -> bool:
    return engine.cohorts is not None and any(c.number == number for c in engine.cohorts.waiting)


def _sums_of(engine: Engine, client_id: str) -> list[int]:
    return [] if engine.cohorts is None else engine.cohorts.numbers_of(client_id)
