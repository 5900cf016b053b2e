"""The certificate that a server shows to whoever connects, before anything is believed of it."""

from __future__ import annotations

import ssl

from anabranch.support.proxies import connected

READ_BYTES = 64 * 1024


def shown_certificate(host: str, port: int, timeout_s: float) -> str:
    """The server's own certificate, PEM, unchecked. Raises `OSError`, of which TLS errors are a kind.

    As `ssl.get_server_certificate`, which leaves a socket open where the server is killed at that moment, and
    passes proxies by.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing, server_hostname=host)
    with connected(host, port, timeout_s) as connection:
        while not _is_done(session):
            connection.sendall(outgoing.read())
            if data := connection.recv(READ_BYTES):
                incoming.write(data)
            else:
                incoming.write_eof()
    certificate = session.getpeercert(binary_form=True)
    if certificate is None:
        raise OSError(f"{host}:{port} shows no certificate")
    return ssl.DER_cert_to_PEM_cert(certificate)


def _is_done(session: ssl.SSLObject) -> bool:
    """A step of the handshake; whether it was the last."""
    try:
        session.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
