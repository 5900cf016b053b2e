"""What a keeper says and signs: its key for boxes, and the sums of masks.

Its name is the SHA-256 of its certificate, which nobody else vouches for: devices are told it by whoever
trusts the keeper. The certificate's key signs the one for boxes, and every sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from anabranch.core.canonical import canonical
from anabranch.core.errors import InvalidSignature
from anabranch.core.secagg.terms import Terms
from anabranch.identity.certificates import fingerprint, public_key_of, read_certificate
from anabranch.identity.signatures import check_signature

KEY_DOMAIN, SUM_DOMAIN = b"anabranch keeper_key 1\n", b"anabranch mask_sum 1\n"


def sum_message(run_id: str, number: int, keeper: str, cohort_sha256: str, sha256: str) -> bytes:
    """What a keeper signs of the sum of a cohort's masks. `sha256`: of the sum as it travels."""
    words = {
        "cohort_sha256": cohort_sha256,
        "keeper": keeper,
        "number": number,
        "run_id": run_id,
        "sha256": sha256,
    }
    return SUM_DOMAIN + canonical(words)


@dataclass(frozen=True)
class KeeperKey:
    """What a keeper says of itself: its certificate (DER), and its key for boxes, which that one signs."""

    certificate: bytes
    public_key: bytes
    signature: bytes

    @property
    def fingerprint(self) -> str:
        """The keeper's name: SHA-256 (hex) of its certificate. Raises `ConfigError` where that is none."""
        return fingerprint(read_certificate(self.certificate, "the keeper's certificate"))

    def check(self, keeper: str) -> None:
        """Raises `InvalidSignature` unless it is this keeper's, and whole."""
        if self.fingerprint != keeper:
            raise InvalidSignature(f"the keeper's certificate has {self.fingerprint}, not {keeper}")
        certificate = read_certificate(self.certificate, "the keeper's certificate")
        check_signature(public_key_of(certificate), self.signature, KEY_DOMAIN + self.public_key)


@dataclass(frozen=True)
class Masking:
    """What a server tells its devices of masked sums: the run's terms, and what each keeper says of itself.

    Nothing of it is to be believed by itself: devices know the keepers' names from elsewhere.
    """

    terms: Terms
    keys: Sequence[KeeperKey]

    @cached_property
    def by_name(self) -> Mapping[str, KeeperKey]:
        """The keys by their keepers' names, for which certificates are read: once, not with each update."""
        return {key.fingerprint: key for key in self.keys}
