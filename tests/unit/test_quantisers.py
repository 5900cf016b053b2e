"""The bytes of values, one by one as the table of the module says, over more than one block of work."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from anabranch.compress.quantisers import E3M0, BFloat16, BlockIntegers, Float32, Int4, Int8
from anabranch.compress.stage import BLOCK, Coded, Dense, Role, Sparse, StageContext, Stream
from anabranch.core.errors import InvalidUpdate
from anabranch.core.model.params import Vector
from anabranch.core.rules import NEWEST

SIZES = [1, 2, 31, 256, 257, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 301]
INTEGERS = [*((n, 256) for n in SIZES[:6]), (BLOCK, 256), (1000, 32), (1000, 64), (BLOCK + 65, 128)]
NUMBERS: dict[type[BlockIntegers], int] = {Int8: 12, Int4: 13}


def values(n: int, seed: int = 1) -> Vector:
    """Of many magnitudes, with zeros, exact halves of a step and a stretch that is all zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n).astype(np.float32) * np.float32(2.0) ** rng.integers(-30, 30, n)
    x[::7] = 0.0
    x[600:900] = 0.0
    return x.astype(np.float32)


def dense_of(x: Vector) -> Dense:
    def blocks() -> Iterator[Vector]:
        for start in range(0, x.size, BLOCK):
            yield x[start : start + BLOCK]

    return Dense(x.size, blocks)


def bits(value: float) -> int:
    (found,) = struct.unpack("<I", struct.pack("<f", value))
    return int(found)


def stream(coded: Coded, role: Role) -> bytes:
    return bytes(coded.streams[role].data)


def scale_of(block: Vector, top: int) -> tuple[int, float]:
    """Max / top in float32, rounded up to a bf16: its bits, and the scale."""
    largest = np.float32(max(float(np.abs(block).max()), 1e-30))
    half = (bits(float(largest / np.float32(top))) + 0xFFFF) >> 16
    return half, float(np.array(half << 16, np.uint32).view(np.float32))


def codes_of(
    x: Vector, block: int, top: int, draws: Vector | None
) -> tuple[list[int], list[int], list[float]]:
    """Codes and scales of every block, and what they stand for; `draws`: added before rounding down."""
    codes: list[int] = []
    halves, back = [], []
    for start in range(0, x.size, block):
        part = x[start : start + block]
        half, scale = scale_of(part, top)
        levels = part * np.float32(np.float32(1.0) / np.float32(scale))
        if draws is None:
            whole = [round(float(level)) for level in levels]  # ties to even
        else:
            moved = levels + draws[start : start + block]
            whole = [min(max(math.floor(float(level)), -top), top) for level in moved]
        codes += whole
        halves.append(half)
        back += [float(np.float32(code) * np.float32(scale)) for code in whole]
    return codes, halves, back


def pack(codes: list[int], kind: type[BlockIntegers]) -> bytes:
    if kind is Int8:
        return bytes(code % 256 for code in codes)
    padded = [code + 8 for code in codes] + [0] * (len(codes) % 2)
    return bytes(low | high << 4 for low, high in zip(padded[::2], padded[1::2], strict=True))


@pytest.mark.parametrize("kind", [Int8, Int4])
@pytest.mark.parametrize(("n", "block"), INTEGERS)
def test_block_integers_are_rounded_to_the_nearest(kind: type[BlockIntegers], n: int, block: int) -> None:
    x = values(n)
    coded = kind(block).encode(dense_of(x), StageContext(n))
    codes, halves, back = codes_of(x, block, kind.top, None)
    assert stream(coded, Role.CODES) == pack(codes, kind)
    assert stream(coded, Role.SCALES) == np.array(halves, "<u2").tobytes()
    assert (coded.k, coded.indices, set(coded.streams)) == (n, None, {Role.CODES, Role.SCALES})
    assert kind(block).raw_max(n, n) == sum(len(s.data) for s in coded.streams.values())
    found = kind(block).decode(coded, StageContext(n))
    assert isinstance(found, Dense)
    assert found.gather().tolist() == back
    assert max(abs(codes[i]) for i in range(n)) <= kind.top


@pytest.mark.parametrize("kind", [Int8, Int4])
@pytest.mark.parametrize("rules", [NEWEST, 0])
def test_block_integers_are_rounded_at_random_by_the_seed(kind: type[BlockIntegers], rules: int) -> None:
    """Every value is moved up by 24 bits of a step; each `BLOCK` begins with a whole word of 64 bits.

    By the rules of older releases by (byte + 1/2) / 256.
    """
    n, seed = BLOCK + 301, 5
    words = np.random.Philox(key=seed | NUMBERS[kind] << 64)
    each, bits_of = (2, "<u4") if rules else (8, "u1")
    drawn = [words.random_raw(-(-size // each)).astype("<u8").view(bits_of)[:size] for size in (BLOCK, 301)]
    whole = np.concatenate(drawn).astype(np.float64)
    draws = (np.floor(whole / 256) / 2**24 if rules else (whole + 0.5) / 256).astype(np.float32)
    x = values(n)
    coded = kind(256, stochastic=True, rules=rules).encode(dense_of(x), StageContext(n, seed))
    codes, halves, _ = codes_of(x, 256, kind.top, draws)
    assert stream(coded, Role.CODES) == pack(codes, kind)
    assert stream(coded, Role.SCALES) == np.array(halves, "<u2").tobytes()


@pytest.mark.parametrize("kind", [Int8, Int4])
@pytest.mark.parametrize("level", [0.0003, 0.001, 0.0019, 0.25, 0.501, 0.9995])
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_rounded_at_random_is_on_average_what_it_was(
    kind: type[BlockIntegers], level: float, sign: int
) -> None:
    """Of a part of a step, however small: 1,275,000 draws, within five deviations of their mean."""
    x = np.full((20, 256), sign * level, np.float32)
    x[:, 0] = kind.top  # so that a step is 1
    stage, total, times = kind(256, stochastic=True), 0.0, 250
    for seed in range(times):
        context = StageContext(x.size, seed)
        found = stage.decode(stage.encode(dense_of(x.reshape(-1)), context), context)
        assert isinstance(found, Dense)
        total += float(found.gather().reshape(x.shape)[:, 1:].sum(dtype=np.float64))
    draws = times * x[:, 1:].size
    deviation = math.sqrt(level * (1 - level) / draws)
    assert abs(total / draws - sign * level) < 5 * deviation


@pytest.mark.parametrize("kind", [Int8, Int4])
@pytest.mark.parametrize("sign", [1, -1])
def test_no_draw_leads_beyond_the_largest_code(kind: type[BlockIntegers], sign: int) -> None:
    """Where a quotient was rounded up to a little over `top`: of 16 million draws some would lead beyond."""
    step = np.float32(1.3046875)  # a bf16
    largest = step * np.float32(kind.top)
    assert largest * (np.float32(1) / step) > kind.top
    x = np.full(1 << 24, sign * largest, np.float32)
    context = StageContext(x.size, 3)
    found = kind(256).decode(kind(256, stochastic=True).encode(dense_of(x), context), context)
    assert isinstance(found, Dense)
    codes = set(np.unique(found.gather() / step).tolist())
    assert codes <= {sign * float(kind.top - 1), sign * float(kind.top)}


def test_powers_of_two_as_the_specification_has_them() -> None:
    x = np.array([1, 0.76, 0.74, 0.3, -0.02, 0.004, 0.0079, 0], np.float32)
    coded = E3M0(256).encode(dense_of(x), StageContext(x.size))
    assert stream(coded, Role.CODES) == bytes([7 | 7 << 4, 6 | 5 << 4, 8 + 1 | 0 << 4, 1 | 0 << 4])
    assert stream(coded, Role.SCALES) == bytes([0x80, 0x3F])
    found = E3M0(256).decode(coded, StageContext(x.size))
    assert isinstance(found, Dense)
    assert found.gather().tolist() == [1, 1, 0.5, 0.25, -0.015625, 0, 0.015625, 0]


POWERS = [0.0, *(2.0 ** (k - 7) for k in range(1, 8))]


def nearest(level: float) -> int:
    """The place of the nearest of `POWERS`, of two the larger; exact, as a float's difference of these is."""
    return max(range(8), key=lambda k: (-abs(POWERS[k] - abs(level)), k))


@pytest.mark.parametrize(("n", "block"), INTEGERS)
def test_powers_of_two_are_the_nearest(n: int, block: int) -> None:
    x = values(n)
    x[:9] = (np.array([1.0, 0.75, 0.375, 0.0234375, 0.0078125, -0.75, -0.0078125, 0.0078, 1])[:n]) * 2.0**20
    coded = E3M0(block).encode(dense_of(x), StageContext(n))
    halves, codes, back = [], [], []
    for start in range(0, n, block):
        half, scale = scale_of(x[start : start + block], 1)
        inverse = np.float32(1.0) / np.float32(scale)
        ks = [nearest(float(level)) for level in x[start : start + block] * inverse]
        signs = x[start : start + block] < 0
        codes += [k + 8 * bool(s) * (k > 0) for k, s in zip(ks, signs, strict=True)]
        back += [(-1) ** int(s) * POWERS[k] * scale for k, s in zip(ks, signs, strict=True)]
        halves.append(half)
    codes += [0] * (n % 2)
    assert stream(coded, Role.CODES) == bytes(
        low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)
    )
    assert stream(coded, Role.SCALES) == np.array(halves, "<u2").tobytes()
    assert E3M0(block).raw_max(n, n) == sum(len(s.data) for s in coded.streams.values())
    found = E3M0(block).decode(coded, StageContext(n))
    assert isinstance(found, Dense)
    assert found.gather().tolist() == back


@pytest.mark.parametrize(
    ("codes", "half", "words"),
    [
        (0x08, 0x3F80, "codes must not be a minus without a value"),
        (0x17, 0x3F80, "the padding of the last code is not zero"),
        (0x01, 0xBF80, "scales must be finite, not negative"),
        (0x01, 0x7F80, "scales must be finite, not negative"),
    ],
)
def test_powers_of_two_that_cannot_be(codes: int, half: int, words: str) -> None:
    streams = {
        Role.CODES: Stream.of(bytes([codes])),
        Role.SCALES: Stream.of(np.array([half], "<u2").tobytes()),
    }
    with pytest.raises(InvalidUpdate, match=words):
        list(E3M0()._read(Coded(1, streams)).blocks())


def test_the_largest_powers_come_back_finite() -> None:
    most = float(np.finfo(np.float32).max)
    x = np.array([most, -most, most / 2, 0.0], np.float32)
    found = E3M0().decode(E3M0().encode(dense_of(x), StageContext(4)), StageContext(4))
    assert isinstance(found, Dense)
    top = float(np.array(0x7F7F0000, np.uint32).view(np.float32))
    assert found.gather().tolist() == [top, -top, top / 2, 0.0]


@pytest.mark.parametrize("n", SIZES)
def test_bf16_is_the_upper_half_rounded_to_the_nearest_ties_to_even(n: int) -> None:
    x = values(n)
    coded = BFloat16().encode(dense_of(x), StageContext(n))
    patterns = x.view(np.uint32).astype(np.uint64)
    low, high = patterns & 0xFFFF, patterns >> 16
    up = (low > 0x8000) | ((low == 0x8000) & (high % 2 == 1))
    wanted = (high + up).astype("<u2")
    assert stream(coded, Role.VALUES) == wanted.tobytes()
    assert BFloat16().raw_max(n, n) == 2 * n
    back = BFloat16().decode(coded, StageContext(n))
    assert isinstance(back, Dense)
    assert back.gather().view(np.uint32).tolist() == [int(half) << 16 for half in wanted]


@pytest.mark.parametrize("n", SIZES)
def test_f32_is_as_it_is(n: int) -> None:
    x = values(n)
    coded = Float32().encode(dense_of(x), StageContext(n))
    assert stream(coded, Role.VALUES) == x.astype("<f4").tobytes()
    assert Float32().raw_max(n, n) == 4 * n
    back = Float32().decode(coded, StageContext(n))
    assert isinstance(back, Dense)
    assert back.gather().tolist() == x.tolist()


@pytest.mark.parametrize("kind", [Float32, BFloat16, Int8, Int4, E3M0])
def test_indices_go_along_or_follow_from_a_seed(kind: type[Float32 | BFloat16 | Int8 | Int4 | E3M0]) -> None:
    x = np.array([1.0, -2.0, 0.5], np.float32)
    indices = np.array([2, 5, 7])
    coded = kind().encode(Sparse(indices, x), StageContext(9))
    assert (coded.k, coded.indices is indices) == (3, True)
    assert Role.SEED not in coded.streams
    found = kind().decode(coded, StageContext(9))
    assert isinstance(found, Sparse)
    assert (found.indices.tolist(), found.seed) == ([2, 5, 7], None)
    coded = kind().encode(Sparse(indices, x, seed=2**64 - 3), StageContext(9))
    assert coded.indices is None
    assert stream(coded, Role.SEED) == (2**64 - 3).to_bytes(8, "little")
    found = kind().decode(coded, StageContext(9))
    assert isinstance(found, Sparse)
    assert (found.indices.size, found.seed) == (0, 2**64 - 3)
    assert np.abs(found.values - x).max() <= 0.5 * 2.0 / 7 * 1.01


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_the_largest_numbers_come_back_finite(kind: type[BlockIntegers]) -> None:
    most = float(np.finfo(np.float32).max)
    x = np.array([most, -most, most / 2, 1e30] + [0.0] * 252 + [2.0**127, -(2.0**126)], np.float32)
    found = kind(256).decode(kind(256).encode(dense_of(x), StageContext(x.size)), StageContext(x.size))
    assert isinstance(found, Dense)
    back = found.gather()
    assert np.isfinite(back).all()
    assert back[0] == -back[1] > 0.98 * most
    assert abs(back[256] - 2.0**127) <= 2.0**127 / kind.top
    assert np.sign(back[:3]).tolist() == [1, -1, 1]


def spoiled(kind: type[BlockIntegers], codes: bytes, halves: list[int], k: int) -> Coded:
    scales = np.array(halves, "<u2").tobytes()
    return Coded(k, {Role.CODES: Stream.of(codes), Role.SCALES: Stream.of(scales)})


def decoded(kind: type[BlockIntegers], codes: bytes, half: int) -> list[float]:
    """The one value of these codes."""
    found = kind().decode(spoiled(kind, codes, [half], 1), StageContext(1))
    assert isinstance(found, Dense)
    value: list[float] = found.gather().tolist()
    return value


@pytest.mark.parametrize(
    ("kind", "codes", "half", "value"),
    [
        (Int8, [129], 0x3F80, -127.0),
        (Int8, [127], 0x4000, 254.0),
        (Int4, [1], 0x3F80, -7.0),
        (Int8, [1], 0, 0.0),
    ],
)
def test_codes_and_scales_at_their_bounds(
    kind: type[BlockIntegers], codes: list[int], half: int, value: float
) -> None:
    assert decoded(kind, bytes(codes), half) == [value]


@pytest.mark.parametrize(
    ("kind", "codes", "half", "words"),
    [
        (Int8, [128], 0x3F80, "codes must be within -127..127"),
        (Int4, [0x00], 0x3F80, "codes must be within -7..7"),
        (Int4, [0x11], 0x3F80, "the padding of the last code is not zero"),
        (Int8, [1], 0xBF80, "scales must be finite, not negative"),
        (Int8, [1], 0x7F80, "scales must be finite, not negative"),
    ],
)
def test_codes_and_scales_that_cannot_be(
    kind: type[BlockIntegers], codes: list[int], half: int, words: str
) -> None:
    with pytest.raises(InvalidUpdate, match=words):
        decoded(kind, bytes(codes), half)


@pytest.mark.parametrize(("kind", "top"), [(Int8, 127), (Int4, 7)])
def test_the_largest_scale_is_that_of_the_largest_number(kind: type[BlockIntegers], top: int) -> None:
    """Cut to bf16, so that top times it is finite; the next one is refused."""
    most = bits(float(np.float32(np.finfo(np.float32).max / top))) >> 16
    one = bytes([1]) if kind is Int8 else bytes([0x09])
    found = kind().decode(spoiled(kind, one, [most], 1), StageContext(1))
    assert isinstance(found, Dense)
    assert np.isfinite(found.gather() * np.float32(top)).all()
    with pytest.raises(InvalidUpdate, match="scales must be finite"):
        kind().decode(spoiled(kind, one, [most + 1], 1), StageContext(1))
