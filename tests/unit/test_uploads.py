"""What an upload keeps in memory is what it counts."""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from page_cache import pages_in_cache, skip_unless_cached

from anabranch.core.errors import InvalidUpdate, Overloaded, Unavailable
from anabranch.core.limits import DEFAULT_LIMITS, MIB, Limits
from anabranch.protos.frames import Chunk, frame_bytes, push_content, request_frame
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server.spool import UploadKey
from anabranch.server.store.blobs import PART_AGE_S, BlobStore
from anabranch.server.uploads import Upload, Uploads


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


PATIENT = replace(DEFAULT_LIMITS, upload_yields_s=3600.0)


def key_of(client: str) -> UploadKey:
    return UploadKey(client, "t", "u")


def uploads_in(folder: Path, limits: Limits = PATIENT) -> Uploads:
    blobs = BlobStore(folder)
    blobs.prepare()
    return Uploads(blobs, limits)


def test_no_more_bytes_are_under_way_than_may_be_and_room_comes_again(tmp_path: Path) -> None:
    async def filled() -> None:
        uploads = uploads_in(tmp_path, replace(PATIENT, uploads_inflight_bytes_max=250))
        first, second = [await uploads.open(key_of(name), 100, "0" * 64) for name in "ab"]
        with pytest.raises(Overloaded, match="uploads of 200 bytes are under way"):
            await uploads.open(key_of("c"), 100, "0" * 64)
        await uploads.done(first)
        await uploads.done(await uploads.open(key_of("c"), 100, "0" * 64))
        await uploads.done(second)
        large = await uploads.open(key_of("d"), 1000, "0" * 64)  # alone it may be larger
        with pytest.raises(Overloaded, match="uploads of 1000 bytes are under way"):
            await uploads.open(key_of("a"), 1, "0" * 64)
        await uploads.done(large)
        for name in "abcdef":
            await uploads.done(await uploads.open(key_of(name), 200, "0" * 64))
        uploads.close()

    asyncio.run(filled())


def test_a_large_one_gives_way_where_bytes_are_scarce_though_a_small_one_is_more_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(Uploads, "now", lambda _: now)

    async def cut() -> None:
        nonlocal now
        limits = Limits(uploads_inflight_bytes_max=300, inline_bytes_max=100, upload_yields_s=5.0)
        uploads = uploads_in(tmp_path, limits)
        small = await uploads.open(key_of("small"), 100, "0" * 64)
        now = 3.0
        large = await uploads.open(key_of("large"), 200, "0" * 64)
        now = 8.0
        other = await uploads.open(key_of("other"), 100, "0" * 64)
        with pytest.raises(Unavailable, match="came too slowly and gave way to another"):
            await large.add(0, bytes(10))
        await small.add(0, bytes(100))
        for upload in (small, large, other):
            await uploads.done(upload)
        assert (uploads.open_count, uploads.open_bytes) == (0, (0, 0))
        uploads.close()

    asyncio.run(cut())


def test_however_uploads_end_nothing_of_them_is_counted_as_held(tmp_path: Path) -> None:
    async def ended() -> list[int]:
        uploads, held = uploads_in(tmp_path, replace(PATIENT, inline_bytes_max=1000)), []

        async def begun(client: str, size_bytes: int, *chunks: tuple[int, int]) -> Upload:
            upload = await uploads.open(key_of(client), size_bytes, "0" * 64)
            for offset, count in chunks:
                await upload.add(offset, bytes(count))
            return upload

        for chunks in ([(0, 100)], [(0, 60)], [(60, 40)], [(0, 30), (30, 30)]):  # whole, half, its rest, cut
            await uploads.done(await begun("small", 100, *chunks))
            held.append(uploads.held_bytes)
        for chunks in ([(0, MIB)], [(MIB, MIB)], []):  # half, the other half, nothing
            await uploads.done(await begun("large", 2 * MIB, *chunks))
            held.append(uploads.held_bytes)
        wrong = await begun("wrong", 100, (0, 60))
        with pytest.raises(InvalidUpdate, match="over its declared 100"):
            await wrong.add(60, bytes(60))
        await uploads.done(wrong)
        held.append(uploads.held_bytes)
        older = await begun("twice", 100, (0, 60))
        newer = await begun("twice", 100, (0, 10))
        for upload in (older, newer):
            await uploads.done(upload)
        uploads.close()
        return [*held, uploads.held_bytes]

    assert asyncio.run(ended()) == [0] * 9


def test_a_part_goes_after_a_day_though_its_task_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(Uploads, "now", lambda _: now)

    async def left() -> list[int]:
        nonlocal now
        uploads = uploads_in(tmp_path, replace(PATIENT, inline_bytes_max=1000))
        for client, size_bytes in (("large", 2000), ("small", 100)):
            upload = await uploads.open(key_of(client), size_bytes, "0" * 64)
            await upload.add(0, bytes(60))
            await uploads.done(upload)
        found = []
        for age_s in (PART_AGE_S - 1.0, PART_AGE_S):
            now = age_s
            await uploads.sweep([("large", "t"), ("small", "t")])
            found += [await uploads.received(client, "u") for client in ("large", "small")]
        found.append(len(uploads.blobs.spooled()))
        uploads.close()
        return found

    assert asyncio.run(left()) == [60, 60, 0, 0, 0]
