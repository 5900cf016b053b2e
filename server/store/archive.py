"""What a log has dropped (`server.keep`), kept in files of its own: `server.archive`.

    FOLDER/<run id>/<first>-<last>.zip   so many events
        events.jsonl                     a line of each: its number, its record, what was decided of an update
        payloads/<digest>                the updates' payloads, as they came

A file is durable before what it has goes from the log, and is never changed. Events are compressed, payloads
have been by their codecs; each has a check sum, a payload a digest besides. That the events are those of
the run is what a replay proves: the chain of the versions goes on from them into the log.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from anabranch.core.errors import ConfigError, StoreCorrupt, StoreFull
from anabranch.core.events import Payload
from anabranch.core.journal import Record, payload_of
from anabranch.core.limits import MIB
from anabranch.core.model.updates import Receipt
from anabranch.core.snapshot import receipt_of, receipt_row
from anabranch.identity.files import sync_folder
from anabranch.server.store.files import make_own_folder, open_file

log = logging.getLogger(__name__)

ARCHIVED_BYTES = 64 * MIB  # payloads in a file: nothing is answered while one is written
EVENTS, PAYLOADS = "events.jsonl", "payloads/"


@dataclass(frozen=True)
class ArchivedEvent:
    """An event that goes: its number, its record, and what was decided if it is an update."""

    seq: int
    record: Record
    receipt: Receipt | None

    def to_line(self) -> str:
        """As a line of JSON, without the line feed."""
        told = None
        if self.receipt is not None:
            told = [*receipt_row(self.receipt), self.receipt.client_id, self.receipt.sha256]
        data = {"seq": self.seq, "record": self.record, "receipt": told}
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @classmethod
    def of(cls, line: str) -> ArchivedEvent:
        """The inverse of `to_line`. Raises `ValueError`, `TypeError`, `LookupError`."""
        data = json.loads(line)
        told, receipt = data["receipt"], None
        if told is not None:
            *row, client_id, sha256 = told
            receipt = receipt_of(row, client_id, sha256)
        return cls(data["seq"], data["record"], receipt)

    @property
    def payload(self) -> Payload | None:
        """What was of use of an update, or of a keeper's answer."""
        return payload_of(self.record)


def check_writable(folder: Path) -> None:
    """Raises `ConfigError` where a folder could not be made or written, as far as can be seen without."""
    try:
        there = next((place for place in (folder, *folder.parents) if place.exists()), folder)
        may_write = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except OSError as error:  # where even a look into a folder above it is refused
        raise ConfigError(f"server.archive: {error}: name a folder that can be written") from error
    if not may_write:
        raise ConfigError(
            f"server.archive: {there} is no folder, or not to be written: name a folder that can be written"
        )


class Archive:
    """The files of one run. One writes, any number read."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.folder = folder / run_id
        self._open: zipfile.ZipFile | None = None

    def prepared(self) -> Archive:
        """The same, with its folder made. Raises `ConfigError`."""
        try:
            make_own_folder(self.folder)
            (self.folder / "next.tmp").unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"server.archive: {error}: name a folder that can be written") from error
        return self

    def write(
        self, events: Sequence[ArchivedEvent], bytes_of: Callable[[Payload], bytes | memoryview]
    ) -> None:
        """Make events durable, with what they name. Raises `StoreFull` where nothing can be written now."""
        try:
            temporary = self.folder / "next.tmp"
            with open(open_file(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC), "w+b") as file:
                with zipfile.ZipFile(file, "w") as archive:
                    _put(archive, EVENTS, "".join(f"{e.to_line()}\n" for e in events).encode(), 1)
                    for payload in {p.sha256: p for e in events if (p := e.payload) is not None}.values():
                        _put(archive, PAYLOADS + payload.sha256, bytes_of(payload))
                file.flush()
                os.fsync(file.fileno())
            self._set_aside(events[0].seq)
            temporary.rename(self.folder / f"{events[0].seq:012d}-{events[-1].seq:012d}.zip")
            sync_folder(self.folder)
        except FileNotFoundError as error:  # unmounted, perhaps: what is made anew might hide under the mount
            raise StoreFull(
                f"server.archive {self.folder} is gone, the log is kept meanwhile: put it back, or make it"
            ) from error
        except OSError as error:
            raise StoreFull(f"server.archive {self.folder}: {error}: the log is kept meanwhile") from error

    def _set_aside(self, first: int) -> None:
        """What is there from this event on is of a crash, or of a log that was taken back to a backup.

        It is kept, under a name that no earlier one has: a log may be taken back more than once.
        """
        for path in self._files():
            if _last_event(path) >= first:
                names = (path.with_suffix(f".old{f'-{n}' if n > 1 else ''}") for n in itertools.count(1))
                aside = next(name for name in names if not name.exists())
                log.warning("%s is of a course that the log has left: it is %s now", path, aside.name)
                path.rename(aside)

    def events(self, after: int = 0) -> Iterator[ArchivedEvent]:
        """All that is here after an event, in order. Raises `StoreCorrupt`."""
        for path in self._files():
            if _last_event(path) > after:
                yield from (event for event in self._read(path) if event.seq > after)

    def payload(self, sha256: str) -> bytes | None:
        """The bytes of a payload, from the file that was read last, or any; None where it is in none."""
        name = PAYLOADS + sha256
        found = [self._open] if self._open is not None and name in self._open.NameToInfo else []
        try:
            for archive in found or map(self._opened, self._files()):
                if name in archive.NameToInfo:
                    return archive.read(name)
        except (OSError, zipfile.BadZipFile, zlib.error) as error:
            raise StoreCorrupt(f"{self.folder}: payload {sha256} cannot be read: {error}") from error
        return None

    @cached_property
    def receipts(self) -> dict[str, Receipt]:
        """What was decided of the updates that are here."""
        return {e.receipt.update_id: e.receipt for e in self.events() if e.receipt is not None}

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*-*.zip"))

    def _opened(self, path: Path) -> zipfile.ZipFile:
        if self._open is None or self._open.filename != str(path):
            self.close()
            self._open = zipfile.ZipFile(path)
        return self._open

    def _read(self, path: Path) -> list[ArchivedEvent]:
        try:
            text = self._opened(path).read(EVENTS).decode()
            return [ArchivedEvent.of(line) for line in text.splitlines()]
        except (OSError, zipfile.BadZipFile, zlib.error, ValueError, TypeError, LookupError) as error:
            raise StoreCorrupt(f"{path} cannot be read: {error}") from error

    def close(self) -> None:
        """Let go of the file that was read last."""
        if self._open is not None:
            self._open.close()
            self._open = None


def _last_event(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _put(archive: zipfile.ZipFile, name: str, data: bytes | memoryview, level: int = 0) -> None:
    info = zipfile.ZipInfo(name)  # without the time: what is written again is the same
    info.external_attr = 0o600 << 16
    kind = zipfile.ZIP_DEFLATED if level else zipfile.ZIP_STORED
    archive.writestr(info, bytes(data), kind, level or None)
