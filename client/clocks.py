"""What a TLS handshake does not say: that a certificate is another's, or does not count by the other's clock.

A device without a battery begins in 1970, and so does a server. All that gRPC says then is that there was no
connection.
"""

from __future__ import annotations

from contextlib import suppress

from cryptography import x509

from anabranch.core.errors import ClocksDisagree, ConfigError, NotAuthenticated, Unavailable
from anabranch.identity.addresses import host_and_port, split_job
from anabranch.identity.certificates import (
    SET_CLOCK,
    fingerprint,
    is_issued_by,
    lifetime,
    read_certificate,
    times_text,
)
from anabranch.identity.wallet import IDENTITY, Wallet
from anabranch.support.shown import PROBE_S, is_turned_away, shown_certificate

Place = tuple[str, int]  # host and port


def check_valid(certificate: x509.Certificate, address: str, now: float) -> None:
    """Raises `ClocksDisagree` where the certificate that a server shows does not count at `now`."""
    begin, end = lifetime(certificate)
    if not begin <= now < end:
        text = times_text(f"the certificate of {address}", (begin, end), "this machine's", now)
        raise ClocksDisagree(f"{text}: {SET_CLOCK}")


def check_unreached(error: Unavailable, address: str, wallet: Wallet | None, now: float) -> None:
    """Raises `ClocksDisagree` where that is why a call over TLS has reached nobody.

    And `NotAuthenticated` where the papers have ended by both clocks. `Unavailable`, which may pass, where
    somebody of another authority answers: anybody on the way could, and no device ends by that.
    """
    if wallet is not None and not error.reached:
        place = host_and_port(split_job(address)[0])
        _check_shown(place, address, wallet, now)
        _check_accepted(place, address, wallet, now)


def _check_shown(place: Place, address: str, wallet: Wallet, now: float) -> None:
    """`check_valid` of what is shown there, if it can be had."""
    with suppress(OSError, ConfigError, NotAuthenticated):
        certificate = read_certificate(shown_certificate(*place, PROBE_S).encode(), address)
        if is_issued_by(certificate, wallet.authority):
            check_valid(certificate, address, now)
            return
        found = Unavailable(
            f"{address}: its certificate is of another authority than {wallet.folder / IDENTITY}, whose "
            f"authority has the SHA-256 {fingerprint(wallet.authority)}: this is another federation's "
            "server, or something on the way. Look at the address, and at which papers are named"
        )
        found.reached = False
        raise found


def _check_accepted(place: Place, address: str, wallet: Wallet, now: float) -> None:
    """Whether the server hangs up on the wallet's certificate: one that it would know, but for the dates."""
    papers = wallet.folder / IDENTITY
    with suppress(OSError):
        if is_turned_away(*place, papers, PROBE_S):
            wallet.check(now)
            valid = lifetime(wallet.certificate)
            text = times_text(f"the certificate in {papers}", valid, "this machine's", now)
            why = "hangs up when it sees it, as one does by whose clock it does not count"
            raise ClocksDisagree(f"{text}; {address} {why}: {SET_CLOCK}")
