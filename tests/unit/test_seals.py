"""Boxes for keepers: HPKE against RFC 9180 written out in the test, whose own vector it passes."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from anabranch.core.errors import InvalidSignature, InvalidUpdate
from anabranch.identity.certificates import certificate_der, fingerprint, make_authority, new_key
from anabranch.identity.keepers import KEY_DOMAIN, KeeperKey
from anabranch.identity.seals import box_text, read_box, seal, seal_info, sealed_content, unseal
from anabranch.identity.signatures import sign
from anabranch.protos.convert import KEEPERS_MAX, seals_from_proto, seals_to_proto

KEM_SUITE, SUITE = b"KEM\x00\x20", b"HPKE\x00\x20\x00\x01\x00\x03"
SEED = bytes(range(32))


def extract(salt: bytes, suite: bytes, label: bytes, ikm: bytes) -> bytes:
    return hmac.digest(salt or bytes(32), b"HPKE-v1" + suite + label + ikm, "sha256")


def expand(prk: bytes, suite: bytes, label: bytes, info: bytes, size: int) -> bytes:
    words = size.to_bytes(2, "big") + b"HPKE-v1" + suite + label + info
    return hmac.digest(prk, words + b"\x01", "sha256")[:size]


def opened(key: X25519PrivateKey, enc: bytes, sealed: bytes, info: bytes, aad: bytes = b"") -> bytes:
    """RFC 9180, sections 4.1 and 5.1: base mode, the first message."""
    dh = key.exchange(X25519PublicKey.from_public_bytes(enc))
    context = enc + key.public_key().public_bytes_raw()
    shared = expand(extract(b"", KEM_SUITE, b"eae_prk", dh), KEM_SUITE, b"shared_secret", context, 32)
    said = b"\x00" + extract(b"", SUITE, b"psk_id_hash", b"") + extract(b"", SUITE, b"info_hash", info)
    secret = extract(shared, SUITE, b"secret", b"")
    nonce = expand(secret, SUITE, b"base_nonce", said, 12)
    return ChaCha20Poly1305(expand(secret, SUITE, b"key", said, 32)).decrypt(nonce, sealed, aad)


def test_the_oracle_passes_the_vector_of_the_rfc() -> None:
    """RFC 9180, A.2.1 and A.2.1.1."""
    key = bytes.fromhex("8057991eef8f1f1af18f4a9491d16a1ce333f695d4db8e38da75975c4478e0fb")
    enc = bytes.fromhex("1afa08d3dec047a643885163f1180476fa7ddb54c6a8029ea33f95796bf2ac4a")
    sealed = bytes.fromhex(
        "1c5250d8034ec2b784ba2cfd69dbdb8af406cfe3ff938e131f0def8c8b60b4db21993c62ce81883d2dd1b51a28"
    )
    info, aad = bytes.fromhex("4f6465206f6e2061204772656369616e2055726e"), bytes.fromhex("436f756e742d30")
    found = opened(X25519PrivateKey.from_private_bytes(key), enc, sealed, info, aad)
    assert found == b"Beauty is truth, truth beauty"


def test_a_box_is_what_the_rfc_says() -> None:
    key = X25519PrivateKey.generate()
    box = seal(key.public_key().public_bytes_raw(), SEED, b"for this")
    assert opened(key, box[:32], box[32:], b"for this") == SEED
    assert unseal(key, box, b"for this") == SEED
    assert read_box(box_text(box)) == box
    assert box != seal(key.public_key().public_bytes_raw(), SEED, b"for this")
    told = seal(key.public_key().public_bytes_raw(), sealed_content(SEED, "0d" * 32), b"for this")
    assert opened(key, told[:32], told[32:], b"for this") == SEED + b"\x0d" * 32
    assert len(read_box(box_text(told))) == 112


def test_a_box_opens_for_its_keeper_and_its_update_alone() -> None:
    key, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    words: dict[str, Any] = {
        "run_id": "r",
        "keeper": "k",
        "update_id": "u",
        "client_id": "c",
        "base_version": 1,
        "base_head": "h",
        "payload_sha256": "p",
        "terms": "t",
    }
    box = seal(key.public_key().public_bytes_raw(), SEED, seal_info(**words))
    assert unseal(key, box, seal_info(**words)) == SEED
    for name, value in words.items():
        with pytest.raises(InvalidSignature, match="does not open"):
            unseal(key, box, seal_info(**{**words, name: 2 if value == 1 else "x"}))
    for changed in (box[:-1], bytes([box[0] ^ 1]) + box[1:], box[:-1] + bytes([box[-1] ^ 1]), b"", bytes(80)):
        with pytest.raises(InvalidSignature, match="does not open"):
            unseal(key, changed, seal_info(**words))
    with pytest.raises(InvalidSignature, match="does not open"):
        unseal(other, box, seal_info(**words))


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(32)])
def test_what_is_no_key_is_not_sealed_for(key: bytes) -> None:
    with pytest.raises(InvalidSignature, match="public key"):
        seal(key, SEED, b"")


@pytest.mark.parametrize("text", ["", "A" * 107, "!" * 108, "A" * 128, "!" * 152, "é"])
def test_what_is_no_box_is_refused(text: str) -> None:
    with pytest.raises(InvalidSignature, match="112 bytes"):
        read_box(text)


def test_a_keeper_is_known_by_its_certificate_which_signs_its_key() -> None:
    key, stranger = new_key(), new_key()
    certificate = make_authority(key, "keeper", 1e9, 1e9)
    public = X25519PrivateKey.generate().public_key().public_bytes_raw()
    der, name = certificate_der(certificate), fingerprint(certificate)
    KeeperKey(der, public, sign(key, KEY_DOMAIN + public)).check(name)
    with pytest.raises(InvalidSignature, match="not " + "0" * 64):
        KeeperKey(der, public, sign(key, KEY_DOMAIN + public)).check("0" * 64)
    for signature in (sign(stranger, KEY_DOMAIN + public), sign(key, public), b""):
        with pytest.raises(InvalidSignature):
            KeeperKey(der, public, signature).check(name)


@pytest.mark.parametrize("size", [112, 80])
def test_seals_travel_and_bad_ones_are_refused(size: int) -> None:
    """Boxes of a seed with a digest, and of a seed alone, as older releases have them."""
    seals = {hashlib.sha256(bytes([i])).hexdigest(): box_text(bytes([i]) * size) for i in range(KEEPERS_MAX)}
    sent = seals_to_proto(seals)
    assert seals_from_proto(sent) == seals
    assert seals_from_proto([]) == {}
    short = seals_to_proto({"ab" * 32: box_text(bytes(size - 1))})
    odd = seals_to_proto({"ab" * 31: box_text(bytes(size))})
    for bad in (short, odd, [sent[0], sent[0]], [*sent, *seals_to_proto({"ff" * 32: box_text(bytes(size))})]):
        with pytest.raises(InvalidUpdate, match="seals"):
            seals_from_proto(bad)
