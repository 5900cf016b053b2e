"""What a server asks a keeper: the members of a cohort, each as its own device has signed it."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

from anabranch.core.limits import KIB
from anabranch.core.secagg.terms import Terms

DOMAIN = b"anabranch cohort 1\n"
# The most bytes that a member has on the wire, with ids of the longest: by itself, and for each keeper's box.
MEMBER_BYTES, SEAL_BYTES = 1536, 240
COHORT_HEAD_BYTES = 64 * KIB  # of the terms, mostly


@dataclass(frozen=True)
class CohortMember:
    """One update of a cohort.

    `signed`: the bytes that its device has signed (docs/protocol.md, "Signatures"): they say whose it is,
    which version it was trained from, the SHA-256 of what was sent, and the boxes. `certificate`: DER.
    `base_head`: of that version, as the device knows it, hex; may be empty. `arrived_version`: the newest
    version when it came; `weight`: the W that follows from its age then.
    """

    signed: bytes
    signature: bytes
    certificate: bytes
    base_head: str
    arrived_version: int
    weight: int


def member_bytes_max(keepers: int) -> int:
    """The most bytes that a member has on its way to one of so many keepers."""
    return MEMBER_BYTES + SEAL_BYTES * keepers


@dataclass(frozen=True)
class Cohort:
    """Updates whose sum is wanted.

    `number` grows with every cohort of a run. `version`: the newest one when the cohort was closed.
    """

    run_id: str
    number: int
    version: int
    terms: Terms
    members: tuple[CohortMember, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of all that is asked, with the length of each part."""
        found = hashlib.sha256(DOMAIN)
        parts = [self.run_id.encode(), self.terms.digest.encode()]
        for member in self.members:
            parts += [member.signed, member.signature, member.certificate, member.base_head.encode()]
            parts.append(struct.pack(">QQ", member.arrived_version, member.weight))
        found.update(struct.pack(">QQQ", self.number, self.version, len(self.members)))
        for part in parts:
            found.update(struct.pack(">Q", len(part)) + part)
        return found.hexdigest()
