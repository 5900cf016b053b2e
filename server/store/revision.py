"""Of which revision the tables of a database are.

Nearly every start finds the newest one. Alembic, which knows the way there, takes a quarter of a second
to load: it is asked only where there is a way to go.
"""

from __future__ import annotations

from sqlalchemy import Connection, String, column, inspect, select, table

NEWEST = "0008"  # of `migrations/versions`; a test holds it beside Alembic's own answer


def has_tables(connection: Connection) -> bool:
    """Whether a database has any tables of ours. Raises `StoreNewer` if this program does not know them."""
    if _is_newest(connection):
        return True
    from anabranch.server.store import migrations

    return migrations.current_revision(connection) is not None


def bring_up(connection: Connection) -> None:
    """Bring the tables to the newest revision, within the caller's transaction. Raises `StoreNewer`."""
    if _is_newest(connection):
        return
    from anabranch.server.store import migrations

    migrations.upgrade(connection)


def _is_newest(connection: Connection) -> bool:
    if not inspect(connection).has_table("alembic_version"):
        return False
    found = connection.scalars(select(column("version_num", String)).select_from(table("alembic_version")))
    return found.all() == [NEWEST]
