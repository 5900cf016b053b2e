"""What a TLS handshake does not say: that a certificate does not count by the other's clock.

A device without a battery begins in 1970, and so does a server. All that gRPC says then is that there was no
connection.
"""

from __future__ import annotations

from contextlib import suppress

from cryptography import x509

from anabranch.core.errors import ClocksDisagree, ConfigError, NotAuthenticated, Unavailable
from anabranch.identity.addresses import host_and_port, split_job
from anabranch.identity.certificates import SET_CLOCK, is_issued_by, lifetime, read_certificate, times_text
from anabranch.identity.wallet import IDENTITY, Wallet
from anabranch.support.shown import is_turned_away, shown_certificate

PROBE_S = 2.0


def check_valid(certificate: x509.Certificate, address: str, now: float) -> None:
    """Raises `ClocksDisagree` where the certificate that a server shows does not count at `now`."""
    begin, end = lifetime(certificate)
    if not begin <= now < end:
        text = times_text(f"the certificate of {address}", (begin, end), "this machine's", now)
        raise ClocksDisagree(f"{text}: {SET_CLOCK}")


def check_unreached(error: Unavailable, address: str, wallet: Wallet | None, now: float) -> None:
    """Raises `ClocksDisagree` where that is why a call over TLS has reached nobody.

    And `NotAuthenticated` where the papers have ended by both clocks.
    """
    if wallet is not None and not error.reached:
        _check_shown(address, wallet.authority, now)
        _check_accepted(address, wallet, now)


def _check_shown(address: str, authority: x509.Certificate, now: float) -> None:
    """`check_valid` of what is shown at `host:port`, if it is of this authority and can be had."""
    host, port = host_and_port(split_job(address)[0])
    with suppress(OSError, ConfigError, NotAuthenticated):
        certificate = read_certificate(shown_certificate(host, port, PROBE_S).encode(), address)
        if is_issued_by(certificate, authority):
            check_valid(certificate, address, now)


def _check_accepted(address: str, wallet: Wallet, now: float) -> None:
    """Whether the server hangs up on the wallet's certificate: one that it would know, but for the dates."""
    host, port = host_and_port(split_job(address)[0])
    papers = wallet.folder / IDENTITY
    with suppress(OSError):
        if is_turned_away(host, port, papers, PROBE_S):
            wallet.check(now)
            valid = lifetime(wallet.certificate)
            text = times_text(f"the certificate in {papers}", valid, "this machine's", now)
            why = "hangs up when it sees it, as one does by whose clock it does not count"
            raise ClocksDisagree(f"{text}; {address} {why}: {SET_CLOCK}")
