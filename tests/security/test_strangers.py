"""What answers where a server of the federation should: whoever has papers is told what, and goes on."""

from __future__ import annotations

import datetime as dt
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from guarded import federation, impostor

from anabranch.client.joining import join
from anabranch.client.operator import OperatorClient
from anabranch.client.strangers import check_is_server
from anabranch.client.transport import GrpcTransport
from anabranch.core.errors import Unavailable
from anabranch.core.model.updates import Capability
from anabranch.identity.addresses import SERVER_NAME
from anabranch.identity.authority import DAY_S
from anabranch.identity.certificates import certificate_pem, key_pem, make_authority, new_key
from anabranch.identity.wallet import Wallet


@contextmanager
def answers(said: bytes) -> Iterator[str]:
    """The address of somebody who says this to all, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    if over.is_set():
                        return
                    connection.recv(65536)  # all of it: what is left unread would be a reset
                    connection.sendall(said)

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            socket.create_connection(listener.getsockname()).close()
            serving.join()


def told(address: str, wallet: Wallet) -> Unavailable:
    """What a device hears there."""
    with GrpcTransport(address, wallet.name, wallet=wallet) as device, pytest.raises(Unavailable) as met:
        device.enrol(Capability())
    assert not met.value.reached
    return met.value


def test_a_portal_that_speaks_no_tls(tmp_path: Path) -> None:
    page = b"HTTP/1.1 302 Found\r\nLocation: http://portal.example/\r\n\r\n"
    with federation(tmp_path) as guarded, answers(page) as address:
        wallet = guarded.joined("device-1")
        assert "speaks no TLS: an HTTP proxy, a captive portal" in str(told(address, wallet))
        with (
            OperatorClient(address, wallet=guarded.operator()) as operator,
            pytest.raises(Unavailable, match="speaks no TLS"),
        ):
            operator.status()


@pytest.mark.parametrize("alert", [40, 70, 80, 112, 120])  # of a handshake, a version, itself, names, ALPN
def test_a_proxy_that_lets_nobody_in_by_the_name_speaks_tls(tmp_path: Path, alert: int) -> None:
    fatal = bytes((0x15, 3, 3, 0, 2, 2, alert))
    with federation(tmp_path) as guarded, answers(fatal) as address:
        text = str(told(address, guarded.joined("device-1")))
    assert f"a TLS proxy that does not pass the name {SERVER_NAME} on (" in text
    assert "speaks no TLS" not in text
    assert "(None)" not in text


def test_a_proxy_whose_server_is_away(tmp_path: Path) -> None:
    with federation(tmp_path) as guarded, answers(b"") as address:
        why = str(told(address, guarded.joined("device-1")))
    assert why.startswith(f"{address}: nobody answers (")
    assert "(OK)" not in why


def test_a_proxy_that_ends_tls_is_told_to_who_joins_and_to_who_has_papers(tmp_path: Path) -> None:
    key = new_key()
    shown = certificate_pem(make_authority(key, "a proxy", time.time(), DAY_S))
    with federation(tmp_path) as guarded, impostor([(key_pem(key), shown)]) as address:
        wallet = guarded.joined("device-1")
        text = str(told(address, wallet))
        assert "of no server of anabranch: a proxy must pass TLS through" in text
        token = guarded.authority.invite("device-2", DAY_S)
        with pytest.raises(Unavailable, match="a proxy must pass TLS through"):
            join(tmp_path / "papers", address, token, guarded.authority.sha256)


def test_names_that_cannot_be_read_end_no_device() -> None:
    """Whoever is on the way shows what he likes; what comes of it is of the kind that a device bears."""
    key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "portal")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 5)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
    )
    # The names of a subject as DER: an x400Address, an ediPartyName, no list at all, text that is none.
    for names in ("3006a3040c026161", "3006a5040c026161", "3005616263", "30048202ffff"):
        odd = x509.UnrecognizedExtension(x509.ObjectIdentifier("2.5.29.17"), bytes.fromhex(names))
        certificate = made.add_extension(odd, critical=False).sign(key, hashes.SHA256())
        with pytest.raises(Unavailable, match="of CN=portal is shown there"):
            check_is_server(certificate, "a:1")
    der = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    unreadable = x509.load_der_x509_certificate(der.replace(b"portal", b"\xff" * 6))
    with pytest.raises(Unavailable, match="whose name cannot be read"):
        check_is_server(unreadable, "a:1")
