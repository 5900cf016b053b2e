"""The schema's history, as Alembic revisions in `versions/`, and the way to the newest one.

A new revision is a module beside the others, written by hand; tests/unit/test_migrations.py says
whether it leads to the tables of `schema.py`.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from anabranch.core.errors import StoreNewer

_alone = threading.Lock()  # Alembic keeps the migration of the moment in module globals: jobs start at a time


def current_revision(connection: Connection) -> str | None:
    """The revision of a database, None if it is empty. Raises `StoreNewer` if it is not known here."""
    current = MigrationContext.configure(connection).get_current_revision()
    if current is not None and current not in _known():
        raise StoreNewer(
            f"the database is of revision {current!r}, which this program does not know: "
            "upgrade anabranch to the release that wrote it"
        )
    return current


@cache
def _known() -> frozenset[str]:
    """All revisions. Alembic compiles the file of each to learn its name, and every read asks for them."""
    return frozenset(script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions())


def newest_revision() -> str | None:
    """The revision that this program writes."""
    return ScriptDirectory.from_config(_config()).get_current_head()


def upgrade(connection: Connection, to: str = "head") -> None:
    """Bring the tables to a revision, within the caller's transaction. Raises `StoreNewer`."""
    current_revision(connection)
    config = _config()
    config.attributes["connection"] = connection
    with _alone:
        command.upgrade(config, to)


def downgrade(connection: Connection, to: str) -> None:
    """Go back to an earlier revision, or to `base`, within the caller's transaction."""
    config = _config()
    config.attributes["connection"] = connection
    with _alone:
        command.downgrade(config, to)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config
