"""Digests of small payloads, and of large ones in a thread."""

from __future__ import annotations

import hashlib
import threading

import pytest
from contents import named

from anabranch.core.content import BLAKE3_FROM_BYTES, UNNAMED
from anabranch.simulation.hasher import LARGE_BYTES, Hasher


@pytest.mark.parametrize("algorithm", ["sha256", "blake3"])
@pytest.mark.parametrize(
    "size", [0, 1, BLAKE3_FROM_BYTES - 1, BLAKE3_FROM_BYTES, LARGE_BYTES - 1, LARGE_BYTES, 10 * LARGE_BYTES]
)
def test_a_digest_is_the_payload_s_however_often_it_is_asked_for(size: int, algorithm: str) -> None:
    named(b"", algorithm)  # which may not be installed
    hasher, payloads = Hasher(algorithm), [bytes([i]) * size for i in range(5)]
    begun = [hasher.begin(payload) for payload in payloads]
    for payload, digest in reversed(list(zip(payloads, begun, strict=True))):
        assert digest() == digest() == named(payload, algorithm if size >= BLAKE3_FROM_BYTES else "sha256")
    hasher.close()


def test_a_hasher_that_is_closed_has_made_all_that_was_begun() -> None:
    hasher, payload = Hasher(), bytes(20 * LARGE_BYTES)
    begun = [hasher.begin(payload) for _ in range(5)]
    hasher.close()
    hasher.close()
    assert {digest() for digest in begun} == {hashlib.sha256(payload).hexdigest()}
    assert "hasher" not in {thread.name for thread in threading.enumerate()}


def test_a_run_that_names_no_payloads_has_empty_digests_and_no_thread() -> None:
    hasher = Hasher(UNNAMED)
    for size in (0, 1, 10 * LARGE_BYTES):
        assert hasher.begin(bytes(size))() == ""
    assert "hasher" not in {thread.name for thread in threading.enumerate()}


def test_a_digest_that_cannot_be_made_says_why_and_those_after_it_are_made() -> None:
    hasher, payload = Hasher(), bytes(LARGE_BYTES)
    scattered = memoryview(bytes(2 * LARGE_BYTES))[::2]  # nobody can hash what does not lie in one piece
    broken, whole = hasher.begin(scattered), hasher.begin(payload)
    for _ in range(2):
        with pytest.raises(BufferError):
            broken()
    assert whole() == hashlib.sha256(payload).hexdigest()
    hasher.close()
