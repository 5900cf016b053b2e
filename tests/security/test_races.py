"""A revocation comes between any two steps of letting somebody in, and holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from guarded import Federation, issued

from anabranch.client.joining import join
from anabranch.core.errors import NotAuthenticated
from anabranch.identity.authority import DAY_S, Authority
from anabranch.identity.certificates import Kind, Peer, new_key, signing_request
from anabranch.identity.wallet import Wallet


def revoke_before_issuing(authority: Authority, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What the authority signs next is signed right after a revocation."""
    issue = authority._issue

    def late(*arguments: object) -> object:
        authority.revoke(name)
        return issue(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(authority, "_issue", late)


def test_a_revocation_in_the_midst_of_a_renewal(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wallet = issued(authority, Kind.DEVICE, "a", tmp_path / "a")
    revoke_before_issuing(authority, monkeypatch, "a")
    with pytest.raises(NotAuthenticated, match="was revoked"):
        authority.renew(wallet.peer, wallet.request(), DAY_S)
    assert [m.revoked for m in authority.members()] == [True]


def test_a_revocation_in_the_midst_of_a_join(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    token = authority.invite("a", DAY_S)
    revoke_before_issuing(authority, monkeypatch, "a")
    with pytest.raises(NotAuthenticated, match="was revoked"):
        authority.admit(token, signing_request(new_key()), DAY_S)
    assert authority.members() == []


def test_a_new_key_in_the_midst_of_the_old_ones_renewal(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = issued(authority, Kind.DEVICE, "a", tmp_path / "old")
    issue = authority._issue
    newer: list[Wallet] = []

    def late(*arguments: object) -> object:
        if not newer:
            monkeypatch.setattr(authority, "_issue", issue)
            newer.append(issued(authority, Kind.DEVICE, "a", tmp_path / "new"))
        return issue(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(authority, "_issue", late)
    with pytest.raises(NotAuthenticated, match="was revoked"):
        authority.renew(old.peer, old.request(), DAY_S)
    authority.check(newer[0].peer)
    with pytest.raises(NotAuthenticated):
        authority.check(old.peer)


def test_a_revoked_device_cannot_repeat_its_join(authority: Authority) -> None:
    token, request = authority.invite("a", DAY_S), signing_request(new_key())
    authority.admit(token, request, DAY_S)
    authority.admit(token, request, DAY_S)  # its answer may have been lost
    assert authority.revoke("a") == 2
    with pytest.raises(NotAuthenticated, match="was revoked"):
        authority.admit(token, request, DAY_S)


def test_who_was_replaced_cannot_take_its_name_back(authority: Authority, tmp_path: Path) -> None:
    token, request = authority.invite("a", DAY_S), signing_request(new_key())
    authority.admit(token, request, DAY_S)
    newer = issued(authority, Kind.DEVICE, "a", tmp_path / "newer")
    with pytest.raises(NotAuthenticated, match="was revoked"):
        authority.admit(token, request, DAY_S)
    authority.check(newer.peer)


def test_nobody_waits_for_somebody_who_joins(authority: Authority, tmp_path: Path) -> None:
    peer = issued(authority, Kind.DEVICE, "a", tmp_path / "a").peer
    with authority._register._writing():
        authority.check(peer)


def test_a_copy_of_a_device_is_shut_out_with_it(guarded: Federation, tmp_path: Path) -> None:
    wallet = guarded.joined("device-1")
    original, clone = guarded.device(wallet), guarded.device(wallet)
    original.enrol()
    clone.enrol()
    task = original.task()
    assert original.answer(task, update_id="u").decision.verdict == "published"
    assert clone.answer(task, update_id="u").version == 1  # the same outbox: it counts once
    token = guarded.authority.invite("device-1", DAY_S)
    fresh = join(tmp_path / "fresh", guarded.join_address, token, guarded.authority.sha256)
    guarded.device(fresh).enrol()
    peer: Peer = wallet.peer
    with pytest.raises(NotAuthenticated, match="is revoked"):
        guarded.authority.check(peer)
