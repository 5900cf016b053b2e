"""Who calls, and whether that still counts.

Asked at every call, before every message of a stream that goes out, and again before an update that came is
decided: so a revocation takes effect at once, on connections and streams that are open as well. And whether
the call is of this run, where a server serves several.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from anabranch.core.errors import ConfigError, NotAuthenticated, NotPermitted
from anabranch.identity.addresses import JOB_KEY
from anabranch.identity.certificates import Kind, Peer, peer_of
from anabranch.server.members import Members
from anabranch.support.tracing import TRACEPARENT, is_tracing


@dataclass(frozen=True)
class Scope:
    """Whose run it is: devices whose name has one of these patterns (`*`, `?`, `[a-z]`); without any, all."""

    patterns: tuple[str, ...] = ()

    def check(self, name: str) -> None:
        """Raises `NotPermitted` for a device that is not of it."""
        if not self.has(name):
            raise NotPermitted(f"device {name!r} is not of this job: its operator says whose it is")

    def has(self, name: str) -> bool:
        """Whether this device may serve it."""
        return not self.patterns or any(fnmatchcase(name, pattern) for pattern in self.patterns)


EVERYBODY = Scope()


@dataclass(frozen=True)
class Caller:
    """Who calls, from which `address` (as gRPC writes it).

    Without TLS there is neither `peer` nor `members`, and a caller is whoever it says.
    """

    peer: Peer | None = None
    address: str = ""
    members: Members | None = field(default=None, repr=False, compare=False)
    trace: str = field(default="", repr=False, compare=False)  # the `traceparent` that came with the call
    scope: Scope = EVERYBODY

    async def check_still(self) -> None:
        """Raises `NotAuthenticated` once the certificate has expired or was revoked."""
        if self.members is not None and self.peer is not None:
            await self.members.check(self.peer)

    def check_name(self, client_id: str) -> None:
        """Raises `NotPermitted` unless the caller is this device, and in scope: none speaks for another."""
        self.scope.check(client_id)
        peer = self.peer
        if peer is not None and (peer.kind, peer.name) != (Kind.DEVICE, client_id):
            raise NotPermitted(f"{peer.kind} {peer.name!r} may not speak for {client_id!r}: use its own name")

    def check_observer(self, client_id: str) -> None:
        """Raises `NotPermitted` for a device that says another's name. An operator may look on."""
        if self.peer is not None and self.peer.kind is Kind.DEVICE:
            self.check_name(client_id)

    def __str__(self) -> str:
        return "somebody on this machine" if self.peer is None else f"{self.peer.kind} {self.peer.name!r}"


class Gate:
    """Of one port and one run. Without `members` it is not guarded; else these `kinds` of them may pass.

    `job` is the run's name among others of the same server, empty for the only one, None for all of them;
    `scope`: whose it is now.
    """

    def __init__(
        self,
        members: Members | None = None,
        kinds: Collection[Kind] = (),
        job: str | None = "",
        scope: Callable[[], Scope] = lambda: EVERYBODY,
    ) -> None:
        self._members, self._kinds = members, frozenset(kinds)
        self._job, self._scope = job, scope

    async def caller(self, context: Any) -> Caller:
        """Who makes this call. Raises `NotAuthenticated` and `NotPermitted`.

        `ConfigError` is for a call of another job.
        """
        self._check_job(job_of(context))
        if self._members is None:
            return Caller(address=context.peer(), trace=_trace(context), scope=self._scope())
        peer = self.shown(context)
        await self.check(peer)
        # Asked for behind the wait: if it changes in that, the streams that are open by then are ended, and
        # this one is none of them yet.
        scope = self._scope()
        if peer.kind is Kind.DEVICE:
            scope.check(peer.name)
        return Caller(peer, context.peer(), self._members, _trace(context), scope)

    def shown(self, context: Any) -> Peer:
        """Whose certificate came with a call, on a guarded port. Whether it still counts is another question.

        Raises `NotAuthenticated`, and `NotPermitted` for one of another kind.
        """
        shown = context.auth_context().get("x509_pem_cert")
        if not shown:  # the handshake has seen to it: this port would be misconfigured
            raise NotAuthenticated("no certificate was shown: join first")
        peer = peer_of(bytes(shown[0]))
        if peer.kind not in self._kinds:
            raise NotPermitted(f"this port is not for {peer.kind}s: {peer.name!r} may not call it")
        return peer

    async def check(self, peer: Peer) -> None:
        """Raises `NotAuthenticated` once the certificate has expired or was revoked."""
        if self._members is not None:
            await self._members.check(peer)

    def _check_job(self, named: str) -> None:
        if self._job is not None and named != self._job:
            raise ConfigError(f"this server has one run and no jobs: leave /{named} out of its address")


def job_of(context: Any) -> str:
    """The job that a call is of, as the caller says; empty where none is named."""
    return _said(context, JOB_KEY)


def _trace(context: Any) -> str:
    return _said(context, TRACEPARENT) if is_tracing() else ""


def _said(context: Any, wanted: str) -> str:
    return next((str(value) for key, value in context.invocation_metadata() or () if key == wanted), "")
