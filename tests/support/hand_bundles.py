"""Bundles written by hand, as docs/bundles.md has the format: well signed, whatever they say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FILES = {"app.py": b"class Mine:\n    pass\n", "words/one.txt": b"one\n", "words/rest.txt": b"three\n"}


def key_of(number: int) -> Ed25519PrivateKey:
    """A key, the same for the same number."""
    return Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))


def signer(number: int) -> str:
    """Its signer."""
    return key_of(number).public_key().public_bytes_raw().hex()


def listed(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """The files of a manifest."""
    return [
        {"path": path, "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
        for path, data in sorted(files.items())
    ]


def manifest(**other: Any) -> dict[str, Any]:
    """A good one, but for what is said."""
    return {
        "name": "mine",
        "entry": "app:Mine",
        "requires_python": ">=3.11",
        "needs": ["numpy"],
        "created_at": 1_800_000_000,
        "files": listed(FILES),
        **other,
    }


def line_of(said: Any) -> bytes:
    """Canonical JSON."""
    return json.dumps(said, sort_keys=True, separators=(",", ":")).encode()


def by_hand(line: bytes, rest: bytes, number: int = 1, magic: bytes = b"anabranch bundle 1\n") -> bytes:
    """A bundle of this manifest and these bytes, signed by a key."""
    head = signer(number).encode() + b"\n"
    content = line + b"\n" + rest
    signature = key_of(number).sign(magic + head + content).hex().encode() + b"\n"
    return magic + head + signature + content


def whole(files: Mapping[str, bytes] = FILES, number: int = 1, **other: Any) -> bytes:
    """A bundle of these files."""
    said = manifest(**{"files": listed(files), **other})
    return by_hand(line_of(said), b"".join(data for _, data in sorted(files.items())), number)
