"""Operators write down by what they find clients again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """No client has a tag so far."""
    op.create_table(
        "tags",
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("client_id", "tag", name="pk_tags"),
    )


def downgrade() -> None:
    """The notes go."""
    op.drop_table("tags")
