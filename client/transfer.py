"""A large payload on its way, in chunks: a model that comes in, an update that goes out."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

from anabranch.client.messages import FetchedModel
from anabranch.client.outbox import UpdateEntry
from anabranch.core.errors import InvalidUpdate, TooLarge, Unavailable
from anabranch.core.limits import CHUNK_BYTES, KIB, MIB, SLOW_CHUNK_BYTES, Limits
from anabranch.core.model.params import ParamSpec
from anabranch.protos import convert
from anabranch.protos.frames import Chunk
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import model_pb2 as model

MEASURED_BYTES = 4 * MIB
QUICK_BYTES_PER_S = 1 * MIB
ANSWERED_BYTES_PER_S = 256 * KIB  # of a link of which the next transfer may begin with large chunks
USUAL_BYTES_PER_S = 32 * KIB  # of a slow link that may have chunks of the usual size again


class LinkPace(IntEnum):
    """How large a link's chunks are, by what was seen of it last."""

    SLOW = 0  # of one of the usual size nothing came through: it is heard of when it is whole
    USUAL = 1
    QUICK = 2


def pace_after(
    size_bytes: int, took_s: float, before: LinkPace, telling_bytes: int = CHUNK_BYTES
) -> LinkPace:
    """The pace of a link over which so much was sent and answered; of less than `telling_bytes`: as before.

    The time that the answer took counts as well. At the pace of a quick one a chunk of 1 MiB takes 4 s, at
    that of a usual one a chunk of 256 KiB takes 8 s: sides wait longer.
    """
    if before is LinkPace.SLOW:
        is_usual = size_bytes >= max(SLOW_CHUNK_BYTES, USUAL_BYTES_PER_S * took_s)
        return LinkPace.USUAL if is_usual else LinkPace.SLOW
    if size_bytes < telling_bytes:
        return before
    return LinkPace.QUICK if size_bytes >= ANSWERED_BYTES_PER_S * took_s else LinkPace.USUAL


class IncomingModel:
    """A model on its way: sizes are checked before anything is allocated. `most`: bytes that it may need."""

    def __init__(
        self, header: devices.ModelHeader, sha256: str, limits: Limits, most: int | None = None
    ) -> None:
        self.header, self.version, self.sha256 = header, header.version, sha256
        check_size = convert.check_frozen_size if header.part.part_id else convert.check_payload_size
        size = check_size(header.part.size_bytes, limits)
        if most is not None and size > most:
            raise TooLarge(
                f"version {self.version} is said to have {size} bytes: the run's model needs {most} at most"
            )
        try:
            self.data = bytearray(size)
        except (MemoryError, OverflowError):
            raise TooLarge(
                f"version {self.version} is said to have {size} bytes: there is no memory for that"
            ) from None
        self.received = 0
        self._hash = hashlib.sha256()

    def take(self, offset: int, chunk: bytes | memoryview) -> None:
        """Raises `InvalidUpdate` when the chunk does not follow the last one, or is too much."""
        end = self.received + len(chunk)
        if chunk and (offset != self.received or end > len(self.data)):
            raise InvalidUpdate(f"a chunk at {offset} of {len(self.data)} bytes: expected {self.received}")
        self.data[self.received : end] = chunk
        self._hash.update(chunk)
        self.received = end

    def finished(self) -> FetchedModel:
        """The model. Raises `Unavailable` when it was damaged on the way."""
        if self._hash.hexdigest() != self.sha256:
            raise Unavailable(f"version {self.version} was damaged on the way: its SHA-256 differs")
        head = self.header
        return FetchedModel(
            self.version,
            head.part.encoding.codec,
            self.data,
            head.published_at_s,
            head.final,
            from_version=head.from_version if head.HasField("from_version") else None,
            vector_sha256=head.vector_sha256.hex(),
            part_only=head.part_only,
            head=head.head.hex(),
            run_id=head.run_id,
        )


def signed_record(entry: UpdateEntry, client_id: str, spec: ParamSpec) -> dict[str, Any]:
    """What is signed of an update, as the server's journal has it: see `identity.signatures`."""
    submodel = None if entry.submodel is None else convert.submodel_from_proto(entry.submodel, spec)
    return {
        "update_id": entry.update_id,
        "task_id": entry.task_id,
        "client_id": client_id,
        "base_version": entry.base_version,
        "examples": entry.examples,
        "local_steps": entry.local_steps,
        "submodel": None if submodel is None else submodel.to_json(),
        "seals": entry.seals,
        "payload": {"codec": entry.codec, "sha256": entry.digest, "size_bytes": len(entry.payload)},
    }


def update_header(
    entry: UpdateEntry,
    client_id: str,
    signature: bytes = b"",
    next_ask: devices.AskTaskRequest | None = None,
) -> devices.UpdateHeader:
    """What is said of an update before its bytes."""
    part = model.Part(
        base_version=entry.base_version,
        size_bytes=len(entry.payload),
        encoding=model.Encoding(codec=entry.codec),
    )
    convert.set_payload_digest(part, entry.digest)
    return devices.UpdateHeader(
        client_id=client_id,
        task_id=entry.task_id,
        update_id=entry.update_id,
        manifest_sha256=bytes.fromhex(entry.manifest_sha256),
        base_version=entry.base_version,
        base_kind=model.BASE_KIND_VERSION,
        examples=entry.examples,
        local_steps=entry.local_steps,
        submodel=entry.submodel,
        parts=[part],
        metrics=entry.metrics,
        signature=signature,
        next=next_ask,
        base_head=bytes.fromhex(entry.base_head),
        seals=convert.seals_to_proto(entry.seals),
    )


def chunks_of(
    payload: bytes | memoryview,
    offset: int,
    most: int,
    clock: Callable[[], float] = time.monotonic,
    pace: LinkPace = LinkPace.USUAL,
) -> Iterator[Chunk]:
    """The bytes from `offset` on, in chunks of up to `most` where the link is seen to take them quickly.

    Who reads the chunks asks for the next one when the link has taken the one before. A side that hears
    nothing for long cuts the transfer, and a chunk is heard of when it is whole: so they are small at first,
    unless the link's `pace` is quick, and wherever the last `MEASURED_BYTES`, more than a system holds back
    of what was sent, have taken long.
    """
    view, small = memoryview(payload), min(SLOW_CHUNK_BYTES if pace is LinkPace.SLOW else CHUNK_BYTES, most)
    size, measured_from, began_at = most if pace is LinkPace.QUICK else small, offset, clock()
    while offset < len(view):
        yield Chunk(offset, view[offset : offset + size])
        offset += size
        if (gone := offset - measured_from) >= MEASURED_BYTES:
            now = clock()
            size = most if gone >= QUICK_BYTES_PER_S * (now - began_at) else small
            measured_from, began_at = offset, now
