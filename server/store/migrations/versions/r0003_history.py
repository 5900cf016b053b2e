"""Versions are links of a chain of hashes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Room for the chain: empty for the versions that are there."""
    op.add_column("model_versions", sa.Column("link", sa.Text(), nullable=True))
    op.add_column("model_versions", sa.Column("head", sa.Text(), nullable=True))


def downgrade() -> None:
    """Forget the chain."""
    op.drop_column("model_versions", "head")
    op.drop_column("model_versions", "link")
