"""One simulated run: from a configuration to a result, and the folder that proves it."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from anabranch.compress.downloads import PARTS
from anabranch.compress.model import frozen_size_bytes
from anabranch.compress.registry import MASKING, simulated_stages
from anabranch.core.config.goal import Goal
from anabranch.core.config.ranges import BUILT, ELASTIC, OVERLAP, OWN
from anabranch.core.config.tables import Config
from anabranch.core.content import UNNAMED, check_algorithm
from anabranch.core.device.overlap import OverlapSession
from anabranch.core.device.session import Session, SessionSettings
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.planner import Planner, too_narrow
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import Tensors, Vector, digest
from anabranch.core.privacy.mechanism import record_salt
from anabranch.host.build import Blueprint
from anabranch.host.first import check_built
from anabranch.host.log import Journal
from anabranch.host.private import salted
from anabranch.identity.noise_key import NOISE_KEY, kept_key, new_key
from anabranch.reports.folders import FolderBusy, has_ended, holds_run, need_free
from anabranch.reports.html import write_report
from anabranch.reports.journal_files import INITIAL, JOURNAL, PAYLOADS, DigestJournal, JournalWriter
from anabranch.reports.models import BEST, FINAL, Best, write_model
from anabranch.reports.origin import reason, started_now
from anabranch.reports.recorder import EVENTS_FILE, Recorder
from anabranch.reports.result import RESULT_FILE, Result, Status
from anabranch.reports.trackers import Tracker, Trackers
from anabranch.reports.tracking.run import TrackedRun
from anabranch.simulation.attacks import hurried
from anabranch.simulation.checkpoint import Checkpoint, RunOrigin, check_same, remove_checkpoint
from anabranch.simulation.clock import Action, VirtualClock
from anabranch.simulation.collector import passed_over
from anabranch.simulation.copies import Copies
from anabranch.simulation.devices import Device
from anabranch.simulation.disk import Disk
from anabranch.simulation.elastic import ElasticTrainings, check_elastic
from anabranch.simulation.elastic_devices import ElasticDevice
from anabranch.simulation.energy import meter_of
from anabranch.simulation.evaluation import Evaluator, MeasuredVersion
from anabranch.simulation.executors.base import Executor
from anabranch.simulation.executors.choice import chosen, make_executor, settled
from anabranch.simulation.executors.names import EXECUTORS
from anabranch.simulation.executors.recalling import RecallingExecutor
from anabranch.simulation.faults import RIGHT, DeviceClock, Faults
from anabranch.simulation.first_version import FirstVersion
from anabranch.simulation.hasher import Hasher
from anabranch.simulation.interruption import Interruptions
from anabranch.simulation.keepers import Keepers
from anabranch.simulation.network import PerfectNetwork
from anabranch.simulation.newcomers import Newcomers, come_as_rows
from anabranch.simulation.parts import PARTS as OWN_PARTS
from anabranch.simulation.problem import Problem, ProblemSource, device_name
from anabranch.simulation.server import DirectServer, Process
from anabranch.simulation.server_time import ServerTime, SteppedTime
from anabranch.simulation.standstill import Standstill
from anabranch.simulation.storage import EMPTY, Storage
from anabranch.simulation.surroundings import Surroundings
from anabranch.simulation.transfers import lines_of
from anabranch.simulation.versions import Versions
from anabranch.simulation.waiting_room import WaitingRoom
from anabranch.simulation.world import World
from anabranch.support.heap import reused_heap
from anabranch.support.own_parts import own_parts
from anabranch.support.shelf import ScratchShelf
from anabranch.workloads.app import App
from anabranch.workloads.arrival import Arrivals
from anabranch.workloads.traces import read_trace

PROGRESS_S = 1.0  # of real time, at least so often
NOTHING_MORE = "nothing more can happen: no device is at work, and none will be"
LEAVINGS = (JOURNAL, INITIAL, PAYLOADS, EVENTS_FILE, NOISE_KEY)  # of a run that has not begun


@dataclass(frozen=True)
class RunProgress:
    """How far a run is, `virtual_s` virtual seconds after its start.

    `metrics` are those of the newest evaluation, `accuracy` and `loss` among them; None before the first, and
    where the App has no such metric. `evaluated`: they are new. They are of `evaluated_version`, which may be
    an earlier one; None before the first.
    `traffic_bytes` have travelled by now, up and down.
    """

    virtual_s: float
    version: int
    updates: int
    rejected: int
    accuracy: float | None
    loss: float | None
    evaluated: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    traffic_bytes: int = 0
    evaluated_version: int | None = None


Tell = Callable[[RunProgress], None]


def simulate(
    config: Config,
    out: Path | None = None,
    app: App | None = None,
    workers: int = 0,
    progress: Tell | None = None,
    trackers: Sequence[Tracker] = (),
    keep_payloads: bool = True,
    checkpoint_s: float | None = None,
    resume: bool = False,
) -> Result:
    """Run the configured fleet on a virtual clock, with real training.

    With `out` the folder gets `result.json`, `report.html`, `events.jsonl`, `final.safetensors`,
    `best.safetensors`, the journal with `initial.safetensors` and, if `[run] keep_payloads`, `payloads.zip`;
    of a run that is interrupted, or whose App raises, what there is until then. `app` stands in for
    `[run] workload`. `[fleet] executor` says who trains; with `workers` so many processes do. The digests are
    the same, except for those of the batched executor; the record names that one.
    `trackers` are told besides those of `[run]`. Without `keep_payloads` the folder has no updates,
    whatever `[run]` says; the digests are the same.
    A run with `out` keeps what it needs to go on after a crash (`checkpoint.py`): every `checkpoint_s`
    virtual seconds, or every minute of real time, and when it is interrupted; 0: never. With `resume` the one
    in `out` goes on, and one that has ended is given back.
    `progress` is called at the start, at every evaluation, and every second or so of real time, between the
    events of the simulation.

    Accuracy is that of the server's own model, not of the replica that devices train from. The byte
    counts are what the wire would carry of models fetched whole and of updates that were decided: a
    resent or broken-off transfer, asks, acknowledgements and heartbeats are not counted.
    `client.device = "auto"` means the CPU here. Raises `ConfigError` without a budget to end the run, and
    where `out` holds a run already, or with `resume` one that is not this one.
    """
    if resume and out is not None and has_ended(out):
        ended = Result.read(out)
        check_same(out, ended, config, app)
        remove_checkpoint(out)
        return ended
    started = time.perf_counter()
    with (
        own_parts(OWN_PARTS),
        open_simulation(
            config,
            out,
            app,
            workers,
            progress,
            trackers=Trackers.of(config.run.trackers, trackers),
            keep_payloads=keep_payloads,
            checkpoint_s=checkpoint_s,
            resume=resume,
        ) as simulation,
    ):
        started -= simulation.before_s
        try:
            with Interruptions() as interruptions, own_parts(OWN_PARTS):
                simulation.world.whole = interruptions.whole
                simulation.run()
        except BaseException as error:
            result = simulation.result(time.perf_counter() - started, "interrupted", reason(error))
            simulation.leave(result, out)
            raise
        result = simulation.result(time.perf_counter() - started)
        simulation.leave(result, out)
    return result


@contextmanager
def open_simulation(
    config: Config,
    out: Path | None = None,
    app: App | None = None,
    workers: int = 0,
    progress: Tell | None = None,
    start: Tensors | None = None,
    trackers: Trackers | None = None,
    keep_payloads: bool = True,
    checkpoint_s: float | None = 0.0,
    resume: bool = False,
    noise_key: bytes | None = None,
) -> Iterator[Simulation]:
    """A run that is set up and has not begun; what it holds is released at the end. As `simulate`.

    `start`: the first weights, in the place of the App's own. `trackers`: None tells nobody of it, whomever
    the configuration names, as where a run is repeated. `noise_key`: of a private run that is repeated; else
    it is made, or read where the run goes on.
    """
    _need_budget(config)
    _check_digest(config, out is not None and keep_payloads)
    if out is not None and not resume:
        need_free(out)
    _check_start(config, start)
    _check_noise(config, noise_key)
    source = ProblemSource(config, app, start)
    problem = source.open().watching()
    executor_name = chosen(config, problem, workers)
    config = settled(config, executor_name)
    with reused_heap(), _nothing_of_refused(out), ExitStack() as stack:
        checkpoint = None
        if out is not None and (resume or checkpoint_s != 0):
            origin = RunOrigin.of(config, problem)
            checkpoint = stack.enter_context(Checkpoint(out, origin, checkpoint_s, resume))
        key = noise_key or _noise_key(config, out, resume)
        retraces = resume and key is not None  # or there might be two sums with one noise
        journal = _journal(config, problem, out, keep_payloads, retraces)
        stack.callback(journal.close)
        if isinstance(journal, JournalWriter) and checkpoint is not None:
            checkpoint.is_proven = journal.has_retraced
        began = started_now() if checkpoint is None else checkpoint.origin.started_at
        recorder = stack.enter_context(_recorder(config, problem, app, out, trackers or Trackers(), began))
        recorder.trackers.start(TrackedRun.of(config, "simulated", out))
        if problem.app.any_model:  # workers need not find out for themselves what the model is
            source = replace(source, start=problem.initial)
        executor = make_executor(executor_name, source, problem, workers)
        stack.callback(executor.close)
        if checkpoint is not None:
            executor = RecallingExecutor(executor, EXECUTORS.find(executor_name).exact, checkpoint)
        simulation = Simulation(config, problem, executor, journal, recorder, progress, checkpoint, key)
        # What a run holds is large, and Python frees circles of objects late.
        for close in (simulation.hasher.close, simulation.elastic.close, simulation.clear):
            stack.callback(close)
        if checkpoint is not None:
            stack.callback(checkpoint.save)  # while the devices still hold their memories
        yield simulation


@contextmanager
def _nothing_of_refused(out: Path | None) -> Iterator[None]:
    """Of a run that was refused before it began nothing is left: once it is mended it may have the folder.

    What was there before stays, whosever it is: a noise key cannot be made again.
    """
    free = out is not None and not holds_run(out)
    made = [] if out is None else [out / name for name in LEAVINGS if not (out / name).exists()]
    try:
        yield
    except FolderBusy:  # what has come meanwhile is of the run that is under way there
        raise
    except ConfigError:
        if out is not None and free and not (out / RESULT_FILE).exists():
            for path in made:
                path.unlink(missing_ok=True)
        raise


def _noise_key(config: Config, out: Path | None, resume: bool) -> bytes | None:
    """That of a private run: read where it goes on, and made where it begins.

    A key beside which there is no journal is another run's. So the journal is there first, empty.
    """
    if out is None or not config.privacy.on:
        return new_key(config, out)
    journal, key = out / JOURNAL, out / NOISE_KEY
    if resume and journal.exists() and (key.exists() or journal.stat().st_size):
        return kept_key(config, out)
    if not key.exists() and out.is_dir():
        journal.touch()
    return new_key(config, out)


def _journal(
    config: Config, problem: Problem, out: Path | None, keep_payloads: bool, retraces: bool
) -> JournalWriter | DigestJournal:
    """What the run's events go to. Raises `ConfigError` where nobody could tell whether it retraces."""
    if out is None:
        return DigestJournal(problem.spec, config)
    path = out / JOURNAL
    begun = retraces and path.exists() and path.stat().st_size > 0
    if begun and config.run.payload_digest == UNNAMED:
        raise ConfigError(
            f"run.payload_digest = {UNNAMED!r}: a private run goes on with the updates that it had, or its "
            "noise would be on two sums, and without digests nobody can tell; begin in another folder"
        )
    return JournalWriter(out, problem.spec, problem.initial, config, keep_payloads, retraces)


def _recorder(
    config: Config,
    problem: Problem,
    app: App | None,
    out: Path | None,
    trackers: Trackers,
    started_at: str,
) -> Recorder:
    """That of a run which began, or first began, at this moment."""
    return Recorder(
        strategy=config.strategy.name,
        workload=config.run.workload if app is None else app.name,
        seed=config.run.seed,
        goal=Goal.of(config.run),
        config=config.to_json(),
        kind="simulated",
        events_path=None if out is None else out / EVENTS_FILE,
        spec=problem.spec,
        started_at=started_at,
        trackers=trackers,
    )


class Simulation:
    """The parts of one run, put together. `world.observers` may be added to before `run`."""

    _is_idle = False  # nothing is to come, before the time is up

    def __init__(
        self,
        config: Config,
        problem: Problem,
        executor: Executor,
        journal: JournalWriter | DigestJournal,
        recorder: Recorder,
        progress: Tell | None,
        checkpoint: Checkpoint | None = None,
        noise_key: bytes | None = None,
    ) -> None:
        self._config, self._problem = config, problem
        self._journal, self._recorder, self._checkpoint = journal, recorder, checkpoint
        self.executor, self.hasher = executor, Hasher.of(config)
        self.elastic = ElasticTrainings(problem)
        self.clock, self.frozen = VirtualClock(), problem.frozen
        blueprint = _blueprint(config, problem, noise_key)
        begin = partial(blueprint.engine, problem.initial)
        engine = begin(None)
        versions = Versions(engine, problem.frozen, config.downlink.parts == OWN)
        self.faults: Faults | None = None
        kept: Journal = journal
        if config.faults.on:
            self.faults = Faults(config.faults, config.run.seed, self.clock, self._names())
            kept = Disk(journal, begin, config.server.snapshot_every_updates, config.faults.takes_back)
        room = WaitingRoom(engine, config.limits, config.server.lapsed) if called_when_free(config) else None
        self.time = (SteppedTime if config.faults.clock_step_every_s else ServerTime)(self.clock)
        self.world = World(
            self.clock,
            engine,
            versions,
            kept,
            recorder,
            blueprint.codec_at,
            room=room,
            time=self.time,
            config=config,
            salt=_salt(config, noise_key),
        )
        self.server = self._serve()
        self.keepers = self._keepers()
        self.devices, self._newcomers = self._fleet()
        teller = ProgressReporter(progress or (lambda _: None), self.clock, versions, recorder.traffic_bytes)
        self.clock.beside = _beside(teller, checkpoint, self.clock)
        self.best = self._best()
        self._evaluator = Evaluator(
            config.run, self.clock, versions, executor, recorder, self.best, teller.measured
        )
        self.world.observers += (self._evaluator.observe, FirstVersion(versions, problem, config).observe)
        self.world.taken_back.append(self._evaluator.taken_back)

    @property
    def before_s(self) -> float:
        """Real seconds that the run took before it was broken off."""
        return 0.0 if self._checkpoint is None else self._checkpoint.wall_s

    @property
    def engine(self) -> Engine:
        """The server's; after a crash it is another."""
        return self.world.engine

    def run(self) -> None:
        """From time 0 to the end of the first budget."""
        self._evaluator.begin()
        if self.faults is not None:
            assert isinstance(self.server, Process)
            copies = Copies(self.devices, self.clock, self.faults.toss)
            self.faults.begin(copies.crash, self.server.crash)
            self.faults.copy_devices(copies.make)
            if self.keepers is not None:
                self.server.on_restart.append(self.keepers.restarted)
                self.faults.crash_keepers([k.name for k in self.keepers.all], self.keepers.crash)
            self.faults.fail_disk(self.server.disk.fill, self.server.backup, self.server.put_back)
            if isinstance(self.time, SteppedTime):
                self.faults.set_clock(self.time.step)
        standstill, until_s = Standstill(self.world), self._config.run.virtual_s_max or math.inf
        searched = self._newcomers is None or not is_large(self._config)
        with nullcontext() if searched else passed_over():
            self.begin_devices()
            self.clock.run(until_s)
        self.world.settle()
        self._is_idle = not self.clock.is_stopped and self.clock.now < until_s
        if (room := self.world.room) is not None and self._is_idle:
            standstill.ended(len(room))
        standstill.told(lambda device: self._problem.examples(device).not_finite())
        self._evaluator.finish()

    def begin_devices(self) -> None:
        """All that there are from the start come."""
        for device in self.devices:
            device.begin()
        if self._newcomers is not None:
            self._newcomers.begin(device_name)

    def clear(self) -> None:
        """Forget what was to come, who waits, and who hears of what happens, which holds the world."""
        self.clock.clear()
        self.world.refused.clear()
        self.world.rejected.clear()
        self.world.invalid.clear()
        self.world.observers.clear()
        self.world.vanished.clear()
        if self.world.room is not None:
            self.world.room.clear()

    def result(self, wall_s: float, status: Status = "finished", why: str = "") -> Result:
        """What the run came to, after `wall_s` real seconds."""
        self.world.settle()  # of one that was interrupted, too
        self._recorder.until(self.clock.now)
        found = self._recorder.result(
            digest(self.engine.vector), self._journal.sha256, wall_s, status, why or self._ended_by()
        )
        return found if self._checkpoint is None else replace(found, code=self._checkpoint.origin.code)

    def leave(self, result: Result, out: Path | None) -> None:
        """Tell the trackers; write the result, its page and the models into the folder, if there is one.

        Raises `FolderMissing` where that was taken away.
        """
        self._recorder.trackers.finish(result.to_json())
        if out is None:
            return
        if self._checkpoint is not None:
            self._checkpoint.check_folder()
        spec, best = self.engine.spec, self.best
        version, newest = self.engine.version, self._evaluator.newest
        measured = newest.metrics if newest is not None and newest.version == version else {}
        write_model(out / FINAL, spec.unflatten(self.engine.vector, self.frozen), version, measured)
        if best.model is not None and best.version is not None:
            tensors = spec.unflatten(best.model, self.frozen)
            write_model(out / BEST, tensors, best.version, best.metrics)
        write_report(result, out)
        self._journal.close()
        result.write(out)  # the last: by it the run has ended, and is given back as it lies there
        if self._checkpoint is not None and result.status == "finished":
            self._checkpoint.remove()

    def _ended_by(self) -> str:
        """What ended it; empty where the engine says so."""
        if self.engine.finished:
            return ""
        if self._evaluator.stopped:
            return "the target was reached"
        return NOTHING_MORE if self._is_idle else "the virtual time is up"

    def _names(self) -> list[str]:
        return [device_name(i) for i in range(self._config.fleet.clients)]

    def _serve(self) -> DirectServer:
        """The server as the devices meet it."""
        disk = self.world.disk
        if disk is None:
            return DirectServer(self.world)
        return Process(self.world, disk, self.clock, self._config.run.seed, self._config.faults)

    def _best(self) -> Best[Vector]:
        """What keeps the best version, and those that may be it again after a loss."""
        disk = self.world.disk
        oldest = disk.oldest_version if disk is not None and disk.takes_back else None
        return Best(Goal.of(self._config.run), oldest)

    def _keepers(self) -> Keepers | None:
        """Who unmasks, where anything is masked."""
        cohorts = self.engine.cohorts
        if cohorts is None:
            return None
        made = Keepers(cohorts.terms, self._config.run.seed, self.clock, self.server)
        self.world.observers.append(made.observe)
        return made

    def _fleet(self) -> tuple[list[Device], Newcomers | None]:
        """All devices; or none yet, and who come in their place."""
        config, seed = self._config, self._config.run.seed
        around, client = self._surroundings(), config.client
        _check_widths(self.engine.planner, around)
        settings = SessionSettings(
            client.retry_base_s,
            client.retry_cap_s,
            tasks_held_max=config.server.tasks_per_client,
            ask_with_push=client.push == ELASTIC,
        )
        session = OverlapSession if client.push == OVERLAP else Session
        device = ElasticDevice if client.push == ELASTIC else Device
        counts = array("q", map(self._problem.count, range(config.fleet.clients)))

        def make(index: int, name: str) -> Device:
            own = session(name, seed, settings)
            return device(index, counts[index], own, around, self._clock_of(name))

        if self.world.room is None or not come_as_rows(config):
            return [make(index, name) for index, name in enumerate(self._names())], None
        made: list[Device] = []

        def come(index: int, name: str) -> Device:
            made.append(make(index, name))
            return made[-1]

        return made, Newcomers(around, counts, come)

    def _surroundings(self) -> Surroundings:
        """What all devices share."""
        config, seed = self._config, self._config.run.seed
        trace = read_trace(config.fleet.trace) if config.fleet.trace else None
        self._recorder.energy = meter_of(self._problem.profiles, trace)
        return Surroundings(
            clock=self.clock,
            server=self.server,
            network=self.faults or PerfectNetwork(self.clock),
            lines=lines_of(self.clock, config.fleet, trace is not None and trace.has_rates),
            executor=self.executor,
            hasher=self.hasher,
            fleet=config.fleet,
            profiles=hurried(self._problem.profiles, config.fleet, seed),
            seed=seed,
            step_cost=self._problem.step_cost,
            horizon_s=config.run.virtual_s_max,
            time=self.time,
            push_steps=config.client.push_steps,
            elastic=self.elastic,
            frozen_bytes=frozen_size_bytes(self._problem.spec, config.run.frozen),
            storage=self._first_storage(),
            codecs=(*self._stages(), *([MASKING] if config.secagg.on else [])),
            arrivals=Arrivals.of(config.fleet, seed),
            trace=trace,
            energy=self._recorder.energy,
        )

    def _stages(self) -> tuple[str, ...]:
        """What devices say that they can do."""
        config = self._config
        parts = f"|{PARTS}" if config.downlink.parts == OWN else ""
        return simulated_stages(config.uplink.codec + parts)

    def _first_storage(self) -> Storage:
        """What a device has before it has met the server: version 0, where it builds that."""
        if self._config.run.initial != BUILT:
            return EMPTY
        disk = self.world.disk
        head = disk.head_of(0) if disk is not None and disk.takes_back else ""
        return Storage(self.world.versions.held(head), has_frozen=True)

    def _clock_of(self, client_id: str) -> DeviceClock:
        return RIGHT if self.faults is None else self.faults.clock_of(client_id)


def _salt(config: Config, noise_key: bytes | None) -> Callable[[str], str]:
    """What the records of a private run are salted with; of masked sums there is no secret to make it of."""
    return partial(record_salt, noise_key) if noise_key and salted(config) else lambda _: ""


def _blueprint(config: Config, problem: Problem, noise_key: bytes | None) -> Blueprint:
    """What a simulated engine is made by: its devices can mask, and may leave their updates without names."""
    shelf = ScratchShelf()
    return Blueprint.of(config, problem.spec, key=noise_key, masks=True, shelf=shelf, unnamed=True)


def _check_widths(planner: Planner | None, around: Surroundings) -> None:
    """Raises `ConfigError` where no device's memory bears any task: then nothing would be learned."""
    if why := too_narrow(planner, around.widest):
        raise ConfigError(f"no device of [fleet] could take part: the widest one's {why}")


def called_when_free(config: Config) -> bool:
    """Whether refused devices sleep until they are called. Raises `ConfigError` where messages get lost."""
    if config.fleet.waiting == "called" and config.faults.on:
        raise ConfigError("fleet.waiting = 'called' is for runs without [faults]: write 'ask' or 'auto'")
    many = is_large(config) and not config.faults.on
    return config.fleet.waiting == "called" or (config.fleet.waiting == "auto" and many)


def is_large(config: Config) -> bool:
    """Whether a fleet has more devices than may stand in a line."""
    return config.fleet.clients > config.limits.waiting_max


class ProgressReporter:
    """Says how far a run is: when something was measured, and every `PROGRESS_S` of real time.

    It knows the versions and not the world, which holds the evaluator and so this.
    """

    def __init__(
        self,
        tell: Tell,
        clock: VirtualClock,
        versions: Versions,
        traffic_bytes: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell_whom, self._clock, self._versions, self._now = tell, clock, versions, now
        self._traffic_bytes = traffic_bytes
        self._measured: MeasuredVersion | None = None
        self._due = now()

    def measured(self, measured: MeasuredVersion) -> None:
        """There is a new measurement."""
        self._measured = measured
        self._tell(evaluated=True)

    def beside(self) -> None:
        """An event was handled."""
        if self._now() >= self._due:
            self._tell(evaluated=False)

    def _tell(self, evaluated: bool) -> None:
        self._due = self._now() + PROGRESS_S
        engine, measured = self._versions.engine, self._measured
        metrics = {} if measured is None else measured.metrics
        self._tell_whom(
            RunProgress(
                virtual_s=self._clock.now,
                version=engine.version,
                updates=engine.counters.applied,
                rejected=engine.counters.rejected,
                accuracy=metrics.get("accuracy"),
                loss=metrics.get("loss"),
                evaluated=evaluated,
                metrics=metrics,
                traffic_bytes=self._traffic_bytes(),
                evaluated_version=None if measured is None else measured.version,
            )
        )


def _beside(teller: ProgressReporter, checkpoint: Checkpoint | None, clock: VirtualClock) -> Action:
    """What is done after every event."""
    if checkpoint is None:
        return teller.beside

    def beside() -> None:
        teller.beside()
        checkpoint.save_if_due(clock.now)

    return beside


def _check_noise(config: Config, key_on_record: bytes | None) -> None:
    """Raises `ConfigError` where a private run would put one noise on two sums; what is on record may."""
    for key in ("restore_every_s", "lost_tail"):
        if config.privacy.on and key_on_record is None and (value := getattr(config.faults, key)):
            raise ConfigError(
                f"faults.{key} = {value!r} has versions come again, with the same noise and other updates: a "
                "private run has none, leave it out"
            )


def _check_start(config: Config, start: Tensors | None) -> None:
    check_elastic(config)
    if start is not None:
        check_built(config, None)


def _check_digest(config: Config, keeps: bool) -> None:
    """Raises `ConfigError` where payloads shall have no digests, and are looked up by them."""
    if config.run.payload_digest != UNNAMED:
        check_algorithm(config.run.payload_digest)
    elif config.faults.on or config.secagg.on:
        raise ConfigError(
            f"run.payload_digest = {UNNAMED!r} is for runs without [faults], whose server reads payloads "
            "again, and without [secagg], whose updates keep their names: leave it out"
        )
    elif keeps and config.run.keep_payloads:
        raise ConfigError(
            f"run.payload_digest = {UNNAMED!r} leaves payloads without the names that they are kept by: set "
            "run.keep_payloads = false"
        )


def _need_budget(config: Config) -> None:
    run = config.run
    if not (run.versions_max or run.updates_max or run.virtual_s_max):
        raise ConfigError(
            "a simulation needs an end: set run.virtual_s_max, run.versions_max or run.updates_max"
        )
