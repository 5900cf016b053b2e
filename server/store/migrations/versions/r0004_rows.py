"""Clients and receipts of snapshots are rows: those of the snapshots that are there stay in their files."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """The tables, empty."""
    op.create_table(
        "enrolments",
        sa.Column("place", BIG, autoincrement=False, nullable=False),
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("place", name="pk_enrolments"),
    )
    op.create_table(
        "client_records",
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.Column("applied_through_seq", BIG, autoincrement=False, nullable=False),
        sa.Column("capability", sa.Text(), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("crc32", BIG, nullable=False),
        sa.PrimaryKeyConstraint("client_id", "applied_through_seq", name="pk_client_records"),
    )
    op.create_index("ix_client_records_applied_through_seq", "client_records", ["applied_through_seq"])
    op.create_table(
        "receipts",
        sa.Column("number", BIG, autoincrement=False, nullable=False),
        sa.Column("applied_through_seq", BIG, nullable=False),
        sa.Column("receipt", sa.Text(), nullable=False),
        sa.Column("crc32", BIG, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_receipts"),
    )
    op.create_index("ix_receipts_applied_through_seq", "receipts", ["applied_through_seq"])


def downgrade() -> None:
    """Without them a snapshot is none: the log has it all."""
    op.execute("DELETE FROM snapshots")
    for table in ("receipts", "client_records", "enrolments"):
        op.drop_table(table)
