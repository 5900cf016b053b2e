"""Uploads and large payloads as files under the data directory.

    spool/<name>.part    an upload on its way; it grows in place
    spool/<name>.whole   a complete one, its digest checked; never written again
    spool/*.tmp          one of the above, in the hands of the call that renamed it
    blobs/ab/<digest>    a payload, named by its content; ab: the first digits (`core/content.py`)

The name of an upload is made of ids, with a + between (`server/spool.py`).

The disk begins to write a part every `SYNC_BYTES`, so that the flush at its end is short and a power cut
costs a resume little. The digest of a part grows with it; what is not known to go on where the digest ends is
read again. A call that checks or keeps an upload takes it out of the others' reach first: no late chunk, and
no second stream of the same update, can change bytes that were checked.
No file name comes from outside unchecked.

No clock that can be set says what is old: what the log names stays, and so does what this process has taken
in a short while ago. What is left of uploads goes with its task (`server/uploads.py`).
"""

from __future__ import annotations

import errno
import math
import os
import re
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from anabranch.core.clock import Seconds
from anabranch.core.content import (
    SHA256,
    ContentHash,
    algorithm_of,
    check_content,
    check_stored,
    digest_like,
    digits,
)
from anabranch.core.errors import ConfigError, InvalidUpdate, StoreCorrupt, StoreError, TooLarge, Unavailable
from anabranch.core.limits import DEFAULT_LIMITS, MIB, Limits
from anabranch.core.model.mapped import MappedFile
from anabranch.identity.files import sync_folder
from anabranch.server.failpoints import reach
from anabranch.server.store.files import (
    PIECE_BYTES,
    begin_write_out,
    check_space,
    disk_errors,
    free_bytes,
    make_folder,
    make_own_folder,
    open_file,
    opened,
    sync_file,
)
from anabranch.support.page_cache import uncache

SYNC_BYTES = 16 * MIB
ADOPTED_S = 60.0  # a blob that has its entry by then, or never
PART_AGE_S = 24 * 3600.0  # a device may stay away this long before it starts its upload again

BETWEEN_IDS, IDS_MAX = "+", 3  # of the name of an upload: what is in no id stands between its ids
PART, WHOLE = ".part", ".whole"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_id(update_id: str, limits: Limits) -> None:
    """Raises `InvalidUpdate` unless the id is short and of a strict alphabet."""
    if len(update_id) > limits.id_chars_max or not _ID.fullmatch(update_id):
        raise InvalidUpdate(
            f"update_id {update_id[:80]!r}: use 1 to {limits.id_chars_max} of A-Z a-z 0-9 . _ - "
            "and begin with a letter or digit"
        )


def check_name(name: str, limits: Limits) -> None:
    """Raises `InvalidUpdate` unless the name of an upload is of ids, up to three."""
    ids = name.split(BETWEEN_IDS)
    if len(ids) > IDS_MAX:
        raise InvalidUpdate(f"upload {name[:80]!r} is named by more than {IDS_MAX} ids")
    for one in ids:
        check_id(one, limits)


def check_digest(digest: str) -> None:
    """Raises `InvalidUpdate` unless it is a digest of a content, and so fit to be a file's name."""
    try:
        algorithm_of(digest)
    except ConfigError as error:
        raise InvalidUpdate(str(error)) from error


def check_bytes(update_id: str, data: bytes | memoryview, digest: str, known: str = "") -> None:
    """Raises `InvalidUpdate` if the digest of the bytes is another; `known`: where it was made already."""
    if (found := known or digest_like(data, digest)) != digest:
        raise InvalidUpdate(
            f"update {update_id!r}: {len(data)} bytes have the digest {found}, not {digest}: send them again"
        )


@dataclass
class _PartDigest:
    """Of the first `size_bytes` of a part; `hash` is None while, or where, it is not known."""

    size_bytes: int
    hash: ContentHash | None = None


class BlobStore:
    """Uploads under way and large payloads, as files of a data directory; `Blobs` in base.py is the contract.

    It holds no open files.
    """

    def __init__(
        self, data_dir: Path, limits: Limits = DEFAULT_LIMITS, monotonic: Seconds = time.monotonic
    ) -> None:
        self.limits, self._monotonic = limits, monotonic
        self._spool, self._blobs = data_dir / "spool", data_dir / "blobs"
        self._lock = threading.Lock()  # on the names in the spool
        self._sealed: dict[str, str] = {}  # the digest of each .whole that this process checked
        self._digests: dict[str, _PartDigest] = {}  # of parts, as the last write has left them
        self._adopted: dict[str, float] = {}  # blobs that this process was given lately, and when

    def prepare(self) -> None:
        """Make the folders, and remove what a crash left half done. Raises `StoreFull`, `DiskFailed`."""
        with disk_errors("making the data directory"):
            make_own_folder(self._spool)
            make_own_folder(self._blobs)
            for path in self._spool.glob("*.tmp"):
                path.unlink()

    # --- uploads -----------------------------------------------------------------------------

    def received(self, update_id: str) -> int:
        """Bytes of an upload that are here and durable: where to go on."""
        with disk_errors(f"flushing upload {update_id}"):
            for path in (self._whole(update_id), self._part(update_id)):
                with suppress(FileNotFoundError):
                    _flush(path)
                    sync_folder(self._spool)
                    return path.stat().st_size
        return 0

    def write(self, update_id: str, offset: int, chunk: bytes | memoryview, algorithm: str = SHA256) -> int:
        """Put a chunk at `offset`, dropping what lies after it; returns where the next one goes.

        Behind the beginning of an upload that was sealed nothing is written: all of it is here, and may be
        read. `algorithm`: of the digest that `seal` will be given; one of another is made there. Raises
        `Unavailable` if it would leave a gap, `TooLarge`, `StoreFull`.
        """
        path, end = self._part(update_id), offset + len(chunk)
        if end > self.limits.payload_bytes_max:
            raise TooLarge(f"update {update_id!r} is over payload_bytes_max, {self.limits.payload_bytes_max}")
        check_space(self._spool, self.limits.free_disk_bytes_min)
        with self._lock:  # whoever writes, seals or drops meanwhile takes this out of its place
            before, mine = self._digests.get(update_id), _PartDigest(0)
            self._digests[update_id] = mine
        # Before the bytes are written: the kernel takes five times as long to copy them out of another
        # processor's cache as out of this one's, where a digest brings them.
        made = _gone_on(before, offset, chunk, algorithm)
        with disk_errors(f"spooling upload {update_id}"):
            with self._lock:
                alone = self._digests.pop(update_id, None) is mine
                if offset == 0:
                    self._drop(update_id, self._whole(update_id))
                descriptor = _opened(path, offset)
                if descriptor is None:
                    self._check_sealed(update_id, offset, end)
                    return end
                try:
                    _put(update_id, descriptor, offset, chunk)
                except BaseException:
                    os.close(descriptor)
                    raise
                self._digests[update_id] = _PartDigest(end, made if alone else None)
            try:
                if offset // SYNC_BYTES != end // SYNC_BYTES:
                    begin_write_out(descriptor)
            finally:
                os.close(descriptor)
        reach("chunk_written")
        return end

    def seal(self, update_id: str, digest: str) -> memoryview:
        """The bytes of a whole upload, mapped, its digest checked.

        Raises `InvalidUpdate`; `Unavailable` where nothing is here, as another stream of it may have taken
        it; and `StoreError` where there is no memory to map it: it stays as it came.
        """
        check_digest(digest)
        part, whole = self._part(update_id), self._whole(update_id)
        with disk_errors(f"sealing upload {update_id}"):
            with self._lock:
                if (taken := self._take(part) or self._take(whole)) is None:
                    raise Unavailable(f"update {update_id!r} is not here: query it, and send what is lacking")
                known = self._digests.pop(update_id, None)
            try:
                data = _map_upload(taken)
            except StoreError:
                with self._lock:
                    taken.rename(part)
                raise
            try:
                check_bytes(update_id, data, digest, _found(known, data, digest))
            except InvalidUpdate:
                taken.unlink()
                raise
            with self._lock:
                taken.rename(whole)
                self._sealed[update_id] = digest
        reach("payload_sealed")
        return data

    def adopt(self, update_id: str, digest: str) -> None:
        """Make a sealed upload a durable blob: before its entry is appended. May be repeated.

        Raises `Unavailable` where another stream of it has taken its place.
        """
        check_digest(digest)
        whole = self._whole(update_id)
        with disk_errors(f"storing payload {digest}"):
            with self._lock:
                self._note_adopted(digest)
                taken = None
                if self._sealed.get(update_id) == digest:
                    del self._sealed[update_id]
                    taken = self._take(whole)
            if taken is None:
                if self.exists(digest):
                    return
                raise Unavailable(f"update {update_id!r} is not sealed: query it, and send what is lacking")
            try:
                self._keep(taken, digest)
            except BaseException:  # it is sent again: what nobody knows would take room until the next start
                with suppress(OSError):  # which would be said in the place of a failed flush
                    taken.unlink(missing_ok=True)
                raise
        reach("payload_durable")

    def cool(self, digest: str) -> None:
        """Let the system use the pages of its cache for the next upload."""
        with suppress(OSError), opened(self.path(digest)) as descriptor:
            uncache(descriptor)

    def _note_adopted(self, digest: str) -> None:
        now = self._monotonic()
        self._adopted.pop(digest, None)
        self._adopted[digest] = now
        while now - next(iter(self._adopted.values())) >= ADOPTED_S:
            del self._adopted[next(iter(self._adopted))]

    def _is_on_its_way(self, digest: str) -> bool:
        """Whether an entry that names this blob may not have been appended yet."""
        return self._monotonic() - self._adopted.get(digest, -math.inf) < ADOPTED_S

    def _keep(self, taken: Path, digest: str) -> None:
        blob = self.path(digest)
        with self._lock:  # so that the folder's name is durable for whoever finds it there
            make_folder(blob.parent)
        sync_file(taken)
        reach("payload_synced")
        taken.rename(blob)
        reach("payload_renamed")
        sync_folder(blob.parent)

    def discard(self, update_id: str) -> None:
        """Forget an upload, if it is there."""
        with disk_errors(f"removing upload {update_id}"), self._lock:
            self._drop(update_id, self._part(update_id), self._whole(update_id))

    def spooled(self) -> dict[str, int]:
        """What is left of uploads, by name: bytes."""
        with disk_errors("looking at the spool"):
            return {
                path.stem: status.st_size
                for path in self._spool.iterdir()
                if path.suffix in (PART, WHOLE) and (status := _status(path)) is not None
            }

    def spooled_bytes(self, update_id: str) -> int:
        """How much there is of an upload, durable or not."""
        with disk_errors(f"looking at upload {update_id}"):
            found = [_status(path) for path in (self._whole(update_id), self._part(update_id))]
        return next((status.st_size for status in found if status is not None), 0)

    def make_room(self) -> list[str]:
        """Before anything is written: remove what nobody comes back for; returns the names.

        Where the disk is below its watermark that is whatever has come of any upload: it will be sent again.
        """
        with self._lock:
            gone = [name for name in self.spooled() if BETWEEN_IDS not in name]
            self._drop_all(gone)
            if free_bytes(self._spool) >= self.limits.free_disk_bytes_min:
                return gone
            gone += (rest := list(self.spooled()))
            self._drop_all(rest)
        return gone

    def _drop_all(self, names: list[str]) -> None:
        with disk_errors("clearing the spool"):
            for name in names:
                self._drop(name, *(self._spool / f"{name}{suffix}" for suffix in (PART, WHOLE)))

    def _take(self, path: Path) -> Path | None:
        """Give a file a name that nobody else knows; None if it is not there."""
        taken = self._spool / f"{uuid.uuid4().hex}.tmp"
        try:
            path.rename(taken)
        except FileNotFoundError:
            return None
        return taken

    def _drop(self, update_id: str, *paths: Path) -> None:
        self._sealed.pop(update_id, None)
        self._digests.pop(update_id, None)
        for path in paths:
            path.unlink(missing_ok=True)

    def _check_sealed(self, update_id: str, offset: int, end: int) -> None:
        """Raises `Unavailable` unless a sealed upload has the bytes from `offset` to `end`."""
        status = _status(self._whole(update_id))
        size = 0 if status is None else status.st_size
        check_place(update_id, offset, size)
        check_place(update_id, end, size)

    # --- blobs -------------------------------------------------------------------------------

    def path(self, digest: str) -> Path:
        """Where the blob of this digest lies, or would lie."""
        check_digest(digest)
        return self._blobs / digits(digest)[:2] / digest

    def exists(self, digest: str) -> bool:
        """Whether a blob is here."""
        return self.path(digest).exists()

    def missing(self, named: set[str]) -> list[Path]:
        """Where those of these blobs would lie that are not here."""
        here = {path.name for path in self._blobs.glob("??/*")}
        # Not `path`: a row that is damaged may name no digest at all.
        return [self._blobs / digest[-64:][:2] / digest for digest in sorted(named - here)]

    def read(self, digest: str) -> memoryview:
        """The bytes of a blob, mapped, its digest checked. Raises as `check_content` does."""
        check_stored(digest)
        try:
            data = _map(self.path(digest))
        except OSError as error:
            raise StoreCorrupt(f"payload {digest} cannot be read ({error}): restore a backup") from error
        check_content(data, digest)
        return data

    def collect_garbage(self, referenced: set[str]) -> list[str]:
        """Remove blobs that nothing references, but for those on their way; returns their names."""
        with disk_errors("removing orphans"):
            return self._unlink([p for p in self._blobs.glob("??/*") if p.name not in referenced])

    def remove(self, payloads: set[str]) -> set[str]:
        """Remove blobs that no entry names; returns those that it is too early for: one may be on its way."""
        with disk_errors("removing old payloads"):
            here = [path for digest in payloads if (path := self.path(digest)).exists()]
            return {path.name for path in here} - set(self._unlink(here))

    def _unlink(self, blobs: list[Path]) -> list[str]:
        """Remove those that are not on their way; returns their names."""
        gone = []
        for path in blobs:
            with self._lock:
                if not self._is_on_its_way(path.name):
                    path.unlink(missing_ok=True)
                    gone.append(path)
        for folder in {path.parent for path in gone}:
            sync_folder(folder)
        return sorted(path.name for path in gone)

    def _part(self, update_id: str) -> Path:
        check_name(update_id, self.limits)
        return self._spool / f"{update_id}{PART}"

    def _whole(self, update_id: str) -> Path:
        check_name(update_id, self.limits)
        return self._spool / f"{update_id}{WHOLE}"


def check_place(update_id: str, offset: int, size_bytes: int) -> None:
    """Raises `Unavailable` for a chunk that does not go on where an upload of so many bytes can.

    A device that asked where to go on may be told otherwise by then: the upload was in the hands of another
    stream of it. So it asks again.
    """
    if not 0 <= offset <= size_bytes:
        raise Unavailable(
            f"update {update_id!r}: a chunk at {offset} leaves a gap, go on at byte {size_bytes}: query it"
        )


def _opened(path: Path, offset: int) -> int | None:
    """A part, to write in; None if it is not there, unless the chunk is its first."""
    try:
        return open_file(path, os.O_RDWR | (0 if offset else os.O_CREAT))
    except FileNotFoundError:
        return None


def _put(update_id: str, descriptor: int, offset: int, chunk: bytes | memoryview) -> None:
    size = os.fstat(descriptor).st_size
    check_place(update_id, offset, size)
    if offset < size:
        os.ftruncate(descriptor, offset)
    view = memoryview(chunk)
    while view:
        written = os.pwrite(descriptor, view[:PIECE_BYTES], offset)
        view, offset = view[written:], offset + written


def _gone_on(
    before: _PartDigest | None, offset: int, chunk: bytes | memoryview, algorithm: str
) -> ContentHash | None:
    """The digest behind a chunk, of the one before it; None where that is not known or ends elsewhere."""
    made = ContentHash(algorithm) if offset == 0 else None
    if offset and before is not None and before.size_bytes == offset:
        made = before.hash
    if made is not None:
        made.update(chunk)
    return made


def _found(known: _PartDigest | None, data: memoryview, digest: str) -> str:
    """The digest of a whole part, by the algorithm of `digest`; nothing where it is not known."""
    if known is None or known.hash is None or known.size_bytes != len(data):
        return ""
    return known.hash.text() if known.hash.algorithm == algorithm_of(digest) else ""


def _flush(path: Path) -> None:
    """Make an upload durable. One that the disk did not take goes: the next flush would say that it has."""
    with opened(path) as descriptor:  # what cannot be opened now is as it was
        try:
            os.fsync(descriptor)
        except OSError:
            with suppress(OSError):
                path.unlink()
            raise


def _map(path: Path) -> memoryview:
    """The bytes of a file without a copy; they stay readable when its name is gone."""
    with opened(path) as descriptor:
        return memoryview(MappedFile(descriptor) if os.fstat(descriptor).st_size else b"")


def _map_upload(path: Path) -> memoryview:
    """As `_map`. Raises `StoreError` where the process may have no more memory: the disk has not failed."""
    try:
        return _map(path)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise StoreError("no memory is left for an upload: give the server's process more") from error


def _status(path: Path) -> os.stat_result | None:
    """Of a file that may be gone in the meantime."""
    with suppress(FileNotFoundError):
        return path.lstat()
    return None
