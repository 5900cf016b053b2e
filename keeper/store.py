"""What a keeper remembers: every seed and every update that it has unmasked, by digest. One SQLite file.

It is written before an answer is made, and on the disk when that is given: whoever is killed between the two
answers the same cohort again, and none that has a part of it. A copy of before must never take its place:
what came since could be unmasked again in another sum, whose difference is one update.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from anabranch.core.errors import ConfigError, StoreError, check_format
from anabranch.core.secagg.cohort import Cohort
from anabranch.identity.files import tighten, write_private
from anabranch.keeper.papers import STORE, KeeperPapers
from anabranch.keeper.rules import Declined, Opened, Why

FORMAT = 1
BUSY_S = 10.0
TABLES = """
CREATE TABLE runs (run_id TEXT PRIMARY KEY, terms TEXT NOT NULL, number INTEGER NOT NULL);
CREATE TABLE cohorts (digest TEXT PRIMARY KEY, run_id TEXT NOT NULL, number INTEGER NOT NULL);
CREATE TABLE seeds (seed_sha256 TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE updates (
    run_id TEXT NOT NULL,
    update_id TEXT NOT NULL,
    client_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    PRIMARY KEY (run_id, update_id)
);
CREATE INDEX ix_updates_client ON updates (run_id, client_id, number);
CREATE TABLE heads (
    run_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    head TEXT NOT NULL,
    PRIMARY KEY (run_id, version)
);
"""


class KeeperStore:
    """The memory of a keeper. Methods may be called from any thread. Raises `StoreError`."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        fresh = not path.exists()
        if fresh:
            write_private(path, b"")
        tighten(path)
        with self._named("opened"), ExitStack() as opening:
            self._connection = sqlite3.connect(
                path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            opening.callback(self.close)
            # With FULL the journal may be back after a power cut, and undo what was said.
            self._connection.execute("PRAGMA synchronous = EXTRA")
            self._open()
            opening.pop_all()  # it stays open

    def _open(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        ((version,),) = self._connection.execute("PRAGMA user_version").fetchall()
        if version == 0:
            for statement in TABLES.split(";"):
                self._connection.execute(statement)
            self._connection.execute(f"PRAGMA user_version = {FORMAT}")
        self._connection.execute("COMMIT")
        check_format(self._path, version, FORMAT)
        if version not in (0, FORMAT):
            raise ConfigError(
                f"{self._path} is of format {version}, this program reads {FORMAT}: use the version of "
                "anabranch that wrote it"
            )

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def counts(self) -> tuple[int, int, int]:
        """Runs, cohorts and updates that were unmasked."""
        with self._lock, self._named("read"):
            (found,) = self._connection.execute(
                "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM cohorts), "
                "(SELECT count(*) FROM updates)"
            ).fetchall()
        return found[0], found[1], found[2]

    def knows(self, cohort: Cohort) -> bool:
        """Whether this very cohort was admitted before, to the byte."""
        with self._lock, self._named("read"):
            query = "SELECT 1 FROM cohorts WHERE digest = ?"
            return self._connection.execute(query, (cohort.digest,)).fetchone() is not None

    def admit(self, cohort: Cohort, members: Sequence[Opened]) -> Declined | None:
        """Remember a cohort, all of it; or say why it may not be unmasked, and remember nothing."""
        with self._lock, self._named("written"):
            with self._connection:  # all or nothing; of a full disk SQLite has rolled back by itself
                self._connection.execute("BEGIN IMMEDIATE")
                refused = self._refused(cohort, members)
                if refused is None:
                    self._write(cohort, members)
            return refused

    @contextmanager
    def _named(self, used: str) -> Iterator[None]:
        """Inside, what SQLite says is of this file, which is `used` so."""
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"{self._path} cannot be {used}: {error}") from error

    def _refused(self, cohort: Cohort, members: Sequence[Opened]) -> Declined | None:
        row = self._one("SELECT terms, number FROM runs WHERE run_id = ?", cohort.run_id)
        if row is not None and row[0] != cohort.terms.digest:
            return Declined(Why.OTHER_TERMS, f"run {cohort.run_id!r} has begun under other terms")
        if row is None and not cohort.terms.plan:
            return Declined(
                Why.OTHER_TERMS,
                "the terms are those of an older release, whose boxes say too little: only what such a run "
                "has begun here goes on; begin another with server and devices of this release",
            )
        if row is not None and cohort.number <= row[1]:
            return Declined(Why.NUMBER, f"cohort {cohort.number} comes after {row[1]}")
        heads: dict[int, str] = {}
        for member in members:
            refused = self._used(cohort, member) or self._other_model(cohort, member, heads)
            if refused is None and cohort.terms.noise:
                refused = self._over(cohort, member)
            if refused is not None:
                return refused
        return None

    def _used(self, cohort: Cohort, member: Opened) -> Declined | None:
        if self._one("SELECT 1 FROM seeds WHERE seed_sha256 = ?", member.seed_sha256):
            return Declined(Why.SEED_USED, f"the seed of update {member.update_id!r} was unmasked before")
        query = "SELECT 1 FROM updates WHERE run_id = ? AND update_id = ?"
        if self._one(query, cohort.run_id, member.update_id):
            return Declined(Why.UPDATE_USED, f"update {member.update_id!r} was unmasked before")
        return None

    def _other_model(self, cohort: Cohort, member: Opened, heads: dict[int, str]) -> Declined | None:
        """Whether devices were given different models under one number: a sum would tell of one of them."""
        version = member.base_version
        row = self._one("SELECT head FROM heads WHERE run_id = ? AND version = ?", cohort.run_id, version)
        known = row[0] if row else heads.setdefault(version, member.model)
        if known != member.model:
            return Declined(Why.OTHER_MODEL, f"version {version} was not the same model for all devices")
        return None

    def _over(self, cohort: Cohort, member: Opened) -> Declined | None:
        query = "SELECT count(*), max(number) FROM updates WHERE run_id = ? AND client_id = ?"
        row = self._one(query, cohort.run_id, member.client_id)
        assert row is not None
        times, last = row
        if times >= cohort.terms.participations:
            return Declined(
                Why.PARTICIPATIONS, f"{member.client_id!r} was in {times} sums, as often as it may"
            )
        if times and cohort.number - last < cohort.terms.separation:
            return Declined(Why.SEPARATION, f"{member.client_id!r} was in cohort {last}")
        return None

    def _write(self, cohort: Cohort, members: Sequence[Opened]) -> None:
        run, number, run_sql = cohort.run_id, cohort.number, self._connection.execute
        run_sql("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", (run, cohort.terms.digest, number))
        run_sql("INSERT INTO cohorts VALUES (?, ?, ?)", (cohort.digest, run, number))
        many = self._connection.executemany
        many("INSERT INTO seeds VALUES (?)", [(m.seed_sha256,) for m in members])
        rows = [(run, m.update_id, m.client_id, number) for m in members]
        many("INSERT INTO updates VALUES (?, ?, ?, ?)", rows)
        heads = [(run, m.base_version, m.model) for m in members]
        many("INSERT OR IGNORE INTO heads VALUES (?, ?, ?)", heads)

    def _one(self, query: str, *values: object) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._connection.execute(query, values).fetchone()
        return row


def open_memory(papers: KeeperPapers) -> KeeperStore:
    """What the keeper has unmasked. Raises `ConfigError` where that is gone, `StoreError`."""
    path = papers.folder / STORE
    if papers.remembers and not path.exists():
        raise ConfigError(
            f"{path} is gone, which has what this keeper has unmasked: without it a part of a sum could be "
            "unmasked again, and the rest be known. Put that very file back as it was last, no older copy, "
            "or make another keeper (`anabranch keeper init --folder DIR`), and tell devices and server its "
            "name"
        )
    return KeeperStore(path)
