"""Serves several runs from one process: each folder in a folder is a job, with a run of its own.

A job has its own store, lock, engine, writer and log, in its own data folder; ports, authority and limits of
connections are shared. The folder is looked at every second: a job that came is recovered and served, one
that is stopped or gone is drained and closed. What stops one job stops no other: it is said, and tried again
after a while, as a service manager would start a server again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from anabranch.core.backoff import backed_off_s
from anabranch.core.clock import Seconds
from anabranch.core.config.tables import Config
from anabranch.core.errors import AnabranchError, ConfigError, Unavailable
from anabranch.host.parts import ENGINE_PARTS
from anabranch.server.app import Means, RunEnded, check_done, checked_store, led_run, until_over
from anabranch.server.bundles import offered_in
from anabranch.server.job import HostedJob, JobState
from anabranch.server.job_folder import DATA, JobNote, names_in, note_of
from anabranch.server.manifest import Manifest
from anabranch.server.metrics import Metrics
from anabranch.server.recovery import recover
from anabranch.server.run import LiveRun
from anabranch.server.standby import Tenure
from anabranch.server.tls import ServerIdentity
from anabranch.server.writer import Writer
from anabranch.support.folders import from_root
from anabranch.support.job import JOB
from anabranch.support.own_parts import told_part

log = logging.getLogger(__name__)

LOOK_S = 1.0  # so often the folder is looked at
AGAIN_S, AGAIN_MAX_S = 5.0, 300.0  # until a job that failed is tried again, twice as long each time

# The settings of a job's folder, with the data folder and the ports that it is served on, and its model.
ReadJob = Callable[[Path, Path], tuple[Config, Manifest]]


# Of a job: what has become of it, and why where there is something to say.
Told = Callable[[str, JobState, str], None]


class Jobs:
    """Those of a folder. For the event loop's thread. `wall`, `identity`: see `server/app.py`."""

    def __init__(
        self,
        folder: Path,
        read: ReadJob,
        identity: ServerIdentity | None,
        told: Told | None = None,
        wall: Seconds = time.time,
    ) -> None:
        self.folder = from_root(folder)
        self._read, self._identity, self._wall = read, identity, wall
        self._told = told
        self._jobs: dict[str, HostedJob] = {}
        self._unread = ""  # what is wrong with the folder

    def all(self) -> list[HostedJob]:
        """In the order in which they were added."""
        return sorted(self._jobs.values(), key=lambda job: (job.note.added_at, job.name))

    def running(self) -> list[tuple[HostedJob, LiveRun]]:
        """Those that are served."""
        return [(job, job.run) for job in self.all() if job.run is not None]

    def writers(self) -> list[Writer]:
        """Of those that are served."""
        return [run.writer for _, run in self.running()]

    @contextmanager
    def calling(self, name: str) -> Iterator[tuple[HostedJob, LiveRun]]:
        """The job of a call, which ends before the job does. Raises `ConfigError`, `Unavailable`."""
        if not name:
            raise ConfigError("this server serves several jobs: name one in its address, as HOST:PORT/JOB")
        job = self._jobs.get(name)
        if job is None or job.run is None:
            says = "`anabranch admin jobs list` says which there are, and how they stand"
            raise Unavailable(f"no job {name!r} is served here now: {says}")
        job.calls += 1
        job.idle.clear()
        try:
            yield job, job.run
        finally:
            job.calls -= 1
            if not job.calls:
                job.idle.set()

    async def look(self) -> None:
        """Begin and end what the folder says. Raises nothing for what is wrong with one job."""
        found = await asyncio.to_thread(self._notes)
        for name, note in found.items():
            job = self._jobs.setdefault(name, HostedJob(self.folder / name))
            if isinstance(note, AnabranchError):
                self._say_unread(job, str(note))
                continue
            if job.unread:
                self._read_again(job)
            if job.run is not None and job.note.devices != note.devices:
                job.run.streams.end()  # who goes on opens another, if the job is still for it
            job.note = note
            if note.stopped:
                self._end(job)
            elif job.task is None and time.monotonic() >= job.not_before:
                self._begin(job)
        for name in self._jobs.keys() - found.keys():
            job = self._jobs[name]
            self._end(job)
            if job.task is None:
                del self._jobs[name]

    async def close(self) -> None:
        """End all of them, and wait."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for job in self._jobs.values():
            job.stop.set()
        await asyncio.gather(*tasks)

    def drain(self) -> None:
        """Hand out no more tasks, and let streams end."""
        for _, run in self.running():
            run.drain()

    def _notes(self) -> dict[str, JobNote | AnabranchError]:
        """What the folder says of each. A folder that cannot be read says what it said last."""
        try:
            names = names_in(self.folder)
        except AnabranchError as error:
            if self._unread != str(error):
                self._unread = str(error)
                log.warning("no job comes or goes, as the folder cannot be read: %s", error)
            return {job.name: job.note for job in self.all()}
        self._unread = ""
        return {name: _note(self.folder / name) for name in names}

    def _begin(self, job: HostedJob) -> None:
        job.stop = asyncio.Event()
        job.idle.set()
        self._now(job, JobState.STARTING)
        job.task = asyncio.create_task(self._serve(job), name=f"anabranch-job-{job.name}")

    def _end(self, job: HostedJob) -> None:
        job.stop.set()
        if job.task is None:
            job.failures, job.not_before = 0, 0.0
            self._now(job, JobState.STOPPED)

    async def _serve(self, job: HostedJob) -> None:
        """Until it is stopped, or its writer is. Raises nothing."""
        JOB.set(job.name)
        try:
            await self._lead(job)
        except Exception as error:
            if not isinstance(error, AnabranchError):
                log.exception("a bug has stopped it")
            self._failed(job, error)
        finally:
            job.run = job.metrics = job.task = None

    async def _lead(self, job: HostedJob) -> None:
        config, manifest = await asyncio.to_thread(self._read, job.path, job.path / DATA)
        job.bundle = await asyncio.to_thread(offered_in, job.path)
        job.app, limits, metrics = manifest.app, config.limits, Metrics()
        store = checked_store(config.server, limits)
        try:
            async with Tenure(store) as tenure:
                begin = partial(recover, store, config, manifest, limits, self._wall)
                recovered = await asyncio.to_thread(begin)
                means = Means(limits, self._identity, self._wall, metrics)
                led = led_run(store, recovered, config, manifest, means, tenure)
                del manifest, recovered, begin  # the first weights are in the engine
                async with led as run:
                    await self._open(job, run, metrics)
        finally:
            store.close()

    async def _open(self, job: HostedJob, run: LiveRun, metrics: Metrics) -> None:
        job.run, job.metrics, job.failures = run, metrics, 0
        self._now(job, JobState.RUNNING)

        def ended(end: RunEnded) -> None:
            self._now(job, JobState.ENDED, end.why)

        await until_over(run, job.stop, ended, lambda: self._now(job, JobState.RUNNING))
        job.run = None
        run.drain()
        if run.writer.failure is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(run.config.server.drain_s):
                    await job.idle.wait()
        check_done(run)

    def _failed(self, job: HostedJob, error: Exception) -> None:
        """It is tried again, unless it is stopped."""
        wait_s = backed_off_s(AGAIN_S, AGAIN_MAX_S, job.failures)
        job.failures, job.not_before = job.failures + 1, time.monotonic() + wait_s
        if isinstance(error, AnabranchError):
            said = str(error)
        elif found := told_part(error, ENGINE_PARTS):
            said, *_ = str(found).splitlines()  # which part, where; its lines are in the log's traceback
        else:
            said = f"{type(error).__name__}: {error}"
        self._say_failed(job, wait_s, said)

    def _say_unread(self, job: HostedJob, said: str) -> None:
        """One that is served goes on as it was told last, and whoever has changed its note is to know."""
        if job.task is None:
            self._say_failed(job, LOOK_S, said)
        elif job.unread != said:
            job.unread = said
            log.warning("job %s goes on as it was told before: %s", job.name, said)
            if job.state is JobState.RUNNING:
                self._now(job, JobState.RUNNING, f"as it was told before: {said}")

    def _read_again(self, job: HostedJob) -> None:
        job.unread = ""
        if job.state is JobState.RUNNING:
            self._now(job, JobState.RUNNING)

    def _say_failed(self, job: HostedJob, wait_s: float, said: str) -> None:
        if (job.state, job.why) != (JobState.FAILED, said):
            log.error("job %s has failed, and is tried again in %.0f s: %s", job.name, wait_s, said)
        self._now(job, JobState.FAILED, said)

    def _now(self, job: HostedJob, state: JobState, why: str = "") -> None:
        if job.told and (job.state, job.why) == (state, why):
            return
        job.state, job.why, job.told = state, why, True
        if self._told is not None:
            self._told(job.name, state, why)


def _note(job: Path) -> JobNote | AnabranchError:
    try:
        return note_of(job)
    except AnabranchError as error:
        return error
