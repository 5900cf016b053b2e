"""How Alembic runs a revision here: on the connection, and in the transaction, of whoever calls."""

from __future__ import annotations

from alembic import context

from anabranch.server.store.schema import metadata


def run() -> None:
    """Run what Alembic has chosen. Batch mode: SQLite changes a table by making it anew."""
    context.configure(
        connection=context.config.attributes["connection"],
        target_metadata=metadata,
        render_as_batch=True,
        transactional_ddl=True,
    )
    with context.begin_transaction():
        context.run_migrations()


run()
