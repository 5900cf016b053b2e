"""The process of a server of several runs: opens the ports, looks after the jobs, drains in the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from anabranch.core.config.tables import ENVIRONMENT, Config
from anabranch.core.errors import ConfigError
from anabranch.server.app import close_ports, identity_of, placed
from anabranch.server.exposition import Exposition
from anabranch.server.job_folder import OF_THE_HOST
from anabranch.server.job_metrics import registry_of
from anabranch.server.job_ports import JobPorts
from anabranch.server.jobs import LOOK_S, Jobs, ReadJob, Told
from anabranch.server.metrics import Metrics
from anabranch.server.notify import READY, STOPPING, beat_s, keep_alive, notify
from anabranch.server.seen_register import check_register
from anabranch.server.tls import ServerIdentity
from anabranch.support.heap import bound_heap, use_small_pages
from anabranch.support.stop_signals import call_on_signals, stop_signals

log = logging.getLogger(__name__)

# What a server of jobs goes by of its own settings: whole tables, and keys.
HEARD = ("identity", "limits")
HEARD_KEYS = tuple(f"server.{key}" for key in (*OF_THE_HOST, "metrics_address"))


@dataclass(frozen=True)
class HostInfo:
    """Where jobs are served; see `ServerInfo`."""

    address: str
    admin_address: str
    metrics_address: str = ""
    join_address: str = ""
    ca_sha256: str = ""


async def serve_jobs(
    folder: Path,
    config: Config,
    read: ReadJob,
    *,
    ready: Callable[[HostInfo], None] | None = None,
    told: Told | None = None,
    stop: asyncio.Event | None = None,
    insecure: bool = False,
) -> int:
    """Serve the jobs of a folder until SIGTERM, SIGINT or `stop`; returns the exit code, 0.

    Of `config`, `[server]` says where, `[identity]` who may call and `[limits]` what the ports bear; the rest
    is each job's own. `ready`: the ports take calls, and jobs come. `told`: see `Told`. Raises `ConfigError`
    and `PortInUse`; what is wrong with a job is said and stops nothing else.
    """
    if config.server.standby:
        raise ConfigError("a server of jobs cannot stand by for another: leave server.standby out")
    _say_unheard(config)
    config = placed(config)
    identity = identity_of(config, insecure, time.time)
    bound_heap()
    use_small_pages()
    stop, metrics = stop or asyncio.Event(), Metrics()
    call_on_signals(stop.set, *stop_signals())
    jobs = Jobs(folder, read, identity, told, time.time)
    ports = JobPorts(jobs, config, config.limits, identity, insecure, metrics)
    async with contextlib.AsyncExitStack() as stack:
        if identity is not None:
            stack.callback(identity.close)
            _keep_register(jobs.folder, identity)
        port = _exposed(config.server.metrics_address, metrics, jobs)
        if port is not None:
            stack.push_async_callback(port.close)
        await ports.open()
        stack.push_async_callback(ports.close, 0)
        stack.push_async_callback(jobs.close)
        alive = asyncio.create_task(keep_alive(jobs.writers, beat_s()))
        stack.callback(alive.cancel)
        notify(READY, f"STATUS=serving jobs on {ports.address}")
        if ready is not None:
            ca = "" if identity is None else identity.authority.sha256
            shown = "" if port is None else port.address
            ready(HostInfo(ports.address, ports.admin_address, shown, ports.join_address, ca))
        while not stop.is_set():
            await jobs.look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await stop.wait()
        notify(STOPPING)
        jobs.drain()
        await close_ports(ports, config.server.drain_s)
    log.info("drained")
    return 0


def _keep_register(folder: Path, identity: ServerIdentity) -> None:
    """In one place for all jobs, whose own data have it from their starts and ends alone."""
    if folder.is_dir():
        check_register(folder, identity.authority, identity.members.point)
    identity.note_in(folder)


def _say_unheard(config: Config) -> None:
    # What the environment says it says to all jobs.
    said = [path for path, source in config.sources.items() if not source.startswith(ENVIRONMENT)]
    unheard = [path for path in said if path not in HEARD_KEYS and path.partition(".")[0] not in HEARD]
    if unheard:
        log.warning(
            "%s: a server of jobs does not go by that, each job has its own settings: see `anabranch admin "
            "jobs add`",
            ", ".join(sorted(unheard)),
        )


def _exposed(address: str, metrics: Metrics, jobs: Jobs) -> Exposition | None:
    return Exposition(registry_of(metrics, jobs), address) if address else None
