"""Who leads, and large files in pieces."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make both tables."""
    op.create_table(
        "leader",
        sa.Column("epoch", BIG, autoincrement=False, nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("lease_s", sa.Double(), nullable=False),
        sa.Column("renewed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("epoch", name="pk_leader"),
    )
    op.create_table(
        "chunks",
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", "number", name="pk_chunks"),
        sa.CheckConstraint("kind IN ('payload', 'snapshot')", name=op.f("ck_chunks_kind")),
    )
    if op.get_bind().dialect.name == "postgresql":  # what was encoded does not get smaller
        op.execute("ALTER TABLE chunks ALTER COLUMN data SET STORAGE EXTERNAL")


def downgrade() -> None:
    """Drop both tables."""
    for table in ("chunks", "leader"):
        op.drop_table(table)
