"""Who signs bundles of Apps: an Ed25519 key (RFC 8032) in a file, known by its public key in hex.

It is no key of the federation's: whoever may write code for devices need not be able to make members.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from cryptography.exceptions import InvalidSignature as BadSignature
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from anabranch.core.errors import ConfigError, InvalidSignature, disk_error
from anabranch.identity.certificates import key_pem
from anabranch.identity.files import tighten, write_private

_SIGNER = re.compile(r"[0-9a-f]{64}\Z")


def make_signer(file: Path) -> str:
    """Write a new key for its owner alone; returns its signer, the public key in hex.

    Raises `ConfigError` where the file is there already, `StoreError`.
    """
    key = Ed25519PrivateKey.generate()
    write_private(file, key_pem(key), replace=False)
    return signer_of(key)


def read_signer(file: Path) -> Ed25519PrivateKey:
    """The key of a file, which is made its owner's alone. Raises `ConfigError`, `StoreError`."""
    try:
        tighten(file)
        key = load_pem_private_key(file.read_bytes(), None)
    except FileNotFoundError:
        raise ConfigError(f"{file} is not there: `anabranch bundle key --out {file}` makes a key") from None
    except OSError as error:
        raise disk_error(file, error) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{file} is no key of a signer: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{file} is a key of another kind: `anabranch bundle key` makes one that signs")
    return key


def signer_of(key: Ed25519PrivateKey) -> str:
    """The public key of a key: 64 hex digits."""
    return key.public_key().public_bytes_raw().hex()


def checked_signers(given: Iterable[str]) -> frozenset[str]:
    """Signers as their user names them. Raises `ConfigError` for what is none."""
    signers = frozenset(text.strip().lower() for text in given)
    for signer in signers:
        if not _SIGNER.match(signer):
            raise ConfigError(
                f"signer {signer!r}: 64 hex digits, as `anabranch bundle key` and `bundle show` print them"
            )
    return signers


def check_signed(signer: str, signature: bytes, message: bytes) -> None:
    """Raises `InvalidSignature` unless this signer has signed the message."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer)).verify(signature, message)
    except (BadSignature, ValueError):
        raise InvalidSignature("the bundle is not what its signer has signed: it was changed") from None
