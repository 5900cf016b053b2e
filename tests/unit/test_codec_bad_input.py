"""What a payload can have wrong: the rows of the table "Bad input" of docs/compression.md."""

from __future__ import annotations

import re
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backports import zstd as zstandard

from anabranch.compress import wire
from anabranch.compress.chain import Chain
from anabranch.compress.entropy import Huffman, Zstd
from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.compress.selectors import kept_count
from anabranch.compress.stage import Coded, Role, Stream
from anabranch.core.errors import AnabranchError, InvalidUpdate, TooLarge
from anabranch.core.kernels.chosen import loops
from anabranch.testing.payloads import laplace, model, resealed

SPEC = model()
LAYOUT = Layout.of(SPEC)
MAIN, SMALL = LAYOUT.groups
N, K = MAIN.size, kept_count(0.1, MAIN.size)
X = laplace(SPEC.size)
TEXT = "topk(0.1)|int8(256)|gaps|zstd"
GOOD = make_codec(TEXT).encode(X, LAYOUT)
GROUP, STAGE = wire.HEAD.size + wire.CRC.size, wire.HEAD.size + wire.CRC.size + wire.GROUP.size
STREAM = STAGE + 4 * wire.STAGE.size


def stages(text: str) -> tuple[Any, ...]:
    codec = make_codec(text)
    assert isinstance(codec, Chain)
    return codec.stages


def payload(text: str, k: int, streams: dict[Role, bytes | Stream]) -> bytes:
    """A sealed payload of these streams, whatever they are; the small group is all zeros."""
    of = {role: s if isinstance(s, Stream) else Stream.of(s) for role, s in streams.items()}
    exact = any(stage.name == "f32" for stage in stages(text))
    small = Coded(SMALL.size, {Role.VALUES: Stream.of(bytes((4 if exact else 2) * SMALL.size))})
    parts = [
        wire.WireGroup(stages(text), Coded(k, of)),
        wire.WireGroup(stages("f32" if exact else "bf16"), small),
    ]
    return wire.write(parts, LAYOUT)


def patched(at: int, data: bytes) -> bytes:
    return resealed(GOOD[:at] + data + GOOD[at + len(data) :])


def refuse(text: str, data: bytes, error: type[AnabranchError], words: str) -> None:
    """The payload is refused by this error, and neither the text of a bug nor a change is left behind."""
    with pytest.raises(error, match=re.escape(words)):
        make_codec(text).decode(data, LAYOUT)


HEADS: dict[str, tuple[Callable[[], bytes], type[AnabranchError], str]] = {
    "nothing": (lambda: b"", InvalidUpdate, "in the middle"),
    "half a head": (lambda: GOOD[:9], InvalidUpdate, "in the middle"),
    "magic": (lambda: b"XX" + GOOD[2:], InvalidUpdate, "format"),
    "format": (lambda: GOOD[:2] + b"\x02" + GOOD[3:], InvalidUpdate, "format"),
    "layout": (lambda: GOOD[:4] + bytes(8) + GOOD[12:], InvalidUpdate, "another layout"),
    "groups": (lambda: GOOD[:3] + b"\x03" + GOOD[4:], InvalidUpdate, "3 groups"),
    "a flipped bit": (lambda: GOOD[:-1] + bytes([GOOD[-1] ^ 1]), InvalidUpdate, "checksum"),
    "truncated": (lambda: GOOD[:-5], InvalidUpdate, "checksum"),
    "truncated and sealed": (lambda: resealed(GOOD[:-5]), InvalidUpdate, "in the middle"),
    "truncated heads": (lambda: resealed(GOOD[: STREAM + 3]), InvalidUpdate, "in the middle"),
    "a tail": (lambda: resealed(GOOD + b"x"), InvalidUpdate, "goes on for 1 bytes"),
    "group": (lambda: patched(GROUP, b"\x01"), InvalidUpdate, "payload has group 1"),
    "n": (lambda: patched(GROUP + 3, struct.pack("<I", 7)), InvalidUpdate, "group 0 of 7 values"),
    "number of stages": (lambda: patched(GROUP + 1, b"\x05"), InvalidUpdate, "5 stages"),
    "number of streams": (lambda: patched(GROUP + 2, b"\xff"), InvalidUpdate, "255 streams"),
    "another stage": (lambda: patched(STAGE, b"\x02"), InvalidUpdate, "stage (2, 1), the codec says topk:1"),
    "another version": (lambda: patched(STAGE + 1, b"\x02"), InvalidUpdate, "stage (1, 2)"),
    "k over the density": (lambda: patched(GROUP + 7, struct.pack("<I", K + 1)), TooLarge, "at most"),
    "k over n": (lambda: patched(GROUP + 7, b"\xff\xff\xff\xff"), TooLarge, "at most"),
    "k too small for its streams": (lambda: patched(GROUP + 7, bytes(4)), TooLarge, "more than"),
    "unknown stream": (lambda: patched(STREAM, b"\x63"), InvalidUpdate, "unknown or repeated"),
    "repeated stream": (lambda: patched(STREAM, bytes([Role.SCALES])), InvalidUpdate, "unknown or repeated"),
    "foreign stream": (lambda: patched(STREAM, bytes([Role.SIGNS])), InvalidUpdate, "lacks the stream codes"),
    "foreign coder": (lambda: patched(STREAM + 21, b"\x1f"), InvalidUpdate, "lacks the stream index"),
    "stream over its bound": (lambda: patched(STREAM + 22, b"\xff\xff\xff\x7f"), TooLarge, "more than"),
    "stream longer than it says": (lambda: patched(STREAM + 22, bytes(4)), InvalidUpdate, "longer than"),
}


@pytest.mark.parametrize("what", HEADS)
def test_heads(what: str) -> None:
    make, error, words = HEADS[what]
    refuse(TEXT, make(), error, words)


def gaps(*indices: int) -> bytes:
    return loops.write_gaps(np.array(indices, np.int64))


def bits(*indices: int, size: int = N) -> bytes:
    flags = np.zeros(8 * -(-size // 8), bool)
    flags[list(indices)] = True
    return np.packbits(flags, bitorder="little").tobytes()


INT8 = {Role.CODES: b"\x01\x02", Role.SCALES: b"\x80\x3f"}
BITMAP, DEADZONE = "topk(0.1)|int8|bitmap", "deadzone(0.1)|gaps"
LEVELS = {
    Role.STEP: struct.pack("<f", 0.5),
    Role.SIGNS: b"\x02",
    Role.MAGNITUDES: b"\x00\x03",
    Role.CODES: b"",
}
F32, MASK = "topk(0.1)|u32", "mask(0.1)|int4"
NAN, INF = struct.pack("<f", np.nan), struct.pack("<f", np.inf)
MASK_K = kept_count(0.1, N)
MASKED = {
    Role.SEED: bytes(8),
    Role.CODES: b"\x88" * (MASK_K // 2) + b"\x08" * (MASK_K % 2),
    Role.SCALES: bytes(2 * -(-MASK_K // 256)),
}

# text, k, streams: the good ones, each followed by what is changed in it.
STREAMS: dict[str, tuple[str, int, dict[Role, bytes], str]] = {
    "scales too short": (
        "int8",
        N,
        {Role.CODES: bytes(N), Role.SCALES: bytes(2)},
        "stream scales has 2 bytes",
    ),
    "codes too short": (TEXT, 2, {**INT8, Role.CODES: b"\x01", Role.INDEX: gaps(3, 9)}, "stream codes has 1"),
    "infinite scale": (TEXT, 2, {**INT8, Role.SCALES: b"\x80\x7f", Role.INDEX: gaps(3, 9)}, "finite"),
    "scale that is no number": (
        TEXT,
        2,
        {**INT8, Role.SCALES: b"\xc1\x7f", Role.INDEX: gaps(3, 9)},
        "finite",
    ),
    "negative scale": (TEXT, 2, {**INT8, Role.SCALES: b"\x80\xbf", Role.INDEX: gaps(3, 9)}, "negative"),
    "scale of infinite values": (
        TEXT,
        2,
        {**INT8, Role.SCALES: b"\x7f\x7f", Role.INDEX: gaps(3, 9)},
        "finite",
    ),
    "code out of range": (TEXT, 2, {**INT8, Role.CODES: b"\x80\x00", Role.INDEX: gaps(3, 9)}, "-127..127"),
    "no indices": (TEXT, 2, INT8, "lacks the stream index"),
    "fewer gaps": (TEXT, 2, {**INT8, Role.INDEX: gaps(3)}, "cannot be 2 indices"),
    "more gaps": (TEXT, 2, {**INT8, Role.INDEX: gaps(3, 4, 5)}, "are of 3 indices"),
    "gap without an end": (TEXT, 2, {**INT8, Role.INDEX: b"\x03\xff"}, "no end"),
    "long gap without an end": (TEXT, 2, {**INT8, Role.INDEX: b"\x03\x04\xff"}, "the gaps are of"),
    "index over n": (TEXT, 2, {**INT8, Role.INDEX: gaps(3, N)}, f"index {N} is over"),
    "bitmap too short": (BITMAP, 2, {**INT8, Role.INDEX: bits(3, 9)[:-1]}, "stream index has"),
    "bitmap with fewer bits": (BITMAP, 2, {**INT8, Role.INDEX: bits(3)}, "1 bits set"),
    "bitmap with more bits": (BITMAP, 2, {**INT8, Role.INDEX: bits(3, 9, 10)}, "3 bits set"),
    "padding of a bitmap": (BITMAP, 2, {**INT8, Role.INDEX: bits(3, N)}, "bits set"),
    "indices that fall": (
        F32,
        2,
        {Role.VALUES: bytes(8), Role.INDEX: struct.pack("<2I", 9, 3)},
        "increasing",
    ),
    "equal indices": (F32, 2, {Role.VALUES: bytes(8), Role.INDEX: struct.pack("<2I", 3, 3)}, "increasing"),
    "plain index over n": (
        F32,
        2,
        {Role.VALUES: bytes(8), Role.INDEX: struct.pack("<2I", 3, N)},
        "increasing",
    ),
    "plain index of 32 bits": (F32, 1, {Role.VALUES: bytes(4), Role.INDEX: b"\xff" * 4}, "increasing"),
    "values that are no numbers": (F32, 1, {Role.VALUES: NAN, Role.INDEX: bytes(4)}, "not finite"),
    "infinite values": (F32, 1, {Role.VALUES: INF, Role.INDEX: bytes(4)}, "not finite"),
    "infinite bf16": ("bf16", N, {Role.VALUES: bytes(2 * N - 2) + b"\x80\x7f"}, "not finite"),
    "a step of zero": (DEADZONE, 2, {**LEVELS, Role.STEP: bytes(4), Role.INDEX: gaps(3, 9)}, "positive"),
    "a negative step": (
        DEADZONE,
        2,
        {**LEVELS, Role.STEP: b"\0\0\0\xbf", Role.INDEX: gaps(3, 9)},
        "positive",
    ),
    "a step that is no number": (DEADZONE, 2, {**LEVELS, Role.STEP: NAN, Role.INDEX: gaps(3, 9)}, "finite"),
    "levels of infinite values": (
        DEADZONE,
        2,
        {**LEVELS, Role.STEP: struct.pack("<f", 3e38), Role.INDEX: gaps(3, 9)},
        "not of finite values",
    ),
    "signs with padding": (DEADZONE, 2, {**LEVELS, Role.SIGNS: b"\x82", Role.INDEX: gaps(3, 9)}, "padding"),
    "excess that is not there": (
        DEADZONE,
        2,
        {**LEVELS, Role.MAGNITUDES: b"\xff\x01", Role.INDEX: gaps(3, 9)},
        "stream codes has 0 bytes",
    ),
    "excess of nothing": (
        DEADZONE,
        2,
        {**LEVELS, Role.CODES: bytes(4), Role.INDEX: gaps(3, 9)},
        "stream codes has 4 bytes",
    ),
    "no seed": (MASK, MASK_K, {r: s for r, s in MASKED.items() if r != Role.SEED}, "lacks the stream seed"),
    "a short seed": (MASK, MASK_K, {**MASKED, Role.SEED: bytes(7)}, "stream seed has 7"),
    "a seed for nothing": (
        TEXT,
        2,
        {**INT8, Role.INDEX: gaps(3, 9), Role.SEED: bytes(8)},
        "does not know: seed",
    ),
    "a masked code out of range": (MASK, MASK_K, {**MASKED, Role.CODES: bytes(-(-MASK_K // 2))}, "-7..7"),
    "fewer values than the mask": (
        MASK,
        2,
        {Role.SEED: bytes(8), Role.CODES: b"\x88", Role.SCALES: bytes(2)},
        "its mask has",
    ),
    "fewer values than the model": ("int8", 2, INT8, f"2 values, the manifest needs {N}"),
}


@pytest.mark.parametrize("what", STREAMS)
def test_streams(what: str) -> None:
    text, k, streams, words = STREAMS[what]
    refuse(text, payload(text, k, dict(streams)), InvalidUpdate, words)


@pytest.mark.parametrize(
    ("text", "k", "streams"),
    [
        (TEXT, 2, {**INT8, Role.INDEX: gaps(3, 9)}),
        (BITMAP, 2, {**INT8, Role.INDEX: bits(3, N - 1)}),
        (DEADZONE, 2, {**LEVELS, Role.INDEX: gaps(3, N - 1)}),
        (F32, 2, {Role.VALUES: bytes(8), Role.INDEX: struct.pack("<2I", 3, N - 1)}),
        (MASK, MASK_K, MASKED),
    ],
)
def test_the_same_payloads_without_the_flaw_are_taken(text: str, k: int, streams: Any) -> None:
    make_codec(text).decode(payload(text, k, streams), LAYOUT)


# What expands: one stream of `topk(1.0)|f32` whose announced and true sizes differ.
BIG = bytes(30_000_000)


def bomb(text: str, coder: int, data: bytes, announced: int) -> bytes:
    indices = Stream.of(bits(*range(10)))
    return payload(text, 10, {Role.VALUES: Stream(data, announced, coder), Role.INDEX: indices})


def deflated(data: bytes) -> bytes:
    coder = zlib.compressobj(9, zlib.DEFLATED, -15)
    return coder.compress(data) + coder.flush()


def zstd(data: bytes, *, sized: bool = True) -> bytes:
    return zstandard.compress(data, options={zstandard.CompressionParameter.content_size_flag: int(sized)})


def windowed() -> bytes:
    """Forty zeros in a frame that asks for a window of 128 MiB; RFC 8878, section 3.1.1."""
    descriptor, window, block = b"\x80", bytes([17 << 3]), (40 << 3 | 1 << 1 | 1).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd" + descriptor + window + struct.pack("<I", 40) + block + b"\0"


ZSTD, HUFFMAN = "topk(0.5)|f32|bitmap|zstd", "topk(0.5)|f32|bitmap|huffman"
BOMBS: dict[str, tuple[str, int, Callable[[], bytes], int, type[AnabranchError], str]] = {
    "zstd of another size": (ZSTD, Zstd.number, lambda: zstd(BIG)[:30], 40, TooLarge, "announced as 40"),
    "zstd without a size": (
        ZSTD,
        Zstd.number,
        lambda: zstd(bytes(40), sized=False),
        40,
        TooLarge,
        "announced as 40",
    ),
    "two zstd frames": (ZSTD, Zstd.number, lambda: zstd(bytes(40)) + zstd(b""), 40, InvalidUpdate, "damaged"),
    "zstd window": (ZSTD, Zstd.number, windowed, 40, TooLarge, "window"),
    "no zstd": (ZSTD, Zstd.number, lambda: bytes(20), 40, InvalidUpdate, "damaged"),
    "zstd cut short": (ZSTD, Zstd.number, lambda: zstd(bytes(40))[:-2], 40, InvalidUpdate, "damaged"),
    "a skippable frame": (
        ZSTD,
        Zstd.number,
        lambda: b"\x50\x2a\x4d\x18\x28\0\0\0",
        40,
        InvalidUpdate,
        "zstd",
    ),
    "deflate bomb": (
        HUFFMAN,
        Huffman.number,
        lambda: deflated(bytes(30_000))[:39],
        40,
        TooLarge,
        "more than",
    ),
    "deflate too short": (
        HUFFMAN,
        Huffman.number,
        lambda: deflated(bytes(30)),
        40,
        InvalidUpdate,
        "30 bytes",
    ),
    "deflate with a tail": (
        HUFFMAN,
        Huffman.number,
        lambda: deflated(bytes(40)) + b"x",
        40,
        InvalidUpdate,
        "tail",
    ),
    "no deflate": (HUFFMAN, Huffman.number, lambda: b"\xff" * 20, 40, InvalidUpdate, "damaged"),
}


@pytest.mark.parametrize("what", BOMBS)
def test_bombs_are_refused_before_they_are_expanded(what: str) -> None:
    text, coder, make, announced, error, words = BOMBS[what]
    data = bomb(text, coder, make(), announced)
    assert len(data) < 5_000
    tracemalloc.start()
    try:
        refuse(text, data, error, words)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("coder", [Zstd(), Huffman()])
def test_large_bombs_cost_no_memory(coder: Zstd | Huffman) -> None:
    """30 MB in a stream of a model of 10,000 values."""
    packed = coder.shrink(BIG)
    text = ZSTD if coder.name == "zstd" else HUFFMAN
    honest, lying = bomb(text, coder.number, packed, len(BIG)), bomb(text, coder.number, packed, len(packed))
    tracemalloc.start()
    try:
        refuse(text, honest, TooLarge, "would have more than")
        refuse(text, lying, TooLarge, "more than")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_what_the_log_of_one_layout_says_is_nothing_to_another() -> None:
    other = replace(LAYOUT, fingerprint=b"12345678")
    with pytest.raises(InvalidUpdate, match="another layout"):
        make_codec(TEXT).decode(GOOD, other)
