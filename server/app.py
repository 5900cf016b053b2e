"""Serves one run: recovers it, opens the ports, and drains when told to stop.

The order of a drain: health says NOT_SERVING, no task is granted any more, the calls under way get
`drain_s` to end, then the queue is committed, a last snapshot written and the store closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from anabranch.core import events as ev
from anabranch.core.clock import EventClock, Seconds
from anabranch.core.config.goal import Goal
from anabranch.core.config.ranges import OWN
from anabranch.core.config.tables import Config, ServerTable
from anabranch.core.effects import Effect
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.objections import tasks_of_use
from anabranch.core.engine.settable import as_started
from anabranch.core.errors import AnabranchError, ConfigError, DataError, Unavailable
from anabranch.core.limits import Limits
from anabranch.core.model.params import Tensors
from anabranch.core.retention import Keep
from anabranch.core.snapshot import Snapshot
from anabranch.host.first import first_model
from anabranch.host.secagg import check_guarded
from anabranch.identity.addresses import host_and_port
from anabranch.identity.authority import Authority, authority_exists
from anabranch.reports.trackers import Trackers
from anabranch.server.backup import check_servable
from anabranch.server.bundles import OfferedBundle, offered_at
from anabranch.server.calls import Calls
from anabranch.server.chronicle import Chronicle, Coming, Standing
from anabranch.server.clock import run_clock
from anabranch.server.exposition import Exposition
from anabranch.server.feed import Feed
from anabranch.server.figures import RunFigures
from anabranch.server.history import head_at
from anabranch.server.intake import Intake
from anabranch.server.manifest import Manifest, keep_manifest, kept_manifest, read_manifest
from anabranch.server.metrics import Metrics
from anabranch.server.models import ModelRequest, Models
from anabranch.server.notify import READY, STOPPING, beat_s, keep_alive, notify
from anabranch.server.ports import Ports, RunPorts
from anabranch.server.presence import Presence
from anabranch.server.proofs import keep_authority, read_authorities
from anabranch.server.recovery import Recovered, check_takeover, recover, refolder
from anabranch.server.restored import read_restored
from anabranch.server.run import LiveRun
from anabranch.server.saving import Every
from anabranch.server.seen_register import check_register, check_seen
from anabranch.server.standby import StandbyPorts, Tenure, await_turn, check_standby
from anabranch.server.store.base import Store
from anabranch.server.store.factory import store_of
from anabranch.server.tls import ServerIdentity, check_address, uses_tls
from anabranch.server.tracking import track, until_told
from anabranch.server.unmasking import Unmasking
from anabranch.server.uploads import Uploads
from anabranch.server.writer import Listener, Writer
from anabranch.support.folders import from_root
from anabranch.support.heap import bound_heap, use_small_pages
from anabranch.support.stop_signals import call_on_signals, stop_signals

log = logging.getLogger(__name__)

LOOK_S = 1.0  # so often the log hears that time passes
SWEEP_S = 60.0  # so often what is left of uploads is looked through


@dataclass(frozen=True)
class ServerInfo:
    """What is being served, and where: the addresses with their real ports."""

    address: str
    admin_address: str
    run_id: str
    version: int
    replayed: int
    # For Prometheus; empty unless `server.metrics_address` names one.
    metrics_address: str = ""
    # Where devices join, and the SHA-256 (hex) of the authority's certificate; empty without TLS.
    join_address: str = ""
    ca_sha256: str = ""
    name: str = ""  # of the run, as its data have it


Ready = Callable[[ServerInfo], None] | None


@dataclass(frozen=True)
class RunEnded:
    """A run is over: why, and whether a version that is held was measured."""

    why: str
    rated: bool


@dataclass(frozen=True)
class Means:
    """What a run is served with: caps, who may call, the machine's clock, and where it is measured."""

    limits: Limits
    identity: ServerIdentity | None
    wall: Seconds
    metrics: Metrics


async def serve(
    config: Config,
    manifest: Manifest,
    *,
    ready: Ready = None,
    limits: Limits | None = None,
    stop: asyncio.Event | None = None,
    insecure: bool = False,
    store: Store | None = None,
    waiting: Callable[[str], None] | None = None,
    ended: Callable[[RunEnded], None] | None = None,
    reopened: Callable[[], None] | None = None,
    wall: Seconds = time.time,
    bundle: Path | None = None,
) -> int:
    """Serve a run until SIGTERM, SIGINT or `stop`; returns the exit code, 0 after a clean drain.

    `ready` is called once both ports take calls; `waiting` before, with the reason, where another server
    leads the run and this one is a standby; `ended` after it, once the run is over, and `reopened` if it then
    goes on. `store` replaces the one that `[server]` names, `limits` those of `[limits]`.
    `wall` is the machine's clock: certificates go by it, the run's time does not. `bundle`: the file from
    which devices may have the App.
    An address that other machines reach is served with mutual TLS, by the authority in
    `identity.folder`; `insecure` serves it in the clear.
    Raises `ConfigError`, `PortInUse`, `ManifestMismatch` and the errors of the store; and, should
    the writer fail, the error that stopped it: `LeadershipLost` where another server took over.
    """
    offered, config = None if bundle is None else _offered(bundle), placed(config)
    identity = identity_of(config, insecure, wall)
    check_guarded(config, uses_tls(config.server.address, config, insecure))
    bound_heap()
    use_small_pages()
    stop, limits = stop or asyncio.Event(), limits or config.limits
    call_on_signals(stop.set, *stop_signals())
    table = config.server
    store = checked_store(table, limits, store)
    try:
        async with Tenure(store) as tenure, _exposed(table.metrics_address, ready) as (metrics, ready):
            begin = partial(recover, store, config, manifest, limits, wall)
            ports = StandbyPorts(config, limits, identity, insecure)
            check = partial(_check_turn, store, config, manifest, limits, identity)
            turn = await await_turn(begin, config, ports, stop, waiting, check)
            if turn is not None:
                config, recovered = turn
                means = Means(limits, identity, wall, metrics)
                led = led_run(store, recovered, config, manifest, means, tenure)
                del manifest, begin, check  # the first weights are in the engine: no need to hold them twice
                async with led as run:
                    run.bundle = offered
                    await _serve(run, recovered, ready, (ended, reopened), stop, insecure)
    finally:
        store.close()
        if identity is not None:
            identity.close()
    log.info("drained")
    return 0


def placed(config: Config) -> Config:
    """With its folders named from the root: a strategy of one's own may change the working directory."""
    server, identity = config.server, config.identity
    data_dir, folder = (str(from_root(Path(name))) for name in (server.data_dir, identity.folder))
    archive = server.archive and str(from_root(Path(server.archive)))
    table = replace(server, data_dir=data_dir, archive=archive)
    return replace(config, server=table, identity=replace(identity, folder=folder))


def _offered(file: Path) -> OfferedBundle:
    """A bundle for devices. Raises `DataError` where there is none, and as `open_bundle`."""
    if (found := offered_at(file.absolute())) is None:
        raise DataError(f"{file} is not there: `anabranch bundle make` writes one")
    return found


@asynccontextmanager
async def _exposed(address: str, ready: Ready) -> AsyncIterator[tuple[Metrics, Ready]]:
    """The metrics of this process, where Prometheus reads them if it does: while it stands by, too.

    `ready` is given back, told of the address as well.
    """
    metrics = Metrics()
    port = Exposition(metrics.registry, address) if address else None
    shown = "" if port is None else port.address
    try:
        yield metrics, None if ready is None else lambda info: ready(replace(info, metrics_address=shown))
    finally:
        if port is not None:
            await port.close()


def checked_store(table: ServerTable, limits: Limits, given: Store | None = None) -> Store:
    """Where the run is kept. Raises `ConfigError`, and `DataError` for a backup and what is half put back."""
    check_servable(Path(table.data_dir))
    store = given or store_of(table, limits)
    check_standby(table, store)
    return store


@asynccontextmanager
async def led_run(
    store: Store,
    recovered: Recovered,
    config: Config,
    manifest: Manifest,
    means: Means,
    tenure: Tenure,
) -> AsyncIterator[LiveRun]:
    """The run that was recovered, to be served as `config` says; whoever serves it opens the ports."""
    config, identity = as_started(Config.from_json(recovered.info.config), config), means.identity
    check_guarded(config, identity is not None)
    folder = Path(config.server.data_dir)
    keep_manifest(kept_manifest(folder), manifest)
    _keep_register(config, identity)
    frozen, head = manifest.frozen, head_at(store, 0) or ""
    first = first_model(recovered.blueprint, manifest.tensors, manifest.seed, head)
    del manifest
    authority, database = None if identity is None else identity.authority, config.server.database
    restored = read_restored(folder, database, store, recovered.info, authority)
    async with _live(store, recovered, config, frozen, means) as run:
        run.restored, run.first = restored, first
        try:
            await _begin(run, recovered, tenure)
        except Unavailable:  # to who asks the writer; what has stopped that is for who starts it
            check_done(run)
            raise
        yield run


async def _begin(run: LiveRun, recovered: Recovered, tenure: Tenure) -> None:
    """What comes before the first call of others."""
    newest = ModelRequest(run.writer.glance.version, "exact")
    rate = partial(_rate, run.models, newest.version)
    if await run.writer.look_store(rate) and newest.version not in run.models.exact():
        # As where the data come from a backup; it may be the best.
        await run.writer.look(lambda engine: run.models.keep(engine, newest, for_long=True))
        await run.writer.look_store(rate)
    tenure.watch(run.writer)
    if recovered.said:
        said = ev.SettingsChanged(run.writer.now(), recovered.said, recovered.said_by, at_start=True)
        await run.writer.submit(said)


def _rate(models: Models, newest: int, store: Store) -> bool:
    """What followers have reported of the versions that are still here; whether any has of the newest."""
    for version in sorted(models.exact()):
        models.rate(version, store.metrics(version))
    return bool(store.metrics(newest))


def identity_of(config: Config, insecure: bool, wall: Seconds) -> ServerIdentity | None:
    """What guards the ports, None where none needs it. Raises `ConfigError`."""
    folder = Path(config.identity.folder)
    addresses = (config.server.address, config.server.admin_address)
    for address in addresses:
        check_address(address, insecure, authority_exists(folder))
    if not any(uses_tls(address, config, insecure) for address in addresses):
        if authority_exists(folder) and not insecure:
            log.warning(
                "%s has an authority, and this server is open to all of this machine: on loopback nobody "
                'shows papers and no token is taken; identity.tls = "always" guards it as well',
                folder,
            )
        return None
    return ServerIdentity(Authority.open(folder, wall), config.identity.certificate_s)


def _keep_register(config: Config, identity: ServerIdentity | None) -> None:
    """Write down by which authority members are known. Raises `ConfigError` for a register taken back."""
    if identity is not None:
        folder = Path(config.server.data_dir)
        keep_authority(folder, identity.authority)
        check_register(folder, identity.authority, identity.members.point)


def _check_turn(
    store: Store, config: Config, manifest: Manifest, limits: Limits, identity: ServerIdentity | None
) -> None:
    """Raises what would stand in the way of a standby at its turn."""
    check_takeover(store, config, manifest, limits)
    if identity is not None:
        folder = Path(config.server.data_dir)
        check_seen(folder, identity.authority, identity.members.point)
        read_authorities(folder)


async def _serve(
    run: LiveRun,
    recovered: Recovered,
    ready: Ready,
    over: tuple[Callable[[RunEnded], None] | None, Callable[[], None] | None],
    stop: asyncio.Event,
    insecure: bool,
) -> None:
    """Open the ports until it is time to stop. Raises what has stopped the writer.

    `over`: who is told that the run has ended, and who that it goes on.
    """
    if run.identity is not None:
        run.identity.note_in(Path(run.config.server.data_dir))
    ports = RunPorts(run, insecure)
    async with contextlib.AsyncExitStack() as stack:
        await ports.open()
        stack.push_async_callback(ports.close, 0)
        notify(READY, f"STATUS=serving {run.info.name} on {ports.address}")
        if ready is not None:
            ready(_info(ports, recovered, run))
        alive = asyncio.create_task(keep_alive(lambda: [run.writer], beat_s()))
        stack.callback(alive.cancel)
        await until_over(run, stop, *over)
        await _drain(run, ports)
    check_done(run)


async def until_over(
    run: LiveRun,
    stop: asyncio.Event,
    ended: Callable[[RunEnded], None] | None,
    reopened: Callable[[], None] | None,
) -> None:
    """Wait until it is time to stop, or the writer has; say when the run has ended, and when it goes on."""
    while not (stop.is_set() or run.writer.stopped.is_set()):
        await any_set(stop, run.writer.stopped, run.ended)
        if run.ended.is_set():
            if ended is not None:
                ended(RunEnded(run.writer.glance.finished, run.models.best is not None))
            await any_set(stop, run.writer.stopped, run.going_on)
            if reopened is not None and run.going_on.is_set():
                reopened()


def check_done(run: LiveRun) -> None:
    """Raises what has stopped the writer, and `ConfigError` for a register that was taken back meanwhile."""
    if run.writer.failure is not None:
        raise run.writer.failure  # first: the data may be there no more, and what is noted beside them
    if run.identity is not None:
        identity = run.identity
        check_register(Path(run.config.server.data_dir), identity.authority, identity.members.point)


@asynccontextmanager
async def _live(
    store: Store,
    recovered: Recovered,
    config: Config,
    frozen: Tensors,
    means: Means,
) -> AsyncIterator[LiveRun]:
    """The parts of the run, started; closed in the opposite order."""
    server, spec, limits, metrics = config.server, recovered.engine.spec, means.limits, means.metrics
    trackers = Trackers.of(config.run.trackers)
    models = _models(store, recovered, config, frozen)
    clock = run_clock(recovered.last_now, means.wall)
    writer = _writer(store, recovered, config, models, clock, means)
    uploads, feed = Uploads(store.blobs, limits, server.upload_bytes_per_client), Feed()
    await uploads.find(tasks_of_use(recovered.engine))
    chronicle = Chronicle(lambda: writer.glance, clock.now())
    intake = Intake(spec, recovered.info.run_id, writer, uploads, Calls(limits), config)
    run = LiveRun(
        info=recovered.info,
        given=config,
        spec=spec,
        writer=writer,
        models=models,
        uploads=uploads,
        intake=intake,
        feed=feed,
        started_at=clock.now(),
        identity=means.identity,
        limits=limits,
        calls=intake.calls,
        in_parts=recovered.engine.in_parts,
    )
    writer.listener = _listener(run, metrics, chronicle)
    _ask_keepers(run, recovered.engine)
    run.presence = Presence(writer.glance.settings.lease_s, recovered.engine.ledger.leased())
    run.set_over(bool(writer.glance.finished))
    metrics.figures = RunFigures(run)
    writer.start()
    looks = (_keep(chronicle, writer, uploads), _watch(chronicle, writer))
    chores = [asyncio.create_task(work) for work in (*looks, _sweep(uploads, writer), _unmask(run))]
    tracking = asyncio.create_task(track(run, trackers))
    try:
        yield run
    finally:
        for chore in chores:
            chore.cancel()
        feed.close()
        await until_told(tracking, trackers)
        uploads.close()
        await writer.close()
        models.close()


def _listener(run: LiveRun, metrics: Metrics, chronicle: Chronicle) -> Listener:
    """Tells everybody who counts, shows or forgets by what happened."""

    def listen(seq: int, now: float, effects: Sequence[Effect]) -> None:
        run.feed.hear(seq, now, effects)
        metrics.hear(effects)
        run.moments.hear(now, effects)
        chronicle.hear(now, effects)
        run.uploads.hear(effects)
        run.hear(effects)

    return listen


async def _keep(chronicle: Chronicle, writer: Writer, uploads: Uploads) -> None:
    """Let the log know how time passes."""
    while True:
        await asyncio.sleep(LOOK_S)
        if chronicle.look(writer.now()):
            try:
                standing = await writer.look(Standing.of)
            except AnabranchError:  # it goes down, or has too much to do
                continue
            coming = Coming(uploads.open_count, *uploads.open_bytes)
            chronicle.stalled(standing, writer.now(), coming)


async def _watch(chronicle: Chronicle, writer: Writer) -> None:
    """Have the log say that the writer hangs; `_keep` would wait for it."""
    while True:
        await asyncio.sleep(LOOK_S)
        chronicle.hanging(writer.turn_s)


def _ask_keepers(run: LiveRun, engine: Engine) -> None:
    """Have keepers asked, where updates are masked. Raises `ConfigError` where some have no address."""
    cohorts, addresses = engine.cohorts, run.given.server.keepers
    if cohorts is None:
        return
    if len(addresses) < len(cohorts.terms.keepers):
        raise ConfigError(
            f"secagg.keepers names {len(cohorts.terms.keepers)} and server.keepers has {len(addresses)} "
            "addresses: say where each keeper is asked, HOST:PORT, in any order"
        )
    for address in addresses:
        host_and_port(address)
    folder = Path(run.given.server.data_dir)
    run.unmasking = Unmasking(cohorts.terms, run.info.run_id, run.writer, addresses, folder)
    run.intake.keepers = cohorts.terms.keepers


async def _unmask(run: LiveRun) -> None:
    """Have keepers asked as long as the run is served."""
    if run.unmasking is not None:
        await run.unmasking.ask()


async def _sweep(uploads: Uploads, writer: Writer) -> None:
    """Remove, every now and then, what has come of updates that are not wanted any more."""
    while True:
        await asyncio.sleep(SWEEP_S)
        with contextlib.suppress(AnabranchError):  # it goes down, or the disk is not to be read now
            await uploads.sweep(await writer.look(tasks_of_use))


def _models(store: Store, recovered: Recovered, config: Config, frozen: Tensors) -> Models:
    def head_of(version: int) -> str | None:
        return recovered.history.head_of(version) or head_at(store, version)

    return Models(
        Path(config.server.data_dir) / "models" / recovered.info.run_id,
        recovered.engine.spec,
        frozen,
        codec_at=recovered.blueprint.codec_at,
        goal=Goal.of(config.run),
        frozen_served=config.run.frozen,
        own_parts=config.downlink.parts == OWN,
        head_of=head_of,
    )


def _writer(
    store: Store,
    recovered: Recovered,
    config: Config,
    models: Models,
    clock: EventClock,
    means: Means,
) -> Writer:
    server, engine, limits = config.server, recovered.engine, means.limits
    writer = Writer(
        engine,
        store,
        models,
        clock,
        history=recovered.history,
        seq=recovered.seq,
        saved=recovered.saved,
        every=every_of(config),
        limits=limits,
        keep=Keep.of(server.keep),
        metrics=means.metrics,
    )
    kept, blueprint = kept_manifest(Path(server.data_dir)), recovered.blueprint

    def begin(snapshot: Snapshot | None) -> Engine:
        return blueprint.engine(read_manifest(kept, limits).tensors, snapshot)

    writer.fold_by(refolder(store, begin))
    return writer


def every_of(config: Config) -> Every:
    """When snapshots are due."""
    table = config.server
    return Every(table.snapshot_every_versions, table.snapshot_every_updates, table.snapshot_every_events)


async def _drain(run: LiveRun, ports: Ports) -> None:
    notify(STOPPING)
    run.drain()
    grace_s = run.config.server.drain_s if run.writer.failure is None else 0.0  # no call can succeed any more
    await close_ports(ports, grace_s)


async def close_ports(ports: Ports, grace_s: float) -> None:
    """Give the calls under way so many seconds, or until Ctrl-C comes once more."""
    if grace_s:
        log.info("draining, at most %.0f s; Ctrl-C cuts off the calls under way", grace_s)
    cut_off = asyncio.Event()
    call_on_signals(cut_off.set, signal.SIGINT)
    closing, cutting = asyncio.create_task(ports.close(grace_s)), asyncio.create_task(cut_off.wait())
    await asyncio.wait((closing, cutting), return_when=asyncio.FIRST_COMPLETED)
    cutting.cancel()
    if cut_off.is_set():
        await ports.close(0.0)
    await closing


async def any_set(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _info(ports: Ports, recovered: Recovered, run: LiveRun) -> ServerInfo:
    identity = run.identity
    return ServerInfo(
        address=ports.address,
        admin_address=ports.admin_address,
        run_id=recovered.info.run_id,
        version=run.writer.glance.version,
        replayed=recovered.replayed,
        join_address=ports.join_address,
        ca_sha256="" if identity is None else identity.authority.sha256,
        name=recovered.info.name,
    )
