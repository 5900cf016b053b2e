"""Clocks that are wrong: nobody gets in by them, and who is kept out is told why and comes back by itself."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from guarded import TENSORS, Federation, federation, issued

from anabranch.client.agent import Agent
from anabranch.client.link import Link
from anabranch.client.stopping import Bell
from anabranch.core.errors import ClocksDisagree, NotAuthenticated, Unavailable
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.identity.authority import DAY_S, Authority
from anabranch.identity.certificates import SKEW_S, Kind, certificate_der, lifetime, time_text
from anabranch.identity.wallet import read_wallet
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server.tls import CertificateSupply, ServerIdentity
from anabranch.server.verify import verify
from anabranch.testing.federation import BASE, first_weights
from anabranch.workloads.app import Shard
from anabranch.workloads.synthetic import Synthetic


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
    with pytest.raises(ClocksDisagree, match=r"is valid from 20.*by the server's clock it is 20"):
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


def test_the_end_of_an_authority_is_said_half_a_year_before(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    ahead_s = [0.0]
    end = lifetime(authority.certificate)[1]
    with clock(authority, lambda: ahead_s[0]) as moved:
        identity = ServerIdentity(moved, 7 * DAY_S)
        for at, said in (
            (end - 190 * DAY_S, ""),
            (end - 170 * DAY_S, "ends on"),
            (end + DAY_S, "has ended, on"),
        ):
            caplog.clear()
            ahead_s[0] = at - time.time()
            identity.sign(b"")
            warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
            assert len(warnings) == bool(said)
            assert all(f" {said} {time_text(end)}: then no device" in text for text in warnings)


def test_a_handshake_is_given_a_certificate_only_where_it_is_another(authority: Authority) -> None:
    ahead_s = [0.0]
    with clock(authority, lambda: ahead_s[0]) as moved:
        identity = ServerIdentity(moved, 7 * DAY_S)
        changes = CertificateSupply(identity, identity.configuration())
        assert changes.latest() is None
        ahead_s[0] = 5 * DAY_S
        assert changes.latest() is identity.configuration()
        assert changes.latest() is None


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


class Wall:
    """The server's clock, which somebody sets."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.ahead_s = ahead_s

    def __call__(self) -> float:
        return time.time() + self.ahead_s


class Patience:
    """A bell whose sleeps take no time."""

    def __init__(self) -> None:
        self._slept_s = 0.0
        self.bell = Bell(lambda: time.monotonic() + self._slept_s, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self._slept_s += seconds


# Past the end of the device's certificate; before its beginning; so that the server's own is of the future.
@pytest.mark.parametrize("ahead_s", [30 * DAY_S, -DAY_S, 5 * DAY_S])
def test_a_device_outlives_a_wrong_clock_of_its_server_and_says_so(tmp_path: Path, ahead_s: float) -> None:
    wall = Wall()
    failed: list[dict[str, Any]] = []

    def hear(kind: str, **data: Any) -> None:
        if kind == "pushed":
            wall.ahead_s = 0.0 if failed else ahead_s
        elif kind == "failed":
            failed.append(data)
            wall.ahead_s = 0.0

    with federation(tmp_path, first_weights(), DEFAULT_LIMITS, wall, **BASE) as guarded:
        transport = guarded.transport(guarded.joined("device-1"))
        shard, folder, bell = Shard("train", 0, 4), tmp_path / "device", Patience().bell
        agent = Agent(
            Synthetic(), transport, "device-1", shard, folder, tasks_max=3, on_event=hear, bell=bell
        )
        assert agent.run().answered == 3
    first = failed[0]
    assert (first["error"], first["again"]) == ("ClocksDisagree", True)
    assert re.search(r"is valid from .* to .*clock it is 20.*set the clock that is wrong", first["detail"])


def test_a_call_within_another_tells_both_clocks_once(tmp_path: Path) -> None:
    """As a download makes it."""
    wall, request = Wall(), devices.EnrolRequest(client_id="device-1", protocol_version=1)
    with federation(tmp_path, TENSORS, DEFAULT_LIMITS, wall) as guarded:
        link = Link(guarded.address, wallet=guarded.joined("device-1"))
        link.stub().Enrol(request)
        wall.ahead_s = 30 * DAY_S
        with (
            pytest.raises(ClocksDisagree, match="by the server's clock") as told,
            link.calling(),
            link.calling(),
        ):
            link.stub().Enrol(request)
        assert str(told.value).count("this machine's") == str(told.value).count("set the clock") == 1
        link.close()


def test_who_joins_by_a_token_that_a_wrong_clock_has_ended_is_told_both_clocks(tmp_path: Path) -> None:
    wall = Wall()
    with federation(tmp_path, TENSORS, DEFAULT_LIMITS, wall) as guarded:
        token = guarded.authority.invite("device-1", DAY_S)
        wall.ahead_s = 2 * DAY_S
        told = r"expired at 20.*by the server's clock it is 20.*\(by this machine's clock it is 20"
        with pytest.raises(NotAuthenticated, match=told):
            guarded.joined("device-1", token)
        wall.ahead_s = 0.0
        assert guarded.joined("device-1", token).name == "device-1"


def test_a_device_that_is_behind_its_server_is_told_so_when_it_joins_and_when_it_comes_back(
    tmp_path: Path,
) -> None:
    """Its TLS refuses a certificate of its future, and all that gRPC says of it is that nobody answers."""
    wall = Wall()
    told = r"of 127\.0\.0\.1:\d+ is valid from .* by this machine's clock it is 20.*: set the clock that"
    request = devices.EnrolRequest(client_id="device-1", protocol_version=1)
    with federation(tmp_path, TENSORS, DEFAULT_LIMITS, wall) as guarded:
        wallet = guarded.joined("device-1")
        wall.ahead_s = 5 * DAY_S  # so that it has made another certificate, of its own time
        with pytest.raises(ClocksDisagree, match=told):
            guarded.joined("device-2")
        link = Link(guarded.address, wallet=wallet)
        with pytest.raises(ClocksDisagree, match=told), link.calling():
            link.servers.current.stub.Enrol(request)
        link.close()
        wall.ahead_s = 0.0
        assert guarded.joined("device-2").name == "device-2"


def test_an_operator_who_is_behind_the_server_is_told_so(tmp_path: Path) -> None:
    wall = Wall()
    with federation(tmp_path, TENSORS, DEFAULT_LIMITS, wall) as guarded:
        wallet = guarded.operator()
        wall.ahead_s = 5 * DAY_S
        with pytest.raises(ClocksDisagree):  # the server has made another certificate by now
            guarded.joined("device-2")
        with pytest.raises(ClocksDisagree, match="by this machine's clock it is"):
            guarded.operators(wallet).status()
        wall.ahead_s = 0.0
        assert guarded.operators(wallet).status().version == 0


def test_who_is_ahead_of_the_server_is_told_that_it_hangs_up(tmp_path: Path) -> None:
    """gRPC's TLS goes by the machine's clock, and sends no alert: who calls hears "Socket closed"."""
    told = (
        r"identity\.pem is valid from 20.*by this machine's.*hangs up when it sees it.*: set the clock that"
    )
    request = devices.EnrolRequest(client_id="device-1", protocol_version=1)
    with federation(tmp_path, TENSORS, DEFAULT_LIMITS) as guarded:
        with clock(guarded.authority, lambda: 3 * DAY_S) as ahead:
            operator = issued(ahead, Kind.OPERATOR, "bob", tmp_path / "bob")
            device = issued(ahead, Kind.DEVICE, "device-1", tmp_path / "device-1")
        with pytest.raises(ClocksDisagree, match=told):
            guarded.operators(operator).status()
        link = Link(guarded.address, wallet=device, now=lambda: time.time() + 3 * DAY_S)
        with pytest.raises(ClocksDisagree, match=told), link.calling():
            link.stub().Enrol(request)
        link.close()
        with clock(guarded.authority, lambda: -300 * DAY_S) as behind:
            expired = issued(behind, Kind.OPERATOR, "carol", tmp_path / "carol")
        with pytest.raises(NotAuthenticated, match=r"expired at 20.*anabranch admin operator"):
            guarded.operators(expired).status()
        assert guarded.operators(guarded.operator()).status().version == 0


def test_a_server_that_is_gone_hangs_up_on_nobody(tmp_path: Path) -> None:
    with federation(tmp_path, TENSORS, DEFAULT_LIMITS) as guarded:
        client = guarded.operators(guarded.operator())
        client.status()
    with pytest.raises(Unavailable):
        client.status()


def test_a_certificate_that_the_server_signs_by_a_wrong_clock_is_not_put_in_the_place_of_a_good_one(
    tmp_path: Path,
) -> None:
    wall = Wall()
    with federation(tmp_path, TENSORS, DEFAULT_LIMITS, wall) as guarded:
        wallet, ahead_s = guarded.joined("device-1"), [5 * DAY_S]  # a renewal is due
        link = Link(guarded.address, wallet=wallet, now=lambda: time.time() + ahead_s[0])
        link.stub()
        assert link.wallet is not None
        renewed = link.wallet.peer
        assert renewed.serial != wallet.peer.serial
        for wrong_s in (6 * DAY_S, -60.0):  # later than the device's, and one that would end before
            wall.ahead_s, ahead_s[0] = wrong_s, ahead_s[0] + 60.0
            link.stub()
            assert link.wallet.peer == renewed
        on_disk = read_wallet(wallet.folder)
        assert on_disk is not None
        assert on_disk.peer == renewed
        link.close()


@pytest.mark.parametrize(("before_s", "after_s"), [(7 * DAY_S, DAY_S), (60.0, 7 * DAY_S)])
def test_a_certificate_of_another_life_takes_the_place_of_the_present_one(
    tmp_path: Path, before_s: float, after_s: float
) -> None:
    """A device that compared the ends said for days that a clock is wrong, after the setting was changed."""
    t0, now = 1_800_000_000.0, [0.0]
    with Authority.create(tmp_path / "ca", lambda: t0 + now[0]) as authority:
        wallet = issued(authority, Kind.DEVICE, "device-1", tmp_path / "a", before_s)
        now[0] = before_s * 0.8
        assert wallet.is_due(t0 + now[0])
        made = authority.renew(wallet.peer, wallet.request(), after_s)
        newer = wallet.renewed(certificate_der(made), t0 + now[0])
        assert newer.peer.not_after == t0 + now[0] + after_s
        stale = authority.renew(wallet.peer, wallet.request(), 60.0)
        with pytest.raises(ClocksDisagree, match="set the clock that is wrong"):
            newer.renewed(certificate_der(stale), t0 + now[0] + 60.0)  # it would have ended by now


def test_a_renewal_that_a_wrong_clock_prevents_is_tried_less_and_less(tmp_path: Path) -> None:
    """Each attempt leaves a certificate in the register: it was 120 of them in an hour, of every device."""
    t0 = time.time()
    wall = [t0]
    with federation(tmp_path, TENSORS, DEFAULT_LIMITS, lambda: wall[0]) as guarded:
        wallet, now = guarded.joined("device-1"), [t0 + 5 * DAY_S]
        link = Link(guarded.address, wallet=wallet, now=lambda: now[0])
        wall[0] = t0 - 60.0  # before it made the device's certificate
        began, asked_at = now[0], [0.0]
        register = sqlite3.connect(guarded.authority.folder / "register.db")
        with closing(register):
            while now[0] < began + 4 * 3600.0:
                link.stub()
                (count,) = register.execute("SELECT COUNT(*) FROM certificates").fetchone()
                if count - 1 > len(asked_at):
                    asked_at.append(now[0] - began)
                now[0] += 30.0
            assert link.wallet is not None
            assert link.wallet.peer == wallet.peer
            waits = [later - earlier for earlier, later in pairwise(asked_at)]
            assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]
            wall[0] = t0
            now[0] += 3600.0
            link.stub()
            assert link.wallet.peer != wallet.peer
        link.close()


def test_signatures_hold_where_the_run_began_by_a_wrong_clock(tmp_path: Path) -> None:
    wall = Wall(-300 * DAY_S)
    with federation(tmp_path, TENSORS, DEFAULT_LIMITS, wall) as guarded:
        wall.ahead_s = 0.0
        device = guarded.device(guarded.joined("device-1"))
        device.enrol()
        device.work()
        ca_sha256 = guarded.authority.sha256
    found = verify(guarded.data_dir, ca_sha256=ca_sha256)
    assert (found.problems, found.version) == ((), 1)
