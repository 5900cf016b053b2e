"""Shelves (`core/engine/shelf.py`) by rows that lie somewhere under their names: in a folder, or in memory.

Python counts who has a reference, so nobody says what is not needed any more: a state that a rollback drops,
a fold that came to nothing, a phase that has ended. A row goes when its last reference has gone, at once
where no snapshot can name it, and else with the last snapshot that can: one that was taken after the row was
put there, and before its last reference went.

What is written over a row has the same name, and so the same bytes. What a crash leaves half written was not
flushed, so no snapshot names it, and it is removed at the next start. Where the disk is full a row stays in
memory, and the next snapshot waits for room; the log takes no update then, so there are few.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from typing import Protocol

from anabranch.core.engine.shelf import Described, Shelved, check_row, delta_of, name_of, row_of
from anabranch.core.errors import StoreCorrupt, StoreFull, on_disk
from anabranch.core.model.params import Delta
from anabranch.support.forks import remove_at_the_end
from anabranch.support.page_cache import uncache

log = logging.getLogger(__name__)

Pieces = list[bytes | memoryview]
Data = bytes | memoryview
FOLDER = "shelf"  # in a data directory
LOST = "what a strategy remembers of a device is lost."
START_AGAIN = "Remove that file, if it is there, and start again: it is made again from the log"


class RowPlace(Described, Protocol):
    """Where rows lie, by the SHA-256 (hex) of their bytes. Raises `StoreError` and the like; thread-safe."""

    def write(self, sha256: str, row: Pieces) -> None:
        """Put a row there; one of that name is written over. Raises `StoreFull`, and has none then."""
        ...

    def read(self, sha256: str) -> Data:
        """The bytes of a row, whatever they are. Raises `StoreCorrupt` where there is none."""
        ...

    def flush(self, names: Collection[str]) -> set[str]:
        """Make rows durable; returns those that are not there."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Drop rows, if they are there."""
        ...

    def names(self) -> set[str]:
        """Of all rows."""
        ...


class RowShelf:
    """A shelf of rows. References may go in any thread, all methods may be called in any."""

    def __init__(self, rows: RowPlace) -> None:
        self.rows = rows
        self._lock = threading.RLock()
        self._live: dict[str, weakref.KeyedRef[str, Shelved]] = {}
        self._born: dict[str, float] = {}  # of live rows: the newest snapshot when they came
        self._gone: deque[str] = deque()  # names whose reference went, in whatever thread
        # Rows that no reference is of, which snapshots after the first of these can name, up to the second.
        self._dead: dict[str, tuple[float, float]] = {}
        self._unflushed: set[str] = set()
        self._unnamed: set[str] = set()  # no snapshot can name one of these
        self._unwritten: dict[str, bytes] = {}  # for want of room
        self._newest = 0.0

    def put(self, delta: Delta) -> Shelved:
        """See `Shelf`."""
        row = row_of(delta)
        name = name_of(row)
        with self._lock:
            self._settle()
            held = self._held(name)
            if held is None or not self._has(name):
                self._write(name, row)  # though there may be a row of a start before: it was not looked at
            return held or self._refer(name, delta.size)

    def take(self, row: Shelved) -> Delta:
        """See `Shelf`."""
        with self._lock:
            data: Data | None = self._unwritten.get(row.sha256)
        if data is None:
            data = self.rows.read(row.sha256)
            check_row(row.sha256, data, self.rows)
        return delta_of(data)

    def named(self, sha256: str, size: int) -> Shelved:
        """See `Shelf`."""
        with self._lock:
            self._settle()
            return self._held(sha256) or self._refer(sha256, size)

    def begin(self, snapshots: Mapping[int, Collection[str]], clears: bool = True) -> None:
        """A start: what the snapshots name that there are, by the last event of each.

        `clears`: those are all; then other rows are of no use, which a crash has left.
        """
        with self._lock:
            here = self.rows.names()
            if clears:
                self.rows.remove(here.difference(*snapshots.values()))
            self._newest, self._dead = max(snapshots, default=0), {}
            for event, names in sorted(snapshots.items()):
                # Those that are missing as well: a replay that puts one there again mends the snapshot.
                for name in names:
                    self._dead[name] = self._dead.get(name, (event - 1, 0))[0], event
            for name in [name for name in self._dead if self._held(name) is not None]:
                self._born[name] = self._dead.pop(name)[0]

    def missing(self, named: Collection[str]) -> set[str]:
        """Those of these rows that are not there."""
        return set(named).difference(self.rows.names()) if named else set()

    def flush(self) -> None:
        """Make durable whatever a snapshot that was taken may name. One at a time. Raises `StoreFull`."""
        with self._lock:
            self._settle()
            for name, data in list(self._unwritten.items()):
                self.rows.write(name, [data])
                del self._unwritten[name]
                self._unflushed.add(name)
            names, self._unflushed = self._unflushed, set()
            self._unnamed.clear()
        try:
            missing = self.rows.flush(names)
        except BaseException:
            with self._lock:
                self._unflushed |= names
            raise
        with self._lock:
            for name in missing - self._unflushed:  # one that went may have come again
                if self._held(name) is not None:
                    raise StoreCorrupt(f"{self.rows.place(name)} is not there any more: {LOST} Start again")

    def retain(self, events: Collection[int]) -> None:
        """The newest snapshot was named; these are the last events of all that are kept."""
        with self._lock:
            self._settle()
            self._newest, kept = max(events), sorted(events)
            self._drop(name for name, (born, last) in self._dead.items() if not _is_any(kept, born, last))

    def _drop(self, names: Iterable[str]) -> None:
        names = list(names)
        self.rows.remove(names)
        for name in names:
            del self._dead[name]

    def _has(self, name: str) -> bool:  # noqa: ARG002
        """Whether the row of a reference is there as long as that."""
        return True

    def _held(self, name: str) -> Shelved | None:
        found = self._live.get(name)
        held = None if found is None else found()
        if found is not None and held is None:  # it went just now: another thread has not said so yet
            self._bury(name)
        return held

    def _refer(self, name: str, size: int) -> Shelved:
        made = Shelved(name, size)
        self._born[name] = self._dead.pop(name, (self._newest, 0))[0]
        self._live[name] = weakref.KeyedRef(made, self._note_gone, name)
        return made

    def _note_gone(self, reference: weakref.KeyedRef[str, Shelved]) -> None:
        # It is called wherever the last reference goes, perhaps inside the lock: it must take none.
        self._gone.append(reference.key)

    def _settle(self) -> None:
        """See to the rows whose reference went."""
        while self._gone:
            self._held(self._gone.popleft())  # perhaps it is there again

    def _bury(self, name: str) -> None:
        """The last reference of a row is gone."""
        del self._live[name]
        born = self._born.pop(name)
        if name in self._unnamed:
            self._unnamed.remove(name)
            self._unflushed.discard(name)
            self.rows.remove([name])
        else:  # though the last one to put it there had no room: a snapshot may name the row of one before
            self._unwritten.pop(name, None)
            self._dead[name] = born, self._newest

    def _write(self, name: str, row: Pieces) -> None:
        try:
            self.rows.write(name, row)
        except StoreFull as full:
            if not self._unwritten:
                log.warning("what a strategy remembers waits in memory: %s", full)
            self._unwritten[name] = b"".join(row)
        else:
            self._written(name)

    def _written(self, name: str) -> None:
        self._unflushed.add(name)
        if name not in self._dead:
            self._unnamed.add(name)


class FolderRows:
    """A file for each row, `FOLDER/ab/ab12...`: a backup copies those it needs, and their room is free."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def remedy(self) -> str:
        """See `RowPlace`."""
        return START_AGAIN

    def path(self, sha256: str) -> Path:
        """Where a row lies, or would lie."""
        return self.folder / sha256[:2] / sha256

    def place(self, sha256: str) -> str:
        """See `RowPlace`."""
        return str(self.path(sha256))

    def write(self, sha256: str, row: Pieces) -> None:
        """See `RowPlace`."""
        path = self.path(sha256)
        with self.errors(f"writing {path}"):
            descriptor, is_new = self._open(path)
            try:
                size = _write_all(descriptor, row)
                os.ftruncate(descriptor, size)  # not before: a row of that name may be a snapshot's
            except OSError:
                if is_new:
                    path.unlink()
                raise
            finally:
                os.close(descriptor)

    def read(self, sha256: str) -> Data:
        """See `RowPlace`."""
        path = self.path(sha256)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return _read_all(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreCorrupt(f"{path} cannot be read ({error.strerror}): {LOST} {self.remedy}") from error

    def flush(self, names: Collection[str]) -> set[str]:
        """See `RowPlace`: a folder for a trial needs none."""
        return {name for name in names if not self.path(name).exists()}

    def remove(self, names: Iterable[str]) -> None:
        """See `RowPlace`."""
        for name in names:
            with self.errors(f"removing rows from {self.folder}"), suppress(FileNotFoundError):
                self.path(name).unlink()

    def names(self) -> set[str]:
        """See `RowPlace`."""
        return set(self._names())

    def _names(self) -> Iterator[str]:
        for folder in self.folder.glob("??"):
            with suppress(FileNotFoundError):
                yield from (entry.name for entry in os.scandir(folder))

    def _open(self, path: Path) -> tuple[int, bool]:
        """A descriptor, and whether the file is new."""
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(2):
            try:
                return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
            except FileNotFoundError:
                self.make_folder(path.parent)
            except FileExistsError:
                break
        return os.open(path, flags), False

    # What differs where rows must survive.

    def errors(self, doing: str) -> AbstractContextManager[None]:
        """Inside, what the operating system says becomes an error of ours."""
        return on_disk(doing)

    def make_folder(self, folder: Path) -> None:
        """One of the folders of rows."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


class MemoryRows:
    """Rows that a process has, and that go with it."""

    remedy = START_AGAIN

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def place(self, sha256: str) -> str:
        """See `RowPlace`."""
        return f"row {sha256}"

    def write(self, sha256: str, row: Pieces) -> None:
        """See `RowPlace`."""
        self.data[sha256] = b"".join(row)

    def read(self, sha256: str) -> Data:
        """See `RowPlace`."""
        try:
            return self.data[sha256]
        except KeyError:
            raise StoreCorrupt(f"row {sha256} is not there: {LOST} {self.remedy}") from None

    def flush(self, names: Collection[str]) -> set[str]:
        """There is no disk."""
        return set(names).difference(self.data)

    def remove(self, names: Iterable[str]) -> None:
        """See `RowPlace`."""
        for name in names:
            self.data.pop(name, None)

    def names(self) -> set[str]:
        """See `RowPlace`."""
        return set(self.data)


def _is_any(events: Sequence[int], after: float, through: float) -> bool:
    """Whether any of these events, in order, is behind one and not behind another."""
    place = bisect_right(events, after)
    return place < len(events) and events[place] <= through


class ScratchShelf(RowShelf):
    """A shelf that goes with its process: in a folder of its own, made with the first row, in `TMPDIR`.

    For simulations and replays. `under`: of a server whose data are read, so that what its snapshots name is
    there; nothing of it is written to.
    """

    def __init__(self, under: RowShelf | None = None) -> None:
        self._scratch = _ScratchRows(None if under is None else under.rows)
        super().__init__(self._scratch)

    def _has(self, name: str) -> bool:
        return self._scratch.has(name)  # those of a server that goes on may go

    def _settle(self) -> None:
        super()._settle()
        self._drop(list(self._dead))  # no snapshot names any, but by what it holds

    def _write(self, name: str, row: Pieces) -> None:
        self.rows.write(name, row)
        self._written(name)


class _ScratchRows:
    """Rows in a temporary folder, over others that are only read."""

    def __init__(self, under: RowPlace | None) -> None:
        self._under = under
        self._mine: set[str] = set()
        self.remedy = START_AGAIN if under is None else under.remedy

    @cached_property
    def _rows(self) -> FolderRows:
        with on_disk(tempfile.gettempdir()):
            folder = Path(tempfile.mkdtemp(prefix="anabranch-shelf-"))
        remove_at_the_end(self, folder)
        return FolderRows(folder)

    def place(self, sha256: str) -> str:
        """See `RowPlace`."""
        return self._of(sha256).place(sha256)

    def write(self, sha256: str, row: Pieces) -> None:
        """See `RowPlace`."""
        self._rows.write(sha256, row)
        self._mine.add(sha256)

    def read(self, sha256: str) -> Data:
        """See `RowPlace`."""
        return self._of(sha256).read(sha256)

    def flush(self, names: Collection[str]) -> set[str]:
        """See `RowPlace`: nothing of it is there after the process."""
        return set(names) - self._mine

    def remove(self, names: Iterable[str]) -> None:
        """See `RowPlace`."""
        mine = self._mine.intersection(names)
        if mine:
            self._rows.remove(mine)
            self._mine -= mine

    def names(self) -> set[str]:
        """See `RowPlace`."""
        return self._mine | (set() if self._under is None else self._under.names())

    def has(self, sha256: str) -> bool:
        """Whether it has this row itself."""
        return sha256 in self._mine

    def _of(self, sha256: str) -> RowPlace:
        return self._rows if self._under is None or sha256 in self._mine else self._under


def _read_all(descriptor: int) -> memoryview:
    view, at = memoryview(bytearray(os.fstat(descriptor).st_size)), 0
    while got := os.preadv(descriptor, [view[at:]], at):
        at += got
    uncache(descriptor)  # its device comes again after many others, and this is of no use then
    return view[:at]


def _write_all(descriptor: int, row: Pieces) -> int:
    """All pieces, from the first byte of a file on; returns how many bytes they are."""
    at = 0
    for piece in row:
        view = memoryview(piece).cast("B")
        while view:
            written = os.pwrite(descriptor, view, at)
            view, at = view[written:], at + written
    return at
