"""The certificate that a server shows to whoever connects, before anything is believed of it."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from anabranch.support.proxies import connected, seconds_to

T = TypeVar("T")

READ_BYTES = 64 * 1024
PROBE_S = 2.0  # for a look at where a call has just failed


def shown_certificate(host: str, port: int, timeout_s: float, name: str) -> str:
    """The server's own certificate, PEM, unchecked. Raises `OSError`, of which TLS errors are a kind.

    `name` is asked for (SNI): what is between may go by it. As `ssl.get_server_certificate`, which leaves a
    socket open where the server is killed at that moment, passes proxies by, and asks for the host.
    """
    session = _Session(name, _unchecking(), time.monotonic() + timeout_s)
    with connected(host, port, session.until) as connection:
        session.shake_hands(connection)
    certificate = session.tls.getpeercert(binary_form=True)
    if certificate is None:
        raise OSError(f"{host}:{port} shows no certificate")
    return ssl.DER_cert_to_PEM_cert(certificate)


def is_turned_away(host: str, port: int, papers: Path, timeout_s: float, name: str) -> bool:
    """Whether a gRPC server hangs up as soon as it has seen the certificate in `papers` (PEM, with its key).

    It says no word of why, not by TLS either. `name`: see `shown_certificate`. Raises `OSError`.
    """
    context = _unchecking()
    context.load_cert_chain(papers)
    context.set_alpn_protocols(["h2"])
    session = _Session(name, context, time.monotonic() + timeout_s)
    with connected(host, port, session.until) as connection:
        session.shake_hands(connection)  # in TLS 1.3 the client's certificate is looked at when this is over
        return not session.hears(connection)


def _unchecking() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class _Session:
    """TLS over a connection, which may be a proxy's tunnel: all of it by `until` (`time.monotonic`)."""

    def __init__(self, name: str, context: ssl.SSLContext, until: float) -> None:
        self.until = until
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)

    def shake_hands(self, connection: socket.socket) -> None:
        self._run(connection, self.tls.do_handshake)

    def hears(self, connection: socket.socket) -> bool:
        """Whether a first byte comes, or the end."""
        try:
            return bool(self._run(connection, lambda: self.tls.read(1)))
        except (ssl.SSLError, ConnectionError):
            return False

    def _run(self, connection: socket.socket, step: Callable[[], T]) -> T:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                pass
            finally:
                connection.settimeout(seconds_to(self.until))  # anew: one byte at a time could last for ever
                if self._outgoing.pending:
                    connection.sendall(self._outgoing.read())
            if data := connection.recv(READ_BYTES):
                self._incoming.write(data)
            else:
                self._incoming.write_eof()
