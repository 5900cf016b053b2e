"""Whether a server serves, by the standard health protocol.

A container asks every few seconds, of the memory that its server has: neither numpy nor protobuf is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from anabranch.identity.addresses import host_and_port
from anabranch.support.proxies import options_to

if TYPE_CHECKING:
    from anabranch.identity.wallet import Wallet

Answer = Any  # grpc.Future, which is generic in its stubs alone

HEALTH_S = 10.0
HEALTH_METHOD = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}


def check_health(address: str, service: str = "", wallet: Wallet | None = None) -> bool:
    """Whether the server at `host:port` serves, by the standard health protocol; never raises for a no."""
    with _opened(address, wallet) as channel:
        return says_serving(asked_health(channel, HEALTH_S, service))


def _opened(address: str, wallet: Wallet | None) -> grpc.Channel:
    if wallet is None:
        return grpc.insecure_channel(address, options_to(host_and_port(address)[0]))
    from anabranch.client.channel import open_channel  # here: a port of this machine's is asked without

    return open_channel(address, wallet=wallet)


def asked_health(channel: grpc.Channel, timeout_s: float, service: str = "") -> Answer:
    """Ask a server whether it serves, by the standard health protocol; `says_serving` has the answer.

    The messages are so small that they are written by hand: a device need not have grpcio-health-checking.
    """
    name = service.encode()
    request = b"\x0a" + bytes([len(name)]) + name if name else b""  # HealthCheckRequest{service}
    check = channel.unary_unary(
        HEALTH_METHOD, request_serializer=lambda data: data, response_deserializer=lambda data: data
    )
    future: Answer = check.future(request, timeout=timeout_s)
    return future


def says_serving(asked: Answer) -> bool:
    """Whether the answer is yes; whatever goes wrong is a no."""
    try:
        return bool(asked.result() == SERVING)
    except (grpc.RpcError, grpc.FutureCancelledError):
        return False
