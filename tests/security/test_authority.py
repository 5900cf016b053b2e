"""The authority: tokens that are good once, certificates that end, and what is written down."""

from __future__ import annotations

import sqlite3
import stat
import time
from contextlib import closing
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from guarded import issued, yesterday
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.core.errors import ClocksDisagree, ConfigError, NotAuthenticated, NotPermitted, StoreError
from anabranch.identity.authority import DAY_S, Authority
from anabranch.identity.certificates import (
    Kind,
    certificate_der,
    certificate_pem,
    key_pem,
    new_key,
    peer_of,
    read_certificate,
    read_key,
    signing_request,
)
from anabranch.identity.wallet import Wallet, joining_key, read_wallet


def request() -> bytes:
    return signing_request(new_key())


def test_a_token_is_good_for_one_key(authority: Authority) -> None:
    token, first = authority.invite("device-1", DAY_S), request()
    name, made = authority.admit(token, first, DAY_S)
    assert (name, peer_of(certificate_der(made)).name) == ("device-1", "device-1")
    again, _ = authority.admit(token, first, DAY_S)  # the answer may have got lost
    assert again == "device-1"
    with pytest.raises(NotAuthenticated, match="used before"):
        authority.admit(token, request(), DAY_S)


def test_a_token_ends(authority: Authority) -> None:
    with yesterday(authority) as late:
        token = late.invite("device-1", DAY_S / 2)
    with pytest.raises(NotAuthenticated, match=r"expired at 20.*, and by the server's clock it is 20"):
        authority.admit(token, request(), DAY_S)


def test_a_revoked_token_is_not_good(authority: Authority) -> None:
    token = authority.invite("device-1", DAY_S)
    assert authority.revoke("device-1") == 1
    with pytest.raises(NotAuthenticated, match="revoked"):
        authority.admit(token, request(), DAY_S)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_no_made_up_token_is_good(authority: Authority, text: str) -> None:
    token_id = authority.invite("device-1", DAY_S).partition(".")[0]
    for token in (text, f"{token_id}.{text}", token_id, ""):
        with pytest.raises(NotAuthenticated, match="not known"):
            authority.admit(token, request(), DAY_S)


def test_a_token_that_is_too_long_is_refused_without_a_look_at_the_register(authority: Authority) -> None:
    with closing(sqlite3.connect(authority.folder / "register.db")) as other:
        other.execute("BEGIN EXCLUSIVE")  # whoever has to look waits for that, and fails
        with pytest.raises(NotAuthenticated, match="not known"):
            authority.admit("x" * 129, request(), DAY_S)


def test_tokens_are_written_down_as_digests_alone(authority: Authority) -> None:
    secret = authority.invite("device-1", DAY_S).partition(".")[2]
    assert all(secret.encode() not in path.read_bytes() for path in authority.folder.iterdir())


def test_nobody_else_can_read_the_files(authority: Authority, tmp_path: Path) -> None:
    wallet = issued(authority, Kind.DEVICE, "device-1", tmp_path / "device")
    joining_key(tmp_path / "joining")
    private = [*authority.folder.iterdir(), *wallet.folder.iterdir(), *(tmp_path / "joining").iterdir()]
    assert len(private) == 5
    for path in private:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700, path.parent


def test_a_certificate_counts_until_it_ends(authority: Authority, tmp_path: Path) -> None:
    peer = issued(authority, Kind.DEVICE, "device-1", tmp_path / "a", life_s=DAY_S).peer
    authority.check(peer)
    for days in (-1.5, 0.5):  # tomorrow, yesterday
        with (
            yesterday(authority, days) as other,
            pytest.raises(ClocksDisagree, match="clock it is 20"),
        ):
            other.check(peer)


def test_a_revoked_name_may_be_let_in_anew(authority: Authority, tmp_path: Path) -> None:
    first = issued(authority, Kind.DEVICE, "device-1", tmp_path / "a").peer
    authority.revoke("device-1")
    with pytest.raises(NotAuthenticated, match="is revoked"):
        authority.check(first)
    second = issued(authority, Kind.DEVICE, "device-1", tmp_path / "b").peer
    authority.check(second)
    with pytest.raises(NotAuthenticated, match="is revoked"):
        authority.check(first)


def test_one_name_has_one_key(authority: Authority, tmp_path: Path) -> None:
    first = issued(authority, Kind.DEVICE, "device-1", tmp_path / "a").peer
    issued(authority, Kind.DEVICE, "device-1", tmp_path / "b")
    with pytest.raises(NotAuthenticated, match="is revoked"):
        authority.check(first)


def test_a_certificate_that_is_on_no_list_does_not_count(authority: Authority, tmp_path: Path) -> None:
    peer = issued(authority, Kind.DEVICE, "device-1", tmp_path / "a").peer
    with sqlite3.connect(authority.folder / "register.db") as register:
        register.execute("DELETE FROM certificates")
    register.close()
    with pytest.raises(NotAuthenticated, match="is unknown"):
        authority.check(peer)


def test_a_device_renews_for_itself_and_its_key_alone(authority: Authority, tmp_path: Path) -> None:
    wallet = issued(authority, Kind.DEVICE, "device-1", tmp_path / "a")
    made = certificate_der(authority.renew(wallet.peer, wallet.request(), 2 * DAY_S))
    newer = wallet.renewed(made, time.time())
    assert newer.peer.serial != wallet.peer.serial
    assert newer.peer.not_after > wallet.peer.not_after
    for peer in (wallet.peer, newer.peer):  # what is under way goes on
        authority.check(peer)
    with pytest.raises(NotPermitted):
        authority.renew(wallet.peer, request(), DAY_S)
    operator = issued(authority, Kind.OPERATOR, "alice", tmp_path / "b")
    with pytest.raises(NotPermitted):
        authority.renew(operator.peer, operator.request(), DAY_S)
    authority.revoke("device-1")
    with pytest.raises(NotAuthenticated):
        authority.renew(newer.peer, newer.request(), DAY_S)


def _rsa_request() -> bytes:
    key = rsa.generate_private_key(65537, 2048)
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def _other_curve() -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    made = builder.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256())
    return made.public_bytes(serialization.Encoding.DER)


def _forged() -> bytes:
    made = bytearray(request())
    made[-1] ^= 1
    return bytes(made)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        pytest.param(b"", "cannot be read", id="empty"),
        pytest.param(b"junk", "cannot be read", id="junk"),
        pytest.param(b"\x30" * 4096, "cannot be read", id="longest"),
        pytest.param(b"\x30" * 4097, "has 4097 bytes, 4096 are the most", id="too long"),
        pytest.param(_rsa_request(), "by its own key, of P-256", id="rsa"),
        pytest.param(_other_curve(), "by its own key, of P-256", id="curve"),
        pytest.param(_forged(), "by its own key, of P-256", id="forged"),
    ],
)
def test_a_bad_signing_request_does_not_use_the_token_up(authority: Authority, bad: bytes, why: str) -> None:
    token = authority.invite("device-1", DAY_S)
    with pytest.raises(NotAuthenticated, match=f"signing request .*{why}"):
        authority.admit(token, bad, DAY_S)
    assert authority.admit(token, request(), DAY_S)[0] == "device-1"


@pytest.mark.parametrize("name", ["", "../x", "a:b", "a b", "x" * 65, "-x"])
def test_names_are_ids(authority: Authority, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        authority.invite(name, DAY_S)
    with pytest.raises(ConfigError, match="name"):
        authority.operator(name, new_key().public_key(), DAY_S)


def test_an_authority_is_not_overwritten(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already"):
        Authority.create(authority.folder)
    with pytest.raises(ConfigError, match="ca init"):
        Authority.open(tmp_path / "nowhere")


def test_an_authority_that_could_not_be_made_is_made_by_the_next_try(tmp_path: Path) -> None:
    in_the_way = tmp_path / "ca" / "ca.pem.tmp"
    in_the_way.mkdir(parents=True)
    with pytest.raises(StoreError, match=r"ca\.pem cannot be used"):
        Authority.create(tmp_path / "ca")
    in_the_way.rmdir()
    Authority.create(tmp_path / "ca").close()


@pytest.mark.parametrize("damage", ["key", "certificate", "another's", "register", "no register", "older"])
def test_a_damaged_authority_says_so(authority: Authority, tmp_path: Path, damage: str) -> None:
    folder = authority.folder
    match damage:
        case "key":
            (folder / "ca.key").write_bytes(b"junk")
        case "certificate":
            (folder / "ca.pem").write_bytes(b"junk")
        case "another's":
            with Authority.create(tmp_path / "other") as other:
                (folder / "ca.pem").write_bytes(other.pem)
        case "register":
            (folder / "register.db").write_bytes(b"junk" * 1000)
        case "no register":
            (folder / "register.db").unlink()
        case "older":
            with sqlite3.connect(folder / "register.db") as register:
                register.execute("PRAGMA user_version = 1")
            register.close()
    with pytest.raises(ConfigError, match=str(folder)):
        Authority.open(folder)


def test_a_register_that_cannot_be_opened_is_named(authority: Authority) -> None:
    """As one of another user, or of a disk that is gone: no traceback of the database's."""
    register = authority.folder / "register.db"
    register.unlink()
    register.mkdir()
    with pytest.raises(StoreError, match=r"register\.db cannot be opened"):
        Authority.open(authority.folder)


# The library warns of damage that it reads all the same: that is for the signature to tell.
@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
def test_a_bit_that_flips_in_a_paper_names_the_file(authority: Authority) -> None:
    """What it leaves is read, or is refused by name: as PEM, of which some bits say nothing, and as DER."""
    certificate, key = authority.certificate, new_key()
    for whole, read in (
        (certificate_der(certificate), read_certificate),
        (certificate_pem(certificate), read_certificate),
        (key_pem(key), read_key),
    ):
        for bit in range(8 * len(whole)):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            said = "the paper: the "
            try:
                read(bytes(damaged), "the paper").public_key()
            except ConfigError as error:
                said = str(error)
            assert said.startswith("the paper: the ")


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
def test_no_bit_that_flips_in_the_authoritys_certificate_is_taken_for_it(authority: Authority) -> None:
    whole, path = authority.pem, authority.folder / "ca.pem"
    said = []
    for at in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 7
        path.write_bytes(damaged)
        try:
            with Authority.open(authority.folder) as opened:
                assert opened.sha256 == authority.sha256, f"byte {at}"  # PEM has bits that say nothing
        except ConfigError as error:
            said.append(str(error))
    assert len(said) > len(whole) // 6
    assert all(str(authority.folder) in text for text in said)


def test_the_list_of_members(authority: Authority, tmp_path: Path) -> None:
    issued(authority, Kind.DEVICE, "b", tmp_path / "b")
    issued(authority, Kind.OPERATOR, "a", tmp_path / "a")
    authority.revoke("b")
    found = [(m.kind, m.name, m.revoked, m.expires_at > time.time()) for m in authority.members()]
    assert found == [("device", "b", True, True), ("operator", "a", False, True)]


def test_a_device_shuts_out_no_operator_of_its_name_and_a_revocation_both(
    authority: Authority, tmp_path: Path
) -> None:
    made = [
        issued(authority, kind, "alice", tmp_path / f"{n}").peer
        for n, kind in enumerate((Kind.OPERATOR, Kind.OPERATOR, Kind.DEVICE, Kind.DEVICE))
    ]
    with pytest.raises(NotAuthenticated, match="is revoked"):
        authority.check(made[2])
    for peer in (*made[:2], made[3]):
        authority.check(peer)
    members = [("device", "alice"), ("operator", "alice")]
    assert [(m.kind, m.name) for m in authority.members() if not m.revoked] == members
    assert authority.revoke("alice") == 3
    for peer in made:
        with pytest.raises(NotAuthenticated, match="is revoked"):
            authority.check(peer)
    assert [(m.kind, m.name) for m in authority.members() if m.revoked] == members


# --- what a member has ------------------------------------------------------------------------------


def test_papers_are_read_as_they_were_written(authority: Authority, tmp_path: Path) -> None:
    wallet = issued(authority, Kind.DEVICE, "device-1", tmp_path / "a")
    found = read_wallet(tmp_path / "a")
    assert found is not None
    assert found.credentials() == wallet.credentials()
    assert read_wallet(tmp_path / "b") is None
    whole = (tmp_path / "a" / "identity.pem").read_bytes()
    for damaged in (b"", b"junk", whole[: len(whole) // 2], whole[:-200]):
        (tmp_path / "a" / "identity.pem").write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"identity\.pem.*; or remove it: a device joins again"):
            read_wallet(tmp_path / "a")


def test_papers_take_no_certificate_of_another(authority: Authority, tmp_path: Path) -> None:
    mine = issued(authority, Kind.DEVICE, "mine", tmp_path / "mine")
    other = issued(authority, Kind.DEVICE, "other", tmp_path / "other")
    with pytest.raises(NotAuthenticated, match="'other'"):
        mine.renewed(certificate_der(other.certificate), time.time())
    with pytest.raises(NotAuthenticated, match="another key"):
        Wallet(tmp_path / "x", mine.key, other.certificate, authority.certificate).save()
    with (
        Authority.create(tmp_path / "elsewhere") as elsewhere,
        pytest.raises(NotAuthenticated, match="signed"),
    ):
        Wallet(tmp_path / "x", mine.key, mine.certificate, elsewhere.certificate).save()
    assert not (tmp_path / "x").exists()


def test_the_key_to_join_with_is_made_once(tmp_path: Path) -> None:
    first, again = joining_key(tmp_path / "a"), joining_key(tmp_path / "a")
    assert first.private_numbers() == again.private_numbers()
    (tmp_path / "a" / "joining.pem").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"joining\.pem.*; or remove it, and join with a new token"):
        joining_key(tmp_path / "a")


def test_many_are_invited_at_once_or_none(authority: Authority) -> None:
    names = [f"device-{n}" for n in range(200)]
    tokens = authority.invite_all(names, DAY_S)
    assert [i.name for i in authority.invitations()] == sorted(names)
    assert [authority.admit(token, request(), DAY_S)[0] for token in tokens[:2]] == names[:2]
    with pytest.raises(ConfigError, match="name"):
        authority.invite_all(["good", "no good"], DAY_S)
    assert len(authority.invitations()) == 198


def test_an_open_invitation_is_withdrawn_and_a_member_stays(authority: Authority) -> None:
    first, second = authority.invite_all(["device-1", "device-1"], DAY_S)
    listed = authority.invitations()
    name, made = authority.admit(first, request(), DAY_S)
    assert authority.withdraw(listed) == 1  # the other was used meanwhile
    assert authority.invitations() == []
    authority.check(peer_of(certificate_der(made)))
    with pytest.raises(NotAuthenticated, match="revoked"):
        authority.admit(second, request(), DAY_S)
    assert name == "device-1"


def test_a_copy_has_all_that_was_written_down_and_nobody_else_can_read_it(
    authority: Authority, tmp_path: Path
) -> None:
    _, made = authority.admit(authority.invite("device-1", DAY_S), request(), DAY_S)
    late = authority.invite("device-2", DAY_S)
    authority.copy(tmp_path / "copy")
    authority.revoke("device-1")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "copy").iterdir()} == {0o600}
    with Authority.open(tmp_path / "copy") as copy:
        assert copy.sha256 == authority.sha256
        copy.check(peer_of(certificate_der(made)))  # as it was at that moment
        assert copy.admit(late, request(), DAY_S)[0] == "device-2"
    with pytest.raises(ConfigError, match="is not empty"):
        authority.copy(tmp_path / "copy")
