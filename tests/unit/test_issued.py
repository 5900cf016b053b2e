"""Whose key has signed a certificate."""

from __future__ import annotations

from typing import Any

from anabranch.identity.certificates import is_issued_by


class Counted:
    """Stands where a certificate would, and counts how often its signature was looked at."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.looks = error, 0

    def verify_directly_issued_by(self, authority: object) -> None:
        self.looks += 1
        if self.error is not None:
            raise self.error


def test_a_signature_is_looked_at_once() -> None:
    # Every seal and every update's proof asks: a signature of an elliptic curve takes longer than most calls.
    for error, issued in ((None, True), (ValueError("another's"), False)):
        certificate: Any = Counted(error)
        authority: Any = object()
        assert [is_issued_by(certificate, authority) for _ in range(3)] == 3 * [issued]
        assert certificate.looks == 1
        is_issued_by(certificate, object())
        assert certificate.looks == 2
