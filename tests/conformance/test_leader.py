"""One leader on a PostgreSQL database: who is turned out, and that nothing is written under an old epoch."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit, urlunsplit

import numpy as np
import psycopg
import pytest
from postgres import cluster, new_database
from postgres_gate import SOCKET
from sqlalchemy import Connection, Engine
from stores import LIMITS
from wire import Served, server_config

from anabranch.core.errors import ConfigError, LeadershipLost, StoreError, StoreUnreachable
from anabranch.server import standby
from anabranch.server.manifest import write_manifest
from anabranch.server.store.base import DiskFailed, Entry, LedByAnother, Projection
from anabranch.server.store.chunks import ChunkedBlobs
from anabranch.server.store.factory import open_store
from anabranch.server.store.postgresql_store import PostgresqlStore
from anabranch.server.store.row_table import TableRows
from anabranch.testing.store import INFO, logged, snapshot, update, upload

T = TypeVar("T")

LEASE_S = 0.4
WAIT_S = 600.0
SESSIONS = 4  # that a narrow role may have at a time


def opened(url: str, folder: Path, lease_s: float = LEASE_S) -> PostgresqlStore:
    store = open_store(url, folder, LIMITS, lease_s)
    assert isinstance(store, PostgresqlStore)
    return store


def pass_the_epoch(url: str) -> None:
    """What a takeover does to the row, and nothing else: the old leader's session lives on."""
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("UPDATE leader SET epoch = epoch + 1, owner = 'another:1'")


def test_a_leader_that_renews_is_left_alone(postgresql_url: str, tmp_path: Path) -> None:
    first, second = opened(postgresql_url, tmp_path / "1", 60.0), opened(postgresql_url, tmp_path / "2")
    first.start(INFO)
    with pytest.raises(LedByAnother, match=r":\d+ leads this run"):
        second.start(INFO)
    first.renew()
    assert first.append([update(1)]) == [1]
    first.close()
    second.start(INFO)  # at once: the lock went with the session
    assert second.append([update(1), update(2)]) == [None, 2]
    second.close()


def test_a_database_of_no_encoding_keeps_every_text(
    postgresql_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `initdb` makes it where no locale is set: no server could start there."""
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    with new_database(postgresql_cluster, "SQL_ASCII") as url:
        for store in (opened(url, tmp_path), opened(url, tmp_path)):
            store.start(replace(INFO, name="läuft →"))
            store.add_metrics(1, {"größe →": 1.0}, 5.0)
            found = store.info()
            assert (found and found.name, store.metrics(1)) == ("läuft →", {"größe →": 1.0})
            store.close()


def test_a_database_that_does_not_take_every_text_is_refused(postgresql_cluster: str, tmp_path: Path) -> None:
    """The first name that it did not take ended the server."""
    with new_database(postgresql_cluster, "LATIN1") as url:
        store = opened(url, tmp_path)
        with pytest.raises(
            ConfigError, match="is of encoding LATIN1, which has not every letter: make one of"
        ):
            store.start(INFO)
        assert store.info() is None
        store.close()


def test_a_run_whose_schema_comes_further_on_is_another_servers(postgresql_url: str, tmp_path: Path) -> None:
    """Its leadership was taken, past its lock, and its run gone on with."""
    first = opened(postgresql_url, tmp_path / "1", 60.0)
    first.start(INFO)
    with psycopg.connect(postgresql_url, autocommit=True) as admin:
        admin.execute("CREATE SCHEMA mine")
    second = opened(f"{postgresql_url}&options=-csearch_path%3Dmine%2Cpublic", tmp_path / "2")
    assert second.info() is None
    other = replace(INFO, run_id="run-2")
    assert second.start(other) == other
    assert [store.append([update(1)]) for store in (first, second)] == [[1], [1]]
    first.renew()
    assert [store.info() for store in (first, second)] == [INFO, other]
    second.close()
    first.close()


BOUNDS = ("statement_timeout", "lock_timeout", "idle_session_timeout", "idle_in_transaction_session_timeout")


def bounds_of(store: PostgresqlStore) -> set[str]:
    """What the sessions of a store are bound by: of the writer, and of the two kinds beside it."""
    kept, database = set(), store._database
    for session in (database.transaction, database.aside, database.beside):
        with session() as connection:
            kept |= {str(connection.exec_driver_sql(f"SHOW {name}").scalar()) for name in BOUNDS}
    return kept


def test_what_a_database_bounds_for_all_ends_no_session_of_a_server(
    postgresql_url: str, tmp_path: Path
) -> None:
    """A writer idles where no device comes, and a statement may wait for another's lock."""
    with psycopg.connect(postgresql_url, autocommit=True) as admin:
        for name in BOUNDS:
            admin.execute(f"ALTER DATABASE {admin.info.dbname} SET {name} = '7s'".encode())
    store = opened(postgresql_url, tmp_path / "1")
    store.start(INFO)
    assert bounds_of(store) == {"0"}
    store.close()
    own = opened(f"{postgresql_url}&options=-c%20statement_timeout%3D8s", tmp_path / "2")
    own.start(INFO)
    assert bounds_of(own) == {"0", "8s"}, "what an address says of one is heard"
    own.close()


@pytest.mark.parametrize(("asked", "named"), [("", "anabranch"), ("&application_name=ours", "ours")])
def test_sessions_have_a_name(
    asked: str, named: str, postgresql_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGAPPNAME", raising=False)
    store = opened(postgresql_url + asked, tmp_path)
    store.start(INFO)
    with psycopg.connect(postgresql_url) as admin:
        where = "datname = current_database() AND pid <> pg_backend_pid()"
        found = admin.execute(f"SELECT application_name FROM pg_stat_activity WHERE {where}".encode())
        names = [name for (name,) in found.fetchall()]
    assert len(names) >= 2
    assert set(names) == {named}
    store.close()


@pytest.mark.parametrize(
    "default",
    ["extra_float_digits=0", "extra_float_digits=-15", "default_transaction_isolation=serializable"],
)
def test_what_a_database_says_of_numbers_and_transactions_is_not_a_server_s(
    default: str, postgresql_url: str, tmp_path: Path
) -> None:
    """The head of a run's history is of its row: a digit that is left out is a log that is another one."""
    exact = replace(INFO, created_at=1795856400.1234567)
    store = opened(postgresql_url, tmp_path)
    store.start(exact)
    store.close()
    with psycopg.connect(postgresql_url, autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {admin.info.dbname} SET {default}".encode())
    again = opened(f"{postgresql_url}&options=-c%20{default}", tmp_path)
    assert again.start(INFO) == exact
    for session in (again._database.transaction, again._database.aside):
        with session() as connection:
            assert connection.exec_driver_sql("SELECT 0.1::float8 + 0.2::float8").scalar() == 0.1 + 0.2
            assert connection.exec_driver_sql("SHOW transaction_isolation").scalar() == "read committed"
    again.close()


@pytest.fixture
def narrow_url(postgresql_url: str) -> str:
    """A database whose owner may have `SESSIONS` at a time."""
    role = f"narrow_{uuid.uuid4().hex}"
    with psycopg.connect(postgresql_url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT {SESSIONS}".encode())
        admin.execute(f"ALTER DATABASE {admin.info.dbname} OWNER TO {role}".encode())
    return postgresql_url.replace("//postgres@", f"//{role}@")


def take_all(url: str, others: ExitStack, store: PostgresqlStore | None = None) -> None:
    """All connections that are left: those that `store` has not, where it is known.

    A session that has just ended counts for a moment: what it had is waited for, or it is free later.
    """
    if store is not None:
        for _ in range(SESSIONS - len(store._database._raw)):
            others.enter_context(as_soon_as_reached(lambda: psycopg.connect(url)))
        return
    with suppress(psycopg.OperationalError):  # "too many connections"
        while True:
            others.enter_context(psycopg.connect(url))


def as_soon_as_reached(act: Callable[[], T]) -> T:
    """What it comes to once there is a connection for it."""
    latest = time.monotonic() + WAIT_S
    while True:
        try:
            return act()
        except (psycopg.OperationalError, StoreUnreachable):
            if time.monotonic() > latest:
                raise
            time.sleep(0.05)


def test_a_leader_renews_though_others_have_all_connections(narrow_url: str, tmp_path: Path) -> None:
    first, second = opened(narrow_url, tmp_path / "1", 60.0), opened(narrow_url, tmp_path / "2")
    first.start(INFO)
    first.renew()
    with ExitStack() as others:
        take_all(narrow_url, others, first)
        first.renew()
        assert first.append([update(1)]) == [1]
        with pytest.raises(StoreUnreachable, match="too many connections") as refused:
            second.start(INFO)
        assert standby._may_pass(refused.value, standby=False), "a start waits for one"
        with pytest.raises(StoreUnreachable, match="too many connections"):  # which a device tries again
            upload(first, b"x" * 100, "u2")
    assert not list((tmp_path / "1" / "spool").iterdir())
    first.close()


def test_a_lease_is_renewed_while_rows_are_written_by_the_only_other_connection(
    narrow_url: str, tmp_path: Path
) -> None:
    store = opened(narrow_url, tmp_path, 3600.0)
    store.start(INFO)

    def renewed_at() -> float:
        with store._database.transaction() as connection:
            return float(connection.exec_driver_sql("SELECT renewed_at FROM leader").scalar_one())

    with ExitStack() as others, store._database.beside():
        take_all(narrow_url, others, store)
        before = renewed_at()
        store.renew()
        assert renewed_at() > before
    store.close()


@pytest.mark.parametrize("ends", ["given back", "abandoned"])
def test_who_needs_a_second_connection_that_there_is_not_waits_for_the_first(
    narrow_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """A snapshot's rows are written in a thread beside the writer's."""
    store, name = opened(narrow_url, tmp_path, 3600.0), "ab" * 32
    store.start(INFO)
    database, refused, told = store._database, threading.Event(), list[object]()
    rows = TableRows(database)
    rows.write(name, [b"a row"])
    opening = database._opened

    def opens(engine: Engine) -> Connection:
        try:
            return opening(engine)
        except StoreUnreachable:
            refused.set()
            raise

    def flush() -> None:
        try:
            told.append(rows.flush([name]))
        except StoreError as error:
            told.append(error)

    with ExitStack() as others, suppress(StoreError):
        take_all(narrow_url, others, store)
        monkeypatch.setattr(database, "_opened", opens)
        with database.beside():
            flushing = threading.Thread(target=flush)
            flushing.start()
            assert refused.wait(WAIT_S)
            assert not told
            if ends == "abandoned":
                store.abandon()
                flushing.join(WAIT_S)
        flushing.join(WAIT_S)
    assert told == [set()] if ends == "given back" else isinstance(told[0], StoreUnreachable)
    store.close()


def test_a_payload_that_is_here_is_logged_though_others_have_all_connections(
    narrow_url: str, tmp_path: Path
) -> None:
    """Whether it is here is asked by the writer's own connection."""
    store = opened(narrow_url, tmp_path, 60.0)
    store.start(INFO)
    upload(store, data := b"x" * 100, "u1")
    with ExitStack() as others:
        take_all(narrow_url, others, store)
        assert store.append([Entry(update(1, data).record)]) == [1]
        missing = Entry(update(2, b"y" * 100).record)
        with pytest.raises(StoreError, match="is no blob: adopt it first"):
            store.append([missing])
        with pytest.raises(StoreUnreachable, match="too many connections"):
            store.write_snapshot(snapshot(1))
    as_soon_as_reached(lambda: store.write_snapshot(snapshot(1)))
    assert store.append([update(3)]) == [2]
    store.close()


def test_a_leader_goes_on_without_snapshots_where_others_have_all_connections(
    narrow_url: str, postgresql_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = write_manifest(tmp_path / "model", "narrow", {"w": np.zeros((8,), np.float32)})
    table = {"database": narrow_url, "snapshot_every_versions": 3, "leader_lease_s": 3600.0}
    with Served(server_config(tmp_path / "data", server=table), manifest) as server:
        device = server.device()

        def worked(until: Callable[[], bool]) -> None:
            latest = time.monotonic() + WAIT_S
            while not until():
                assert time.monotonic() < latest, "it does not come"
                assert device.work().decision.verdict == "published"

        with ExitStack() as others:
            take_all(narrow_url, others)
            worked(lambda: "no snapshot was written: " in caplog.text)
            worked(lambda: caplog.text.count("no snapshot was written: ") > 1)
        # Not by the narrow role: what others had is free when their sessions have ended, a moment later.
        with psycopg.connect(postgresql_url, autocommit=True) as admin:
            worked(lambda: admin.execute("SELECT * FROM snapshots WHERE version > 3").fetchall() != [])
    assert server.exit_code == 0


def test_a_silent_leader_is_turned_out_and_can_write_nothing(postgresql_url: str, tmp_path: Path) -> None:
    first, second = opened(postgresql_url, tmp_path / "1"), opened(postgresql_url, tmp_path / "2")
    first.start(INFO)
    assert first.append([update(1)]) == [1]
    time.sleep(2 * LEASE_S)  # its lease ends
    second.start(INFO)
    with pytest.raises(DiskFailed):
        first.append([update(2)])
    with pytest.raises(LeadershipLost, match="leads this run now"):
        first.renew()
    assert second.append([update(3)]) == [2]
    assert [record["update_id"] for _, record in logged(second)] == ["u1", "u3"]
    first.close()
    second.close()


class Noticed(threading.Condition):
    """A condition that tells of whoever has to wait for it."""

    def __init__(self, lock: threading.Lock, waited: threading.Event) -> None:
        super().__init__(lock)
        self._waited = waited

    def wait(self, timeout: float | None = None) -> bool:
        self._waited.set()
        return super().wait(timeout)


@contextmanager
def beside_removal(
    store: PostgresqlStore,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[], object],
    until: threading.Event,
) -> Iterator[None]:
    """The transaction of a removal lasts until the `work` of another thread has come so far."""
    writing, other = store._database.writing, threading.Thread(target=work)

    @contextmanager
    def late() -> Iterator[Connection]:
        with writing() as connection:
            other.start()
            came_so_far = until.wait(WAIT_S)
            yield connection
        assert came_so_far

    with monkeypatch.context() as patched:
        patched.setattr(store._database, "writing", late)
        yield
    other.join(WAIT_S)


def test_a_payload_that_comes_again_while_it_is_dropped_is_there(
    postgresql_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has let go of an update, and another one of the same bytes comes in just then."""
    store, data, waits = opened(postgresql_url, tmp_path, 60.0), bytes(range(256)) * 40, threading.Event()
    store.start(INFO)
    blobs = store.blobs
    assert isinstance(blobs, ChunkedBlobs)
    sha256 = upload(store, data, "u1")
    blobs._adopted.clear()  # which was long ago
    blobs.write("u2", 0, data)
    blobs.seal("u2", sha256)
    monkeypatch.setattr(blobs, "_gone", Noticed(blobs._lock, waits))

    def adopt() -> None:
        blobs.adopt("u2", sha256)
        waits.set()

    with beside_removal(store, monkeypatch, adopt, waits):
        blobs.remove({sha256})
    assert blobs.read(sha256) == data
    store.close()


def test_no_other_payload_waits_while_one_is_dropped(
    postgresql_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, data, came = opened(postgresql_url, tmp_path, 60.0), bytes(range(256)) * 40, threading.Event()
    store.start(INFO)
    old = upload(store, data, "u1")
    store.blobs._adopted.clear()  # which was long ago

    def come() -> None:
        upload(store, data[1:], "u2")
        store.blobs.discard("u3")
        came.set()

    with beside_removal(store, monkeypatch, come, came):
        assert store.blobs.remove({old}) == set()
    assert not store.blobs.exists(old)
    assert store.blobs.read(hashlib.sha256(data[1:]).hexdigest()) == data[1:]
    store.close()


WRITES: dict[str, Callable[[PostgresqlStore], object]] = {
    "an event": lambda store: store.append([update(1)]),
    "what came of events": lambda store: store.append([], [Projection(1, 3.0, ())]),
    "a snapshot": lambda store: store.save_snapshot(snapshot(1), 1, 5.0),
    "metrics": lambda store: store.add_metrics(1, {"loss": 1.0}, 5.0),
    "tags": lambda store: store.tag(["c1"], ["eu"], []),
    "payloads that go": lambda store: store.blobs.collect_garbage(set()),
    "snapshots that go": lambda store: store._snapshots.remove_all_but(set()),
}


@pytest.mark.parametrize("what", WRITES)
def test_nothing_is_written_under_an_epoch_that_has_passed(
    what: str, postgresql_url: str, tmp_path: Path
) -> None:
    store = opened(postgresql_url, tmp_path, 60.0)
    store.start(INFO)
    pass_the_epoch(postgresql_url)
    with pytest.raises(
        LeadershipLost, match=r"another:1 \(epoch 2\) leads this run now, .* epoch 1 has passed"
    ):
        WRITES[what](store)
    assert logged(store) == []
    assert store.load().snapshot is None
    store.close()


def test_a_takeover_waits_for_a_commit_that_is_under_way(postgresql_url: str, tmp_path: Path) -> None:
    store = opened(postgresql_url, tmp_path, 60.0)
    store.start(INFO)
    passed = threading.Event()

    def take_over() -> None:
        pass_the_epoch(postgresql_url)
        passed.set()

    thread = threading.Thread(target=take_over)
    with store._database.writing():
        thread.start()
        assert not passed.wait(0.5)
        store.renew()  # which does not wait
    assert passed.wait(600)
    thread.join()
    store.close()


def test_whoever_waits_for_an_answer_is_let_go(postgresql_url: str, tmp_path: Path) -> None:
    store = opened(postgresql_url, tmp_path, 60.0)
    store.start(INFO)
    errors: list[StoreError] = []

    def wait() -> None:
        try:
            store.append([update(1)])
        except StoreError as error:
            errors.append(error)

    with psycopg.connect(postgresql_url) as admin:
        admin.execute("LOCK TABLE events IN ACCESS EXCLUSIVE MODE")
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        store.abandon()
        thread.join(600)
    assert [type(error) for error in errors] == [DiskFailed]
    store.close()


@pytest.fixture
def moving_url(postgresql_url: str) -> Iterator[tuple[str, Callable[[str], None]]]:
    """An address that leads where one says by another: to a first database, to begin with."""
    parts = urlsplit(postgresql_url)
    folder = Path(tempfile.mkdtemp(prefix="anabranch-moving-"))  # a socket's path has 107 bytes at most

    def move(to: str) -> None:
        (host,) = parse_qs(urlsplit(to).query)["host"]
        (folder / SOCKET).unlink(missing_ok=True)
        (folder / SOCKET).symlink_to(f"{host}/{SOCKET}")

    move(postgresql_url)
    yield urlunsplit(parts._replace(query=f"host={folder}")), move
    shutil.rmtree(folder)


def test_what_is_large_goes_to_the_writer_s_own_database_or_nowhere(
    moving_url: tuple[str, Callable[[str], None]], postgresql_url: str, tmp_path: Path
) -> None:
    """A database of before a failover comes back, and the address leads there: what it gets goes with it."""
    url, move = moving_url
    name, data = urlsplit(url).path[1:], bytes(range(256)) * 10_000
    with cluster() as address:
        with psycopg.connect(f"{address} dbname=postgres", autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE {name}".encode())
        other_url = f"postgresql://postgres@/{name}?host={address.split()[0].removeprefix('host=')}"
        other, store = opened(other_url, tmp_path / "other"), opened(url, tmp_path / "1", 60.0)
        for one in (other, store):
            one.start(INFO)
        other.close()
        move(other_url)
        with pytest.raises(StoreUnreachable, match="another database by now"):
            upload(store, data, "u1")
        with pytest.raises(StoreUnreachable, match="another database by now"):
            store.save_snapshot(snapshot(1), 0, 5.0)
        store.renew()  # by the session that it has
        assert store.append([update(2)]) == [1]
        with psycopg.connect(other_url) as admin:
            assert admin.execute("SELECT count(*) FROM chunks").fetchone() == (0,)
        move(postgresql_url)
        upload(store, data, "u3")
        store.close()
    with psycopg.connect(postgresql_url) as admin:
        assert admin.execute("SELECT count(*) FROM chunks").fetchone() == (3,)


def test_another_schema_is_another_database(postgresql_url: str, tmp_path: Path) -> None:
    store = opened(postgresql_url, tmp_path, 60.0)
    store.start(INFO)
    with psycopg.connect(postgresql_url, autocommit=True) as admin:
        admin.execute("CREATE SCHEMA elsewhere; CREATE TABLE elsewhere.chunks (LIKE chunks INCLUDING ALL)")
        admin.execute(f"ALTER DATABASE {admin.info.dbname} SET search_path = elsewhere".encode())
    with pytest.raises(StoreUnreachable, match="another database by now"):
        upload(store, bytes(range(256)) * 10_000, "u1")
    store.close()


def test_large_files_are_in_the_database(postgresql_url: str, tmp_path: Path) -> None:
    first, second = opened(postgresql_url, tmp_path / "1"), opened(postgresql_url, tmp_path / "2")
    first.start(INFO)
    data = bytes(range(256)) * 10_000  # more than two pieces
    sha256 = upload(first, data, "u1")
    first.append([replace(update(1, data), inline=None)])
    first.save_snapshot(snapshot(1), 1, 5.0)
    first.close()
    second.start(INFO)  # with a folder of its own
    assert bytes(second.blobs.read(sha256)) == data
    found = second.load().snapshot
    assert found is not None
    assert found.meta == snapshot(1).meta
    second.close()
    files = {
        path.suffix for folder in ("1", "2") for path in (tmp_path / folder).rglob("*") if path.is_file()
    }
    assert files == {""}, "nothing but the locks"
