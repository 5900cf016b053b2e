"""The store that a configuration names."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from urllib.parse import unquote

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from anabranch.core.config.extras import how_to_install
from anabranch.core.config.secrets import MASK, masked
from anabranch.core.config.tables import ServerTable
from anabranch.core.errors import ConfigError
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.parts import PartKind, answer_text, is_code, members
from anabranch.server.store.archived import ArchivedPostgresql, ArchivedSqlite
from anabranch.server.store.base import Blobs, Store
from anabranch.server.store.files import SQLITE_FILE
from anabranch.server.store.memory import MemoryStore
from anabranch.server.store.postgresql_store import PostgresqlStore
from anabranch.server.store.sqlite_store import SqliteStore
from anabranch.support.code import let_in_one

LEASE_S = ServerTable.leader_lease_s
SCHEMES = ("postgresql://", "postgres://", "postgresql+psycopg://")  # libpq takes the first two for the same
_HOST = r"([\w.-]+|\[[\da-fA-F:.]+(?:%25[\w.-]+)?\])(?::(\d+))?"
_HOSTS = re.compile(rf"\w[\w+]*://(?:[^@/?]*@)?(?P<hosts>{_HOST}(?:,{_HOST})+)(?=[/?]|$)")
_FORMS = (
    'server.database must be "" (SQLite in data_dir), "memory", or postgresql://USER:PASSWORD@HOST/NAME; '
    "your own is path/to/file.py:Class"
)
PORT = "5432"  # PostgreSQL's, where an address names none
OF_THE_MADE = ("blobs", "lease_s")  # which a class need not have, as `__init__` may set them
STORES = PartKind("store", "stores", ("server.database",), {}, (*members(Store, OF_THE_MADE), "of"))


def open_store(
    database: str,
    data_dir: Path,
    limits: Limits = DEFAULT_LIMITS,
    lease_s: float = LEASE_S,
    archive: Path | None = None,
    disk_bytes_max: int = 0,
) -> Store:
    """The store of `server.database`; it reads only until `start`. Raises `ConfigError`.

    `lease_s`: `server.leader_lease_s`. `archive`: where what `server.keep` does not ask for goes.
    `disk_bytes_max`: how much `data_dir` may hold, 0 for no bound.
    """
    if database == "memory":
        return MemoryStore(limits)
    name = database if is_code(database) else database.partition("://")[0]
    let_in_one(STORES, name)  # a command line or settings of this machine's say where its data are
    # To look through all that is installed takes as long as to open a database: not for the usual one.
    if name and (name in STORES.names() or is_code(name)):
        opened: Store = STORES.find(name).of(database, data_dir, limits, lease_s)
        _check_made(opened, name)
        return opened
    if not database:
        return SqliteStore(_sqlite_file(data_dir), data_dir, limits, archive, disk_bytes_max)
    return PostgresqlStore(_postgresql(database), data_dir, limits, lease_s, archive, disk_bytes_max)


def _check_made(store: Store, name: str) -> None:
    """What `PartKind` cannot look at: some of it is called in threads, where it would be missed by nobody."""
    lacking = [need for need in members(Store) if not hasattr(store, need)]
    if lacking == list(members(Store)):
        raise ConfigError(f"{name}: of must give the store, not {answer_text(store)}")
    if lacking:
        raise ConfigError(f"{name}: what of gives lacks {', '.join(lacking)}; see docs/extending/store.md")
    if lacking := [need for need in members(Blobs) if not hasattr(store.blobs, need)]:
        raise ConfigError(f"{name}: its blobs lack {', '.join(lacking)}; see docs/extending/store.md")
    if not isinstance(store.lease_s, int | float):
        raise ConfigError(
            f"{name}: its lease_s must be seconds, 0 for none, not {answer_text(store.lease_s)}"
        )


def store_of(table: ServerTable, limits: Limits = DEFAULT_LIMITS) -> Store:
    """The store of a server's settings. Raises `ConfigError`."""
    archive = Path(table.archive) if table.archive else None
    given = (table.database, Path(table.data_dir), limits, table.leader_lease_s, archive)
    return open_store(*given, table.disk_bytes_max)


def open_data(database: str, data_dir: Path, archive: Path | None = None) -> Store:
    """A server's data, to be read; with the `archive` of what its log has dropped from the first event on."""
    if archive is None:
        return open_store(database, data_dir)
    if not database:
        return ArchivedSqlite(_sqlite_file(data_dir), data_dir, archive=archive)
    return ArchivedPostgresql(_postgresql(database), data_dir, archive=archive)


def is_same_database(one: str, other: str) -> bool:
    """Whether two addresses lead to one place, as far as they say; each may be spelt in several ways."""
    if one == other:
        return True
    try:
        here, there = (_postgresql(address) for address in (one, other))
    except ConfigError:  # of another kind, or none: that is said elsewhere
        return False
    users = {here.username, there.username} - {None}  # each may have a schema of its own
    named = [(url.database, url.query.get("options", "")) for url in (here, there)]
    return len(users) < 2 and named[0] == named[1] and not _ends(here).isdisjoint(_ends(there))


def _ends(url: URL) -> set[tuple[str, str]]:
    """The hosts that an address names, each with its port, as the driver is given them."""
    given = url.get_dialect()().create_connect_args(url)[1]
    hosts = str(given.get("host") or "").lower().split(",")
    ports = [port or PORT for port in str(given.get("port") or "").split(",")]
    return set(zip(hosts, ports if len(ports) == len(hosts) else ports * len(hosts), strict=False))


def _sqlite_file(data_dir: Path) -> Path:
    path = data_dir / SQLITE_FILE
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"server.data_dir = {str(data_dir)!a} is no text in UTF-8: take another name, or name it "
            "from a working directory in which it is"
        ) from None
    return path


def _postgresql(database: str) -> URL:
    # The value is not repeated in a message: it may hold a password.
    if not database.startswith(SCHEMES):
        raise ConfigError(_FORMS)
    try:
        url = _read(database).set(drivername="postgresql+psycopg")
    except (ArgumentError, ValueError):
        raise ConfigError(f"{_FORMS}; quote the special characters of a password as %XX") from None
    if "@" in f"{url.host}{url.database}":  # of a password, of which the rest would be named as a host
        raise ConfigError("server.database has more than one @: in a password it is written %40")
    if not url.database:
        raise ConfigError(f"server.database = {masked(database)!r} names no database: add /NAME")
    if url.password == MASK:
        raise ConfigError(
            f"server.database = {database!r} has its password masked, as all that is stored: give the whole "
            "address, in the environment as ANABRANCH_SERVER_DATABASE"
        )
    if importlib.util.find_spec("psycopg") is None:
        raise ConfigError(f"server.database is PostgreSQL: {how_to_install('psycopg')}")
    try:
        url.get_dialect()().create_connect_args(url)
    except ArgumentError:
        raise ConfigError(
            "server.database: give each of several hosts its port, HOST:PORT,HOST:PORT"
        ) from None
    return url


def _read(database: str) -> URL:
    """An address; SQLAlchemy takes the hosts of libpq's list, `a:5432,b:5432`, in the query alone."""
    if (found := _HOSTS.match(database)) is None:
        url = make_url(database)
        return url.set(host=unquote(url.host)) if url.host else url  # before the zone of an IPv6 address: %25
    url = make_url(database[: found.start("hosts")] + database[found.end("hosts") :])
    hosts, ports = zip(*re.findall(_HOST, found["hosts"]), strict=True)
    listed = {"host": ",".join(unquote(host.strip("[]")) for host in hosts), "port": ",".join(ports)}
    return url.set(query={**listed, **url.query})  # what is said there counts, as it does to libpq
