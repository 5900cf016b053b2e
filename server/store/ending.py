"""Whether the log reaches as far as it is known to have: by the mark beside it, and by the snapshots."""

from __future__ import annotations

import sqlite3
from collections.abc import Container
from contextlib import closing, suppress
from pathlib import Path

from sqlalchemy import Connection, func, select

from anabranch.core.errors import ConfigError, LogLost
from anabranch.server.store.base import Mark
from anabranch.server.store.files import SQLITE_FILE, sqlite_address
from anabranch.server.store.mark import MarkFile
from anabranch.server.store.run_note import FILE as NOTE
from anabranch.server.store.schema import events, model_versions, snapshots
from anabranch.server.store.segments import Segments
from anabranch.server.store.snapshots import SnapshotFiles

_GO_ON = (
    "nothing was changed: restore a backup or, to go on without what is lost, "
    "say so with `anabranch admin attest-restore{}`"
)
ATTEST, ATTEST_DATABASE = _GO_ON.format(""), _GO_ON.format(" --database URL")
# Of the tables themselves: a view of the same name (`overlay.py`) has what is in the log besides.
_LAST_BROUGHT = {
    "updates": "SELECT max(seq) FROM main.updates",
    "mask_sums": "SELECT max(seq) FROM main.mask_sums",
}


def log_end(connection: Connection) -> int:
    """The last event in the log, 0 where there is none."""
    # Not the maximum: over a view (`overlay.py`) that is a look at each row.
    return connection.scalar(select(events.c.seq).order_by(events.c.seq.desc()).limit(1)) or 0


def rows_end(connection: Connection) -> int:
    """The last event that has a row in SQLite's own table, whatever the log has behind it."""
    return connection.exec_driver_sql("SELECT max(seq) FROM main.events").scalar() or 0


def check_alone(segments: Segments, marks: MarkFile, database: Path) -> None:
    """Raises `LogLost` where a run's log, or its mark, lies beside SQLite's file that knows of no run.

    What a run's settings were, and when it began, the log does not have: `server/rebuild.py`.
    """
    elsewhere, anew = "name a run in PostgreSQL by server.database (--database)", ""
    left = segments.folder if segments.state() else marks.path
    if segments.state() or (database.parent / NOTE).exists():  # which a run in PostgreSQL does not have
        anew = "make it anew from the log (`anabranch admin rebuild`), "
    if left.exists():
        first, last = (anew, f"; {elsewhere}, and") if anew else (f"{elsewhere}, ", ";")
        raise LogLost(
            f"{database} is missing or empty, and {left} is of a run that it does not know; nothing was "
            f"changed. Put back the file that belongs to it, {first}or put a backup into a folder of its own "
            f"(`anabranch admin restore`){last} for another run name another server.data_dir"
        )


def check_own(data_dir: Path, run_id: str) -> None:
    """Raises `ConfigError` where PostgreSQL is to serve a run beside another one, on SQLite.

    That one's mark would be written over: then nobody could tell whether that run's log is whole. Where an
    older release has done so, nothing is left to be kept.
    """
    mark = MarkFile(data_dir).read()
    other = _run_on_sqlite(data_dir, mark)
    if other not in (None, run_id) and (mark is None or mark.run_id == other):
        raise ConfigError(
            f"{data_dir} has run {other} on SQLite, and server.database (--database) names PostgreSQL, "
            "where that run is not: leave it out to go on with that run, and for another run name "
            "another server.data_dir (--data-dir)"
        )


def check_begins(data_dir: Path, name: str) -> None:
    """Raises `LogLost` where a run is to begin in PostgreSQL, and the mark tells of one there.

    Its database is another one, or was emptied. Begun again it would be lost unseen, and its mark with it.
    """
    marks = MarkFile(data_dir)
    if (mark := marks.read()) is not None:
        raise LogLost(
            f"{name} has no run, and {marks.path} is of run {mark.run_id}, which was acknowledged up to "
            f"event {mark.seq}; nothing was changed. Name the database that has it (server.database; in it "
            "the role's search_path counts), or put it back (`pg_restore`); for another run name another "
            "server.data_dir (--data-dir)"
        )


def _run_on_sqlite(data_dir: Path, mark: Mark | None) -> str | None:
    """The run of which SQLite's file tells, or, where that is lost, the log that the mark is of."""
    path = data_dir / SQLITE_FILE
    if path.exists() and path.stat().st_size > 0:  # to open an empty one removes SQLite's log beside it
        address = sqlite_address(path)
        with suppress(sqlite3.Error), closing(sqlite3.connect(address, uri=True)) as file:
            if (row := file.execute("SELECT run_id FROM runs").fetchone()) is not None:
                return str(row[0])
    return mark.run_id if mark is not None and Segments(data_dir).has(mark.run_id) else None


def check_end(mark: Mark | None, end: int, name: str = "the store", advice: str = ATTEST_DATABASE) -> None:
    """Raises `LogLost` where the log ends before the mark."""
    if mark is not None and (lost := mark.lost(end)):
        raise LogLost(
            f"{name}: the log ends at event {end}, but was acknowledged up to event {mark.seq}: "
            f"{lost} events are lost, and the updates among them; {advice}"
        )


def check_rows(connection: Connection, end: int, name: str) -> None:
    """Raises `LogLost` where SQLite has rows of what events behind `end`, the last with a row, brought.

    A commit brings them together, so somebody has damaged it. The log may have the events, and not what was
    decided of their updates.
    """
    there = set(connection.exec_driver_sql("SELECT name FROM main.sqlite_schema").scalars())
    for table in _LAST_BROUGHT.keys() & there:  # an older release's data may lack one
        last = connection.exec_driver_sql(_LAST_BROUGHT[table]).scalar() or 0
        if last > end:
            raise LogLost(
                f"{name}: the events end at event {end}, but a row of {table} is of event {last}: "
                "nothing was changed: restore a backup"
            )


def check_snapshots(connection: Connection, end: int, name: str) -> None:
    """Raises `LogLost` where a snapshot has folded events that the log does not have."""
    folded = connection.scalar(select(func.max(snapshots.c.applied_through_seq))) or 0
    if folded > end:
        raise LogLost(
            f"{name}: the log ends at event {end}, but a snapshot is of event {folded}: restore a backup"
        )


def files_ahead(connection: Connection, files: SnapshotFiles) -> list[str]:
    """The digests of snapshots' files of versions that the log has not published.

    A crash may leave a file that no row names, but its version is in the log before the file is written.
    """
    newest = connection.scalar(select(func.max(model_versions.c.version))) or 0
    named = set(connection.scalars(select(snapshots.c.sha256)))
    return [sha256 for sha256 in files.others(named) if (files.version_of(sha256) or 0) > newest]


def check_files(
    connection: Connection, files: SnapshotFiles, name: str, there: Container[str] | None = None
) -> None:
    """Raises `LogLost` where there is a snapshot of a version that the log has not published.

    `there`: the files of before this transaction, where a server may go on: later ones are of later versions.
    """
    for sha256 in files_ahead(connection, files):
        if there is not None and sha256 not in there:
            continue
        raise LogLost(f"{name}: {files.path(sha256)} is of a version that the log does not have; {ATTEST}")
