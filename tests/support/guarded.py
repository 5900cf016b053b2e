"""A server with mutual TLS on loopback, its authority, and members of its federation."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from cryptography import x509
from wire import QUICK, Device, Served, server_config

from anabranch.client.channel import secure_channel
from anabranch.client.joining import join
from anabranch.client.operator import OperatorClient
from anabranch.client.transport import GrpcTransport
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.params import Tensors
from anabranch.identity.authority import DAY_S, Authority
from anabranch.identity.certificates import Kind, new_key, signing_request
from anabranch.identity.signatures import update_message
from anabranch.identity.wallet import Wallet
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub
from anabranch.server.manifest import write_manifest

TENSORS: Tensors = {"w": np.zeros(8, np.float32)}


@dataclass
class Federation:
    """A running server and its authority; `folder` has all that belongs to it."""

    folder: Path
    authority: Authority
    served: Served
    opened: list[Any] = field(default_factory=list)

    @property
    def data_dir(self) -> Path:
        """The server's data."""
        return self.folder / "data"

    @property
    def address(self) -> str:
        """The devices' port."""
        assert self.served.info is not None
        return self.served.info.address

    @property
    def admin_address(self) -> str:
        """The operators' port."""
        assert self.served.info is not None
        return self.served.info.admin_address

    @property
    def join_address(self) -> str:
        """Where devices join."""
        assert self.served.info is not None
        return self.served.info.join_address

    def joined(self, name: str, token: str = "") -> Wallet:
        """A device that joins as a real one does."""
        token = token or self.authority.invite(name, DAY_S)
        return join(self.folder / f"of-{name}-{token[:8]}", self.join_address, token, self.authority.sha256)

    def operator(self, name: str = "alice") -> Wallet:
        """An operator's papers."""
        return issued(self.authority, Kind.OPERATOR, name, self.folder / f"operator-{name}")

    def transport(self, wallet: Wallet) -> GrpcTransport:
        """A device's transport."""
        transport = GrpcTransport(self.address, wallet.name, reconnect_max_s=0.2, wallet=wallet)
        self.opened.append(transport)
        return transport

    def operators(self, wallet: Wallet) -> OperatorClient:
        """An operator's client."""
        client = OperatorClient(self.admin_address, wallet=wallet)
        self.opened.append(client)
        return client

    def device(self, wallet: Wallet, client_id: str = "") -> SigningDevice:
        """A device that speaks the protocol by hand, under its own name or another's."""
        channel = self.served.keep(secure_channel(self.address, QUICK, *wallet.credentials()))
        spec = self.served.manifest.spec
        assert self.served.info is not None
        return SigningDevice(channel, spec, client_id or wallet.name, wallet, self.served.info.run_id)

    @contextmanager
    def started_again(self) -> Iterator[Served]:
        """The server on the data as they are by now; it is spoken to from now on."""
        self.served.close()
        self.served = Served(self.served.config, self.served.manifest)
        with self.served as served:
            yield served

    def stub(self, channel: grpc.Channel) -> DevicesStub:
        """Calls over a channel of one's own."""
        return DevicesStub(self.served.keep(channel))


class SigningDevice(Device):
    """A `Device` that signs what it pushes, unless it is given a signature."""

    def __init__(self, channel: grpc.Channel, spec: Any, client_id: str, wallet: Wallet, run_id: str) -> None:
        super().__init__(channel, spec, client_id)
        self.wallet, self.run_id = wallet, run_id

    def header(
        self, task: devices.Task, data: bytes, update_id: str = "", **more: Any
    ) -> devices.UpdateHeader:
        """The header with a signature over what it says."""
        signature = more.pop("signature", None)
        header = super().header(task, data, update_id, **more)
        header.signature = self.signature(header) if signature is None else signature
        return header

    def signature(self, header: devices.UpdateHeader, **other: Any) -> bytes:
        """The signature of a header, or of one with `other` values."""
        return self.wallet.sign(update_message(other.pop("run_id", self.run_id), record_of(header) | other))


def record_of(header: devices.UpdateHeader) -> dict[str, Any]:
    """What is signed of a header of the whole model."""
    part = header.parts[0]
    payload = {
        "codec": part.encoding.codec,
        "sha256": part.sha256.hex(),
        "size_bytes": part.size_bytes,
    }
    names = ("base_version", "client_id", "examples", "local_steps", "task_id", "update_id")
    return {**{n: getattr(header, n) for n in names}, "submodel": None, "payload": payload}


def issued(authority: Authority, kind: Kind, name: str, folder: Path, life_s: float = DAY_S) -> Wallet:
    """Papers that an authority gives out without being asked over a network."""
    key = new_key()
    if kind is Kind.OPERATOR:
        made = authority.operator(name, key.public_key(), life_s)
    else:
        token = authority.invite(name, DAY_S)
        _, made = authority.admit(token, signing_request(key), life_s)
    wallet = Wallet(folder, key, made, authority.certificate)
    wallet.save()
    return wallet


def yesterday(authority: Authority, days: float = 1.0) -> Authority:
    """The same authority with a clock that is late."""
    return Authority.open(authority.folder, lambda: time.time() - days * DAY_S)


@contextmanager
def federation(
    folder: Path,
    tensors: Tensors = TENSORS,
    limits: Limits = DEFAULT_LIMITS,
    wall: Callable[[], float] = time.time,
    made: Callable[[], float] = time.time,
    /,
    **tables: Mapping[str, Any],
) -> Iterator[Federation]:
    """A guarded server on free ports of loopback; its clock is `wall`, its authority's `made`."""
    places = {"folder": str(folder / "ca"), "join_address": "127.0.0.1:0"}
    identity = {**places, "tls": "always", **tables.pop("identity", {})}
    config = server_config(folder / "data", identity=identity, **tables)
    manifest = write_manifest(folder / "model", "test", tensors)
    with (
        Authority.create(folder / "ca", made) as authority,
        Served(config, manifest, limits, wall=wall) as served,
    ):
        begun = Federation(folder, authority, served)
        try:
            yield begun
        finally:
            for opened in begun.opened:
                opened.close()


def shown_serial(address: str) -> int:
    """The serial number of the certificate that a server shows at this moment."""
    host, _, port = address.rpartition(":")
    shown = ssl.get_server_certificate((host, int(port)), timeout=600)
    return x509.load_pem_x509_certificate(shown.encode()).serial_number


@contextmanager
def impostor(pairs: list[tuple[bytes, bytes]]) -> Iterator[str]:
    """The address of a TLS server that shows another certificate than a server's, and serves nothing."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pairs))
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0)
