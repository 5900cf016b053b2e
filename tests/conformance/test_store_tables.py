"""The tables of the stores on disk: what is written beside the log, and how broken rows are found."""

from __future__ import annotations

import pytest
from sqlalchemy import text
from stores import Backend

from anabranch.core.effects import Granted, LeaseEnd, LeaseEnded
from anabranch.core.model.updates import (
    Decision,
    Reason,
    Verdict,
)
from anabranch.server.store.sql import SqlStore
from anabranch.testing.store import BAD, GOOD, History, asked, decided, enrolled, project, task, update

BREAK: dict[str, tuple[str, str]] = {
    "a hole in the log": ("DELETE FROM events WHERE seq = 1", "numbered 2 to 7"),
    "no row for an update": ("DELETE FROM updates WHERE seq = 7", "without a row"),
    "another kind": ("UPDATE events SET kind = 'asked' WHERE seq = 7", "of an event of kind 'asked'"),
    "another update": ("UPDATE updates SET update_id = 'x' WHERE seq = 7", "differs from event 7"),
    "a task twice": ("UPDATE updates SET task_id = 't1' WHERE seq = 3", "'t1' counts 2 times"),
    "no reason": ("UPDATE updates SET reason = '' WHERE seq = 4", "without a reason"),
    "no weight": ("UPDATE updates SET weight = NULL WHERE seq = 2", "has no weight"),
    "a version missing": ("DELETE FROM model_versions WHERE version = 1", "not known"),
    "an update missing": ("UPDATE model_versions SET updates = 3 WHERE version = 1", "was made of 3"),
    "an order broken": (
        "UPDATE model_versions SET applied_through_seq = 2 WHERE version = 2",
        "fewer events",
    ),
    "a lease open": ("UPDATE leases SET state = 'leased'", "is open, but"),
    "a lease alone": ("UPDATE updates SET client_id = 'c9' WHERE seq = 2", "no update of it was taken"),
    "not decided": (
        "INSERT INTO snapshots VALUES (7, 2, 'ff', 0)",
        "'u6' is folded into a snapshot, but not decided",
    ),
    "a snapshot ahead": ("INSERT INTO snapshots VALUES (99, 2, 'ff', 0)", "ahead of the log"),
    "a snapshot gone": ("INSERT INTO snapshots VALUES (6, 2, 'ff', 0)", "cannot be read"),
}


@pytest.mark.parametrize("what", BREAK)
def test_problems_names_what_is_broken(on_disk: Backend, what: str, a_history: History) -> None:
    store = on_disk.start()
    store.append(a_history[0])
    store.append([], a_history[1])
    assert store.problems() == []
    statement, words = BREAK[what]
    assert isinstance(store, SqlStore)
    _break(store, on_disk.kind, statement)
    assert any(words in problem for problem in store.problems()), store.problems()
    store.close()


def _break(store: SqlStore, kind: str, statement: str) -> None:
    """Change the tables, foreign keys or not."""
    connection = store._database._connection
    assert connection is not None
    if kind == "sqlite":
        raw = connection.connection.driver_connection
        assert raw is not None
        raw.execute("PRAGMA foreign_keys = OFF")
    with store._database.writing() as writing:
        if kind == "postgresql":
            writing.execute(text("SET LOCAL session_replication_role = replica"))
        writing.execute(text(statement))


def test_leases_end_as_the_effects_say(on_disk: Backend) -> None:
    store = on_disk.start()
    names = [f"t{i}" for i in range(1, 8)]
    store.append([*(asked(n) for n in names), update(1), update(2), update(3, task="t3"), update(4)])
    store.append([], [project(1, *(Granted(task(n)) for n in names), Granted(task("t1"), again=True))])
    unknown = Decision(Verdict.REJECTED, 0, None, Reason.UNKNOWN_TASK, "not yours")
    ends = [
        project(8, LeaseEnded(task("t1"), LeaseEnd.EXPIRED), decided(1, GOOD)),
        project(9, decided(2, BAD)),
        project(10, decided(3, unknown)),
        project(11, LeaseEnded(task("t4"), LeaseEnd.CANCELLED), LeaseEnded(task("t5"), LeaseEnd.DROPPED)),
        project(11, LeaseEnded(task("t6"), LeaseEnd.SUPERSEDED), LeaseEnded(task("t7"), LeaseEnd.EXPIRED)),
    ]
    store.append([], ends)
    assert isinstance(store, SqlStore)
    with store._database.transaction() as connection:
        rows = connection.execute(text("SELECT state FROM leases ORDER BY task_id")).scalars().all()
    assert rows == ["accepted", "rejected", "leased", "cancelled", "dropped", "superseded", "expired"]
    store.close()


def test_clients_are_entered_when_they_enrol(on_disk: Backend) -> None:
    store = on_disk.start()
    store.append([enrolled("c1", 1.0), enrolled("c1", 2.0), enrolled("c2", 3.0)])
    store.append([enrolled("c2", 9.0)])
    store.append([])  # the rows are written by now
    assert isinstance(store, SqlStore)
    with store._database.transaction() as connection:
        query = text("SELECT client_id, enrolled_at, seen_at FROM clients ORDER BY client_id")
        assert list(connection.execute(query)) == [("c1", 1.0, 2.0), ("c2", 3.0, 9.0)]
    store.close()
