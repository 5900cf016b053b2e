"""A log need not be kept whole: what is left of versions that it has dropped."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Nothing has been dropped so far."""
    op.create_index("ix_leases_ended_at", "leases", ["ended_at"])
    op.create_table(
        "old_links",
        sa.Column("first", BIG, autoincrement=False, nullable=False),
        sa.Column("last", BIG, nullable=False),
        sa.Column("links", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("first", name="pk_old_links"),
    )


def downgrade() -> None:
    """A log that has dropped something stays without it."""
    op.drop_table("old_links")
    op.drop_index("ix_leases_ended_at", "leases")
