"""What the authority knows: the tokens it gave out, and the certificates it signed. One SQLite file.

The server and the command line use it at the same time, each through a connection of its own. Tokens are
stored as digests.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.core.errors import ConfigError, NotAuthenticated, StoreError, StoreFull, check_format
from anabranch.identity.certificates import SERVERS_CLOCK, Kind, time_text
from anabranch.identity.files import write_private

BUSY_S = 10.0
FORMAT = 2
AGE = 1 << 32  # changes that no register lives to see
MARK_BYTES = 8
TOKEN_CHARS_MAX = 128
UNKNOWN = (
    "the token is not known here: look whether it is as `anabranch admin enrol` printed it, or ask for "
    "another"
)

TABLES = """
CREATE TABLE tokens (
    token_id TEXT PRIMARY KEY,
    secret_sha256 TEXT NOT NULL,
    name TEXT NOT NULL,
    expires_at REAL NOT NULL,
    used_by TEXT,
    revoked INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE certificates (
    serial TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    key_sha256 TEXT NOT NULL,
    issued_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    revoked_at REAL
);
CREATE TABLE changes (count INTEGER NOT NULL);
INSERT INTO changes VALUES (0);
CREATE INDEX ix_certificates_name ON certificates (name);
"""
# A random one for each change: two registers that went on from one backup are told apart. Made with the next
# change where an earlier program has made the register.
MARKS = "CREATE TABLE IF NOT EXISTS marks (count INTEGER PRIMARY KEY, mark TEXT NOT NULL)"
# The numbers of the restores that were attested. Made with the first one that this program attests.
RESTORES = "CREATE TABLE IF NOT EXISTS restores (number INTEGER PRIMARY KEY)"

Ask = Callable[..., Sequence[Any]]  # rows, for a query and its values


@dataclass(frozen=True)
class RegisterPoint:
    """How far a register has come: its changes, and the newest mark with the change that it is of.

    Without a `mark` an earlier program has made all of them.
    """

    changes: int = 0
    marked: int = 0
    mark: str = ""

    @classmethod
    def of(cls, ask: Ask) -> RegisterPoint:
        """Where a register is."""
        ((changes,),) = ask("SELECT count FROM changes")
        marks = ask("SELECT count, mark FROM marks ORDER BY count DESC LIMIT 1") if _has_marks(ask) else ()
        return cls(changes, *(marks[0] if marks else ()))

    @property
    def age(self) -> int:
        """How often the register was said to be restored."""
        return self.changes // AGE

    def lost_by(self, now: RegisterPoint, ask: Ask) -> str:
        """Why a register that is at `now` has not come from here; empty where it has.

        `now` was read before: a backup that is copied over it in between is told by its marks.
        """
        if now.changes < self.changes:
            return f"it has {now.changes} of {self.changes} changes"
        query = "SELECT mark FROM marks WHERE count = ?"
        if self.mark and (not _has_marks(ask) or [*ask(query, self.marked)] != [(self.mark,)]):
            return f"its change {self.marked} is another one"
        return ""


def standing_of(serial: str, ask: Ask) -> str:
    """What a register says of a certificate: `good`, `revoked` or `unknown`."""
    rows = ask("SELECT revoked_at FROM certificates WHERE serial = ?", serial)
    return "unknown" if not rows else "good" if rows[0][0] is None else "revoked"


def check_same_file(path: Path, inode: int) -> None:
    """Raises `StoreError` where a register's file is gone, or its name is another one's by now."""
    try:
        if path.stat().st_ino != inode:
            raise StoreError(f"{path} was replaced: restart the server")
    except OSError as error:
        raise StoreError(f"{path} is gone: {error.strerror}") from error


def _has_marks(ask: Ask) -> bool:
    return bool(ask("SELECT 1 FROM sqlite_master WHERE name = 'marks'"))


@dataclass(frozen=True)
class Membership:
    """One name's standing. `expires_at` is its newest certificate's, in seconds since 1970."""

    kind: str
    name: str
    expires_at: float
    revoked: bool


@dataclass(frozen=True)
class Invitation:
    """A token that nobody has used, by its public part. Times are in seconds since 1970."""

    token_id: str
    name: str
    expires_at: float


@dataclass(frozen=True)
class Basis:
    """What a certificate is given out for: a token, or the certificate before."""

    token_id: str = ""
    serial: str = ""

    def counts(self, connection: sqlite3.Connection) -> bool:
        """Whether it has not been revoked."""
        if self.token_id:
            query, key = "SELECT revoked FROM tokens WHERE token_id = ?", self.token_id
        else:
            query = "SELECT revoked_at IS NOT NULL FROM certificates WHERE serial = ?"
            key = self.serial
        row = connection.execute(query, (key,)).fetchone()
        return row is not None and not row[0]


class Register:
    """Tokens and certificates of an authority, in one SQLite file.

    Methods may be called from any thread. Raises `StoreError` where the file fails.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        if not path.exists():
            raise ConfigError(f"{path} is not there: restore it, or make another authority")
        self._inode = path.stat().st_ino
        self._connection, self._reader_lock = _connected(path), threading.Lock()
        # Looks go through a connection of their own: no call waits for somebody who joins.
        self._reader = _connected(path)
        try:
            ((version,),) = self._look("PRAGMA user_version")
        except StoreError as error:
            self.close()
            raise ConfigError(f"{error}: restore it from a backup") from error
        if version != FORMAT:
            self.close()
            if version == 0:  # nobody wrote that: it is empty
                raise ConfigError(f"{path} is empty or damaged: restore it from a backup")
            check_format(path, version, FORMAT)
            raise ConfigError(
                f"{path} is of format {version}, this program reads {FORMAT}: "
                "use the version of anabranch that wrote it"
            )
        # By default the journal may be back after a power cut, and take a revocation back.
        self._connection.execute("PRAGMA synchronous = EXTRA")

    @classmethod
    def create(cls, path: Path) -> Register:
        """A new, empty register. Raises `StoreError`, and leaves nothing behind then."""
        write_private(path, b"", replace=False)
        try:
            with closing(sqlite3.connect(path)) as connection:
                connection.executescript(f"{TABLES} PRAGMA user_version = {FORMAT};")
            return cls(path)
        except sqlite3.Error as error:
            path.unlink()
            raise _failed(path, "made", error) from error

    def copy(self, path: Path) -> None:
        """Write the register, as it is at one moment, to a new file."""
        write_private(path, b"", replace=False)
        with self._reader_lock, closing(_connected(path)) as copy:
            try:
                self._reader.backup(copy)
            except sqlite3.Error as error:
                raise _failed(path, "made", error) from error

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()
        self._reader.close()

    def point(self) -> RegisterPoint:
        """How far it has come."""
        return RegisterPoint.of(self._look)

    def lost(self, before: RegisterPoint) -> str:
        """Why it has not come from where it was; empty where it has, or was said to be restored since."""
        now = self.point()
        return "" if now.age > before.age else before.lost_by(now, self._look)

    def begin_age(self) -> None:
        """After a restore: more changes than there ever were, and no token of before counts."""
        with self._writing() as connection:
            connection.execute("UPDATE changes SET count = (count / ? + 1) * ?", (AGE, AGE))
            connection.execute("UPDATE tokens SET revoked = 1")

    def number_restore(self, at_least: int) -> int:
        """A number for a restore that is attested, above all that there were."""
        with self._writing() as connection:
            connection.execute(RESTORES)
            ((last,),) = connection.execute("SELECT COALESCE(MAX(number), 0) FROM restores")
            number = max(at_least, int(last) + 1)
            connection.execute("INSERT INTO restores VALUES (?)", (number,))
        return number

    # --- tokens ------------------------------------------------------------------------------

    def add_tokens(self, tokens: Sequence[tuple[str, str, str, float]]) -> None:
        """Tokens as (id, secret, name, expires_at), all or none; a secret's digest is kept, no secret is."""
        rows = [(token_id, _digest(secret), name, until) for token_id, secret, name, until in tokens]
        with self._writing() as connection:
            connection.executemany(
                "INSERT INTO tokens (token_id, secret_sha256, name, expires_at) VALUES (?, ?, ?, ?)", rows
            )

    def invitations(self) -> list[Invitation]:
        """The tokens that nobody has used and nobody has withdrawn, by name; some may have expired."""
        query = (
            "SELECT token_id, name, expires_at FROM tokens WHERE revoked = 0 AND used_by IS NULL"
            " ORDER BY name, expires_at"
        )
        return [Invitation(*row) for row in self._look(query)]

    def withdraw(self, token_ids: Sequence[str]) -> int:
        """Let tokens that nobody has used count no more; returns how many of these there were."""
        with self._writing() as connection:
            query = "UPDATE tokens SET revoked = 1 WHERE revoked = 0 AND used_by IS NULL AND token_id = ?"
            return sum(connection.execute(query, (token_id,)).rowcount for token_id in token_ids)

    def use_token(self, token: str, key_sha256: str, now: float, whose: str = "") -> tuple[str, Basis]:
        """The name that a token was made out to, and its basis; from now on it is of that key alone.

        A repeated call with the same key is harmless: an answer may get lost. Raises `NotAuthenticated`, and
        `ConfigError` where it was made out to another than `whose`, if that is said.
        """
        if len(token) > TOKEN_CHARS_MAX:
            raise NotAuthenticated(UNKNOWN)
        token_id, _, secret = token.partition(".")
        with self._writing() as connection:
            query = "SELECT secret_sha256, name, expires_at, used_by, revoked FROM tokens WHERE token_id = ?"
            row = connection.execute(query, (token_id,)).fetchone()
            # Compared even where there is none, and in constant time.
            known = "" if row is None else row[0]
            if not hmac.compare_digest(_digest(secret), known.ljust(64)):
                raise NotAuthenticated(UNKNOWN)
            _, name, expires_at, used_by, revoked = row
            if revoked:
                raise NotAuthenticated(f"the token of {name!r} was revoked: ask for another")
            if now >= expires_at:
                raise NotAuthenticated(
                    f"the token of {name!r} expired at {time_text(expires_at)}, and {SERVERS_CLOCK} it is "
                    f"{time_text(now)}: if that is right, ask for another"
                )
            if used_by not in (None, key_sha256):
                raise NotAuthenticated(f"the token of {name!r} was used before: ask for another")
            if whose not in ("", name):
                raise ConfigError(
                    f"the token is of {name!r}, and this device is {whose!r}: it has not been used. Start "
                    f"{name!r} with it, in a --state-dir of its own, or give {whose!r} a token made for it"
                )
            connection.execute("UPDATE tokens SET used_by = ? WHERE token_id = ?", (key_sha256, token_id))
        return str(name), Basis(token_id=token_id)

    # --- certificates ------------------------------------------------------------------------

    def add_certificate(
        self,
        serial: str,
        kind: Kind,
        name: str,
        key_sha256: str,
        times: tuple[float, float],
        alone: bool,
        basis: Basis | None = None,
    ) -> None:
        """A certificate that was signed, `times` = (issued_at, expires_at).

        `alone`: those of the same name with another key are revoked, with the tokens that they came of.
        `basis`: what it is given out for. Raises `NotAuthenticated` if that was revoked meanwhile.
        """
        issued_at, expires_at = times
        with self._writing() as connection:
            if basis is not None and not basis.counts(connection):
                raise NotAuthenticated(f"{name!r} was revoked: join again with a new token")
            if alone:
                connection.execute(
                    "UPDATE certificates SET revoked_at = ? WHERE kind = ? AND name = ?"
                    " AND key_sha256 != ? AND revoked_at IS NULL",
                    (issued_at, kind.value, name, key_sha256),
                )
                connection.execute(
                    "UPDATE tokens SET revoked = 1 WHERE name = ? AND used_by != ?", (name, key_sha256)
                )
            connection.execute(
                "INSERT INTO certificates (serial, kind, name, key_sha256, issued_at, expires_at)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (serial, kind.value, name, key_sha256, issued_at, expires_at),
            )

    def standing(self, serial: str) -> str:
        """`good`, `revoked` or `unknown`."""
        check_same_file(self._path, self._inode)
        return standing_of(serial, self._look)

    def revoke(self, name: str, now: float) -> int:
        """Revoke all certificates and tokens of a name; returns how many there were of use."""
        with self._writing() as connection:
            certificates = connection.execute(
                "UPDATE certificates SET revoked_at = ? WHERE name = ? AND revoked_at IS NULL", (now, name)
            )
            query = "SELECT COUNT(*) FROM tokens WHERE name = ? AND revoked = 0 AND used_by IS NULL"
            (unused,) = connection.execute(query, (name,)).fetchone()
            # Used ones as well: its device could repeat its join.
            connection.execute("UPDATE tokens SET revoked = 1 WHERE name = ?", (name,))
        return int(certificates.rowcount + unused)

    def members(self) -> list[Membership]:
        """Everybody who has had a certificate, by name."""
        query = (
            "SELECT kind, name, MAX(expires_at), MIN(revoked_at IS NOT NULL) FROM certificates"
            " GROUP BY kind, name ORDER BY kind, name"
        )
        return [
            Membership(kind, name, expires_at, bool(revoked))
            for kind, name, expires_at, revoked in self._look(query)
        ]

    def _look(self, query: str, *values: str | int) -> list[Any]:
        """Rows, through the connection that never writes."""
        with self._reader_lock:
            try:
                return self._reader.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise _failed(self._path, "read", error) from error

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all or nothing."""
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
            except sqlite3.Error as error:
                raise _failed(self._path, "written", error) from error
            try:
                yield self._connection
                self._connection.execute("UPDATE changes SET count = count + 1")
                self._connection.execute(MARKS)
                mark = secrets.token_hex(MARK_BYTES)
                self._connection.execute("INSERT INTO marks SELECT count, ? FROM changes", (mark,))
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                self._roll_back()
                raise _failed(self._path, "written", error) from error
            except BaseException:
                self._roll_back()
                raise

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")


def _failed(path: Path, doing: str, error: sqlite3.Error) -> StoreError:
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return StoreFull(f"{path}: no space left on the disk: make room, then try again")
    return StoreError(f"{path} cannot be {doing}: {error}")


def _connected(path: Path) -> sqlite3.Connection:
    try:
        return sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise _failed(path, "opened", error) from error


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
