"""Large payloads and snapshots in the database itself, in pieces, for servers that share no disk.

A file goes in by one transaction on a connection of its own, from any thread, named by its content: to put
the same one twice is harmless, so is one that nothing comes to name. What decides is the row that names it.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Select, delete, exists, select

from anabranch.core.content import SHA256, ContentHash, algorithm_of
from anabranch.core.errors import StoreCorrupt
from anabranch.core.limits import MIB, Limits
from anabranch.server.store.blobs import BlobStore, check_digest
from anabranch.server.store.packs import IN_A_FILE
from anabranch.server.store.postgresql import PostgresqlDatabase
from anabranch.server.store.projections import upsert
from anabranch.server.store.schema import chunks, updates
from anabranch.server.store.snapshots import NO_ROWS, SnapshotFiles
from anabranch.server.store.tensors import notes_of

CHUNK_BYTES = 1 * MIB
PAYLOAD, SNAPSHOT = "payload", "snapshot"


class Chunks:
    """Files of one kind. Raises `StoreError` and the like where the database fails."""

    def __init__(self, database: PostgresqlDatabase, kind: str) -> None:
        self._database, self._kind = database, kind

    def has(self, sha256: str) -> bool:
        """Whether the file is here, as a whole."""
        with self._database.aside() as connection:
            return connection.scalar(_piece(self._kind, sha256)) is not None

    def put(self, path: Path, sha256: str) -> None:
        """Store a file, durably."""
        row = {"sha256": sha256, "kind": self._kind, "at": time.time()}
        with path.open("rb") as file, self._database.aside() as connection:
            number = 0
            while (data := file.read(CHUNK_BYTES)) or not number:
                upsert(connection, chunks, [{**row, "number": number, "data": data}])
                number += 1

    def parts(self, sha256: str) -> Iterator[bytes]:
        """The pieces of a file, in order. Raises `StoreCorrupt` if they are missing or damaged."""
        made, number = ContentHash(algorithm_of(sha256) if self._kind == PAYLOAD else SHA256), 0
        with self._database.aside() as connection:
            data: bytes | None
            while data := connection.scalar(_piece(self._kind, sha256, number)):
                made.update(data)
                yield data
                number += 1
            here = number or connection.scalar(_piece(self._kind, sha256)) is not None
        if not here:
            raise StoreCorrupt(f"{self._kind} {sha256} cannot be read, it is not there: restore a backup")
        if (found := made.text()) != sha256:
            raise StoreCorrupt(f"{self._kind} {sha256} has the digest {found}: restore it from a backup")


def has_payload(connection: Connection, sha256: str) -> bool:
    """Whether a payload is here, by a connection that is open: no other one is needed."""
    return connection.scalar(_piece(PAYLOAD, sha256).with_only_columns(chunks.c.number)) is not None


def _piece(kind: str, sha256: str, number: int = 0) -> Select[Any]:
    c = chunks.c
    return select(c.data).where(c.sha256 == sha256, c.number == number, c.kind == kind)


class ChunkedBlobs(BlobStore):
    """Uploads on their way are files of this server; a large payload goes into the database."""

    def __init__(self, database: PostgresqlDatabase, data_dir: Path, limits: Limits) -> None:
        super().__init__(data_dir, limits)
        self._database, self._chunks = database, Chunks(database, PAYLOAD)
        self._going: set[str] = set()  # what is removed at the moment
        self._gone = threading.Condition(self._lock)

    def exists(self, sha256: str) -> bool:
        """Whether a payload is stored."""
        check_digest(sha256)
        return self._chunks.has(sha256)

    def read(self, sha256: str) -> memoryview:
        """The bytes of a payload, its digest checked. Raises `StoreCorrupt`."""
        check_digest(sha256)
        return memoryview(b"".join(self._chunks.parts(sha256)))

    def collect_garbage(self, referenced: set[str]) -> list[str]:
        """Remove payloads that nothing references; returns their names."""
        gone = super().collect_garbage(referenced)
        c = chunks.c
        named = exists().where(updates.c.sha256 == c.sha256, IN_A_FILE)
        with self._database.writing() as connection:
            orphans = set(connection.scalars(select(c.sha256).where(c.kind == PAYLOAD, ~named).distinct()))
            orphans = {sha256 for sha256 in orphans if not self._is_on_its_way(sha256)}
            connection.execute(delete(chunks).where(c.kind == PAYLOAD, c.sha256.in_(orphans)))
        return sorted({*gone, *orphans})

    def remove(self, payloads: set[str]) -> set[str]:
        """Remove payloads that no entry names; returns those that it is too early for."""
        if not payloads:
            return set()
        c = chunks.c
        with self._lock:
            self._going = {sha256 for sha256 in payloads if not self._is_on_its_way(sha256)}
        try:
            with self._database.writing() as connection:
                connection.execute(delete(chunks).where(c.kind == PAYLOAD, c.sha256.in_(self._going)))
                left = select(c.sha256).where(c.kind == PAYLOAD, c.sha256.in_(payloads)).distinct()
                return set(connection.scalars(left))
        finally:
            with self._gone:
                self._going = set()
                self._gone.notify_all()

    def _note_adopted(self, digest: str) -> None:
        # Who comes with what is removed just then waits, and puts it there again; nobody else does.
        self._gone.wait_for(lambda: digest not in self._going)
        super()._note_adopted(digest)

    def _keep(self, taken: Path, sha256: str) -> None:
        self._chunks.put(taken, sha256)
        taken.unlink()


class ChunkedSnapshots(SnapshotFiles):
    """A snapshot is made as a file of this server, and goes into the database."""

    def __init__(self, database: PostgresqlDatabase, data_dir: Path, limits: Limits) -> None:
        super().__init__(data_dir, limits)
        self._database, self._chunks = database, Chunks(database, SNAPSHOT)

    def _remove_all_but(self, kept: set[str]) -> None:
        gone = delete(chunks).where(chunks.c.kind == SNAPSHOT, chunks.c.sha256.not_in(kept))
        with self._database.writing() as connection:
            connection.execute(gone)

    def names(self, sha256: str) -> set[str]:
        """See `SnapshotFiles`. One that names nothing says so at its beginning: that alone is fetched."""
        if notes_of(next(self._chunks.parts(sha256), b"")) == NO_ROWS:
            return set()
        return super().names(sha256)

    def _keep(self, temporary: Path, sha256: str) -> None:
        self._chunks.put(temporary, sha256)

    @contextmanager
    def _found(self, sha256: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="anabranch-") as folder:
            path = Path(folder) / self.path(sha256).name
            with path.open("wb") as file:
                for part in self._chunks.parts(sha256):
                    file.write(part)
            yield path
