"""What answers in the server's place: a proxy that ends TLS, a captive portal, another federation's server.

gRPC says no more of it than that there was no connection.
"""

from __future__ import annotations

import ssl

from cryptography import x509

from anabranch.core.errors import ConfigError, NotAuthenticated, Unavailable
from anabranch.core.text import visible
from anabranch.identity.addresses import SERVER_NAME
from anabranch.identity.certificates import (
    Kind,
    fingerprint,
    is_for_server,
    is_issued_by,
    papers_of_next,
    read_certificate,
)
from anabranch.identity.wallet import IDENTITY, Wallet
from anabranch.support.shown import PROBE_S, shown_certificate

Place = tuple[str, int]  # host and port

NO_TLS = (
    "what answers there speaks no TLS: an HTTP proxy, a captive portal (open a page in a browser), or a "
    "server in the clear: one that was started with --insecure, or that only this machine reaches, where an "
    "operator leaves out --identity"
)
# What OpenSSL says of bytes that are no record of TLS's. (It names not every alert, and they are many more.)
NO_RECORDS = frozenset(
    (
        "WRONG_VERSION_NUMBER",
        "HTTP_REQUEST",
        "HTTPS_PROXY_REQUEST",
        "UNKNOWN_PROTOCOL",
        "PACKET_LENGTH_TOO_LONG",
        "BAD_RECORD_TYPE",
        "RECORD_LAYER_FAILURE",
    )
)
ALERT = f"what answers there ends the handshake: a TLS proxy that does not pass the name {SERVER_NAME} on"
ENDS_TLS = "must pass TLS through to the server, as it comes"


def stranger(address: str, why: str) -> Unavailable:
    """That who answers there is not the server. What is between may let it through later."""
    error = Unavailable(f"{address}: {why}")
    error.reached = False
    return error


def check_is_server(certificate: x509.Certificate, address: str) -> None:
    """Raises `Unavailable` where a certificate that was shown is not one of a server of any authority's."""
    if not is_for_server(certificate):
        shown = f"the certificate of {_owner(certificate)} is shown there, of no server of anabranch"
        raise stranger(address, f"{shown}: a proxy {ENDS_TLS}")


def _owner(certificate: x509.Certificate) -> str:
    try:
        return visible(certificate.subject.rfc4514_string())
    except ValueError:  # it is read when it is asked for
        return "an owner whose name cannot be read"


def shown_by_server(place: Place, address: str, wallet: Wallet) -> x509.Certificate | None:
    """The certificate that the server at `place` shows; None where none comes.

    Raises `Unavailable`, with the reason, where who answers is no server of the wallet's authority.
    """
    try:
        shown = shown_certificate(*place, PROBE_S, SERVER_NAME)
        certificate = read_certificate(shown.encode(), address)
    except (ssl.SSLEOFError, ConfigError, NotAuthenticated):
        return None
    except ssl.SSLError as error:
        why = NO_TLS if error.reason in NO_RECORDS else ALERT
        raise stranger(address, f"{why} ({error.reason or error})") from error
    except OSError:
        return None
    check_is_server(certificate, address)
    if not is_issued_by(certificate, wallet.authority):
        raise stranger(
            address,
            f"its certificate is of another authority than {wallet.folder / IDENTITY}, whose "
            f"authority has the SHA-256 {fingerprint(wallet.authority)}: this is another federation's "
            "server, or something on the way. Look at the address, and at which papers are named; only where "
            f"the federation's operators say that it has another authority by now, {_papers_of_next(wallet)}",
        )
    return certificate


def _papers_of_next(wallet: Wallet) -> str:
    """What a member does whose authority another one has replaced."""
    kind = wallet.peer.kind
    by = " (`anabranch admin enrol`; then --token and --ca-sha256 here)" if kind is Kind.DEVICE else ""
    return f"{papers_of_next(kind)}{by}"
