"""What a TLS handshake does not say: that a certificate does not count by the other's clock.

A device without a battery begins in 1970, and so does a server. All that gRPC says then is that there was no
connection.
"""

from __future__ import annotations

from contextlib import suppress

from cryptography import x509

from anabranch.client.strangers import Place, shown_by_server
from anabranch.core.errors import ClocksDisagree, Unavailable
from anabranch.identity.addresses import SERVER_NAME, host_and_port, split_job
from anabranch.identity.certificates import SET_CLOCK, lifetime, times_text
from anabranch.identity.wallet import IDENTITY, Wallet
from anabranch.support.shown import PROBE_S, is_turned_away


def check_valid(certificate: x509.Certificate, address: str, now: float) -> None:
    """Raises `ClocksDisagree` where the certificate that a server shows does not count at `now`."""
    begin, end = lifetime(certificate)
    if not begin <= now < end:
        text = times_text(f"the certificate of {address}", (begin, end), "this machine's", now)
        raise ClocksDisagree(f"{text}: {SET_CLOCK}")


def check_unreached(error: Unavailable, address: str, wallet: Wallet | None, now: float) -> None:
    """Raises `ClocksDisagree` where that is why a call over TLS has reached nobody.

    `NotAuthenticated` where the papers or their authority have ended; and an `Unavailable` that says what
    answers there where it is no server of the wallet's authority: it may pass, and anybody on the way could
    answer.
    """
    if wallet is None or error.reached:
        return
    place = host_and_port(split_job(address)[0])
    if (certificate := shown_by_server(place, address, wallet)) is not None:
        wallet.check_authority(now)  # first: else both sides' certificates look as if a clock were wrong
        check_valid(certificate, address, now)
        _check_accepted(place, address, wallet, now)


def _check_accepted(place: Place, address: str, wallet: Wallet, now: float) -> None:
    """Whether the server hangs up on the wallet's certificate: one that it would know, but for the dates."""
    papers = wallet.folder / IDENTITY
    with suppress(OSError):
        if is_turned_away(*place, papers, PROBE_S, SERVER_NAME):
            wallet.check(now)
            valid = lifetime(wallet.certificate)
            text = times_text(f"the certificate in {papers}", valid, "this machine's", now)
            why = "hangs up when it sees it, as one does by whose clock it does not count"
            raise ClocksDisagree(f"{text}; {address} {why}: {SET_CLOCK}")
