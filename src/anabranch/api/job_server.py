"""`JobServer`: a server of several runs in this process, and `ServedJob`, one of them."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Unpack

from anabranch.api.configuration import load_config
from anabranch.api.jobs import add_job, read_job
from anabranch.api.listening import Listening
from anabranch.api.live import ANY_PORT
from anabranch.api.objects import RunObjects, Settings, Source, check_settings, plan_run, setting_layers
from anabranch.api.operated import Operated, first_model, run_of_data
from anabranch.api.run import Run
from anabranch.api.temporary import folder_at
from anabranch.client.operator import OperatorClient
from anabranch.core.errors import ConfigError, FolderMissing, Unavailable
from anabranch.core.spelling import spelled
from anabranch.identity.addresses import checked_job
from anabranch.identity.files import write_private
from anabranch.server.job import JobState
from anabranch.server.job_folder import DATA, SETTINGS, names_in, note_of, set_stopped
from anabranch.workloads.app import App

FREE_PORTS = ("a free port", {"server": {"address": ANY_PORT, "admin_address": ANY_PORT}})
SERVED = frozenset({JobState.RUNNING, JobState.ENDED})
STOPPED, ENDED = frozenset({JobState.STOPPED}), frozenset({JobState.ENDED})
HOPELESS = frozenset({JobState.FAILED, JobState.STOPPED})


class JobServer(Listening):
    """Serves every job of a folder while its context lasts: `with JobServer("jobs") as server: ...`.

    It is `anabranch server --jobs`, in a thread: docs/jobs.md says what it promises. `folder`: where the jobs
    lie, and go on from; None: a temporary one. `config`: the server's own file of settings, and `settings`
    over it, `{"limits.rpcs_max": 500}`: `[server]` says where it is served, `[identity]` who may call,
    `[limits]` what the ports bear. Where nobody names its addresses they are on loopback, on ports that are
    free; `insecure` is as for `Server`. Raises `ConfigError`, and when it starts `PortInUse`; what is wrong
    with one job stops nothing else.
    """

    @spelled()
    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        address: str | None = None,
        admin_address: str | None = None,
        insecure: bool = False,
        config: str | Path | None = None,
        settings: Settings | None = None,
    ) -> None:
        super().__init__("anabranch-job-server")
        check_settings(settings or {})
        given = {"server.address": address, "server.admin_address": admin_address, **(settings or {})}
        said = {path: value for path, value in given.items() if value is not None}
        self.config = load_config(config, presets=[FREE_PORTS], flags=setting_layers(said))
        at, self.holds = folder_at(folder)
        if at.exists() and not at.is_dir():
            raise ConfigError(f"{at} is a file: name the folder of the jobs")
        self.folder = at / "jobs" if self.holds else at
        self.insecure = insecure
        self._jobs: dict[str, ServedJob] = {}
        self._heard = threading.Condition()
        self._said: dict[str, tuple[JobState, str]] = {}
        self._done = False

    @spelled(RunObjects)
    def add(
        self,
        name: str,
        source: Source,
        *,
        devices: Sequence[str] = (),
        bundle: str | Path | None = None,
        **objects: Unpack[RunObjects],
    ) -> ServedJob:
        """Put a job into the folder; it begins within seconds, once the server runs.

        `source` and the objects are those of `Server`; `devices`: a list of the names of those that may serve
        it, or of patterns such as `ward-*`; none for all. `bundle`: the file from which they may have the
        App. Raises `ConfigError` and `AppError`.
        """
        plan = plan_run(source, objects, ends=False, name=checked_job(name))
        app = plan.load_app()
        with tempfile.TemporaryDirectory() as made:
            settings, model = Path(made) / SETTINGS, Path(made) / "model"
            write_private(settings, plan.config.to_toml(clear=True).encode())
            first_model(app, plan.config, model)
            add_job(self.folder, name, settings, model, devices, None if bundle is None else Path(bundle))
        job = self._jobs[name] = ServedJob(self, name, app)
        return job

    def job(self, name: str) -> ServedJob:
        """One of the folder. Raises `FolderMissing`, `DataError` and `ConfigError`."""
        note_of(self.folder / checked_job(name))
        return self._jobs.setdefault(name, ServedJob(self, name))

    def jobs(self) -> list[ServedJob]:
        """All of them, by their names. Raises `DataError`."""
        try:
            return [self.job(name) for name in names_in(self.folder)]
        except FolderMissing:  # the first one makes it
            return []

    def stands(self, name: str) -> tuple[JobState | None, str]:
        """What a job does, and why where there is something to say; None: nothing was heard of it yet."""
        with self._heard:
            return self._said.get(name, (None, ""))

    def until(
        self,
        name: str,
        states: frozenset[JobState],
        timeout_s: float | None = None,
        hopeless: frozenset[JobState] = HOPELESS,
    ) -> None:
        """Wait until a job stands so.

        Raises `Unavailable` where it comes to a hopeless state instead, or when the time is up; and what
        stopped the server.
        """
        _ = self._served  # it runs, or did
        over = states | hopeless
        with self._heard:
            within = self._heard.wait_for(lambda: self._done or self.stands(name)[0] in over, timeout_s)
            state, why = self.stands(name)
        if state in states:
            return
        self._raise()
        if not within:
            raise Unavailable(f"job {name!r} is not {' or '.join(sorted(states))} within {timeout_s:g} s")
        if state is JobState.FAILED:
            raise Unavailable(f"job {name!r} has failed, and is tried again: {why}")
        whole = "it" if state is JobState.STOPPED else "the server"
        raise Unavailable(f"job {name!r} is not served: {whole} is stopped")

    @property
    def running(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    def _over_now(self) -> None:
        with self._heard:
            self._done = True
            self._heard.notify_all()

    async def _serve(self, stop: asyncio.Event) -> None:
        from anabranch.server.hosting import serve_jobs

        await serve_jobs(
            self.folder,
            self.config,
            partial(read_job, self.config),
            ready=self._serving,
            told=self._tell,
            stop=stop,
            insecure=self.insecure,
        )

    def _tell(self, name: str, state: JobState, why: str) -> None:
        with self._heard:
            self._said[name] = (state, why)
            self._heard.notify_all()


class ServedJob(Operated):
    """A job of a `JobServer`, for `Client(app, job)` too. What is asked of it waits until it is served."""

    def __init__(self, server: JobServer, name: str, app: App | None = None) -> None:
        self.server, self.name, self._app = server, name, app

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.server.folder / self.name

    @property
    def state(self) -> str:
        """`starting`, `running`, `ended`, `stopped` or `failed`; empty: nothing was heard of it yet."""
        return self.server.stands(self.name)[0] or ""

    @property
    def why(self) -> str:
        """Why it has ended or failed."""
        return self.server.stands(self.name)[1]

    @property
    def address(self) -> str:
        """Where devices reach it: `host:port/job`."""
        return f"{self.server.address}/{self.name}"

    @property
    def admin_address(self) -> str:
        """Where operators do."""
        return f"{self.server.admin_address}/{self.name}"

    @property
    def join_address(self) -> str:
        """See `JobServer`."""
        return self.server.join_address

    @property
    def insecure(self) -> bool:
        """See `Operated`."""
        return self.server.insecure

    def operator(self, identity: str | Path | None = None) -> OperatorClient:
        """See `Operated`. Raises `Unavailable` where it has failed, or is stopped."""
        self.server.until(self.name, SERVED)
        return super().operator(identity)

    def wait(self, timeout_s: float | None = None) -> None:
        """Until its run has ended: the last version is served on. Raises `Unavailable`: see `operator`."""
        self.server.until(self.name, ENDED, timeout_s)

    async def wait_async(self, timeout_s: float | None = None) -> None:
        """The same, while other tasks go on."""
        await asyncio.to_thread(self.wait, timeout_s)

    def stop(self) -> None:
        """Drain it and close its data, until `start`; the other jobs go on. Harmless to repeat."""
        set_stopped(self.folder, True)
        if self.server.running:
            self.server.until(self.name, STOPPED, hopeless=frozenset())

    def start(self) -> None:
        """Let it go on where it was stopped. Harmless to repeat."""
        if set_stopped(self.folder, False) and self.server.running:
            self.server.until(self.name, frozenset(JobState) - STOPPED, hopeless=frozenset())

    def report(self, out: str | Path | None = None) -> Run:
        """The run, once the job or its server has stopped: see `Server.report`."""
        if self.server.running and self.state != JobState.STOPPED:
            raise ConfigError(
                f"job {self.name!r} is served: call its stop(), or the server's, before report()"
            )
        config, _ = read_job(self.server.config, self.folder, self.folder / DATA)
        data_dir = Path(config.server.data_dir)
        return run_of_data(data_dir, config.server.database, self._app, out, self.server.holds)
