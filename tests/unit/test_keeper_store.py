"""A keeper's memory by itself: whose file it is, what it refuses to open, and what a failed write leaves."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from keepers import remembered, terms_of

from anabranch.core.errors import StoreError, StoreNewer
from anabranch.core.secagg.cohort import Cohort
from anabranch.keeper.rules import Declined, Opened, Why
from anabranch.keeper.store import KeeperStore

TERMS = terms_of("ab" * 32)


def opened(name: str, base_version: int = 0, base_head: str = "aa") -> Opened:
    """The update `name` of a device of that name."""
    return Opened(f"u-{name}", f"d-{name}", base_version, base_head, 4, name.encode())


def admitted(store: KeeperStore, number: int, members: Sequence[Opened], run_id: str = "r") -> Why | None:
    """Why a cohort of these was refused; None where it was taken."""
    found = store.admit(Cohort(run_id, number, 9, TERMS, ()), members)
    return found.why if isinstance(found, Declined) else None


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KeeperStore]:
    with closing(KeeperStore(tmp_path / "keeper.db")) as made:
        yield made


@pytest.fixture
def open_umask() -> Iterator[None]:
    """New files would be everybody's."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_the_file_is_its_owners_from_its_first_moment_and_again_where_it_was_not(tmp_path: Path) -> None:
    path = tmp_path / "keeper.db"
    for _ in range(2):
        with closing(KeeperStore(path)) as store:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert admitted(store, 1, [opened("a")]) in (None, Why.NUMBER)
        path.chmod(0o644)


def test_it_remembers_after_it_was_closed(tmp_path: Path) -> None:
    with closing(KeeperStore(tmp_path / "keeper.db")) as first:
        assert first.counts() == (0, 0, 0)
        assert admitted(first, 1, [opened("a"), opened("b"), opened("c")]) is None
        assert admitted(first, 2, [opened("d"), opened("e")]) is None
        assert admitted(first, 1, [opened("f")], "other") is None
    with pytest.raises(StoreError, match=r"keeper\.db cannot be read: Cannot operate on a closed database"):
        first.counts()
    with closing(KeeperStore(tmp_path / "keeper.db")) as second:
        assert second.counts() == (2, 3, 6)
        assert admitted(second, 3, [opened("a")]) is Why.SEED_USED
        assert second.counts() == (2, 3, 6)


def test_a_file_of_another_format_or_of_none_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "keeper.db"
    KeeperStore(path).close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        connection.execute("PRAGMA user_version = 2")
    with pytest.raises(StoreNewer, match=r"keeper\.db is of format 2: a newer release has written it"):
        KeeperStore(path)
    path.write_bytes(b"This is no database, though it is long enough to be taken for one. " * 20)
    with pytest.raises(StoreError, match=r"keeper\.db cannot be opened"):
        KeeperStore(path)


def test_what_cannot_be_read_is_an_error_that_names_the_file(store: KeeperStore, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "keeper.db")) as other:
        other.execute("DROP TABLE cohorts")
    for look in (store.counts, lambda: store.knows(Cohort("r", 1, 9, TERMS, ()))):
        with pytest.raises(StoreError, match=r"keeper\.db cannot be read: no such table: cohorts"):
            look()


def test_any_thread_may_ask(store: KeeperStore) -> None:
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(admitted(store, 1, [opened("a")])))
    thread.start()
    thread.join()
    assert answers == [None]
    assert store.counts() == (1, 1, 1)


@pytest.mark.parametrize("undone", ["ABORT", "ROLLBACK"])  # on a full disk SQLite itself rolls back
def test_a_write_that_fails_leaves_nothing_and_the_next_one_is_done(
    store: KeeperStore, tmp_path: Path, undone: str
) -> None:
    """The last of the five tables cannot be written: what was written before it is undone."""
    raised = f"SELECT RAISE({undone}, 'no room')"
    with closing(sqlite3.connect(tmp_path / "keeper.db")) as other:
        other.execute(f"CREATE TRIGGER full BEFORE INSERT ON heads BEGIN {raised}; END")
        before = remembered(tmp_path)
        with pytest.raises(StoreError, match=r"keeper\.db cannot be written: no room"):
            admitted(store, 1, [opened("a"), opened("b")])
        assert remembered(tmp_path) == before
        other.execute("DROP TRIGGER full")
    assert admitted(store, 1, [opened("a"), opened("b")]) is None


def test_each_version_has_one_model(store: KeeperStore) -> None:
    """Of two versions the heads differ; of one they may not, in one cohort or in two."""
    assert admitted(store, 1, [opened("a", 0, "aa"), opened("b", 1, "bb"), opened("c", 1, "bb")]) is None
    assert admitted(store, 2, [opened("d", 2, "cc"), opened("e", 2, "dd")]) is Why.OTHER_MODEL
    assert admitted(store, 3, [opened("f", 1, "aa")]) is Why.OTHER_MODEL
    assert admitted(store, 4, [opened("g", 1, "bb"), opened("h", 3, "ee"), opened("i", 2, "dd")]) is None
