"""A run may have masked sums: what its keepers have answered."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """No run has any so far."""
    op.create_table(
        "mask_sums",
        sa.Column("seq", BIG, autoincrement=False, nullable=False),
        sa.Column("number", BIG, nullable=False),
        sa.Column("keeper", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("size_bytes", BIG, nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=True),
        sa.Column("pack", BIG, nullable=True),
        sa.Column("pack_offset", BIG, nullable=True),
        sa.ForeignKeyConstraint(["seq"], ["events.seq"], name="fk_mask_sums_seq"),
        sa.PrimaryKeyConstraint("seq", name="pk_mask_sums"),
        sa.CheckConstraint(
            "payload IS NULL OR length(payload) = size_bytes", name=op.f("ck_mask_sums_payload")
        ),
        sa.CheckConstraint("(payload IS NULL) = (pack IS NOT NULL)", name=op.f("ck_mask_sums_place")),
        sa.CheckConstraint("(pack IS NULL) = (pack_offset IS NULL)", name=op.f("ck_mask_sums_pack")),
    )
    op.create_index("ix_mask_sums_sha256", "mask_sums", ["sha256"])


def downgrade() -> None:
    """A run with masked sums loses them."""
    op.drop_table("mask_sums")
