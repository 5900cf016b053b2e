"""Clocks that are wrong: nobody gets in by them, and who is kept out is told why and comes back by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from guarded import Federation, issued

from anabranch.client.link import Link
from anabranch.core.errors import NotAuthenticated
from anabranch.identity.authority import DAY_S, Authority
from anabranch.identity.certificates import SKEW_S, Kind, lifetime
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server.tls import ServerIdentity


def clock(authority: Authority, ahead_s: Callable[[], float]) -> Authority:
    """The same authority by another clock."""
    return Authority.open(authority.folder, lambda: time.time() + ahead_s())


@pytest.mark.parametrize("behind_s", [0.0, SKEW_S - 10])
def test_a_device_whose_clock_is_a_little_late_is_let_in(
    authority: Authority, tmp_path: Path, behind_s: float
) -> None:
    peer = issued(authority, Kind.DEVICE, "a", tmp_path / "a").peer
    with clock(authority, lambda: -behind_s) as late:
        late.check(peer)


def test_a_certificate_from_the_future_does_not_count_yet(authority: Authority, tmp_path: Path) -> None:
    with clock(authority, lambda: DAY_S) as ahead:
        peer = issued(ahead, Kind.DEVICE, "a", tmp_path / "a").peer
        ahead.check(peer)
    with pytest.raises(NotAuthenticated, match="not valid yet: see to the clocks"):
        authority.check(peer)


def test_a_server_whose_clock_was_set_back_shows_a_certificate_of_now(authority: Authority) -> None:
    ahead_s = [365 * DAY_S]
    with clock(authority, lambda: ahead_s[0]) as moved:
        identity = ServerIdentity(moved, 7 * DAY_S)
        identity.sign(b"")
        ahead_s[0] = 0.0
        _, shown = identity.sign(b"")
        begin, end = lifetime(identity.certificate)
        assert begin <= time.time() < end
        assert identity.sign(b"")[1] == shown  # and then keeps it


def test_a_device_whose_clock_jumps_ahead_says_so_and_is_back_when_it_is_right(guarded: Federation) -> None:
    wallet, ahead_s = guarded.joined("device-1"), [0.0]
    link = Link(guarded.address, wallet=wallet, now=lambda: time.time() + ahead_s[0])
    request = devices.EnrolRequest(client_id="device-1", protocol_version=1)
    link.stub().Enrol(request)
    ahead_s[0] = 3650 * DAY_S
    with pytest.raises(NotAuthenticated, match="by this machine's clock it is 203"):
        link.stub()
    ahead_s[0] = 0.0
    link.stub().Enrol(request)
    link.close()
