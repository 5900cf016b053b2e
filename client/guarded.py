"""What is behind a call in the clear that failed: a port that wants a certificate."""

from __future__ import annotations

from anabranch.core.errors import NotAuthenticated
from anabranch.identity.addresses import SERVER_NAME, host_and_port, split_job
from anabranch.support.shown import PROBE_S, shown_certificate


def check_not_guarded(address: str) -> None:
    """Raises `NotAuthenticated`, with the fix, where a server speaks TLS; for when plain text failed."""
    try:
        shown_certificate(*host_and_port(split_job(address)[0]), PROBE_S, SERVER_NAME)
    except OSError:  # nobody is there, or no TLS
        return
    raise NotAuthenticated(
        f"{address} wants a certificate: a device joins with --token and --ca-sha256, an operator names its "
        "papers with --identity (`anabranch admin operator NAME` makes them)"
    )
