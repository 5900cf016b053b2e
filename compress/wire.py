"""An encoded vector as bytes: a head, then each group of the layout with its stages and streams.

    head    2 magic "aB", 1 format, 1 groups, 8 fingerprint of the layout, 4 CRC-32 of all that follows
    group   1 number (0 main, 1 small), 1 stages, 1 streams, 4 n, 4 k
            stages times:  1 number, 1 version
            streams times: 1 role, 1 coder (0 none), 4 length before it, 4 length
    streams back to back, in the order of their heads

All numbers are little-endian and unsigned.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from anabranch.compress.layout import MAIN, Layout
from anabranch.compress.stage import Coded, Role, Stage, Stream
from anabranch.core.errors import AppError, InvalidUpdate, TooLarge
from anabranch.core.kernels.chosen import loops
from anabranch.core.parts import answer_text

MAGIC, FORMAT = b"aB", 1
HEAD, CRC = struct.Struct("<2sBB8s"), struct.Struct("<I")
GROUP, STAGE, STREAM = struct.Struct("<BBBII"), struct.Struct("<BB"), struct.Struct("<BBII")
STREAMS_MAX = 8
_ROLES = {int(role): role for role in Role}


@dataclass(frozen=True)
class WireGroup:
    """One group on the wire: its stages in the order in which they encoded, and what came out."""

    stages: tuple[Stage, ...]
    coded: Coded


def bytes_max(stages: tuple[Stage, ...], n: int) -> int:
    """The most bytes that a group of n values can take on the wire."""
    heads = GROUP.size + STAGE.size * len(stages) + STREAM.size * STREAMS_MAX
    return heads + raw_max(stages, k_max(stages, n), n)


def raw_max(stages: tuple[Stage, ...], k: int, n: int) -> int:
    """The most bytes that the streams of k values of n can have, expanded."""
    total = 0
    for stage in stages:
        most = stage.raw_max(k, n)
        if not isinstance(most, int):
            raise AppError(
                f"codec stage {stage.name!r}: raw_max must return a whole number, not {answer_text(most)}"
            )
        total += most
    return total


def k_max(stages: tuple[Stage, ...], n: int) -> int:
    """The most values of n that travel."""
    return min(stage.values_max(n) for stage in stages)


def write(parts: list[WireGroup], layout: Layout, tail: bytes | memoryview = b"") -> bytes:
    """The bytes of all groups of a layout, and a tail behind them as it is."""
    heads: list[bytes] = []
    for group, part in zip(layout.groups, parts, strict=True):
        streams = part.coded.streams
        heads.append(GROUP.pack(group.name != MAIN, len(part.stages), len(streams), group.size, part.coded.k))
        heads += [STAGE.pack(stage.number, stage.version) for stage in part.stages]
        heads += [STREAM.pack(role, s.coder, s.raw_len, len(s.data)) for role, s in streams.items()]
    body = [b"".join(heads), *(stream.data for part in parts for stream in part.coded.streams.values())]
    crc = 0
    for part_of_body in body:
        crc = loops.crc32(part_of_body, crc)
    return b"".join([HEAD.pack(MAGIC, FORMAT, len(parts), layout.fingerprint), CRC.pack(crc), *body, tail])


def check_bounds(part: WireGroup, n: int) -> None:
    """Raises `AppError` where stages made more of n values than they say: nobody would read it."""
    k, made = part.coded.k, sum(stream.raw_len for stream in part.coded.streams.values())
    if k > (most := k_max(part.stages, n)):
        method, said = "values_max", f"{k} values, and it says at most {most}"
    elif made > (most := raw_max(part.stages, k, n)):
        method, said = "raw_max", f"{made} bytes of {k} values, and it says at most {most}"
    else:
        return
    names = "|".join(stage.name for stage in part.stages)
    raise AppError(f"codec {names} makes {said}: {method} of a stage of one's own is too small")


def read(data: bytes | memoryview, layout: Layout, stages: list[tuple[Stage, ...]]) -> list[WireGroup]:
    """The groups, checked but for the streams' contents. `stages` are those expected, group by group.

    Raises `InvalidUpdate` or `TooLarge`.
    """
    cursor = _Cursor(memoryview(data))
    magic, form, groups, fingerprint = cursor.take(HEAD)
    if magic != MAGIC or form != FORMAT:
        raise InvalidUpdate(f"payload is not of format {FORMAT}")
    if fingerprint != layout.fingerprint:
        raise InvalidUpdate("payload is of another layout: its fingerprint differs from the manifest's")
    (crc,) = cursor.take(CRC)
    if loops.crc32(cursor.view[cursor.at :]) != crc:
        raise InvalidUpdate("payload is damaged: its checksum differs")
    if groups != len(layout.groups):
        raise InvalidUpdate(f"payload has {groups} groups, the manifest {len(layout.groups)}")
    heads = [
        _read_group(cursor, group.name != MAIN, group.size, wanted)
        for group, wanted in zip(layout.groups, stages, strict=True)
    ]
    parts = []
    for (k, streams), wanted in zip(heads, stages, strict=True):
        coded = Coded(k)
        for role, coder, raw_len, length in streams:
            coded.streams[_ROLES[role]] = Stream(cursor.bytes(length), raw_len, coder)
        parts.append(WireGroup(wanted, coded))
    if cursor.at != len(cursor.view):
        raise InvalidUpdate(f"payload goes on for {len(cursor.view) - cursor.at} bytes after its end")
    return parts


StreamHead = tuple[int, int, int, int]


def _read_group(
    cursor: _Cursor, number: int, n: int, wanted: tuple[Stage, ...]
) -> tuple[int, list[StreamHead]]:
    found_number, stage_count, stream_count, found_n, k = cursor.take(GROUP)
    if (found_number, found_n) != (number, n):
        raise InvalidUpdate(
            f"payload has group {found_number} of {found_n} values, the manifest has {number} of {n}"
        )
    if stage_count != len(wanted) or stream_count > STREAMS_MAX:
        raise InvalidUpdate(f"payload has {stage_count} stages and {stream_count} streams in a group")
    for stage in wanted:
        found = cursor.take(STAGE)
        if found != (stage.number, stage.version):
            raise InvalidUpdate(f"payload has stage {found}, the codec says {stage.name}:{stage.version}")
    if k > k_max(wanted, n):
        raise TooLarge(f"payload has {k} values of a group, its codec keeps at most {k_max(wanted, n)}")
    streams = [cursor.take(STREAM) for _ in range(stream_count)]
    _check_streams(streams, raw_max(wanted, k, n))
    return k, streams


def _check_streams(streams: list[tuple[int, ...]], most: int) -> None:
    roles = [role for role, *_ in streams]
    if len(set(roles)) != len(roles) or any(role not in _ROLES for role in roles):
        raise InvalidUpdate(f"payload has unknown or repeated streams: {roles}")
    if any(length > raw_len if coder else length != raw_len for _, coder, raw_len, length in streams):
        raise InvalidUpdate("a stream is longer than it says")
    if sum(raw_len for _, _, raw_len, _ in streams) > most:
        raise TooLarge(f"the streams of a group would have more than {most} bytes")


class _Cursor:
    """Reads on from where it is. Raises `InvalidUpdate` at the end of the bytes."""

    def __init__(self, view: memoryview) -> None:
        self.view, self.at = view, 0

    def take(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack_from(self.view, self._pass(form.size))

    def bytes(self, length: int) -> memoryview:
        start = self._pass(length)
        return self.view[start : self.at]

    def _pass(self, length: int) -> int:
        """Go on behind so many bytes; returns where they begin."""
        start, self.at = self.at, self.at + length
        if self.at > len(self.view):
            raise InvalidUpdate(f"payload ends after {len(self.view)} bytes, in the middle of something")
        return start
