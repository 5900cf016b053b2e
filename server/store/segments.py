"""The log beside SQLite, in files that only grow: `log/<number>.log`, written in batches, one flush each.

    header     magic, whose run it is, salt, number of the first event, CRC-32
    batch      magic, salt, number of its first event, how many, bytes and CRC-32 of the rest, CRC-32 of these
      event    bytes of its line, bytes of its payload (`NONE`: it has none here), the line, the payload
      ...

A batch counts if it is whole. One that is not, with nothing behind it, was under way when the power went: it
was never acknowledged, and is cut. One with another behind it had been flushed before that was written: if it
is damaged, the log has lost something, and says so (`LogLost`). A segment goes on from where its header says:
what an older one has beyond that was refused, for want of room, and counts for nothing.

The salt is of the segment: no payload can look like the beginning of a batch.
The rows of the database follow (`following.py`); payloads stay here, and rows name their places.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from anabranch.core.errors import LogLost, StoreCorrupt
from anabranch.core.kernels.chosen import loops
from anabranch.core.limits import KIB, MIB
from anabranch.identity.files import sync_folder
from anabranch.server.failpoints import reach
from anabranch.server.store.files import disk_errors, make_own_folder, open_file, opened
from anabranch.server.store.packs import PackPlace
from anabranch.support.page_cache import uncache

FOLDER = "log"
SEGMENT_BYTES = 256 * MIB  # a segment is closed when it is this large
CACHED_BYTES = 4 * MIB  # of the segment at hand, in the system's cache
TRIMMED_BYTES = 16 * MIB  # or this, where what is kept of the log begins in it
SHARE = 8  # or such a part of what the data directory may hold
MAGIC, BATCH_MAGIC = b"ANBRLOG1", b"\xa5BTC"
NONE = 0xFFFFFFFF
IOV_MAX = 1024  # pieces that Linux takes in one call
ATTEST = "restore a backup or, to go on without what is lost, say so with `anabranch admin attest-restore`"

_HEADER = struct.Struct("<8s16s8sQ")
_BATCH = struct.Struct("<4s8sQIQI")
_EVENT = struct.Struct("<II")
_CRC = struct.Struct("<I")
HEADER_BYTES, BATCH_BYTES = _HEADER.size + _CRC.size, _BATCH.size + _CRC.size
_SEARCHED = 64 * KIB
_LAST = 1 << 64  # no event comes after it


State = tuple[tuple[int, int], ...]  # the numbers and bytes of the files, in order


class LoggedEvent(NamedTuple):
    """An event of the log: its number, its canonical line, and where its payload lies if it has one here."""

    seq: int
    line: str
    place: PackPlace | None


@dataclass(frozen=True)
class Segment:
    """A file of the log, as its header has it; of one that is damaged, nothing else is known."""

    number: int
    path: Path
    salt: bytes
    first: int
    is_damaged: bool = False


@dataclass(frozen=True)
class _Batch:
    """What the beginning of a batch says: `at` is where it lies, `size` the bytes of its events."""

    at: int
    first: int
    count: int
    size: int
    crc: int

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def end(self) -> int:
        return self.at + BATCH_BYTES + self.size


class Segments:
    """The files of one run's log. Writing is for the writer's thread, reading for any process.

    Another process may read while one writes: of the batch that is being written it sees nothing.
    """

    def __init__(self, data_dir: Path, segment_bytes: int = SEGMENT_BYTES, held_bytes_max: int = 0) -> None:
        self.folder = data_dir / FOLDER
        self._segment_bytes = min(segment_bytes, held_bytes_max // SHARE or segment_bytes)
        self._descriptor: int | None = None
        self._number, self._size = 0, 0
        self._cached_from = 0
        self._run, self._salt = bytes(16), bytes(8)

    # --- writing -----------------------------------------------------------------------------

    def prepare(self, run_id: str, taken: int) -> None:
        """Make the folder; `taken` is the highest number of a pack. Raises `StoreFull`, `DiskFailed`."""
        with disk_errors("making the data directory"):
            make_own_folder(self.folder)
        self._run, self._number = run_of(run_id), max((taken, *self._numbers()))

    def append(
        self, first: int, events: Sequence[tuple[str, bytes | memoryview | None]]
    ) -> list[PackPlace | None]:
        """Make a batch durable, with one write and one flush; returns where its payloads lie.

        `first`: the number of its first event. Raises `StoreFull`: then nothing of it counts; `DiskFailed`.
        """
        with disk_errors("writing the log"):
            try:
                if self._descriptor is None or self._size >= self._segment_bytes:
                    self._begin(first)
                places = self._put(first, events)
            except OSError:
                self._take_back()
                raise
        reach("log_flushed")
        return places

    def _put(
        self, first: int, events: Sequence[tuple[str, bytes | memoryview | None]]
    ) -> list[PackPlace | None]:
        assert self._descriptor is not None
        pieces: list[bytes | memoryview] = [b""]
        places: list[PackPlace | None] = []
        size = crc = 0
        for line, payload in events:
            text = line.encode()
            head = _EVENT.pack(len(text), NONE if payload is None else len(payload)) + text
            for piece in (head,) if payload is None else (head, payload):
                crc = loops.crc32(piece, crc)
                pieces.append(piece)
            size += len(head)
            at = self._size + BATCH_BYTES + size
            places.append(None if payload is None else PackPlace(self._number, at))
            size += 0 if payload is None else len(payload)
        pieces[0] = _checked(_BATCH.pack(BATCH_MAGIC, self._salt, first, len(events), size, crc))
        end = _write(self._descriptor, pieces, self._size)
        reach("log_written")
        os.fdatasync(self._descriptor)
        self._size = end
        self._uncache()
        return places

    def _uncache(self) -> None:
        """Of what is durable nothing is read before the next start; but the last page is written on."""
        end = self._size // mmap.PAGESIZE * mmap.PAGESIZE
        if self._descriptor is not None and end >= self._cached_from + CACHED_BYTES:
            uncache(self._descriptor, self._cached_from, end - self._cached_from)
            self._cached_from = end

    def _begin(self, first: int) -> None:
        """A new segment. Its header is durable before anything lies behind it."""
        self.close()
        self._number += 1
        path, self._salt = self._path(self._number), os.urandom(8)
        self._descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._size = self._cached_from = 0
        header = _checked(_HEADER.pack(MAGIC, self._run, self._salt, first))
        self._size = _write(self._descriptor, [header], 0)
        os.fdatasync(self._descriptor)
        sync_folder(self.folder)

    def _take_back(self) -> None:
        """What was begun does not count. If it cannot be cut off: the next segment's header says the same."""
        if self._descriptor is not None:
            with suppress(OSError):
                if self._size > HEADER_BYTES:
                    os.ftruncate(self._descriptor, self._size)
                else:  # nothing that counts is in it, and the next one says the same
                    self._path(self._number).unlink()
            self.close()

    def go_on_from(self, run_id: str, end: int) -> None:
        """By an operator's word: the log ends with event `end`, whatever lies behind it."""
        if not self._numbers():
            return
        self._run, self._number = run_of(run_id), max(self._numbers())
        with disk_errors("writing the log"):
            self._begin(end + 1)
        self.close()

    def end_soon(self) -> None:
        """What is kept of the log begins in the segment at hand: if it is large, the next goes on from here.

        A segment is removed whole, so what was dropped of it would take room until it were full.
        """
        if self._size >= min(TRIMMED_BYTES, self._segment_bytes // 2):
            self.close()

    def close(self) -> None:
        """Write no more into the segment at hand."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    # --- reading -----------------------------------------------------------------------------

    def state(self) -> State:
        """The numbers and bytes of the files: another answer, another log."""
        found = []
        for number in self._numbers():
            with suppress(FileNotFoundError):
                found.append((number, self._path(number).stat().st_size))
        return tuple(found)

    def has(self, run_id: str) -> bool:
        """Whether the log here is of this run, as a header says."""
        try:
            found = [self._segment(number, run_id) for number in self._numbers()]
        except StoreCorrupt:  # of another
            return False
        return any(segment is not None and not segment.is_damaged for segment in found)

    def needed(self, run_id: str, after: int) -> list[Segment]:
        """The segments that have what follows an event, in order. Raises `LogLost`, `StoreCorrupt`.

        Those among them whose headers are damaged are there as well: `events` comes to them.
        """
        needed: list[Segment] = []
        begun = _LAST
        for number in reversed(self._numbers()):
            segment = self._segment(number, run_id)
            if segment is None or (not segment.is_damaged and segment.first >= begun):
                continue  # a later one says all of it anew
            needed.insert(0, segment)
            begun = begun if segment.is_damaged else segment.first
            if begun <= after + 1:
                return needed
        if damaged := [segment for segment in needed if segment.is_damaged]:
            raise _unreadable(damaged[0])
        if needed:
            raise LogLost(
                f"{self.folder} has no event {after + 1}, and goes on with event {needed[0].first}: {ATTEST}"
            )
        return []

    def make_durable(self, segments: Sequence[Segment]) -> None:
        """Flush what a process that was killed may have written and not flushed. Raises `DiskFailed`.

        Where its last flush had failed, the system takes what could not be written for written, and reads it
        from memory: so the last batch is written anew, as it is.
        """
        with disk_errors("flushing the log"):
            for segment in segments:
                with opened(segment.path, os.O_RDWR) as descriptor:
                    if segment is segments[-1] and not segment.is_damaged:
                        _write_last(descriptor, segment)
                    os.fdatasync(descriptor)
            if segments:
                sync_folder(self.folder)

    def events(self, segments: Sequence[Segment], after: int) -> Iterator[LoggedEvent]:
        """What follows an event, from `needed`, as far as batches are whole. Raises `LogLost`.

        It is raised after the last event before what is lost.
        """
        damaged: Segment | None = None  # where the events lay that are needed next, if that is known
        for n, segment in enumerate(segments):
            if segment.is_damaged:
                damaged = segment
                continue
            if damaged is not None and segment.first > after + 1:
                raise _unreadable(damaged)
            damaged, behind = None, segments[n + 1 :]
            gap = bool(behind) and behind[0].is_damaged
            limit = next((each.first - 1 for each in behind if not each.is_damaged), None)
            with disk_errors(f"reading {segment.path}"):
                try:
                    after = yield from _events_of(segment, after, limit, gap)
                except FileNotFoundError as error:
                    raise LogLost(f"{segment.path} is gone: {ATTEST}") from error
        if damaged is not None:
            raise _unreadable(damaged)

    def _segment(self, number: int, run_id: str) -> Segment | None:
        """None for one in which there is nothing yet. Raises `LogLost`, `StoreCorrupt`, `DiskFailed`."""
        path, size, data = self._path(number), 0, b""
        # One that is gone was removed just now: of its events there are rows.
        with disk_errors(f"reading {path}"), suppress(FileNotFoundError), opened(path) as descriptor:
            size, data = os.fstat(descriptor).st_size, os.pread(descriptor, HEADER_BYTES, 0)
        if _is_checked(data, HEADER_BYTES):
            magic, run, salt, first = _HEADER.unpack_from(data)
            if magic == MAGIC:
                if run != run_of(run_id):
                    raise StoreCorrupt(
                        f"{path} is of another run than the database: name the log's server.database; or, "
                        "if the database is the right one, move the file away, and of the others none that "
                        "is not of another run as well"
                    )
                return Segment(number, path, salt, first)
        if size <= HEADER_BYTES:  # the power went while it was made
            return None
        return Segment(number, path, bytes(8), 0, is_damaged=True)

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("*.log") if path.stem.isdecimal())

    def _path(self, number: int) -> Path:
        return segment_path(self.folder.parent, number)


def segment_path(data_dir: Path, number: int) -> Path:
    """Where a segment lies."""
    return data_dir / FOLDER / f"{number:06d}.log"


def run_of(run_id: str) -> bytes:
    """A run, as headers name it."""
    return hashlib.sha256(run_id.encode()).digest()[:16]


def _events_of(
    segment: Segment, after: int, limit: int | None, gap: bool
) -> Generator[LoggedEvent, None, int]:
    """Events after one, up to `limit`, where a later segment goes on; returns the last that is whole.

    `gap`: between the two is one that may have had what lacks, so that it is not lost here.
    """
    with opened(segment.path) as descriptor:
        at, end = _place(descriptor, segment, after)
        while limit is None or end < limit:
            batch = _batch(descriptor, at, segment.salt)
            whole = batch is not None and batch.first == end + 1
            body = _body(descriptor, batch) if batch is not None and whole and batch.last > after else b""
            if batch is None or not whole or body is None:
                batch = _found(descriptor, at + 1, segment.salt)
                if batch is None:
                    break
                if batch.first > after + 1:
                    if _is_whole(descriptor, at, segment.salt, end + 1):
                        continue  # it was being written, and so was what is behind it by now
                    raise _lost(segment, end)
                at, end = batch.at, batch.first - 1  # only what the rows have is damaged
                continue
            if body:
                yield from _parsed(segment, batch, body, after)
            at, end = batch.end, batch.last
    if limit is not None and end < limit and limit > after and not gap:
        raise _lost(segment, end)
    return max(end, after)


def _place(descriptor: int, segment: Segment, after: int) -> tuple[int, int]:
    """Where a batch begins, not far before what follows an event, and the last event before that batch.

    By halves: a batch is found from any byte on, so a look does not take longer where the segment is large.
    """
    at, end = HEADER_BYTES, segment.first - 1
    low, high = at, os.fstat(descriptor).st_size
    while high - low > _SEARCHED:
        middle = (low + high) // 2
        batch = _found(descriptor, middle, segment.salt)
        if batch is None or batch.first > after + 1:
            high = middle
        else:
            low, at, end = batch.at, batch.at, batch.first - 1
    return at, end


def _unreadable(segment: Segment) -> LogLost:
    return LogLost(f"{segment.path} is damaged in its beginning, and what follows cannot be told: {ATTEST}")


def _lost(segment: Segment, end: int) -> LogLost:
    return LogLost(
        f"{segment.path} is damaged after event {end}, and goes on behind that: events are lost; {ATTEST}"
    )


def _parsed(segment: Segment, batch: _Batch, body: bytes, after: int) -> Iterator[LoggedEvent]:
    place, start = 0, batch.at + BATCH_BYTES
    for seq in range(batch.first, batch.first + batch.count):
        line_bytes, payload_bytes = _EVENT.unpack_from(body, place)
        place += _EVENT.size
        line = body[place : place + line_bytes].decode()
        place += line_bytes
        lies = None if payload_bytes == NONE else PackPlace(segment.number, start + place)
        place += 0 if payload_bytes == NONE else payload_bytes
        if seq > after:
            yield LoggedEvent(seq, line, lies)


def _batch(descriptor: int, at: int, salt: bytes) -> _Batch | None:
    """What a batch at a place says of itself, None where none begins there."""
    data = os.pread(descriptor, BATCH_BYTES, at)
    if not _is_checked(data, BATCH_BYTES):
        return None
    magic, found, first, count, size, crc = _BATCH.unpack_from(data)
    return _Batch(at, first, count, size, crc) if (magic, found) == (BATCH_MAGIC, salt) else None


def _body(descriptor: int, batch: _Batch) -> bytes | None:
    """The events of a batch, None if they are not whole."""
    if os.fstat(descriptor).st_size < batch.end:
        return None
    body = os.pread(descriptor, batch.size, batch.at + BATCH_BYTES)
    return body if len(body) == batch.size and loops.crc32(body) == batch.crc else None


def _is_whole(descriptor: int, at: int, salt: bytes, first: int) -> bool:
    batch = _batch(descriptor, at, salt)
    return batch is not None and batch.first == first and _body(descriptor, batch) is not None


def _found(descriptor: int, at: int, salt: bytes) -> _Batch | None:
    """The next place from here on at which a batch begins."""
    sign = BATCH_MAGIC + salt
    while piece := os.pread(descriptor, _SEARCHED + len(sign) - 1, at):
        place = piece.find(sign)
        while place >= 0:
            if (batch := _batch(descriptor, at + place, salt)) is not None:
                return batch
            place = piece.find(sign, place + 1)
        at += _SEARCHED
    return None


def _checked(data: bytes) -> bytes:
    return data + _CRC.pack(loops.crc32(data))


def _is_checked(data: bytes, size: int) -> bool:
    return len(data) == size and _CRC.unpack(data[-_CRC.size :])[0] == loops.crc32(data[: -_CRC.size])


def _write(descriptor: int, pieces: Sequence[bytes | memoryview], at: int) -> int:
    """Write all pieces at a place, in as few calls as the system takes; returns where they end."""
    views = [memoryview(piece) for piece in pieces if len(piece)]
    while views:
        written = os.pwritev(descriptor, views[:IOV_MAX], at)
        at += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
    return at


def _write_last(descriptor: int, segment: Segment) -> None:
    """Write the last whole batch once more, where it lies."""
    at, _ = _place(descriptor, segment, _LAST)
    last: tuple[int, int] | None = None
    while (batch := _batch(descriptor, at, segment.salt)) is not None:
        if _body(descriptor, batch) is None:
            break
        last, at = (batch.at, batch.end), batch.end
    if last is not None:
        begin, end = last
        _write(descriptor, [os.pread(descriptor, end - begin, begin)], begin)
