"""The server's own certificate, made anew before it ends; and which ports use it.

The key is made in this process and never written: whoever restarts the server gets another. gRPC asks at each
handshake, so a new certificate needs no restart, and connections that are open stay.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509

from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError
from anabranch.identity.addresses import JOIN_PORT_AFTER, host_and_port, is_loopback
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import (
    Key,
    certificate_der,
    certificate_pem,
    key_pem,
    lifetime,
    new_key,
    renewal_due,
)
from anabranch.identity.signatures import sign
from anabranch.server.members import Members
from anabranch.server.seen_register import SeenRegister

log = logging.getLogger(__name__)


def check_address(address: str, insecure: bool, has_authority: bool) -> None:
    """Raises `ConfigError` for an address that is malformed, or open to others without protection."""
    if not (is_loopback(address) or insecure or has_authority):
        raise ConfigError(
            f"address {address!r} can be reached by other machines, and identity.folder has no authority, "
            "which says who may: name the folder that has it, make one with `anabranch admin ca init`, use "
            "127.0.0.1, or say --insecure"
        )


def uses_tls(address: str, config: Config, insecure: bool) -> bool:
    """Whether a port on this address is served with mutual TLS. Raises `ConfigError`."""
    always = config.identity.tls == "always"
    if always and insecure:
        raise ConfigError('identity.tls = "always" and --insecure contradict each other: drop one')
    return not insecure and (always or not is_loopback(address))


def join_address(config: Config) -> str:
    """Where devices join: as configured, or on the devices' host, two ports further."""
    if config.identity.join_address:
        return config.identity.join_address
    host, _, _ = config.server.address.rpartition(":")
    _, port = host_and_port(config.server.address)
    return f"{host}:{port + JOIN_PORT_AFTER if port else 0}"


@dataclass(frozen=True)
class PortCertificate:
    """A key, its certificate, and both as gRPC takes them."""

    key: Key
    certificate: x509.Certificate
    configuration: grpc.ServerCertificateConfiguration


class ServerIdentity:
    """The certificate that the server shows. `life_s`: how long one is valid, in seconds."""

    def __init__(self, authority: Authority, life_s: float) -> None:
        self.authority, self.life_s = authority, life_s
        self._members: Members | None = None
        self._lock = threading.Lock()  # gRPC asks from threads of its own
        self._shown: PortCertificate | None = None

    @property
    def members(self) -> Members:
        """Who may call; opened when a port is."""
        if self._members is None:
            self._members = Members(self.authority)
        return self._members

    def note_in(self, folder: Path) -> None:
        """Have it noted in a folder how far the register has come, whenever that is seen."""
        self.members.have_noted(SeenRegister(folder, self.authority).note)

    def close(self) -> None:
        """Let go of the authority and its register."""
        if self._members is not None:
            self._members.close()
        self.authority.close()

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """The certificate of the moment, for a handshake."""
        return self._current().configuration

    def sign(self, message: bytes) -> tuple[bytes, bytes]:
        """A signature of a message (ECDSA with SHA-256, DER), and the certificate of its key (DER)."""
        shown = self._current()
        return sign(shown.key, message), certificate_der(shown.certificate)

    @property
    def certificate(self) -> x509.Certificate:
        """The certificate of the moment."""
        return self._current().certificate

    def _current(self) -> PortCertificate:
        """Another one after two thirds of its life, or if the clock was set back to before it."""
        with self._lock:
            if self._shown is None or not self._is_good(self._shown.certificate):
                key = new_key()
                made = self.authority.server(key.public_key(), self.life_s)
                pair = (key_pem(key), certificate_pem(made))
                configuration = grpc.ssl_server_certificate_configuration([pair], self.authority.pem)
                self._shown = PortCertificate(key, made, configuration)
                log.info("a new certificate for the server, serial %x", made.serial_number)
                if ending := self.authority.ending():
                    log.warning("%s", ending)
            return self._shown

    def _is_good(self, certificate: x509.Certificate) -> bool:
        return lifetime(certificate)[0] <= self.authority.now() < renewal_due(certificate)

    def credentials(self, clients: bool) -> grpc.ServerCredentials:
        """Credentials of a port; `clients`: whoever calls must show a certificate of the authority."""
        shown = self.configuration()
        return grpc.dynamic_ssl_server_credentials(
            shown,
            CertificateSupply(self, shown).latest,  # type: ignore[arg-type] # None: no change
            require_client_authentication=clients,
        )


class CertificateSupply:
    """The certificates of a port, as gRPC asks for them: before every handshake, from threads of its own.

    It takes whatever it is given for new, and frees what it made of the one before under handshakes that go
    on (github.com/grpc/grpc/issues/36693): a server that gave the same one each time died of a few at a time.
    """

    def __init__(self, identity: ServerIdentity, shown: grpc.ServerCertificateConfiguration) -> None:
        self._identity, self._shown = identity, shown
        self._lock = threading.Lock()

    def latest(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificate of the moment, or None if it is the one of the last handshake."""
        current = self._identity.configuration()
        with self._lock:
            if current is self._shown:
                return None
            self._shown = current
            return current
