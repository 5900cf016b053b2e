"""Of which revision the tables of a database are.

A new database gets the tables of `schema.py` as they are, and nearly every other start finds the newest
revision. Alembic, which knows the way there from older ones, takes a tenth of a second to load: it is asked
only where there is a way to go.
"""

from __future__ import annotations

from sqlalchemy import (
    Column,
    Connection,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    insert,
    inspect,
    select,
)

from anabranch.server.store.schema import metadata

NEWEST = "0008"  # of `migrations/versions`; a test holds it beside Alembic's own answer
# Alembic's own table, as it makes it. An empty one is a database that went back to before the first revision.
_revisions = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


def has_tables(connection: Connection) -> bool:
    """Whether a database has any tables of ours. Raises `StoreNewer` if this program does not know them."""
    found = _found(connection)
    if found is None or found == [NEWEST]:
        return found is not None
    from anabranch.server.store import migrations

    return migrations.current_revision(connection) is not None


def bring_up(connection: Connection) -> None:
    """Bring the tables to the newest revision, within the caller's transaction. Raises `StoreNewer`."""
    found = _found(connection)
    if found is None:
        # Without a look for each: a table of this name is somebody else's, and an error.
        metadata.create_all(connection, checkfirst=False)
        _revisions.create(connection)
        connection.execute(insert(_revisions), {"version_num": NEWEST})
    elif found != [NEWEST]:
        from anabranch.server.store import migrations

        migrations.upgrade(connection)


def _found(connection: Connection) -> list[str] | None:
    if not inspect(connection).has_table(_revisions.name):
        return None
    return list(connection.scalars(select(_revisions.c.version_num)))
