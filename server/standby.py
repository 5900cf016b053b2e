"""Servers that share a database: one waits for its turn, one has it and must keep it (docs/durability.md).

The store decides who leads (`Store.lease_s`, `renew`). Here is what a process does about it: a standby says
NOT_SERVING until its turn comes; a leader says every quarter of its lease that it lives, and stops when it
hears that another has taken over, or when it has heard nothing from the database for a whole lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any

import grpc

from anabranch.core.config.tables import Config, ServerTable
from anabranch.core.errors import (
    AnabranchError,
    ConfigError,
    LeadershipLost,
    StoreError,
    StoreLocked,
    StoreUnreachable,
    Unavailable,
)
from anabranch.host.standstill import Pause
from anabranch.reports.text import duration_text
from anabranch.server.notify import READY, notify
from anabranch.server.ports import NOT_SERVING, Ports
from anabranch.server.recovery import Recovered
from anabranch.server.rpc_errors import abort
from anabranch.server.store.base import LedByAnother, Store
from anabranch.server.tls import ServerIdentity
from anabranch.server.writer import Writer

log = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 4
STANDS_BY = "this server stands by while another one leads: try that one"
NO_DATABASE = "this server waits for its database, and its log says why: try again later"
LOOK_AGAIN_S = 1.0  # for a database that does not answer
SAY_AGAIN_S = 60.0
FITNESS_AGAIN_S = 60.0  # until a standby looks again whether it could lead
# To whom PostgreSQL does not let in: its own word, and the driver's where no file has a password.
REFUSED = ("FATAL", "no password supplied")
# But these pass: others may have all its connections.
SOON = (
    "starting up",
    "shutting down",
    "recovery mode",
    "not yet accepting",
    "too many c",
    "slots are reserved",
    "no more connections",  # PgBouncer's
)


class StandbyPorts(Ports):
    """The ports of a server that waits: health says NOT_SERVING, every other call is told to go elsewhere.

    They are guarded as the leader's are; nobody joins here.
    """

    status: int = NOT_SERVING
    refusal: str = STANDS_BY

    def _add_services(
        self,
        server: Any,
        admin: bool,  # noqa: ARG002
        identity: ServerIdentity | None,  # noqa: ARG002
    ) -> None:
        server.add_generic_rpc_handlers((StandingBy(lambda: self.refusal),))

    async def _open_to_join(self, identity: ServerIdentity) -> str:  # noqa: ARG002
        return ""  # whoever joins goes to the leader


class StandingBy(grpc.GenericRpcHandler):
    """Answers every call with `Unavailable`, whatever its method and its messages."""

    def __init__(self, refusal: Callable[[], str]) -> None:
        self._refusal = refusal

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:  # noqa: ARG002
        """The handler of any method."""
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, requests: Any, context: Any) -> None:  # noqa: ARG002
        await abort(context, Unavailable(self._refusal()))


def check_standby(table: ServerTable, store: Store) -> None:
    """Raises `ConfigError` where a standby would wait for ever."""
    if table.standby and not store.lease_s:
        raise ConfigError(
            "server.standby waits for another server of the same database, which must be PostgreSQL: "
            "set server.database = 'postgresql://USER:PASSWORD@HOST/NAME', or leave --standby out"
        )


async def await_turn(
    begin: Callable[[float | None], Recovered],
    config: Config,
    ports: StandbyPorts,
    stop: asyncio.Event,
    waiting: Callable[[str], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Config, Recovered] | None:
    """What `begin` returns, once no other server leads, and the addresses of the ports that were waited on.

    It is told for how many seconds this process has waited, None where it has not. `check` raises what would
    stand in the way of a takeover: while another server leads, it is said what that is.

    For another server only a standby waits: raises `LedByAnother`. For a database that does not answer every
    server does; one that answers and lets nobody in is `StoreUnreachable`. None: `stop` came first.
    """
    try:
        return config, await asyncio.to_thread(begin, None)
    except (LedByAnother, StoreUnreachable) as error:
        if not _may_pass(error, config.server.standby):
            raise
        cause, began, obstacle = error, time.monotonic(), _Obstacle(ports)
        fitness = _Fitness(check)
    await ports.open()
    table = replace(config.server, address=ports.address, admin_address=ports.admin_address)
    try:
        obstacle.hear(cause)
        await fitness.hear(cause)
        if waiting is not None:
            waiting(obstacle.why)
        while not stop.is_set():
            try:  # `begin` waits for the lock itself, a little
                recovered = await asyncio.to_thread(begin, time.monotonic() - began)
            except (LedByAnother, StoreUnreachable) as error:
                if not _may_pass(error, config.server.standby):
                    raise
                obstacle.hear(error)
                await fitness.hear(error)
                if isinstance(error, StoreUnreachable):
                    await _pause(stop)
            else:
                log.info("this server leads now")
                return replace(config, server=table), recovered
    finally:
        await ports.close(0)
    return None


class _Obstacle:
    """What is waited for: said whenever it is another, and of a database again, ever more seldom.

    Whoever calls meanwhile is told which of the two it is; the database's address is for the log alone.
    """

    def __init__(self, ports: StandbyPorts) -> None:
        self._ports = ports
        self.why, self._pause = "", Pause(SAY_AGAIN_S)
        self._since: float | None = None  # that the database does not answer; None: another server leads

    def hear(self, cause: LedByAnother | StoreUnreachable) -> None:
        """Of a look that came to nothing."""
        if isinstance(cause, LedByAnother):
            if cause.leads != self.why:
                self._begin(cause.leads)
                log.info("standing by: %s", self.why)
        elif self._since is None:
            self._begin(f"waiting for the database: {cause}", time.monotonic())
            log.warning("%s", self.why)
        elif self._pause.due(waited_s := time.monotonic() - self._since):
            log.warning("waiting for the database, for %s: %s", duration_text(waited_s), cause)

    def _begin(self, why: str, since: float | None = None) -> None:
        self.why, self._since, self._pause = why, since, Pause(SAY_AGAIN_S)
        self._ports.refusal = STANDS_BY if since is None else NO_DATABASE
        notify(READY, f"STATUS={why}")  # it does what it was started for


class _Fitness:
    """Whether a standby could lead, looked at while another server does: what it lacks is said once.

    Who waits is started long before its turn, and what is missing then ends it when nobody else is left.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check, self._lack = check, ""
        self._looked_at = -math.inf

    async def hear(self, cause: LedByAnother | StoreUnreachable) -> None:
        """Of a look that came to nothing."""
        now = time.monotonic()
        if isinstance(cause, StoreUnreachable) or now < self._looked_at + FITNESS_AGAIN_S:
            return
        self._looked_at, before = now, self._lack
        try:
            await asyncio.to_thread(self._check)
        except (StoreUnreachable, StoreLocked):  # the database, and the leader, are waited for anyway
            return
        except (AnabranchError, OSError) as error:  # a look never ends the wait
            self._lack = str(error)
        else:
            self._lack = ""
        if self._lack and self._lack != before:
            log.warning("this standby cannot take over as it is: %s", self._lack)
        elif before and not self._lack:
            log.info("this standby can take over now")


def _may_pass(error: LedByAnother | StoreUnreachable, standby: bool) -> bool:
    """Whether to wait: for a leader's end, or for a database that is not there, or not ready, yet."""
    if isinstance(error, LedByAnother):
        return standby
    text = str(error)
    refused = any(word in text for word in REFUSED)
    return not refused or any(soon in text for soon in SOON)


async def _pause(stop: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LOOK_AGAIN_S):
            await stop.wait()


class Tenure:
    """The time for which a store is ours: renewed while inside, if there is anybody to lose it to.

    What fails inside because another server leads by now is raised as that, `LeadershipLost`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "anabranch-tenure")
        self._task: asyncio.Task[None] | None = None
        self._writer: Writer | None = None
        self._lost: LeadershipLost | None = None

    async def __aenter__(self) -> Tenure:
        if self._store.lease_s:
            self._task = asyncio.create_task(self._keep(), name="anabranch-tenure")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._thread.shutdown()
        if isinstance(error, AnabranchError) and (reason := await self._reason(error)) is not error:
            raise reason from error

    def watch(self, writer: Writer) -> None:
        """The writer to stop when the leadership is lost."""
        self._writer = writer
        if self._lost is not None:
            writer.give_up(self._lost)

    async def _reason(self, error: Exception) -> Exception:
        if self._lost is None and self._store.lease_s and isinstance(error, StoreError):
            with contextlib.suppress(StoreError, TimeoutError):
                try:
                    async with asyncio.timeout(self._store.lease_s):
                        await asyncio.to_thread(self._store.renew)
                except LeadershipLost as lost:
                    return lost
        return self._lost or error

    async def _keep(self) -> None:
        loop, lease_s = asyncio.get_running_loop(), self._store.lease_s
        heard_at, failures = loop.time(), 0
        while self._lost is None:
            await asyncio.sleep(lease_s / RENEWALS_PER_LEASE)
            try:
                async with asyncio.timeout(lease_s / 2):
                    await loop.run_in_executor(self._thread, self._store.renew)
                heard_at, failures = loop.time(), 0
            except LeadershipLost as lost:
                self._lose(lost)
            except (StoreError, TimeoutError) as error:
                failures += 1
                silent_s = loop.time() - heard_at
                if silent_s >= lease_s and failures > 1:  # a process that was paused tries once more
                    why = f"the database has not answered for {silent_s:.1f} s ({str(error) or 'silence'})"
                    then = "another server may lead by now, so this one stops; start it again to go on"
                    self._lose(LeadershipLost(f"{why}: {then}"))

    def _lose(self, lost: LeadershipLost) -> None:
        """Stop at once: whoever waits for the database in a thread is let go."""
        log.error("%s", lost)
        self._lost = lost
        if self._writer is not None:
            self._writer.give_up(lost)
        self._store.abandon()
