"""The service for devices that have no certificate yet: on a port of its own, as TLS asks for none there."""

# ruff: noqa: N802, ARG002 - the names and the parameters of the calls are gRPC's

from __future__ import annotations

import asyncio
import logging

from anabranch.identity.authority import Authority
from anabranch.identity.certificates import certificate_der
from anabranch.protos.v1 import identity_pb2 as identity
from anabranch.protos.v1.identity_pb2_grpc import JoiningServicer
from anabranch.server.gate import Caller, Gate
from anabranch.server.rpc_errors import answers

log = logging.getLogger(__name__)


class Joining(JoiningServicer):
    """See protos/v1/identity.proto for what each call means."""

    def __init__(self, authority: Authority, life_s: float) -> None:
        self.gate = Gate()  # the token is all that a caller has
        self._authority, self._life_s = authority, life_s

    @answers
    async def GetAuthority(
        self, request: identity.GetAuthorityRequest, caller: Caller
    ) -> identity.GetAuthorityResponse:
        """The authority's certificate."""
        return identity.GetAuthorityResponse(certificate=certificate_der(self._authority.certificate))

    @answers
    async def Join(self, request: identity.JoinRequest, caller: Caller) -> identity.JoinResponse:
        """A certificate for a token."""
        admit = self._authority.admit
        name, made = await asyncio.to_thread(admit, request.token, request.signing_request, self._life_s)
        log.info("%s has joined, certificate %x", name, made.serial_number)
        return identity.JoinResponse(client_id=name, certificate=certificate_der(made))
