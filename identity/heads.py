"""The history of a run as a chain of hashes, and what the server signs of it with each model it hands out.

    link(v) = SHA-256 of the journal's lines since version v - 1 was published, up to the one that published v
    head(v) = SHA-256(head(v - 1) || link(v))

So a head stands for everything that led to a version: every enrolment, ask and update, in order. The model
follows from it, as a replay shows. head(0) stands for the run: its id, settings, layout and first weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from anabranch.core.canonical import canonical

DOMAIN = b"anabranch head 1\n"
RESTORED = b"anabranch restored 1\n"
HASH_BYTES = 32


def first_head(run: Mapping[str, Any]) -> str:
    """head(0), hex, of what a run is fixed by."""
    return hashlib.sha256(DOMAIN + canonical(run)).hexdigest()


def next_head(head: str, link: bytes) -> str:
    """head(v), hex, of head(v - 1) and link(v)."""
    return hashlib.sha256(bytes.fromhex(head) + link).hexdigest()


def follow_links(head: str, links: bytes) -> str:
    """The head that these links lead to, one after the other, 32 bytes each."""
    for start in range(0, len(links), HASH_BYTES):
        head = next_head(head, links[start : start + HASH_BYTES])
    return head


def head_message(
    run_id: str, version: int, head: str, manifest_sha256: str, payload_sha256: str, vector_sha256: str
) -> bytes:
    """What the server signs with a model that it hands out. All digests are hex."""
    data = {
        "head": head,
        "manifest_sha256": manifest_sha256,
        "payload_sha256": payload_sha256,
        "run_id": run_id,
        "vector_sha256": vector_sha256,
        "version": version,
    }
    return DOMAIN + canonical(data)


def restored_message(run_id: str, version: int, head: str, number: int) -> bytes:
    """What the authority signs where a run goes on from a backup: its newest version and head (hex) there.

    `number` grows with every restore, so that no earlier one can be told again.
    """
    return RESTORED + canonical({"head": head, "number": number, "run_id": run_id, "version": version})
