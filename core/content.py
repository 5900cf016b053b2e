"""Digests of contents: by them the bytes of updates are named, told apart and checked. All are made here.

    3f79...           64 lower-case hexadecimal digits: SHA-256, which every release knows
    blake3-3f79...    BLAKE3 with 256 bits, by the extra `blake3`

The text says itself what it is of, and goes as it is into records, signatures, rows and names of files. What
has SHA-256 by its own format does not come here: the chain of records, heads, weights, certificates.

BLAKE3: O'Connor, Aumasson, Neves, Wilcox-O'Hearn (2020), https://github.com/BLAKE3-team/BLAKE3-specs.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from anabranch.core.config.extras import how_to_install
from anabranch.core.errors import ConfigError, StoreCorrupt
from anabranch.core.limits import KIB


def _installed() -> tuple[Any, str]:
    """BLAKE3, or None and why."""
    try:
        from blake3 import blake3
    except ImportError as error:  # of another platform, too: who does not want it goes on
        return None, str(error)
    return blake3, ""


blake3, _why_not = _installed()
Bytes = bytes | bytearray | memoryview

SHA256, BLAKE3 = "sha256", "blake3"
ALGORITHMS = (SHA256, BLAKE3)
UNNAMED = "none"  # in their place: payloads that are simulated and not kept need no name
RAW_BYTES = 32  # of either
BLAKE3_FROM_BYTES = 16 * KIB  # of less SHA-256 takes no longer
BETWEEN = "-"  # of the name of an algorithm and its digits; SHA-256 goes without
_HEX = re.compile(r"[0-9a-f]{64}")
_ANY = re.compile(r"([a-z0-9]+-)?[0-9a-f]{64,}")  # also of algorithms that are not known yet


class ContentHash:
    """The digest of bytes that come piece by piece. Raises `ConfigError` as `check_algorithm` does."""

    def __init__(self, algorithm: str = SHA256) -> None:
        check_algorithm(algorithm)
        self.algorithm = algorithm
        self._hash: Any = hashlib.sha256() if algorithm == SHA256 else blake3()

    def update(self, piece: Bytes) -> None:
        """Go on with the next bytes. Other threads run meanwhile."""
        view = memoryview(piece)
        self._hash.update(view if view.format == "B" else view.cast("B"))  # BLAKE3 takes nothing else

    def text(self) -> str:
        """The digest so far."""
        return _written(self.algorithm, self._hash.hexdigest())


def content_digest(data: Bytes, algorithm: str = SHA256) -> str:
    """The digest of `data`. Raises as `ContentHash` does."""
    if algorithm == SHA256:
        return hashlib.sha256(data).hexdigest()
    found = ContentHash(algorithm)
    found.update(data)
    return found.text()


def digest_like(data: Bytes, digest: str) -> str:
    """The digest of `data`, by the algorithm of another one. Raises `ConfigError`."""
    return content_digest(data, algorithm_of(digest))


def check_content(data: Bytes, digest: str) -> None:
    """Raises `StoreCorrupt` where a stored payload has another digest, and as `check_stored` does."""
    check_stored(digest)
    if (found := digest_like(data, digest)) != digest:
        raise StoreCorrupt(f"payload {digest} has the digest {found}: restore it from a backup")


def check_stored(digest: str) -> None:
    """Raises `StoreCorrupt` for a name that no release gives, and `ConfigError` for that of a later one."""
    if not _ANY.fullmatch(digest):
        raise StoreCorrupt(
            f"a payload is named {digest[:80]!r}, which is no digest: restore it from a backup"
        )
    algorithm_of(digest)


def algorithm_of(digest: str) -> str:
    """What made a digest. Raises `ConfigError` for what is none that this release knows."""
    for algorithm in ALGORITHMS:
        start = _written(algorithm, "")
        if digest.startswith(start) and _HEX.fullmatch(digest, len(start)):
            return algorithm
    raise ConfigError(
        f"digest {digest[:80]!r} is by no algorithm that this release knows ({', '.join(ALGORITHMS)}): "
        "read it with the release that wrote it, or a later one"
    )


def check_algorithm(algorithm: str) -> None:
    """Raises `ConfigError` where it is unknown, or not installed here: how to mend that."""
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"a digest is by one of {', '.join(ALGORITHMS)}, not {algorithm!r}")
    if algorithm == BLAKE3 and blake3 is None:
        raise ConfigError(
            f"digests by BLAKE3 need a package that is not installed here ({_why_not}): "
            f"{how_to_install(BLAKE3)}"
        )


def chosen(offered: str, size_bytes: int) -> str:
    """What a payload of this size is to be named by, in a run that offers this algorithm."""
    return offered if size_bytes >= BLAKE3_FROM_BYTES else SHA256


def kind_of(digest: str) -> str:
    """The algorithm that a digest says it is of, whatever that is."""
    return digest.rpartition(BETWEEN)[0] or SHA256


def usable(algorithm: str) -> bool:
    """Whether digests by this algorithm can be made here."""
    return algorithm == SHA256 or (algorithm == BLAKE3 and blake3 is not None)


def from_raw(algorithm: str, raw: bytes) -> str:
    """The digest of `RAW_BYTES` bytes, as they travel."""
    return _written(algorithm, raw.hex())


def to_raw(digest: str) -> tuple[str, bytes]:
    """The inverse of `from_raw`. Raises `ConfigError` as `algorithm_of` does."""
    algorithm = algorithm_of(digest)
    return algorithm, bytes.fromhex(digest.removeprefix(_written(algorithm, "")))


def digits(digest: str) -> str:
    """The hexadecimal digits of a digest alone."""
    return to_raw(digest)[1].hex()


def _written(algorithm: str, digits: str) -> str:
    return digits if algorithm == SHA256 else f"{algorithm}{BETWEEN}{digits}"
