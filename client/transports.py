"""A device's way to its server, by name: gRPC, or the transport of others that `name://...` names."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing

from anabranch.client.transport import GrpcTransport, Transport
from anabranch.core.errors import ConfigError
from anabranch.core.parts import PartKind, members
from anabranch.identity.wallet import Wallet

NO_TRANSPORTS = ("http", "https", "grpc", "grpcs", "tcp")  # what people write before an address
_NEEDS = (*members(Transport), "of", "close")
TRANSPORTS = PartKind(
    "transport", "transports", (), {"grpc": GrpcTransport}, _NEEDS, option="--part transport=PATH"
)


def is_foreign(server: str) -> bool:
    """Whether an address is one for a transport of others: `name://...`."""
    return "://" in server


def open_transport(server: str, client_id: str, wallet: Wallet | None) -> AbstractContextManager[Transport]:
    """The transport to a server, closed at the end. Raises `ConfigError` for a name that none has."""
    if is_foreign(server):
        name, _, rest = server.partition("://")
        if name in NO_TRANSPORTS:
            raise ConfigError(f"server {server!r}: write HOST:PORT without {name}://, {rest.rstrip('/')}")
        return closing(TRANSPORTS.find(name).of(server, client_id, wallet))
    return GrpcTransport(server, client_id, wallet=wallet)
