"""What an upload keeps in memory is what it counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

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
