"""Who calls, and whether that still counts.

Asked at every call, before every message of a stream that goes out, and again before an update that came is
decided: so a revocation takes effect at once, on connections and streams that are open as well.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from anabranch.core.errors import NotAuthenticated, NotPermitted
from anabranch.identity.certificates import Kind, Peer, peer_of
from anabranch.server.members import Members


@dataclass(frozen=True)
class Caller:
    """Who calls, from which `address` (as gRPC writes it).

    Without TLS there is neither `peer` nor `members`, and a caller is whoever it says.
    """

    peer: Peer | None = None
    address: str = ""
    members: Members | None = field(default=None, repr=False, compare=False)

    async def check_still(self) -> None:
        """Raises `NotAuthenticated` once the certificate has expired or was revoked."""
        if self.members is not None and self.peer is not None:
            await self.members.check(self.peer)

    def check_name(self, client_id: str) -> None:
        """Raises `NotPermitted` unless the caller is this device: nobody speaks for another."""
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
    """Of one port. Without `members` it is not guarded; else these `kinds` of them may pass."""

    def __init__(self, members: Members | None = None, kinds: Collection[Kind] = ()) -> None:
        self._members, self._kinds = members, frozenset(kinds)

    async def caller(self, context: Any) -> Caller:
        """Who makes this call. Raises `NotAuthenticated`, `NotPermitted`."""
        if self._members is None:
            return Caller(address=context.peer())
        shown = context.auth_context().get("x509_pem_cert")
        if not shown:  # the handshake has seen to it: this port would be misconfigured
            raise NotAuthenticated("no certificate was shown: join first")
        peer = peer_of(bytes(shown[0]))
        caller = Caller(peer, context.peer(), self._members)
        await caller.check_still()
        if peer.kind not in self._kinds:
            raise NotPermitted(f"this port is not for {peer.kind}s: {peer.name!r} may not call it")
        return caller
