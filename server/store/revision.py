"""Of which revision the tables of a database are.

A new database gets the tables of `schema.py` as they are, and nearly every other start finds them. Alembic,
which knows the way there from older ones, takes a tenth of a second to load: it is asked only where there is
a way to go.
"""

from __future__ import annotations

import logging

from sqlalchemy import (
    Column,
    Connection,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    insert,
    select,
    update,
)

from anabranch.server.store.schema import has_table, metadata

log = logging.getLogger(__name__)

BROUGHT_UP = "0008"  # what a start brings tables to: the newest revision that needs no more than a start
NEWEST = (
    "0009"  # comes with the first payload that is named by BLAKE3; a test holds it beside Alembic's answer
)
_KNOWN = ([BROUGHT_UP], [NEWEST])
# By the index, which a pattern does not go by. Of the table itself: a view of that name has the log besides.
_NAMED_BY_BLAKE3 = (
    "SELECT EXISTS (SELECT 1 FROM main.updates WHERE sha256 > 'blake3-' AND sha256 < 'blake3.')"
)
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
    if found is None or found in _KNOWN:
        return found is not None
    from anabranch.server.store import migrations

    return migrations.current_revision(connection) is not None


def bring_up(connection: Connection) -> None:
    """Bring the tables to `BROUGHT_UP`, within the caller's transaction. Raises `StoreNewer`."""
    found = _found(connection)
    if found is None:
        # Without a look for each: a table of this name is somebody else's, and an error.
        metadata.create_all(connection, checkfirst=False)
        _revisions.create(connection)
        connection.execute(insert(_revisions), {"version_num": BROUGHT_UP})
    elif found not in _KNOWN:
        from anabranch.server.store import migrations

        migrations.upgrade(connection, BROUGHT_UP)
        log.warning(
            "the database was of revision %s and is of %s now: an older release does not read it any more",
            ", ".join(found) or "none",
            BROUGHT_UP,
        )


def admit_blake3(connection: Connection) -> None:
    """Before a payload is named by BLAKE3: to programs without it the data are `StoreNewer` from now on."""
    connection.execute(update(_revisions).values(version_num=NEWEST))


def admit_named(connection: Connection) -> None:
    """The same where SQLite's rows have such a name: the database of a copy may be older than its log."""
    if connection.exec_driver_sql(_NAMED_BY_BLAKE3).scalar():
        admit_blake3(connection)


def _found(connection: Connection) -> list[str] | None:
    if not has_table(connection, _revisions.name):
        return None
    return list(connection.scalars(select(_revisions.c.version_num)))
