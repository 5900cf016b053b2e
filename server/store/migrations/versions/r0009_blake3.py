"""Payloads may be named by BLAKE3, as texts that begin with `blake3-`; no table is another one.

A program that knows SHA-256 alone would take such a payload for damage. So this comes with the first one
(`revision.admit_blake3`), and not with a start: data without any are those of before.
"""

from __future__ import annotations

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """No payload is named so as yet."""


def downgrade() -> None:
    """Whoever goes back sees to it that no payload is named so."""
