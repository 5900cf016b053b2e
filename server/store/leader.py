"""Who may write to a PostgreSQL database: one server, the leader. The others wait.

Two things, for two questions:

- *Does the leader live?* It holds an advisory lock for as long as its connection does, and renews its row of
  `leader` every now and then. A lock that is let go passes at once to whoever waits for it. A holder that has
  not renewed for its `lease_s` (paused, hung, cut off) is turned out by whoever comes next: its session ends.
- *Is it still the leader?* Each leader has an epoch, higher than any before. Every transaction of a writer
  locks the row of its epoch first (`check`), and a takeover changes that row: so the two wait for each other,
  and nothing can be committed under an epoch that has passed, whatever the old leader believes.

Times are those of the database, which is one clock for all.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, func, insert, select, text, update
from sqlalchemy.exc import DBAPIError

from anabranch.core.errors import LeadershipLost
from anabranch.server.store.base import LedByAnother
from anabranch.server.store.schema import has_table, leader

LOCK_WAIT_S = 2.0  # how long to wait for the lock before a look at whether its holder lives
LOOKS = 2  # the session of a server that was killed needs a moment to let go
TERMINATED_S = 5.0

_LOCK = "pg_advisory_lock(hashtext('anabranch'), hashtext(current_schema()))"
_NOW = func.date_part("epoch", func.clock_timestamp())
# Without its session a holder has neither the lock nor a transaction. One that has only just come, and has
# not written its epoch yet, is left alone.
_TURN_OUT = text(
    """
    SELECT pg_terminate_backend(held.pid, :wait_ms)
    FROM leader, pg_locks AS held JOIN pg_stat_activity AS session ON session.pid = held.pid
    WHERE held.locktype = 'advisory' AND held.granted AND held.objsubid = 2
      AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND held.classid::bigint = hashtext('anabranch')::bigint & 4294967295
      AND held.objid::bigint = hashtext(current_schema())::bigint & 4294967295
      AND date_part('epoch', clock_timestamp()) - leader.renewed_at > leader.lease_s
      AND date_part('epoch', clock_timestamp() - session.backend_start) > leader.lease_s
    """
)


def lock(connection: Connection) -> None:
    """Become the only writer of a database: held until the connection ends. Raises `LedByAnother`."""
    with connection.begin():
        connection.execute(
            text(
                "SELECT set_config('synchronous_commit', 'on', false) "
                "WHERE current_setting('synchronous_commit') IN ('off', 'local')"
            )
        )
    for _ in range(LOOKS):
        owner = _turn_out(connection)
        try:
            with connection.begin():
                connection.execute(text(f"SET LOCAL lock_timeout = {round(1000 * LOCK_WAIT_S)}"))
                connection.execute(text(f"SELECT {_LOCK}"))
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != "55P03":
                raise
        else:
            return
    raise LedByAnother(owner or "a server")


def _turn_out(connection: Connection) -> str | None:
    """End the session of a holder whose lease is over; returns who led last, if anybody."""
    with connection.begin():
        owner = _owner(connection)
        if owner is not None:
            connection.execute(_TURN_OUT, {"wait_ms": round(1000 * TERMINATED_S)})
    return owner


def claim(connection: Connection, owner: str, lease_s: float) -> int | None:
    """Begin a new epoch and return it; None where the tables are yet to be made. For the lock's holder.

    Waits for a commit of the old leader that is under way.
    """
    if not has_table(connection, leader.name):
        return None
    row = connection.execute(select(leader)).first()
    epoch: int = 1 if row is None else row.epoch + 1
    change = insert(leader) if row is None else update(leader)
    connection.execute(change.values(epoch=epoch, owner=owner, lease_s=lease_s, renewed_at=_NOW))
    return epoch


def check(connection: Connection, epoch: int) -> None:
    """Hold the epoch for the rest of the transaction. Raises `LeadershipLost` if it has passed."""
    held = select(leader.c.epoch).where(leader.c.epoch == epoch)
    if connection.scalar(held.with_for_update(read=True, key_share=True)) is None:
        raise _lost(connection, epoch)


def leads(epoch: int) -> ColumnElement[bool]:
    """A condition: an epoch has not passed, and does not until the statement has ended."""
    held = select(leader.c.epoch).where(leader.c.epoch == epoch)
    return held.with_for_update(read=True, key_share=True).exists()


def renew(connection: Connection, epoch: int) -> None:
    """Say that the leader of an epoch lives. Raises `LeadershipLost` if it has passed.

    One statement, which holds or does not: no transaction is needed around it. Who leads instead is looked up
    for the message alone.
    """
    changed = update(leader).where(leader.c.epoch == epoch).values(renewed_at=_NOW)
    if connection.execute(changed).rowcount != 1:
        raise _lost(connection, epoch)


def _owner(connection: Connection) -> str | None:
    return connection.scalar(select(leader.c.owner)) if has_table(connection, leader.name) else None


def _lost(connection: Connection, epoch: int) -> LeadershipLost:
    row = connection.execute(select(leader)).first()
    by = "nobody" if row is None else f"{row.owner} (epoch {row.epoch})"
    return LeadershipLost(
        f"{by} leads this run now, this server's epoch {epoch} has passed: it can write nothing more and "
        "stops; start it again, with --standby, to wait for its turn"
    )
