"""An authority that ends: it is said long before, nobody is let in after it, and no clock is blamed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from commands import anabranch
from guarded import TENSORS, federation, issued

from anabranch.client.clocks import check_unreached
from anabranch.client.link import Link
from anabranch.core.errors import OUTCOMES, ClocksDisagree, ConfigError, NotAuthenticated, Unavailable
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.identity.authority import AUTHORITY_LIFE_S, DAY_S, KEY, Authority
from anabranch.identity.certificates import (
    Kind,
    lifetime,
    make_certificate,
    new_key,
    read_key,
    signing_request,
    time_text,
)
from anabranch.identity.wallet import Wallet

T0 = 1_800_000_000.0
END = T0 + AUTHORITY_LIFE_S


def ending_in(left_s: float) -> Callable[[], float]:
    """A clock by which an authority is made that ends so long from now."""
    return lambda: time.time() + left_s - AUTHORITY_LIFE_S


def unbounded(authority: Authority, kind: Kind, folder: Path) -> Wallet:
    """Papers of now, as an earlier release signed them: whether the authority lasts or not."""
    key = new_key()
    signing = read_key((authority.folder / KEY).read_bytes(), KEY)
    args = (kind, "alice", key.public_key(), time.time(), DAY_S)
    wallet = Wallet(
        folder, key, make_certificate(authority.certificate, signing, *args), authority.certificate
    )
    wallet.save()
    return wallet


def test_nothing_that_an_authority_gives_out_outlives_it(tmp_path: Path) -> None:
    now, reads = [T0], count()  # a clock that goes on between two looks at it
    with Authority.create(tmp_path / "ca", lambda: now[0] + next(reads) / 1024) as authority:
        now[0] = END - 3 * DAY_S
        device = issued(authority, Kind.DEVICE, "a", tmp_path / "a", 7 * DAY_S)
        operator = issued(authority, Kind.OPERATOR, "b", tmp_path / "b", 90 * DAY_S)
        authority.invite("c", 7 * DAY_S)
        assert device.peer.not_after == operator.peer.not_after == END
        assert [i.expires_at for i in authority.invitations()] == [END]
        assert not device.is_due(END - 1.0), "another one would end no later"
        short = issued(authority, Kind.DEVICE, "d", tmp_path / "d", DAY_S)
        assert short.peer.not_after == END - 2 * DAY_S
        assert short.is_due(END - 2 * DAY_S)


def test_after_its_end_an_authority_lets_nobody_in_and_uses_no_token_up(tmp_path: Path) -> None:
    now = [T0]
    with Authority.create(tmp_path / "ca", lambda: now[0]) as authority:
        token, request = authority.invite("a", 2 * AUTHORITY_LIFE_S), signing_request(new_key())
        now[0] = END
        said = f"has ended, on {time_text(END)}.* as where ca.key has leaked .*By this machine's clock"
        with pytest.raises(ConfigError, match=said):
            authority.invite("b", DAY_S)
        with pytest.raises(ConfigError, match=said):
            authority.operator("b", new_key().public_key(), DAY_S)
        with pytest.raises(ClocksDisagree, match=r"authority is valid from .* by the server's clock it is"):
            authority.admit(token, request, DAY_S)
        assert not authority.members()
        now[0] = T0
        assert [i.name for i in authority.invitations()] == ["a"]
        assert authority.admit(token, request, DAY_S)[0] == "a"


@pytest.mark.parametrize(
    ("kind", "fix"),
    [(Kind.DEVICE, "join again with a new token"), (Kind.OPERATOR, "made by `anabranch admin operator`")],
)
def test_a_member_is_told_once_a_day_before_its_authority_ends_and_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Kind, fix: str
) -> None:
    now, fix = [T0], f"{fix} of the authority that takes its place"
    with Authority.create(tmp_path / "ca", lambda: now[0]) as authority:
        now[0] = END - 185 * DAY_S
        wallet = issued(authority, kind, "a", tmp_path / "a", 200 * DAY_S)
    link = Link("127.0.0.1:1", wallet=wallet, now=lambda: now[0])
    try:
        with caplog.at_level(logging.WARNING):
            link.stub()
            assert not caplog.messages
            now[0] = END - 179.5 * DAY_S
            for _ in range(20):  # five days
                link.stub()
                now[0] += DAY_S / 4
        assert caplog.messages == [
            f"the federation's authority ends on {time_text(END)}: before then, {message}"
            for message in [_whole(fix)] * 5
        ]
        now[0] = END
        with pytest.raises(NotAuthenticated, match=f"authority ended on {time_text(END)}, and .*{fix}"):
            link.stub()
    finally:
        link.close()


def _whole(fix: str) -> str:
    return fix if fix.startswith("join") else f"have others {fix}"


def test_nobody_blames_a_clock_when_the_authority_has_ended(tmp_path: Path) -> None:
    """Over real TLS. Certificates of an earlier release outlive their authority, and look good."""
    told = "the federation's authority ended on 20.*of the authority that takes its place"
    with federation(tmp_path, TENSORS, DEFAULT_LIMITS, time.time, ending_in(-60.0)) as guarded:
        with pytest.raises(NotAuthenticated, match=told):
            guarded.joined("device-1")
        operator = unbounded(guarded.authority, Kind.OPERATOR, tmp_path / "operator")
        with pytest.raises(NotAuthenticated, match=told):
            guarded.operators(operator).status()
        link = Link(guarded.address, wallet=unbounded(guarded.authority, Kind.DEVICE, tmp_path / "device"))
        with pytest.raises(NotAuthenticated, match=told):
            link.stub()
        link.close()


def test_the_end_comes_before_the_clocks(tmp_path: Path) -> None:
    """By a clock of after it, the server's certificate does not count either."""
    error = Unavailable("nobody answers")
    error.reached = False
    with federation(tmp_path) as guarded:
        wallet, end = guarded.joined("device-1"), lifetime(guarded.authority.certificate)[1]
        with pytest.raises(ClocksDisagree):
            check_unreached(error, guarded.address, wallet, end - 1.0)
        with pytest.raises(NotAuthenticated, match="authority ended on"):
            check_unreached(error, guarded.address, wallet, end)


def test_commands_say_half_a_year_before_that_the_authority_ends_and_refuse_after(tmp_path: Path) -> None:
    for name, left_s in (("new", 190 * DAY_S), ("late", 100 * DAY_S), ("over", -60.0)):
        with Authority.create(tmp_path / name, ending_in(left_s)) as authority:
            issued(authority, Kind.DEVICE, "a", tmp_path / f"{name}-a", 2 * AUTHORITY_LIFE_S)
            end, sha256 = time_text(lifetime(authority.certificate)[1]), authority.sha256
        shown = anabranch(tmp_path, "admin", "ca", "show", "--folder", name)
        assert (shown.returncode, shown.stdout.split()) == (0, [sha256]), "scripts take it as it is"
        assert f" {end}" in shown.stderr
        assert (f" {end}: then no device" in shown.stderr) == (name != "new")
        told = anabranch(tmp_path, "admin", "ca", "show", "--folder", name, "--json")
        assert time_text(json.loads(told.stdout)["expires_at_s"]) == end
        assert (f" {end}: then no device" in told.stderr) == (name != "new")
        for command in (("enrol", "b"), ("operator", "b", "--out", f"{name}-b"), ("members",)):
            done = anabranch(tmp_path, "admin", *command, "--folder", name, "--json")
            refused = name == "over" and command != ("members",)
            assert done.returncode == (OUTCOMES[ConfigError].exit_code if refused else 0), done.stderr
            assert (f" {end}: then no device" in done.stderr) == (name != "new")
            answered = json.loads(done.stdout.splitlines()[0])
            if command == ("members",):
                assert answered["state"] == ("expired" if name == "over" else "good")
            elif refused:
                assert "has ended, on" in answered["detail"]
                assert not (tmp_path / f"{name}-b").exists()
