"""The durable outbox: a result is on disk before the first byte of it is sent.

One file for each update, `<update_id>.update`:

    line 1   SHA-256 of line 2, hex
    line 2   header as JSON, with the size and the digest of the payload, and its number in the outbox
    then     payload

A file is written under another name, flushed to the disk, then renamed; so after a crash at any moment
an entry is whole, or absent, or (on storage that lies) torn, which the digests show. Removal need not
be durable: an update that comes back is sent again and the server knows it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from anabranch.core.content import SHA256, algorithm_of, check_stored, content_digest
from anabranch.core.errors import (
    UPGRADE,
    ConfigError,
    StoreCorrupt,
    StoreNewer,
    TooLarge,
    check_format,
    disk_error,
)
from anabranch.core.ids import checked_id
from anabranch.core.limits import OUTBOX_BYTES_MAX, OUTBOX_ENTRIES_MAX
from anabranch.core.plain import FieldError, UnknownField, from_plain, make_converter, written
from anabranch.identity.files import make_private_folder, private, sync_folder, tighten
from anabranch.protos.v1.model_pb2 import SubmodelMap

log = logging.getLogger(__name__)

SUFFIX, UNFINISHED = ".update", ".tmp"
FORMAT = 2


@dataclass(frozen=True, eq=False)
class UpdateEntry:
    """The result of a task as it travels: the header, and the encoded delta of `values` coordinates.

    `base_head` (hex) names the version that it was trained from, where that is known: see `BaseModel`.
    `seals`: of a masked one the seeds, keepers to boxes in base64. `algorithm`: of the payload's digest. It
    stays what it was at first, whatever is offered later: who resends is known by the same digest.
    """

    update_id: str
    task_id: str
    manifest_sha256: str
    base_version: int
    examples: int
    local_steps: int
    codec: str
    payload: bytes | memoryview = field(repr=False)
    values: int
    submodel: SubmodelMap | None = field(default=None, repr=False)
    metrics: Mapping[str, float] = field(default_factory=dict)
    base_head: str = ""
    seals: Mapping[str, str] = field(default_factory=dict, repr=False)
    algorithm: str = SHA256

    @cached_property
    def digest(self) -> str:
        """That of the payload, see `core.content`."""
        return content_digest(self.payload, self.algorithm)

    def to_bytes(self, number: int = 0) -> tuple[bytes, bytes | memoryview]:
        """The two lines before the payload, and the payload; `number`: its place in an outbox, from 1."""
        frame = Frame(len(self.payload), self.digest, number)
        header = {"format": FORMAT, **_converter.unstructure(self), **_converter.unstructure(frame)}
        line = json.dumps(header, separators=(",", ":")).encode()
        return hashlib.sha256(line).hexdigest().encode() + b"\n" + line + b"\n", self.payload

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[UpdateEntry, int]:
        """The inverse of `to_bytes`, and the number.

        Raises `StoreCorrupt` for any but the same bytes, and `StoreNewer` for those of a newer release.
        """
        first = data.find(b"\n")
        second = data.find(b"\n", first + 1)
        digest, line, payload = data[:first], data[first + 1 : second], memoryview(data)[second + 1 :]
        if second < 0 or hashlib.sha256(line).hexdigest().encode() != digest:
            raise StoreCorrupt("the header is damaged")
        try:
            entry, frame = _parts(json.loads(line), payload)
        except UnknownField as error:  # its digest is right: nothing is damaged
            raise StoreNewer(f"the header {error}: {UPGRADE}") from error
        except (FieldError, ValueError) as error:
            raise StoreCorrupt(f"the header is not that of an update: {error}") from error
        if len(payload) != frame.size_bytes or entry.digest != frame.sha256:
            raise StoreCorrupt(f"the payload is damaged: {len(payload)} of {frame.size_bytes} bytes")
        return entry, frame.number


@dataclass(frozen=True)
class Frame:
    """What the header of a file says beside the update: of its payload, and its number in the outbox.

    `sha256`: of the payload, see `UpdateEntry.digest`. Older releases did not number them.
    """

    size_bytes: int
    sha256: str
    number: int = 0


def _parts(header: Any, payload: bytes | memoryview) -> tuple[UpdateEntry, Frame]:
    """Of the JSON of a header. Raises `FieldError`, and `StoreCorrupt` for an older format."""
    if not isinstance(header, dict):
        raise FieldError(f"it must be a table, not {header!r}")
    said = header.pop("format", None)
    check_format("the header", said, FORMAT)
    if said != FORMAT:
        raise StoreCorrupt("it is of another format")
    framing = {f.name: header.pop(f.name) for f in fields(Frame) if f.name in header}
    frame = from_plain(framing, Frame, _converter)
    check_stored(frame.sha256)
    beside = {"payload": payload, "algorithm": algorithm_of(frame.sha256)}
    return from_plain({**header, **beside}, UpdateEntry, _converter), frame


def _submodel(packed: Any, _: Any) -> SubmodelMap:
    try:
        return SubmodelMap.FromString(bytes.fromhex(packed))
    except (TypeError, DecodeError) as error:
        raise ValueError(f"must be a map in hexadecimal: {error}") from error


_converter = make_converter()
_converter.register_unstructure_hook(SubmodelMap, lambda found: found.SerializeToString().hex())
_converter.register_structure_hook(SubmodelMap, _submodel)
_converter.register_structure_hook(bytes | memoryview, lambda payload, _: payload)
written(_converter, UpdateEntry, later=("base_head", "seals"), absent=("payload", "algorithm"))


@dataclass(frozen=True)
class OutboxBounds:
    """What an outbox holds at most. Raises `ConfigError` where nothing would fit."""

    entries_max: int = OUTBOX_ENTRIES_MAX
    bytes_max: int = OUTBOX_BYTES_MAX

    def __post_init__(self) -> None:
        if self.entries_max < 1 or self.bytes_max < 1:
            raise ConfigError(f"an outbox must hold at least one result of some bytes, not {self}")


class Outbox:
    """Results that no server has answered yet. None makes room for another: who can wait asks for room first.

    Owned by one process; one thread puts in, another may send and remove. Opening it drops what a crash has
    left unfinished or torn. Raises `StoreError` for a folder that cannot be used, `StoreNewer` for one with
    results of a newer release, which stay in it.
    """

    def __init__(self, folder: Path, bounds: OutboxBounds | None = None) -> None:
        self._folder, self._bounds = folder, bounds or OutboxBounds()
        self._lock = threading.Lock()  # of the list of the files, and of their numbers
        try:
            make_private_folder(folder)
            tighten(*folder.iterdir())
            for path in folder.glob(f"*{UNFINISHED}"):
                path.unlink()
        except OSError as error:
            raise disk_error(folder, error) from error
        # Entries are numbered as they come: the clock may have been set back between two. Those of older
        # releases have no number, and come first, by the time of their files.
        self._numbers: dict[str, int] = {}
        for update_id in self.pending():
            try:
                self._numbers[update_id] = self._load(update_id)[1]
            except StoreCorrupt as error:
                log.warning("outbox: dropped: %s", error)
                self.remove(update_id)

    def has_room(self, entry: UpdateEntry) -> bool:
        """Whether it is within the bounds beside what is held. Raises `TooLarge` when it never can be."""
        size, held = self._size_of(entry), [size for size, _ in self._files()]
        return len(held) < self._bounds.entries_max and size + sum(held) <= self._bounds.bytes_max

    def put(self, entry: UpdateEntry) -> None:
        """Make an entry durable, be there room or not. Raises `StoreFull`, and `TooLarge` as `has_room`."""
        self._size_of(entry)
        number = self._number(entry)
        head, payload = entry.to_bytes(number)
        path = self._path(entry.update_id)
        unfinished = path.with_suffix(UNFINISHED)
        try:
            with open(unfinished, "wb", opener=private) as file:
                file.write(head)
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            with self._lock:
                self._numbers[entry.update_id] = number
            unfinished.replace(path)
            sync_folder(self._folder)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise disk_error(path, error) from error

    def load(self, update_id: str) -> UpdateEntry:
        """An entry, its digests checked.

        Raises `StoreError`; `StoreCorrupt` when it is torn or not there, `StoreNewer` of a newer release.
        """
        return self._load(update_id)[0]

    def _load(self, update_id: str) -> tuple[UpdateEntry, int]:
        try:
            entry, number = UpdateEntry.from_bytes(self._path(update_id).read_bytes())
        except FileNotFoundError as error:
            raise StoreCorrupt(f"outbox entry {update_id}: there is none") from error
        except OSError as error:
            raise disk_error(self._path(update_id), error) from error
        except (StoreCorrupt, StoreNewer) as error:
            raise type(error)(f"outbox entry {update_id}: {error}") from error
        if entry.update_id != update_id:
            raise StoreCorrupt(f"outbox entry {update_id}: it holds update {entry.update_id}")
        return entry, number

    def pending(self) -> list[str]:
        """The update ids, oldest first."""
        return [path.stem for _, path in self._files()]

    def remove(self, update_id: str) -> None:
        """The server has answered. Harmless to repeat."""
        with self._lock:
            self._path(update_id).unlink(missing_ok=True)
            self._numbers.pop(update_id, None)

    def _path(self, update_id: str) -> Path:
        return self._folder / f"{checked_id(update_id, 'update_id')}{SUFFIX}"

    def _files(self) -> list[tuple[int, Path]]:
        """(size in bytes, path) of each entry, oldest first."""
        with self._lock:
            found = [(path.stat(), path) for path in self._folder.glob(f"*{SUFFIX}")]
            numbers = dict(self._numbers)
        ordered = sorted(
            (numbers.get(path.stem, 0), stat.st_mtime_ns, stat.st_size, path) for stat, path in found
        )
        return [(size, path) for _, _, size, path in ordered]

    def _number(self, entry: UpdateEntry) -> int:
        """Its number in the outbox: its own, or the next."""
        with self._lock:
            return self._numbers.get(entry.update_id) or 1 + max(self._numbers.values(), default=0)

    def _size_of(self, entry: UpdateEntry) -> int:
        size = sum(map(len, entry.to_bytes(self._number(entry))))
        if size > self._bounds.bytes_max:
            raise TooLarge(f"update of {size} bytes is over the outbox's cap of {self._bounds.bytes_max}")
        return size
