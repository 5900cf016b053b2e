"""Boxes that one keeper alone opens: HPKE (RFC 9180), base mode, X25519, HKDF-SHA256, ChaCha20-Poly1305.

What a box is for is bound into it: it opens only with the same words (`seal_info`), so it stands for one
update of one run, under one set of terms. What the keepers themselves say is in `keepers.py`.
"""

from __future__ import annotations

import base64

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from anabranch.core.canonical import canonical
from anabranch.core.errors import InvalidSignature
from anabranch.core.secagg.ring import BOX_BYTES, BOXES_BYTES

INFO = b"anabranch/1 mask\n"
_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)


def seal_info(
    run_id: str,
    keeper: str,
    update_id: str,
    client_id: str,
    base_version: int,
    base_head: str,
    payload_sha256: str,
    terms: str,
) -> bytes:
    """What a box is bound to: a line of text, then canonical JSON. `terms`: their digest; digests in hex."""
    words = {
        "base_head": base_head,
        "base_version": base_version,
        "client_id": client_id,
        "keeper": keeper,
        "payload_sha256": payload_sha256,
        "run_id": run_id,
        "terms": terms,
        "update_id": update_id,
    }
    return INFO + canonical(words)


def sealed_content(seed: bytes, model_sha256: str) -> bytes:
    """What is in a box: the seed, and the digest (hex) of the model that the update was trained from."""
    return seed + bytes.fromhex(model_sha256)


def seal(public_key: bytes, content: bytes, info: bytes) -> bytes:
    """A box with what `sealed_content` has, for the holder of a key (32 bytes).

    Raises `InvalidSignature` for what is no key.
    """
    try:
        return _SUITE.encrypt(content, X25519PublicKey.from_public_bytes(public_key), info)
    except ValueError as error:
        raise InvalidSignature(f"the keeper's public key cannot be used: {error}") from None


def unseal(key: X25519PrivateKey, box: bytes, info: bytes) -> bytes:
    """The inverse. Raises `InvalidSignature` for a box of another key, or sealed for anything else."""
    try:
        return _SUITE.decrypt(box, key, info)
    except (InvalidTag, ValueError):
        raise InvalidSignature(
            "the box does not open: it was sealed for another key, update or terms"
        ) from None


def box_text(box: bytes) -> str:
    """As it is in what a device signs, and in the log."""
    return base64.b64encode(box).decode()


def read_box(text: str) -> bytes:
    """The inverse. Raises `InvalidSignature`."""
    try:
        box = base64.b64decode(text, validate=True)
    except ValueError:
        box = b""
    if len(box) not in BOXES_BYTES:
        raise InvalidSignature(f"a box has {BOX_BYTES} bytes, in base64")
    return box
