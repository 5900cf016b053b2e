"""What a keeper has: its keys, its own copy of the authority's certificate, and what it insists on.

    keeper.pem     its keys, of the certificate and for boxes, and the certificate; mode 0600
    ca.pem         the authority of the devices whose updates it unmasks
    rules.json     what a cohort needs at least, whatever the terms of its run say
    revoked.txt    names of devices that no longer count, one a line; may be missing
    keeper.db      what it has unmasked: `store.py`; made with the keys, which are of no use without it

The keys are no use to the server: with them and its own data it could read every update.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from anabranch.core.errors import ConfigError, disk_error
from anabranch.identity.certificates import (
    END_KEY,
    Key,
    certificate_der,
    certificate_pem,
    fingerprint,
    key_pem,
    make_keeper,
    new_key,
    read_certificate,
    read_key,
)
from anabranch.identity.files import make_private_folder, tighten, write_private
from anabranch.identity.keepers import KEY_DOMAIN, KeeperKey
from anabranch.identity.signatures import sign

PAPERS, AUTHORITY, RULES, REVOKED, STORE = "keeper.pem", "ca.pem", "rules.json", "revoked.txt", "keeper.db"
MEMORY = "memory"  # in the rules: the database was made with the keys
LIFE_S = 3650 * 86400.0
COHORT_MIN = 8
DELTA = 1e-6


@dataclass(frozen=True)
class Floors:
    """What this keeper insists on: updates of different devices in a sum, and noise in clips, at least.

    `epsilon_max`: what all the sums that a device may be in come to at most, at `delta` (0: anything).
    """

    cohort_min: int = COHORT_MIN
    noise_min: float = 0.0
    epsilon_max: float = 0.0
    delta: float = DELTA

    def check(self) -> None:
        """Raises `ConfigError`, naming the option."""
        if self.cohort_min < 2:
            raise ConfigError(
                f"--cohort-min must be at least 2, not {self.cohort_min}: a sum of one is that one"
            )
        if not 0 <= self.noise_min < float("inf"):
            raise ConfigError(f"--noise-min must be a number from 0, not {self.noise_min}")
        if not 0 <= self.epsilon_max < float("inf"):
            raise ConfigError(f"--epsilon-max must be a number from 0, not {self.epsilon_max}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"--delta must be between 0 and 1, not {self.delta}")


@dataclass(frozen=True)
class KeeperPapers:
    """A keeper's keys and rules, in `folder`."""

    folder: Path
    key: Key = field(repr=False)
    certificate: x509.Certificate
    box_key: X25519PrivateKey = field(repr=False)
    authority: x509.Certificate
    floors: Floors
    remembers: bool = True  # its memory was made with its keys; keepers of older releases made it later

    @cached_property
    def name(self) -> str:
        """SHA-256 (hex) of the certificate: what devices and the server know the keeper by."""
        return fingerprint(self.certificate)

    def credentials(self) -> tuple[bytes, bytes]:
        """Key and certificate as PEM: what TLS needs."""
        return key_pem(self.key), certificate_pem(self.certificate)

    def statement(self) -> KeeperKey:
        """What it says of itself."""
        public = self.box_key.public_key().public_bytes_raw()
        return KeeperKey(certificate_der(self.certificate), public, self.sign(KEY_DOMAIN + public))

    def sign(self, message: bytes) -> bytes:
        """The signature of its certificate's key."""
        return sign(self.key, message)

    def noise_key(self, cohort_sha256: str) -> bytes:
        """Of one sum: the same for the same cohort, byte for byte, and for no other."""
        words = b"anabranch/1 keeper noise\n" + cohort_sha256.encode()
        return HKDF(SHA256(), 32, None, words).derive(self.box_key.private_bytes_raw())

    def revoked(self) -> frozenset[str]:
        """The devices that no longer count, as the file has them now. Raises `StoreError`."""
        path = self.folder / REVOKED
        try:
            return frozenset(path.read_text(encoding="utf-8").split())
        except FileNotFoundError:
            return frozenset()
        except (OSError, UnicodeDecodeError) as error:
            raise disk_error(path, OSError(str(error))) from error


def make_papers(folder: Path, authority: bytes, floors: Floors, now: float) -> KeeperPapers:
    """A new keeper, for the devices of an authority (its certificate, PEM or DER).

    Raises `ConfigError` where there is one already, `StoreError`.
    """
    floors.check()
    if (folder / PAPERS).exists():
        raise ConfigError(f"{folder} has a keeper already: its key is the only one that opens its boxes")
    ca = read_certificate(authority, "--ca")
    key, box_key = new_key(), X25519PrivateKey.generate()
    certificate = make_keeper(key, now, LIFE_S)
    make_private_folder(folder)
    write_private(folder / AUTHORITY, certificate_pem(ca))
    if not (folder / STORE).exists():
        write_private(folder / STORE, b"")  # a memory of nothing
    write_private(folder / RULES, json.dumps({**asdict(floors), MEMORY: True}).encode() + b"\n")
    pems = key_pem(key) + key_pem(box_key) + certificate_pem(certificate)
    write_private(folder / PAPERS, pems, replace=False)
    return KeeperPapers(folder, key, certificate, box_key, ca, floors)


def read_papers(folder: Path) -> KeeperPapers:
    """The keeper of a folder. Raises `ConfigError` where there is none, or it is damaged."""
    path = folder / PAPERS
    if not path.exists():
        raise ConfigError(f"{folder} has no keeper: make one with `anabranch keeper init`")
    tighten(folder, path)
    try:
        key, box_key, certificate = _parts(path.read_bytes())
        authority = read_certificate((folder / AUTHORITY).read_bytes(), str(folder / AUTHORITY))
        said: Any = json.loads((folder / RULES).read_text(encoding="utf-8"))
        floors = Floors(
            int(said["cohort_min"]),
            float(said["noise_min"]),
            float(said.get("epsilon_max", 0.0)),  # keepers of older releases have none
            float(said.get("delta", DELTA)),
        )
    except OSError as error:
        raise disk_error(folder, error) from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder}: the keeper's files cannot be read: {error}") from error
    floors.check()
    remembers = bool(said.get(MEMORY))
    found = read_certificate(certificate, str(path))
    loaded = read_key(key, str(path))
    if not isinstance(box_key, X25519PrivateKey) or found.public_key() != loaded.public_key():
        raise ConfigError(f"{path} is damaged: restore it from a copy of your own")
    return KeeperPapers(folder, loaded, found, box_key, authority, floors, remembers)


def _parts(pem: bytes) -> tuple[bytes, Any, bytes]:
    key, _, rest = pem.partition(END_KEY)
    box, _, certificate = rest.partition(END_KEY)
    return key + END_KEY, load_pem_private_key(box + END_KEY, None), certificate
