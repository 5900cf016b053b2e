"""The tables. `events` is the truth; every other table is written from it, for look-ups and audits.

One database holds one run. Times are seconds since 1970, UTC, as the events carry them. A change here
needs a revision in `migrations/versions`: a test compares the two on both databases.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    func,
    inspect,
    select,
)

# SQLite's own row id is a key only under the very name INTEGER.
Big = BigInteger().with_variant(Integer, "sqlite")

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

runs = Table(
    "runs",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("config", Text, nullable=False),
    Column("layout", Text, nullable=False),
    Column("initial_sha256", Text, nullable=False),
    Column("created_at", Double, nullable=False),
)

# Append only. `record` is the canonical line of core/journal.py.
events = Table(
    "events",
    metadata,
    Column("seq", Big, primary_key=True, autoincrement=False),
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),
    Column("client_id", Text),
    Column("record", Text, nullable=False),
)

clients = Table(
    "clients",
    metadata,
    Column("client_id", Text, primary_key=True),
    Column("capability", Text, nullable=False),
    Column("enrolled_at", Double, nullable=False),
    Column("seen_at", Double, nullable=False),
)

# One row a task. How many live leases a client may have is a setting (`tasks_per_client`), so the
# engine sees to it, not an index.
leases = Table(
    "leases",
    metadata,
    Column("task_id", Text, primary_key=True),
    Column("client_id", Text, nullable=False),
    Column("base_version", Big, nullable=False),
    Column("state", Text, nullable=False),
    Column("granted_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("ended_at", Double),
    CheckConstraint(
        "state IN ('leased', 'accepted', 'rejected', 'expired', 'superseded', 'dropped', 'cancelled')",
        name="state",
    ),
)
Index("ix_leases_client_id", leases.c.client_id)
Index("ix_leases_ended_at", leases.c.ended_at)

# `payload` has small payloads; larger ones lie in a pack, or are files of their own, named by `sha256`.
# `received` is durable but not yet decided, `held` is folded into a buffer, `applied` is in version
# `applied_version`. `verdict` and `version` are what the device was told.
updates = Table(
    "updates",
    metadata,
    Column("seq", Big, ForeignKey("events.seq"), primary_key=True, autoincrement=False),
    Column("update_id", Text, nullable=False),
    Column("task_id", Text, nullable=False),
    Column("client_id", Text, nullable=False),
    Column("base_version", Big, nullable=False),
    Column("examples", Big, nullable=False),
    Column("received_at", Double, nullable=False),
    Column("codec", Text, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("size_bytes", Big, nullable=False),
    Column("payload", LargeBinary),
    Column("pack", Big),
    Column("pack_offset", Big),
    Column("flawed", Boolean, nullable=False),
    Column("state", Text, nullable=False),
    Column("verdict", Text),
    Column("version", Big),
    Column("staleness", Big),
    Column("weight", Double),
    Column("reason", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Column("applied_version", Big),
    CheckConstraint("state IN ('received', 'held', 'applied', 'rejected')", name="state"),
    CheckConstraint("(state = 'applied') = (applied_version IS NOT NULL)", name="applied_version"),
    CheckConstraint("(state = 'received') = (verdict IS NULL)", name="verdict"),
    CheckConstraint("payload IS NULL OR length(payload) = size_bytes", name="payload"),
    CheckConstraint("(pack IS NULL) = (pack_offset IS NULL)", name="pack"),
)
Index("ix_updates_update_id", updates.c.update_id, unique=True)
Index("ix_updates_sha256", updates.c.sha256)
Index("ix_updates_applied_version", updates.c.applied_version)
# Not unique: the engine forgets old receipts (`receipts_max`), and a projection may never fail. That a
# task counts once is checked by `problems`.
Index("ix_updates_task_id", updates.c.task_id)

# What keepers have answered: the sum of the masks of a cohort. `payload`, or its place in a pack.
mask_sums = Table(
    "mask_sums",
    metadata,
    Column("seq", Big, ForeignKey("events.seq"), primary_key=True, autoincrement=False),
    Column("number", Big, nullable=False),
    Column("keeper", Text, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("size_bytes", Big, nullable=False),
    Column("payload", LargeBinary),
    Column("pack", Big),
    Column("pack_offset", Big),
    CheckConstraint("payload IS NULL OR length(payload) = size_bytes", name="payload"),
    CheckConstraint("(payload IS NULL) = (pack IS NOT NULL)", name="place"),
    CheckConstraint("(pack IS NULL) = (pack_offset IS NULL)", name="pack"),
)
Index("ix_mask_sums_sha256", mask_sums.c.sha256)

model_versions = Table(
    "model_versions",
    metadata,
    Column("version", Big, primary_key=True, autoincrement=False),
    Column("sha256", Text),
    Column("updates", Big, nullable=False),
    Column("applied_through_seq", Big, ForeignKey("events.seq"), nullable=False),
    Column("published_at", Double, nullable=False),
    # Its place in the chain of hashes (identity/heads.py); none for versions of before there was one.
    Column("link", Text),
    Column("head", Text),
)

# Of versions that the log does not have any more: their links in the chain, 32 bytes each.
old_links = Table(
    "old_links",
    metadata,
    Column("first", Big, primary_key=True, autoincrement=False),
    Column("last", Big, nullable=False),
    Column("links", LargeBinary, nullable=False),
)

# The newest three; where the log is not kept whole, the one that it begins with and the next such as well.
# `sha256` names the file, whose bytes hold the state after event `applied_through_seq`.
snapshots = Table(
    "snapshots",
    metadata,
    Column("applied_through_seq", Big, primary_key=True, autoincrement=False),
    Column("version", Big, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("created_at", Double, nullable=False),
)

# What snapshots have as rows, all of them together: the clients in the order in which they came, from 0; what
# was known of each at the snapshots since which it has changed; and the receipts by their number, from 1.
# `crc32` is of the other columns.
enrolments = Table(
    "enrolments",
    metadata,
    Column("place", Big, primary_key=True, autoincrement=False),
    Column("client_id", Text, nullable=False),
)

client_records = Table(
    "client_records",
    metadata,
    Column("client_id", Text, primary_key=True),
    Column("applied_through_seq", Big, primary_key=True, autoincrement=False),
    Column("capability", Text, nullable=False),
    Column("record", Text, nullable=False),
    Column("crc32", Big, nullable=False),
)
Index("ix_client_records_applied_through_seq", client_records.c.applied_through_seq)

receipts = Table(
    "receipts",
    metadata,
    Column("number", Big, primary_key=True, autoincrement=False),
    Column("applied_through_seq", Big, nullable=False),
    Column("receipt", Text, nullable=False),
    Column("crc32", Big, nullable=False),
)
Index("ix_receipts_applied_through_seq", receipts.c.applied_through_seq)

metrics = Table(
    "metrics",
    metadata,
    Column("version", Big, primary_key=True, autoincrement=False),
    Column("name", Text, primary_key=True),
    Column("value", Double, nullable=False),
    Column("at", Double, nullable=False),
)

# Notes of operators, by which clients are found again. They decide nothing, so no event has them.
tags = Table(
    "tags",
    metadata,
    Column("client_id", Text, primary_key=True),
    Column("tag", Text, primary_key=True),
)

# One row. Who leads has its epoch: the key, so that a commit of its (which locks the key) and a takeover
# (which changes it) wait for each other. Times are the database's own. PostgreSQL only.
leader = Table(
    "leader",
    metadata,
    Column("epoch", Big, primary_key=True, autoincrement=False),
    Column("owner", Text, nullable=False),
    Column("lease_s", Double, nullable=False),
    Column("renewed_at", Double, nullable=False),
)

# Large payloads and snapshots, in pieces, where the database has them all. PostgreSQL only.
chunks = Table(
    "chunks",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("data", LargeBinary, nullable=False),
    CheckConstraint("kind IN ('payload', 'snapshot')", name="kind"),
)

# What strategies remember of devices (`row_table.py`), in pieces. PostgreSQL only. It is made with the first
# row and by no revision, so that data without any are those of before.
shelf_rows = Table(
    "shelf_rows",
    MetaData(naming_convention=metadata.naming_convention),
    Column("sha256", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)


def has_table(connection: Connection, name: str) -> bool:
    """Whether a table is where this run's are made: further on in PostgreSQL's search path are others'."""
    is_sqlite = connection.dialect.name == "sqlite"
    schema = None if is_sqlite else connection.scalar(select(func.current_schema()))
    return inspect(connection).has_table(name, schema=schema)
