"""The service for devices that have no certificate yet: on a port of its own, as TLS asks for none there.

Anybody may call it, so it is the one place where strangers cost anything: who fails too often is not
listened to for a while.
"""

# ruff: noqa: N802, ARG002 - the names and the parameters of the calls are gRPC's

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re

from anabranch.core.engine.rates import Rates
from anabranch.core.errors import NotAuthenticated, Overloaded
from anabranch.core.limits import Limits
from anabranch.identity.certificates import certificate_der
from anabranch.protos.v1 import identity_pb2 as identity
from anabranch.protos.v1.identity_pb2_grpc import JoiningServicer
from anabranch.server.gate import Caller, Gate
from anabranch.server.members import Members
from anabranch.server.outage import Outage
from anabranch.server.rpc_errors import Guarded, answers

log = logging.getLogger(__name__)

IPV6_PREFIX = 64  # one customer has that many addresses


def source_of(peer: str) -> str:
    """The host of a peer as gRPC writes it (`ipv4:1.2.3.4:5`, `ipv6:%5B::1%5D:5`); of IPv6 its network."""
    found = re.fullmatch(r"ipv[46]:(?:%5B|\[)?(.*?)(?:%5D|\])?:\d+", peer)
    try:
        address = ipaddress.ip_address(found[1] if found else peer)
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))


class Joining(Guarded, JoiningServicer):
    """See protos/v1/identity.proto for what each call means."""

    def __init__(self, members: Members, life_s: float, limits: Limits, outage: Outage) -> None:
        self.gate, self.outage = Gate(), outage  # the token is all that a caller has
        self._members, self._life_s = members, life_s
        self._failures = Rates(limits.join_failures_per_minute, limits.join_failures_per_minute)

    @answers
    async def GetAuthority(
        self, request: identity.GetAuthorityRequest, caller: Caller
    ) -> identity.GetAuthorityResponse:
        """The authority's certificate."""
        return identity.GetAuthorityResponse(certificate=certificate_der(self._members.authority.certificate))

    @answers
    async def Join(self, request: identity.JoinRequest, caller: Caller) -> identity.JoinResponse:
        """A certificate for a token. Raises `Overloaded` for who has failed too often."""
        source, clock = source_of(caller.address), asyncio.get_running_loop().time
        if wait_s := self._failures.wait_s(source, clock()):
            raise Overloaded("too many joins from there have failed: wait", (wait_s, 2 * wait_s))
        try:
            name, made = await self._members.admit(
                request.token, request.signing_request, self._life_s, request.client_id
            )
        except NotAuthenticated as error:
            self._failures.add(source, clock())
            log.warning("a join from %s was refused: %s", source, error)
            raise
        log.info("%s has joined from %s, certificate %x", name, source, made.serial_number)
        return identity.JoinResponse(client_id=name, certificate=certificate_der(made))
