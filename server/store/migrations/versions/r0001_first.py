"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make all tables."""
    _make_log()
    _make_leases()
    _make_updates()
    _make_versions()


def downgrade() -> None:
    """Drop all tables."""
    for table in ("metrics", "snapshots", "model_versions", "updates", "leases", "clients", "events", "runs"):
        op.drop_table(table)


def _make_log() -> None:
    op.create_table(
        "runs",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("layout", sa.Text(), nullable=False),
        sa.Column("initial_sha256", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_runs"),
    )
    op.create_table(
        "events",
        sa.Column("seq", BIG, autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=True),
        sa.Column("record", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_events"),
    )
    op.create_table(
        "clients",
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.Column("capability", sa.Text(), nullable=False),
        sa.Column("enrolled_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("client_id", name="pk_clients"),
    )


def _make_leases() -> None:
    op.create_table(
        "leases",
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.Column("base_version", BIG, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("granted_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("task_id", name="pk_leases"),
        sa.CheckConstraint(
            "state IN ('leased', 'accepted', 'rejected', 'expired', 'superseded', 'dropped', 'cancelled')",
            name=op.f("ck_leases_state"),
        ),
    )
    op.create_index("ix_leases_client_id", "leases", ["client_id"])


def _make_updates() -> None:
    op.create_table(
        "updates",
        sa.Column("seq", BIG, autoincrement=False, nullable=False),
        sa.Column("update_id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.Column("base_version", BIG, nullable=False),
        sa.Column("examples", BIG, nullable=False),
        sa.Column("received_at", sa.Double(), nullable=False),
        sa.Column("codec", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("size_bytes", BIG, nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=True),
        sa.Column("pack", BIG, nullable=True),
        sa.Column("pack_offset", BIG, nullable=True),
        sa.Column("flawed", sa.Boolean(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.Column("version", BIG, nullable=True),
        sa.Column("staleness", BIG, nullable=True),
        sa.Column("weight", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("applied_version", BIG, nullable=True),
        sa.PrimaryKeyConstraint("seq", name="pk_updates"),
        sa.ForeignKeyConstraint(["seq"], ["events.seq"], name="fk_updates_seq"),
        sa.CheckConstraint(
            "state IN ('received', 'held', 'applied', 'rejected')", name=op.f("ck_updates_state")
        ),
        sa.CheckConstraint(
            "(state = 'applied') = (applied_version IS NOT NULL)", name=op.f("ck_updates_applied_version")
        ),
        sa.CheckConstraint("(state = 'received') = (verdict IS NULL)", name=op.f("ck_updates_verdict")),
        sa.CheckConstraint(
            "payload IS NULL OR length(payload) = size_bytes", name=op.f("ck_updates_payload")
        ),
        sa.CheckConstraint("(pack IS NULL) = (pack_offset IS NULL)", name=op.f("ck_updates_pack")),
    )
    op.create_index("ix_updates_update_id", "updates", ["update_id"], unique=True)
    op.create_index("ix_updates_sha256", "updates", ["sha256"])
    op.create_index("ix_updates_applied_version", "updates", ["applied_version"])
    op.create_index("ix_updates_task_id", "updates", ["task_id"])


def _make_versions() -> None:
    op.create_table(
        "model_versions",
        sa.Column("version", BIG, autoincrement=False, nullable=False),
        sa.Column("sha256", sa.Text(), nullable=True),
        sa.Column("updates", BIG, nullable=False),
        sa.Column("applied_through_seq", BIG, nullable=False),
        sa.Column("published_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("version", name="pk_model_versions"),
        sa.ForeignKeyConstraint(
            ["applied_through_seq"], ["events.seq"], name="fk_model_versions_applied_through_seq"
        ),
    )
    op.create_table(
        "snapshots",
        sa.Column("applied_through_seq", BIG, autoincrement=False, nullable=False),
        sa.Column("version", BIG, nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("applied_through_seq", name="pk_snapshots"),
    )
    op.create_table(
        "metrics",
        sa.Column("version", BIG, autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("version", "name", name="pk_metrics"),
    )
