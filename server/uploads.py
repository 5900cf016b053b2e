"""Updates on their way in: small ones stay in memory, large ones and broken ones are spooled.

The server holds as many declared bytes, and as many large uploads, as its limits say; whoever comes too
many is told when to come again. A stream that stalls is cut; what came of it stays, for a resume. Where
all places are taken, one that lags behind gives way to the next that comes: whoever sends gets a place.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from anabranch.core.content import algorithm_of, digest_like
from anabranch.core.effects import Decided, Effect, LeaseEnd, LeaseEnded
from anabranch.core.errors import AnabranchError, InvalidUpdate, Overloaded, TooLarge, Unavailable
from anabranch.core.limits import DEFAULT_LIMITS, KIB, MIB, UPLOAD_BYTES_PER_CLIENT, Limits
from anabranch.server.spool import Part, Spool, UploadKey
from anabranch.server.store.base import Blobs
from anabranch.server.store.blobs import PART_AGE_S
from anabranch.support.heap import trim_heap

T = TypeVar("T")

SLOWEST_BYTES_PER_S = 16 * KIB  # who brings less is behind
HELD_BYTES_MAX = 128 * MIB  # in memory, of all uploads; from there on small ones are spooled, too
GATHERED_BYTES_MAX = 8 * MIB  # the same; from there on what is spooled is written chunk by chunk
TRIM_EVERY_S = 2.0  # while uploads end
WRITE_BYTES = 512 * KIB  # gathered before a worker thread writes them: few hops between threads
Bytes = bytes | memoryview


class Upload:
    """One stream of chunks of an update, `size_bytes` and `digest` as its header declares.

    `part`: what an earlier stream has left, and what this one leaves.
    """

    def __init__(self, uploads: Uploads, part: Part, size_bytes: int, digest: str) -> None:
        self.part, self.size_bytes, self.digest = part, size_bytes, digest
        self.update_id, self.name = part.key.update_id, part.key.name
        self.is_large = size_bytes > uploads.limits.inline_bytes_max
        # Whether it is in memory as a whole.
        self.inline = not self.is_large
        self.received: int | None = None  # None before the first chunk
        self.adopted = False  # it is a blob
        self._uploads = uploads
        self._chunks: list[Bytes] = []
        self._gathered = self._held = 0
        self._rest: Callable[[], None] | None = None  # the writing of the last bytes, with the sealing
        self._writing: asyncio.Future[None] | None = None
        self._ended, self._keeps = "", True  # why nothing more is taken; whether what was is kept
        self._came = 0
        self._opened_at = self._moved_at = uploads.now()
        # Ends the stream of a cut upload, if there is still one.
        self.on_cut: Callable[[], None] | None = None

    @property
    def behind_s(self) -> float:
        """Seconds since something came, or behind the slowest link of use: the more of the two."""
        if self.received == self.size_bytes:
            return 0.0
        now = self._uploads.now()
        return max(now - self._moved_at, now - self._opened_at - self._came / SLOWEST_BYTES_PER_S)

    @property
    def is_whole_in_memory(self) -> bool:
        """Whether all of it came, and nothing of it has touched the disk."""
        whole = self.inline and self.received == self.size_bytes
        return whole and self._writing is None and not self.part.file_bytes and self.size_bytes < WRITE_BYTES

    async def add(self, offset: int, chunk: Bytes) -> None:
        """Take a chunk. Raises `InvalidUpdate`, `TooLarge`, `StoreFull` and `Unavailable`."""
        if self._ended:
            raise Unavailable(f"upload {self.update_id} {self._ended}")
        if len(chunk) > self._uploads.limits.chunk_bytes_max:
            cap = self._uploads.limits.chunk_bytes_max
            raise TooLarge(f"a chunk of {len(chunk)} bytes is over the cap of {cap}: send smaller ones")
        if self.received is None:
            self.received = await self._start_at(offset)
        if offset != self.received:
            raise Unavailable(f"upload {self.update_id} goes on at {self.received}, not {offset}: query it")
        if offset + len(chunk) > self.size_bytes:
            raise InvalidUpdate(f"upload {self.update_id} is over its declared {self.size_bytes} bytes")
        if not chunk:
            return
        chunk = _by_itself(chunk)
        self.received += len(chunk)
        self._uploads.bytes_total += len(chunk)
        self._chunks.append(chunk)
        self._gathered += len(chunk)
        self._hold(len(chunk))
        self._came, self._moved_at = self._came + len(chunk), self._uploads.now()
        held = self._uploads.held_bytes
        self.inline = self.inline and held <= HELD_BYTES_MAX
        if not self.inline and (self._gathered >= WRITE_BYTES or held > GATHERED_BYTES_MAX):
            await self._write()

    async def complete(self) -> None:
        """Wait until every byte that was sent is written. Raises `InvalidUpdate` if some are missing."""
        if self.received is None:  # a resume of what is here already, to its last byte
            self.received = await self._start_at(self.size_bytes)
        if self.received != self.size_bytes:  # a broken connection looks the same: what is here stays
            raise InvalidUpdate(
                f"upload {self.update_id} ended after {self.received} of the {self.size_bytes} bytes declared"
            )
        await self._written()
        if not self.inline and self._chunks:
            self._rest = self._taken()

    def data(self) -> Bytes:
        """The bytes of a complete upload, of the declared digest. Raises `InvalidUpdate`.

        For a worker thread, unless the upload is inline.
        """
        if not self.inline:
            if self._rest is not None:
                self._rest()
                self._rest = None
            return self._uploads.blobs.seal(self.name, self.digest)
        # In its message it lies at any address, and the loops that check and fold it want whole words.
        data = bytes(_joined(self._chunks))
        self._chunks = [data]  # what it was joined of is not needed any more
        if digest_like(data, self.digest) != self.digest:
            raise InvalidUpdate(
                f"upload {self.update_id} has another digest than was declared: send it again"
            )
        return data

    def adopt(self) -> None:
        """Make a large upload a durable blob. For a worker thread: it waits for the disk."""
        if not self.inline:
            self._uploads.blobs.adopt(self.name, self.digest)
            self.adopted = True

    def drop(self) -> None:
        """Forget what was spooled."""
        if not self.inline:
            self._uploads.blobs.discard(self.name)

    async def supersede(self) -> None:
        """Give way to a newer stream of the same upload."""
        self._ended, self._keeps = "goes on in a newer stream", False
        await self.close()

    async def give_way(self) -> None:
        """End it, for another's sake; what has come is spooled."""
        self._ended = "came too slowly and gave way to another: query it and go on"
        if self.on_cut is not None:
            self.on_cut()
        await self.close()

    async def close(self) -> None:
        """Keep what was gathered, for a resume: what is small in memory. The rest will be sent again."""
        with contextlib.suppress(AnabranchError):
            if self._keeps and self.part.wanted and self.received not in (None, self.size_bytes):
                if self.inline:
                    self._uploads.spool.keep(self.part, bytes(_joined(self._chunks)) if self._chunks else b"")
                else:
                    await self._write()
            await self._written()

    async def _start_at(self, offset: int) -> int:
        begun = self.part.data
        if offset == 0 or (self.inline and offset <= len(begun)):
            self._chunks, self._gathered = ([begun[:offset]], offset) if offset else ([], 0)
            self._hold(offset)
            self._uploads.spool.keep(self.part, b"")
            return offset
        self.inline = False  # its beginning is in the spool
        here = await self._uploads.here(self.part)
        if offset > here:
            raise Unavailable(f"upload {self.update_id} goes on at {here}, not {offset}: query it")
        return offset

    def _hold(self, size_bytes: int) -> None:
        """Count what is in memory, or, if it is negative, what is not any more."""
        self._held += size_bytes
        self._uploads.held_bytes += size_bytes

    def forget(self) -> None:
        """What is still in memory is not needed any more."""
        self._hold(-self._held)
        self._chunks, self._gathered = [], 0

    async def _write(self) -> None:
        """Write what was gathered in a worker thread, while the next chunks come in."""
        await self._written()
        if self._chunks:
            size, write = self._gathered, self._taken()
            self._writing = asyncio.ensure_future(self._uploads.in_thread(write))
            self._writing.add_done_callback(lambda _: self._hold(-size))

    def _taken(self) -> Callable[[], None]:
        """The writing of what was gathered, which is gathered no more."""
        assert self.received is not None
        chunks, offset = self._chunks, self.received - self._gathered
        algorithm = algorithm_of(self.digest)
        self._chunks, self._gathered = [], 0

        def write() -> None:
            self._uploads.blobs.write(self.name, offset, _joined(chunks), algorithm)
            chunks.clear()

        return write

    async def _written(self) -> None:
        """Wait for the write under way. It ends even where the one who waits is cancelled."""
        if self._writing is not None:
            await asyncio.shield(self._writing)


def _by_itself(chunk: Bytes) -> Bytes:
    """A chunk that is most of what it keeps in memory: a view keeps its message, which nobody counts."""
    if not isinstance(chunk, memoryview):
        return chunk
    whole: Any = chunk.obj
    return bytes(chunk) if len(chunk) < KIB or 2 * len(chunk) < len(whole) else chunk


def _joined(chunks: list[Bytes]) -> Bytes:
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class Uploads:
    """Lets uploads in and keeps count of them, and of what is left of those that were cut."""

    def __init__(
        self,
        blobs: Blobs,
        limits: Limits = DEFAULT_LIMITS,
        bytes_per_client: int = UPLOAD_BYTES_PER_CLIENT,
    ) -> None:
        self.blobs, self.limits = blobs, limits
        self.spool = Spool(bytes_per_client)
        self._threads = ThreadPoolExecutor(4, "anabranch-uploads")
        self._open: dict[tuple[str, str], Upload] = {}  # by client and task
        self._bytes = self._large = 0
        self._trimmed_at, self._closed = 0.0, False
        # In memory, of all uploads.
        self.held_bytes = 0
        # Bytes of all chunks since the start, those of failed uploads too.
        self.bytes_total = 0

    async def open(self, key: UploadKey, size_bytes: int, digest: str) -> Upload:
        """Let an upload in; an older one of the same task gives way.

        Raises `Overloaded`, and `TooLarge` where it is over the client's quota by itself.
        """
        self.spool.check_quota(key, size_bytes)
        await self._supersede(key)
        while full := self._no_place(size_bytes):
            # While there are large ones, these are what fills it.
            rivals = [upload for upload in self._open.values() if upload.is_large or not self._large]
            last = max(rivals, key=lambda upload: upload.behind_s, default=None)
            if last is None or last.behind_s < self.limits.upload_yields_s:
                raise Overloaded(full)
            self._release(last)
            await last.give_way()
            await self._settle(last)
        await self._supersede(key)  # who came meanwhile
        part, other = self.spool.enter(key)
        upload = self._open[key.task] = Upload(self, part, size_bytes, digest)
        part.coming = size_bytes
        self._bytes += size_bytes
        self._large += upload.is_large
        if other is not None:
            self._clear(other)
        return upload

    async def _supersede(self, key: UploadKey) -> None:
        while (older := self._open.get(key.task)) is not None:
            if older.part.key != key:
                self.spool.remove(older.part)
            await older.supersede()
            if self._release(older):
                await self._settle(older)

    def _no_place(self, size_bytes: int) -> str:
        """Why an upload of so many bytes cannot be let in, or nothing."""
        if size_bytes > self.limits.inline_bytes_max and self._large >= self.limits.uploads_inflight_max:
            return f"{self._large} large uploads are under way, as many as the server takes"
        if self._open and self._bytes + size_bytes > self.limits.uploads_inflight_bytes_max:
            return f"uploads of {self._bytes} bytes are under way, as many as the server takes"
        return ""

    async def done(self, upload: Upload) -> None:
        """An upload has ended, one way or the other; a cancelled call too leaves its spool in order."""
        if upload.is_whole_in_memory:  # nothing to wait for, and that is most of them
            upload.forget()
            if self._release(upload):
                self._tidy(upload)
        else:
            await asyncio.shield(self._end(upload))

    @property
    def open_count(self) -> int:
        """Updates on their way."""
        return len(self._open)

    @property
    def open_bytes(self) -> tuple[int, int]:
        """How much of them has come, and how much that will be."""
        open_ = self._open.values()
        return sum(upload.received or 0 for upload in open_), sum(upload.size_bytes for upload in open_)

    async def received(self, client_id: str, update_id: str) -> int:
        """Bytes of a client's upload that are here: where to go on."""
        part = self.spool.part(client_id, update_id)
        return 0 if part is None else await self.here(part)

    async def here(self, part: Part) -> int:
        """Bytes of an upload that are here; those of a large one are durable."""
        return len(part.data) or await self.in_thread(lambda: self.blobs.received(part.key.name))

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do what may wait for the disk, or take long, in a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def now(self) -> float:
        """The event loop's clock, seconds."""
        return asyncio.get_running_loop().time()

    def close(self) -> None:
        """Let the worker threads go."""
        self._closed = True
        self._threads.shutdown()

    # --- what is left of uploads -------------------------------------------------------------

    async def find(self, tasks: Collection[tuple[str, str]]) -> None:
        """Enter what an earlier server has left of uploads of these tasks, and remove the rest."""
        found = await self.in_thread(self.blobs.spooled)
        for name, size_bytes in found.items():
            if (key := UploadKey.of(name)) is not None:
                part, _ = self.spool.enter(key)
                part.file_bytes, part.at = size_bytes, self.now()
        await self.sweep(tasks)

    def hear(self, effects: Sequence[Effect]) -> None:
        """What there is of an update goes with its task, as soon as no stream is open."""
        for effect in effects:
            match effect:
                case Decided(client_id, receipt):
                    self._task_ended(client_id, receipt.task_id)
                case LeaseEnded(task, end) if end is not LeaseEnd.EXPIRED:
                    self._task_ended(task.client_id, task.task_id)

    async def sweep(self, tasks: Collection[tuple[str, str]]) -> None:
        """Remove what is of none of these tasks (by client and id), is too old, or is in no book."""
        self.spool.keep_only(lambda p: p.key.task in tasks and self.now() - p.at < PART_AGE_S)
        found = await self.in_thread(self.blobs.spooled)
        known = {part.key.name for part in self.spool} | {u.name for u in self._open.values()}
        for name in found.keys() - known:
            await self.in_thread(partial(self.blobs.discard, name))

    def _task_ended(self, client_id: str, task_id: str) -> None:
        if (part := self.spool.of_task(client_id, task_id)) is not None:
            self.spool.remove(part)
            if not part.coming:
                self._clear(part)

    def _clear(self, part: Part) -> None:
        """Have the file of a part removed, soon; should that fail a sweep will find it."""
        if part.file_bytes and not self._closed:
            self._threads.submit(self.blobs.discard, part.key.name)

    async def _end(self, upload: Upload) -> None:
        await upload.close()
        upload.forget()
        if self._release(upload):
            await self._settle(upload)
        if upload.adopted and not self._closed:  # it is folded: a strategy that keeps it has a copy
            self._threads.submit(self.blobs.cool, upload.digest)
        if upload.size_bytes >= WRITE_BYTES and self.now() >= self._trimmed_at + TRIM_EVERY_S:
            self._trimmed_at = self.now()
            await self.in_thread(trim_heap)

    async def _settle(self, upload: Upload) -> None:
        """Note what a stream has left; nothing is left of the update of a task that has ended."""
        part = upload.part
        if part.file_bytes or not upload.inline:
            name = part.key.name
            with contextlib.suppress(AnabranchError):  # a sweep comes again
                if not part.wanted:
                    await self.in_thread(partial(self.blobs.discard, name))
                part.file_bytes = await self.in_thread(partial(self.blobs.spooled_bytes, name))
        self._tidy(upload)

    def _tidy(self, upload: Upload) -> None:
        if upload.part.wanted:
            self.spool.tidy(upload.part)

    def _release(self, upload: Upload) -> bool:
        """It has no place any more. False: it had none."""
        if self._open.get(upload.part.key.task) is not upload:
            return False
        del self._open[upload.part.key.task]
        upload.part.coming, upload.part.at = 0, self.now()
        self._bytes -= upload.size_bytes
        self._large -= upload.is_large
        return True
