"""A server's data with the archive of what has gone from its log: to be read from the first event."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from anabranch.core.content import digest_like
from anabranch.core.errors import DataError, StoreCorrupt
from anabranch.core.events import Payload
from anabranch.core.journal import Record
from anabranch.core.model.updates import Receipt
from anabranch.server.store.archive import Archive
from anabranch.server.store.base import Recovery
from anabranch.server.store.postgresql_store import PostgresqlStore
from anabranch.server.store.sql import SqlStore
from anabranch.server.store.sqlite_store import SqliteStore


class ArchivedStore(SqlStore):
    """Reads only. Its log begins with the first event. See `SqlStore`."""

    @cached_property
    def _archived(self) -> Archive:
        assert self.archive_folder is not None, "it is what this is for"
        info = self.info()
        archive = Archive(self.archive_folder, "" if info is None else info.run_id)
        if not archive.folder.is_dir():
            raise DataError(f"{archive.folder} is not there: name the server.archive of this run")
        return archive

    def first(self) -> Recovery:
        """No snapshot, and all events."""
        return Recovery(None, 0, self.records())

    def records(self, after: int = 0) -> Iterator[tuple[int, Record]]:
        """The whole log after an event. Raises `StoreCorrupt` where a piece is missing."""
        while True:
            for seq, record in self._gone(after):
                after = seq
                yield seq, record
            try:
                for seq, record in super().records(after):
                    if seq != after + 1:
                        break  # the server has archived more by now
                    after = seq
                    yield seq, record
                else:
                    return
            except StoreCorrupt:
                if self._begins_after <= after:
                    raise

    @property
    def _begins_after(self) -> int:
        """The last event that has gone from the log."""
        return next(super().records(), (1, {}))[0] - 1

    def _gone(self, after: int) -> Iterator[tuple[int, Record]]:
        """What the archive alone has after an event. Raises `StoreCorrupt` where it does not."""
        begin = self._begins_after
        if after < begin:
            for event in self._archived.events(after):
                if event.seq != after + 1:
                    break
                after = event.seq
                yield after, event.record
                if after == begin:
                    break
        if after < begin:
            raise StoreCorrupt(
                f"{self._archived.folder} has no event {after + 1}: the log begins after {begin}"
            )

    def payload(self, reference: Payload) -> bytes | memoryview:
        """The bytes of an update. Raises `StoreCorrupt`."""
        try:
            return super().payload(reference)
        except StoreCorrupt:
            data = self._archived.payload(reference.sha256)
            if data is None or digest_like(data, reference.sha256) != reference.sha256:
                raise
            return data

    def receipt(self, update_id: str) -> Receipt | None:
        """What was decided of an update."""
        return super().receipt(update_id) or self._archived.receipts.get(update_id)

    def close(self) -> None:
        """Let go of files and locks."""
        if "_archived" in self.__dict__:
            self._archived.close()
        super().close()


class ArchivedSqlite(ArchivedStore, SqliteStore):
    """Of a run on SQLite."""


class ArchivedPostgresql(ArchivedStore, PostgresqlStore):
    """Of a run on PostgreSQL."""
