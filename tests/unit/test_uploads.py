"""What an upload keeps in memory is what it counts."""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from page_cache import pages_in_cache, skip_unless_cached

from anabranch.core.limits import MIB
from anabranch.protos.frames import Chunk, frame_bytes, push_content, request_frame
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server.spool import UploadKey
from anabranch.server.store.blobs import BlobStore
from anabranch.server.uploads import Uploads


def pushed(offset: int, data: bytes) -> Chunk:
    """Of a call."""
    chunk = devices.UpdateChunk(offset=offset, data=data)
    found = push_content(devices.PushUpdateRequest(chunk=chunk).SerializeToString())
    assert isinstance(found, Chunk)
    return found


def exchanged(offset: int, data: bytes) -> Chunk:
    """Of a stream, in a message with a large head."""
    head = devices.RequestHead(offset=offset, more=True, traceparent="t" * MIB)
    frame = request_frame(frame_bytes(head, data))
    return Chunk(frame.head.offset, frame.data)


@pytest.mark.parametrize("arrived", [pushed, exchanged])
@pytest.mark.parametrize("size", [0, 1, 2000])
def test_what_is_kept_of_a_chunk_is_not_its_message(
    arrived: Callable[[int, bytes], Chunk], size: int, tmp_path: Path
) -> None:
    async def kept() -> tuple[int, int]:
        blobs = BlobStore(tmp_path)
        blobs.prepare()
        uploads = Uploads(blobs)
        upload = await uploads.open(UploadKey("a", "t", "u"), MIB, "0" * 64)
        for n in range(8):
            await upload.add(*arrived(size * n, bytes(size)))
        whole = [chunk.obj if isinstance(chunk, memoryview) else chunk for chunk in upload._chunks]
        found = sum(memoryview(each).nbytes for each in whole), len(upload._chunks)
        assert uploads.held_bytes == 8 * size
        await uploads.done(upload)
        uploads.close()
        return found

    held_bytes, chunks = asyncio.run(kept())
    assert held_bytes <= 2 * 8 * size
    assert chunks == (8 if size else 0)


def test_updates_of_a_fleet_that_sends_at_once_are_in_memory_alone(tmp_path: Path) -> None:
    half = bytes(200_000)

    async def spooled() -> tuple[dict[str, int], int]:
        blobs = BlobStore(tmp_path)
        blobs.prepare()
        uploads = Uploads(blobs)
        keys = [UploadKey(f"device-{n}", "t", "u") for n in range(256)]
        fleet = [await uploads.open(key, 2 * len(half), "0" * 64) for key in keys]
        for offset in (0, len(half)):
            for upload in fleet:
                await upload.add(offset, half)
        for upload in fleet:
            await upload.complete()
        found = blobs.spooled(), uploads.held_bytes
        for upload in fleet:
            await uploads.done(upload)
        uploads.close()
        return found

    assert asyncio.run(spooled()) == ({}, 256 * 2 * len(half))


def test_a_large_update_leaves_the_cache_of_the_system_once_it_is_decided(tmp_path: Path) -> None:
    skip_unless_cached(tmp_path)
    data = random.Random(0).randbytes(3 * MIB)
    digest = hashlib.sha256(data).hexdigest()
    blobs = BlobStore(tmp_path)
    blobs.prepare()

    async def before() -> int:
        uploads = Uploads(blobs)
        upload = await uploads.open(UploadKey("device", "t", "u"), len(data), digest)
        for offset in range(0, len(data), MIB):
            await upload.add(offset, data[offset : offset + MIB])
        await upload.complete()
        assert upload.data() == data
        upload.adopt()
        here = pages_in_cache(blobs.path(digest))
        await uploads.done(upload)
        uploads.close()
        return here

    assert asyncio.run(before()) == len(data) // mmap.PAGESIZE, "it is folded from there"
    assert not pages_in_cache(blobs.path(digest))
    assert blobs.read(digest) == data


def test_what_is_on_the_way_is_counted_until_it_has_ended(tmp_path: Path) -> None:
    async def counted() -> list[tuple[int, int]]:
        blobs = BlobStore(tmp_path)
        blobs.prepare()
        uploads = Uploads(blobs)
        begun, other = [await uploads.open(UploadKey(name, "t", "u"), 100, "0" * 64) for name in "ab"]
        found = [uploads.open_bytes]
        await begun.add(0, bytes(60))
        found.append(uploads.open_bytes)
        await uploads.done(begun)
        found.append(uploads.open_bytes)
        await uploads.done(other)
        uploads.close()
        return [*found, uploads.open_bytes]

    assert asyncio.run(counted()) == [(0, 200), (60, 200), (0, 100), (0, 0)]


@pytest.mark.parametrize("head", range(4))
def test_values_of_an_update_lie_at_whole_words_wherever_its_message_has_them(
    head: int, tmp_path: Path
) -> None:
    values = np.arange(25_000, dtype=np.float32)
    message = frame_bytes(devices.RequestHead(traceparent="t" * head), values.data.cast("B"))

    async def flags() -> tuple[bool, bool]:
        blobs = BlobStore(tmp_path)
        blobs.prepare()
        uploads = Uploads(blobs)
        sha256 = hashlib.sha256(values.tobytes()).hexdigest()
        upload = await uploads.open(UploadKey("a", "t", "u"), values.nbytes, sha256)
        await upload.add(0, request_frame(message).data)
        await upload.complete()
        found = np.frombuffer(upload.data(), np.float32)
        await uploads.done(upload)
        uploads.close()
        return bool(found.flags.aligned), np.array_equal(found, values)

    assert asyncio.run(flags()) == (True, True)


def test_what_was_joined_is_in_memory_once(tmp_path: Path) -> None:
    chunks = [bytes([n]) * 100_000 for n in range(3)]

    async def kept() -> int:
        blobs = BlobStore(tmp_path)
        blobs.prepare()
        uploads = Uploads(blobs)
        sha256 = hashlib.sha256(b"".join(chunks)).hexdigest()
        upload = await uploads.open(UploadKey("a", "t", "u"), 300_000, sha256)
        for n, chunk in enumerate(chunks):
            await upload.add(100_000 * n, chunk)
        await upload.complete()
        assert upload.data() == upload.data() == b"".join(chunks)  # and asked for again it is the same
        found = {id(chunk) for chunk in upload._chunks} | {id(upload.data())}
        await uploads.done(upload)
        uploads.close()
        return len(found)

    assert asyncio.run(kept()) == 1
