"""Beside SQLite the log is a file, and the rows follow: no table is another one.

A program that knows of no such file would begin where the rows end, and write other events there.
"""

from __future__ import annotations

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Nothing is in the log alone so far."""


def downgrade() -> None:
    """Whoever goes back sees to it that the rows have all: a server that was stopped has written them."""
