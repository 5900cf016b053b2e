"""A server of several runs in a thread, and devices of its jobs that speak the protocol by hand."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from server_thread import ServerThread
from wire import CALL_S, Device, server_config

from anabranch.api.jobs import add_job, read_job
from anabranch.client.channel import open_channel
from anabranch.client.listed import ListedJob
from anabranch.client.operator import OperatorClient, open_operator
from anabranch.core.config.tables import Config
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.params import ParamSpec
from anabranch.server.hosting import HostInfo, serve_jobs
from anabranch.server.job import JobState
from anabranch.server.manifest import write_manifest

FIRST = {"w": np.zeros((3, 4), np.float32)}
# The model is the sum of all deltas.
SETTINGS = """
[strategy]
name = "fedbuff"
buffer_size = 1
server_lr = 1.0
staleness = { name = "constant" }
"""
UNHELD = "[limits]\nearly_calls_at_once = 1000\n"


def with_job(
    folder: Path, name: str, settings: str = "", devices: tuple[str, ...] = (), bundle: Path | None = None
) -> Path:
    """A job of a small model in `folder`/jobs."""
    model = folder / "model"
    if not model.exists():
        write_manifest(model, "test", FIRST)
    file = folder / f"{name}.toml"
    file.write_text(SETTINGS + settings)
    return add_job(folder / "jobs", name, file, model, devices, bundle)


def spec() -> ParamSpec:
    """The layout of their model."""
    return ParamSpec.of(FIRST)


class Host(ServerThread):
    """Serves the jobs of `folder`/jobs: started by `with`, drained at its end."""

    def __init__(self, folder: Path, limits: Limits = DEFAULT_LIMITS, **tables: Mapping[str, Any]) -> None:
        super().__init__("test-jobs")
        self.folder = folder / "jobs"
        config = server_config(folder / "nowhere", **tables)
        self.config: Config = replace(config, limits=limits)
        self.said: list[tuple[str, JobState, str]] = []
        self._heard = threading.Condition()
        self._stack = ExitStack()
        self._info: HostInfo | None = None

    @property
    def info(self) -> HostInfo:
        """Where it serves."""
        assert self._info is not None
        return self._info

    def close(self) -> int | None:
        """See `ServerThread`; who speaks to it hangs up before."""
        self._stack.close()
        return super().close()

    def until(self, name: str, state: JobState) -> str:
        """Wait until a job stands like that; returns why it does."""

        def stands() -> bool:
            return (name, state) == next(((n, s) for n, s, _ in reversed(self.said) if n == name), None)

        with self._heard:
            assert self._heard.wait_for(stands, CALL_S), self.said
            return next(why for n, _, why in reversed(self.said) if n == name)

    def device(self, job: str, client_id: str = "device-1") -> Device:
        """A device of a job, not enrolled yet."""
        return device_of(self._stack, f"{self.info.address}/{job}" if job else self.info.address, client_id)

    def operator(self, job: str = "") -> OperatorClient:
        """An operator of a job, or of none."""
        address = self.info.admin_address
        return self._stack.enter_context(open_operator(f"{address}/{job}" if job else address, None))

    def jobs(self) -> dict[str, ListedJob]:
        """As the server lists them."""
        return {job.name: job for job in self.operator().jobs()}

    async def _serve(self) -> int:
        read = partial(read_job, self.config)
        return await serve_jobs(
            self.folder, self.config, read, ready=self._serves, told=self._tell, stop=self._stop
        )

    def _serves(self, info: HostInfo) -> None:
        self._info = info
        self._ready.set()

    def _tell(self, name: str, state: JobState, why: str) -> None:
        with self._heard:
            self.said.append((name, state, why))
            self._heard.notify_all()


def device_of(stack: ExitStack, address: str, client_id: str) -> Device:
    """A device at an address, which may name a job."""
    channel = open_channel(address)
    stack.callback(channel.close)
    return Device(channel, spec(), client_id)
