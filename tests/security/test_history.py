"""A device that comes back cannot be taken to an older history, or to another one."""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guarded import Federation, SigningDevice, federation, issued, yesterday
from hypothesis import given
from hypothesis import strategies as st

from anabranch.client.history import SeenHistory
from anabranch.core.errors import ClocksDisagree, ConfigError, HistoryMismatch, NotAuthenticated, NotPermitted
from anabranch.core.model.updates import Capability
from anabranch.identity.authority import DAY_S, Authority
from anabranch.identity.certificates import Kind, certificate_der
from anabranch.identity.heads import first_head, follow_links, head_message, next_head
from anabranch.identity.wallet import Wallet
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import model_pb2 as model
from anabranch.server import rpc
from anabranch.server.history import history_at
from anabranch.server.store.factory import open_store
from anabranch.server.tls import ServerIdentity
from anabranch.server.verify import verify

LINKS = [bytes([n]) * 32 for n in range(9)]
HEADS = [first_head({"run": "r"})]
for _link in LINKS:
    HEADS.append(next_head(HEADS[-1], _link))


def links(after: int, to: int) -> bytes:
    """What an honest server answers."""
    return b"".join(LINKS[after:to])


def header(
    identity: Any, version: int, head: str = "", run_id: str = "run", payload: bytes = b"model"
) -> devices.ModelHeader:
    """A model's header as a server signs it; `identity` is its, or another's that can sign."""
    head = head or HEADS[version]
    digest = hashlib.sha256(payload).digest()
    made = devices.ModelHeader(version=version, run_id=run_id, head=bytes.fromhex(head))
    made.part.CopyFrom(model.Part(sha256=digest))
    message = head_message(run_id, version, head, "", digest.hex(), "")
    made.signature, made.certificate = identity.sign(message)
    return made


@pytest.fixture
def server(authority: Authority) -> ServerIdentity:
    """Who signs."""
    return ServerIdentity(authority, DAY_S)


@pytest.fixture
def seen(authority: Authority, tmp_path: Path) -> SeenHistory:
    """A device's memory."""
    return SeenHistory(authority.certificate, tmp_path / "device")


# --- what a device takes ------------------------------------------------------------------------------


def test_a_history_goes_on(seen: SeenHistory, server: ServerIdentity) -> None:
    for version in (2, 2, 3, 9):
        seen.check(header(server, version), links)


def test_links_may_come_in_parts(seen: SeenHistory, server: ServerIdentity) -> None:
    seen.check(header(server, 0), links)
    seen.check(header(server, 9), lambda after, to: links(after, min(to, after + 2)))


def test_a_stale_head(
    seen: SeenHistory, server: ServerIdentity, authority: Authority, tmp_path: Path
) -> None:
    seen.check(header(server, 5), links)
    again = SeenHistory(authority.certificate, tmp_path / "device")  # it comes back
    for memory in (seen, again):
        with pytest.raises(HistoryMismatch, match=r"back to version 4.*seen version 5.*history\.json"):
            memory.check(header(server, 4), links)
    again.check(header(server, 5), links)
    again.check(header(server, 0, run_id="another run"), links)


@pytest.mark.parametrize(
    "get_links",
    [
        lambda after, to: b"",
        lambda after, to: links(after, to)[:-1],
        lambda after, to: links(after, to + 1),
        lambda after, to: links(after, to)[::-1],
        lambda after, to: b"\xff" * 32 * (to - after),
    ],
    ids=["none", "torn", "many", "reversed", "others"],
)
def test_links_that_do_not_lead_there(
    seen: SeenHistory, server: ServerIdentity, get_links: Callable[[int, int], bytes]
) -> None:
    seen.check(header(server, 2), links)
    with pytest.raises(HistoryMismatch, match="version 6"):
        seen.check(header(server, 6), get_links)
    seen.check(header(server, 6), links)  # nothing was forgotten


def test_another_history_of_the_same_length(seen: SeenHistory, server: ServerIdentity) -> None:
    seen.check(header(server, 3), links)
    for version in (3, 4):
        with pytest.raises(HistoryMismatch, match="another history"):
            seen.check(header(server, version, head="ab" * 32), links)


def test_a_head_that_the_server_did_not_sign(
    seen: SeenHistory, server: ServerIdentity, authority: Authority, tmp_path: Path
) -> None:
    for change in (
        {"version": 2},
        {"run_id": "another"},
        {"head": bytes(32)},
        {"manifest_sha256": bytes(32)},
        {"vector_sha256": bytes(32)},
        {"part": model.Part(sha256=bytes(32))},
        {"signature": b""},
        {"certificate": b""},
    ):
        forged = header(server, 1)
        forged.MergeFrom(devices.ModelHeader(**change))
        for name in ("signature", "certificate"):
            if name in change:
                forged.ClearField(name)
        with pytest.raises(NotAuthenticated, match="signed"):
            seen.check(forged, links)

    class Impostor:
        def __init__(self, wallet: Wallet) -> None:
            self.wallet = wallet

        def sign(self, message: bytes) -> tuple[bytes, bytes]:
            return self.wallet.sign(message), certificate_der(self.wallet.certificate)

    with Authority.create(tmp_path / "other") as other:
        elsewhere = ServerIdentity(other, DAY_S)
        member = issued(authority, Kind.DEVICE, "device-1", tmp_path / "member")
        for signer in (elsewhere, Impostor(member)):
            with pytest.raises(NotAuthenticated, match="somebody else"):
                seen.check(header(signer, 1), links)
    assert not (tmp_path / "device").exists()


@pytest.mark.parametrize("days", [30.0, -30.0])
def test_a_head_that_was_signed_by_a_certificate_of_another_time(
    seen: SeenHistory, server: ServerIdentity, authority: Authority, days: float
) -> None:
    """Whoever has found the key of a server of then cannot speak for the server of now."""
    with yesterday(authority, days) as other, pytest.raises(ClocksDisagree, match="by this machine's clock"):
        seen.check(header(ServerIdentity(other, DAY_S), 9), links)
    seen.check(header(server, 1), links)  # and nothing was remembered of it


def test_what_is_remembered_is_evidence_and_private(
    seen: SeenHistory, server: ServerIdentity, authority: Authority, tmp_path: Path
) -> None:
    for run in range(16):
        seen.check(header(server, 1, run_id=f"run-{run}"), links)
    seen.check(header(server, 2, run_id="run-0"), links)
    for run in range(16, 20):
        seen.check(header(server, 1, run_id=f"run-{run}"), links)
    path = tmp_path / "device" / "history.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kept = json.loads(path.read_bytes())
    assert [*kept] == [
        *(f"run-{run}" for run in range(5, 16)),
        "run-0",
        *(f"run-{run}" for run in range(16, 20)),
    ]
    assert bytes.fromhex(kept["run-19"]["message"]).startswith(b"anabranch head 1\n")
    path.write_bytes(b"junk")
    with pytest.raises(ConfigError, match=r"history\.json is damaged"):
        SeenHistory(authority.certificate, path.parent)


@given(parts=st.lists(st.binary(min_size=32, max_size=32), max_size=6), cut=st.integers(0, 6))
def test_links_are_followed_in_any_number_of_steps(parts: list[bytes], cut: int) -> None:
    whole = follow_links(HEADS[0], b"".join(parts))
    half = follow_links(HEADS[0], b"".join(parts[:cut]))
    assert follow_links(half, b"".join(parts[cut:])) == whole


# --- a real server ------------------------------------------------------------------------------------


def worker(guarded: Federation, wallet: Wallet) -> SigningDevice:
    """A device that is enrolled."""
    device = guarded.device(wallet)
    device.enrol()
    return device


def fetch(guarded: Federation, wallet: Wallet) -> int:
    """Fetch the newest version as a device does that starts; returns which."""
    transport = guarded.transport(wallet)
    transport.enrol(Capability())
    return transport.fetch(guarded.served.manifest.spec.layout_hash).version


def test_a_devices_history_goes_on_through_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "LINKS_MAX", 2)
    snapshots = {"server": {"snapshot_every_versions": 3}}
    with federation(tmp_path, **snapshots) as guarded:
        wallet, other = guarded.joined("device-1"), guarded.joined("device-2")
        assert fetch(guarded, wallet) == 0
        device = worker(guarded, other)
        for _ in range(5):
            device.work()
        assert fetch(guarded, wallet) == 5
        for n in range(2):
            with guarded.started_again():
                device = worker(guarded, other)
                for _ in range(4):
                    device.work()
                assert fetch(guarded, wallet) == 9 + 4 * n
                observer = guarded.transport(guarded.operator(f"operator-{n}"))
                assert (
                    observer.fetch(guarded.served.manifest.spec.layout_hash, exact=True).version == 9 + 4 * n
                )
    assert verify(guarded.data_dir).problems == ()
    store = open_store("", guarded.data_dir)
    info = store.info()
    assert info is not None
    rows = store.versions()
    for row in rows:  # from the head on record, and from nothing: the same
        assert history_at(store, info, row.version, row.seq).head == row.head
    store.close()


def test_a_server_that_was_taken_back_is_refused(tmp_path: Path) -> None:
    with federation(tmp_path) as guarded:
        wallet, other = guarded.joined("device-1"), guarded.joined("device-2")
        device = worker(guarded, other)
        device.work()
        guarded.served.close()
        shutil.copytree(guarded.data_dir, tmp_path / "backup")
        with guarded.started_again():
            worker(guarded, other).work()
            assert fetch(guarded, wallet) == 2
        shutil.rmtree(guarded.data_dir)
        (tmp_path / "backup").rename(guarded.data_dir)
        with guarded.started_again():
            with pytest.raises(HistoryMismatch, match="back to version 1"):
                fetch(guarded, wallet)
            worker(guarded, other).work(5.0)  # of the same length, but not the same
            with pytest.raises(HistoryMismatch, match="another history"):
                fetch(guarded, wallet)
            worker(guarded, other).work()
            with pytest.raises(HistoryMismatch, match="version 3 has another history"):
                fetch(guarded, wallet)


def test_a_model_of_a_guarded_port_is_signed(guarded: Federation) -> None:
    device = worker(guarded, guarded.joined("device-1"))
    device.work()
    signed, data = device.fetch()
    SeenHistory(guarded.authority.certificate, None).check(signed, links)
    assert hashlib.sha256(data).digest() == signed.part.sha256
    assert np.frombuffer(data, np.float32).tolist() == [1.0] * 8


def test_a_rollback_is_a_way_on_and_the_only_way_back(tmp_path: Path) -> None:
    with federation(tmp_path) as guarded:
        wallet, bad = guarded.joined("device-1"), guarded.joined("bad")
        good = worker(guarded, guarded.joined("good"))
        good.work(2.0)
        worker(guarded, bad).work(-100.0)
        good.work(4.0)
        assert fetch(guarded, wallet) == 3
        with guarded.operators(guarded.joined("device-2")) as nobody, pytest.raises(NotPermitted):
            nobody.rollback(1, ["bad"])
        version, left_out = guarded.operators(guarded.operator()).rollback(1, ["bad"])
        assert (version, left_out) == (4, 1)
        assert fetch(guarded, wallet) == 4  # it has seen version 3, and the links lead on from there
        assert np.frombuffer(good.fetch()[1], np.float32).tolist() == [6.0] * 8
        guarded.served.close()
        with guarded.started_again():
            worker(guarded, guarded.joined("good-2")).work(1.0)
            assert fetch(guarded, wallet) == 5
    assert verify(guarded.data_dir).problems == ()
