"""A device that serves whatever job its server has for it, one after another.

Each job is worked at by a process of its own, with a state folder of its own below the device's: code of one
job is never beside that of another, and what fails there fails alone. This process asks which jobs there are,
starts the first that may be started, and ends it once the server does not list it any more.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc

from anabranch.client.bundles import BundleFiles
from anabranch.client.channel import CONTROL_S, StallGuard
from anabranch.client.link import Link
from anabranch.client.listed import ListedBundle, ListedJob, read_jobs
from anabranch.client.run import ClientOptions, device_wallet
from anabranch.client.state import JOBS, device_id, fresh_seed, locked
from anabranch.client.stopping import Bell, Interrupted, interruptible, persist
from anabranch.client.waiting import WaitingNotice
from anabranch.client.windows import window_from_proto
from anabranch.core.backoff import backed_off_s
from anabranch.core.errors import AnabranchError, ConfigError, ProtocolError, outcome_of
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.rng import rank
from anabranch.identity.addresses import parse_addresses
from anabranch.identity.bundle import check_allowed
from anabranch.protos.v1 import jobs_pb2 as jobs_pb
from anabranch.protos.v1.jobs_pb2_grpc import JobsStub
from anabranch.workloads.bundled import bundled_spec

log = logging.getLogger(__name__)

ONLY_JOB = "run"  # in the folder of jobs: the job of a server of one run
AGAIN_S, AGAIN_MAX_S = 30.0, 3600.0  # until a job that this device failed at is tried again
LOOK_AGAIN_S = (5.0, 15.0)  # where its server says no window
END_S = 60.0  # for a device to end, then it is killed


@dataclass(frozen=True)
class Listing:
    """What a device may do now, and when it should look again: (earliest, latest) in seconds."""

    jobs: list[ListedJob]
    look_again_s: tuple[float, float]


class JobOffice:
    """Where a device asks what there is to do."""

    def __init__(self, link: Link, client_id: str) -> None:
        self._link, self._client_id = link, client_id

    def listing(self) -> Listing:
        """The jobs of the moment. Raises `ConfigError` for a server of before there were any."""
        try:
            with self._link.calling(first=True):
                answer = self._stub().ListJobs(
                    jobs_pb.ListJobsRequest(client_id=self._client_id), timeout=CONTROL_S
                )
        except ProtocolError as error:
            cause: Any = error.__cause__
            if isinstance(cause, grpc.RpcError) and cause.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise ConfigError(
                    f"{self._link.address} knows of no jobs: install the same version of anabranch there"
                ) from None
            raise
        return Listing(read_jobs(answer), window_from_proto(answer.look_again, LOOK_AGAIN_S))

    def bundle(self, job: ListedJob, bundle: ListedBundle, offset: int) -> Iterator[tuple[int, bytes]]:
        """The bytes of a job's bundle from an offset on, each piece with where it begins."""
        request = jobs_pb.FetchBundleRequest(
            client_id=self._client_id, job=job.name, sha256=bytes.fromhex(bundle.sha256), offset=offset
        )
        stub = self._stub()
        with self._link.calling():
            call: Any = stub.FetchBundle(request)
            with StallGuard(call.cancel, DEFAULT_LIMITS.upload_idle_s) as guard:
                for piece in call:
                    guard.moved()
                    yield piece.offset, piece.data

    def _stub(self) -> JobsStub:
        """With the certificate of the moment."""
        self._link.stub()
        return JobsStub(self._link.servers.current.channel)


class Worker(Protocol):
    """A process of a job, as `subprocess` has it."""

    def poll(self) -> int | None:
        """Its exit code once it has ended."""
        ...

    def terminate(self) -> None:
        """Have it end in good order."""
        ...

    def kill(self) -> None:
        """End it."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises `subprocess.TimeoutExpired`."""
        ...


# Starts a device of a job: (job, its App, the device's name, the folder of its papers or None, its state
# folder).
Begin = Callable[[ListedJob, str, str, Path | None, Path], Worker]


@dataclass
class Rota:
    """Which job a device has, and which it has failed at. `now` is a clock of seconds."""

    now: Callable[[], float] = time.monotonic
    _failures: dict[str, int] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)

    def next(self, jobs: list[ListedJob]) -> ListedJob | None:
        """The first that may be begun."""
        return next((job for job in jobs if self.now() >= self._not_before.get(job.name, 0.0)), None)

    def done(self, name: str, code: int, look_again_s: float) -> None:
        """A job's process has ended: it begins anew after a while, after a longer one if it failed."""
        failures = self._failures[name] = self._failures.get(name, 0) + 1 if code else 0
        wait_s = backed_off_s(AGAIN_S, AGAIN_MAX_S, failures - 1) if failures else look_again_s
        self._not_before[name] = self.now() + wait_s


OnJob = Callable[..., None]


def serve_jobs(
    options: ClientOptions,
    begin: Begin,
    tell: OnJob,
    bell: Bell,
    signers: Collection[str] = (),
) -> None:
    """Work at the server's jobs until SIGTERM, SIGINT or `bell.stop()`. Raises `ConfigError` and the like.

    `tell`: hears "begun", "ended", "waiting" and "left", and of bundles "opened" and "unopened". Of the
    options, the App and the state folder are each job's. `signers`: a job's App is that of its bundle where
    one of these has signed it, else the one of the options; where those name none, the job is left alone.
    """
    for address in parse_addresses(options.server):
        if "/" in address:
            raise ConfigError(f"--server {address} names a job, and --jobs takes them all: leave one out")
    try:
        wallet = device_wallet(options, bell)
    except Interrupted:  # while it waited to join
        return
    client_id = device_id(options.state_dir, options.client_id if wallet is None else wallet.name)
    link = Link(options.server, wallet=wallet)
    papers = None if wallet is None else wallet.folder
    office = JobOffice(link, client_id)
    rounds = _Rounds(options, office, _Apps(options, office, signers, tell), bell, tell)
    below = options.state_dir / JOBS
    try:
        with locked(options.state_dir), interruptible(bell):
            rounds.go(lambda job, app: begin(job, app, client_id, papers, below / (job.name or ONLY_JOB)))
    except Interrupted:
        return
    finally:
        link.close()


class _Apps:
    """Which App a device runs for a job: the one of its bundle, or its own."""

    def __init__(
        self, options: ClientOptions, office: JobOffice, signers: Collection[str], tell: OnJob
    ) -> None:
        self._own, self._signers, self._office, self._tell = options.app, signers, office, tell
        self._files = BundleFiles(options.state_dir, signers)

    def of(self, job: ListedJob, jobs: list[ListedJob]) -> str:
        """Its name. Raises `ConfigError` where there is none, and as `BundleFiles.prepare`."""
        bundle = job.bundle
        if bundle is not None and bundle.signer in self._signers:
            self._files.keep({other.bundle.sha256 for other in jobs if other.bundle is not None})
            folder, opened = self._files.prepare(self._office, job, bundle)
            name = opened.manifest.name
            self._tell("opened", job=job.name, bundle=name, sha256=opened.sha256, signer=opened.signer)
            return bundled_spec(folder, opened.manifest.entry)
        if not self._own:
            if bundle is not None:
                check_allowed(bundle.signer, self._signers)
            raise ConfigError("it has no bundle, and this device has no App of its own")
        if bundle is not None:
            self._tell("unopened", job=job.name, signer=bundle.signer, app=self._own)
        return self._own


class _Rounds:
    def __init__(
        self, options: ClientOptions, office: JobOffice, apps: _Apps, bell: Bell, tell: OnJob
    ) -> None:
        self._options, self._office, self._apps, self._bell, self._tell = options, office, apps, bell, tell
        self._rota, self._seed, self._rests = Rota(bell.now), fresh_seed(), 0
        self._waiting = WaitingNotice(options.server)

    def go(self, begin: Callable[[ListedJob, str], Worker]) -> None:
        idle = False
        while True:
            listing = self._listed()
            job = self._rota.next(listing.jobs)
            if job is None:
                if not idle:
                    self._tell("waiting", jobs=[j.name for j in listing.jobs])
                idle = True
                self._rest(listing)
                continue
            app = self._app(job, listing)
            if app is None:
                continue
            idle = False
            self._tell("begun", job=job.name, app=job.app)
            code = self._work(job, begin(job, app))
            self._rota.done(job.name, code, listing.look_again_s[1])
            self._tell("ended", job=job.name, code=code)

    def _app(self, job: ListedJob, listing: Listing) -> str | None:
        """The App for a job; None: it cannot be had now, and other jobs are not kept waiting."""
        try:
            return self._apps.of(job, listing.jobs)
        except AnabranchError as error:
            outcome = outcome_of(error)
            self._rota.done(job.name, 0 if outcome.retryable else outcome.exit_code, listing.look_again_s[1])
            self._tell("left", job=job.name, why=str(error))
            return None

    def _work(self, job: ListedJob, worker: Worker) -> int:
        """Until the process ends, or the server does not list its job any more. Returns its exit code."""
        try:
            while (code := worker.poll()) is None:
                listing = self._listed()
                if job.name not in [listed.name for listed in listing.jobs]:
                    break
                self._rest(listing, worker)
            return _ended(worker) if code is None else code
        except BaseException:
            _ended(worker)
            raise

    def _listed(self) -> Listing:
        table = self._options
        found = persist(
            self._office.listing,
            self._bell,
            self._seed,
            table.retry_base_s,
            table.retry_cap_s,
            self._waiting.failed,
        )
        self._waiting.answered()
        return found

    def _rest(self, listing: Listing, worker: Worker | None = None) -> None:
        """As long as the server said, or until the process has ended."""
        self._rests += 1
        low, high = listing.look_again_s
        until = self._bell.now() + low + (high - low) * rank(self._seed, "look", self._rests)
        while (left := until - self._bell.now()) > 0 and (worker is None or worker.poll() is None):
            self._bell.rest(left if worker is None else min(left, 0.2))


def _ended(worker: Worker) -> int:
    """End a process, in good order if it will. Returns its exit code."""
    worker.terminate()
    try:
        code = worker.wait(END_S)
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()
    return 0 if code == -signal.SIGTERM else code  # it was not up yet, or had said its last word
