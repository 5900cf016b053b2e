"""Every compiled loop beside its twin in numpy: the same bits, and the same refusals."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from anabranch.core.errors import InvalidUpdate
from anabranch.core.kernels import plain
from anabranch.core.kernels.contract import INFINITY_BITS, BlockForm, Code, Found, Loops, gaps_max

LARGE = 1 << 15  # values for which the loops let other threads run
TOPS = {Code.INT8: 127, Code.INT4: 7, Code.E3M0: 1}
FORMS = [BlockForm(code, block, top) for code, top in TOPS.items() for block in (32, 256)]
BITS = st.integers(0, 0xFFFFFFFF)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MIXED = st.one_of(
    FINITE, st.floats(-1, 1, width=32), st.sampled_from([0.0, -0.0, 1e-45, -1e-31, 3.4e38, -3.4e38])
)


@pytest.fixture(scope="module")
def compiled(loops_module: None) -> Loops:
    """The compiled loops: those that were installed, or such as are made here."""
    from anabranch.core.kernels import compiled

    return compiled


def _floats(bits: list[int]) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def _same(one: np.ndarray, other: np.ndarray) -> None:
    assert one.dtype == other.dtype
    assert one.tobytes() == other.tobytes()


def _normal(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@given(st.lists(BITS, max_size=100))
def test_the_largest_magnitude(compiled: Loops, bits: list[int]) -> None:
    values = _floats(bits)
    expected = max((b & 0x7FFFFFFF for b in bits), default=0)
    assert compiled.top(values) == plain.top(values) == expected
    assert compiled.top(values[::2]) == max((b & 0x7FFFFFFF for b in bits[::2]), default=0)


@given(st.lists(BITS, max_size=150), st.integers(0, INFINITY_BITS))
def test_what_is_over(compiled: Loops, bits: list[int], least: int) -> None:
    values = _floats(bits)
    wanted = [i for i, b in enumerate(bits) if b & 0x7FFFFFFF >= least]
    for loops in (compiled, plain):
        places, kept = np.empty(len(bits), np.int64), np.empty(len(bits), np.float32)
        count = loops.over(values, least, places, kept)
        assert places[:count].tolist() == wanted
        _same(kept[:count], values[wanted])


@given(st.lists(BITS, max_size=150), st.integers(0, INFINITY_BITS), st.integers(0, 150))
@example([0x3F800000] * 64, 1, 31)
@example([0, 0, 0, 0, 0, 0, 0, 0x3F800000] * 8, 1, 8)
def test_of_what_is_over_the_first_are_written(
    compiled: Loops, bits: list[int], least: int, room: int
) -> None:
    values = _floats(bits)
    wanted = [i for i, b in enumerate(bits) if b & 0x7FFFFFFF >= least]
    for loops in (compiled, plain):
        places, kept = np.full(room + 9, -1), np.full(room + 9, -1, np.float32)
        assert loops.over(values, least, places[:room], kept[:room]) == len(wanted)
        assert places[:room][: len(wanted)].tolist() == wanted[:room]
        _same(kept[:room][: len(wanted)], values[wanted[:room]])
        assert set(places[room:].tolist()) == set(kept[room:].tolist()) == {-1}, "written beyond its end"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 1.0])
def test_what_is_over_of_many(compiled: Loops, share: float) -> None:
    values = np.where(np.random.default_rng(1).random(LARGE + 17) < share, 5.0, 1.0).astype(np.float32)
    places, kept = np.empty(values.size, np.int64), np.empty(values.size, np.float32)
    count = compiled.over(values, int(np.float32(2).view(np.int32)), places, kept)
    assert np.array_equal(places[:count], np.flatnonzero(values > 2))


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f.code.name}-{f.block}")
@given(values=arrays.arrays(np.float32, st.integers(1, 600), elements=MIXED))
@example(values=np.array([3.4028235e38, -3.4028235e38, 1.0], np.float32))
@example(values=np.array([1.0, np.nan], np.float32))
@example(values=np.array([0.5, -np.inf, 0.0], np.float32))
@example(values=_normal(LARGE + 33))
@example(values=np.zeros(257, np.float32))
@example(values=(np.arange(-300, 301) / np.float32(254)).astype(np.float32))  # ties
def test_codes_of_blocks(compiled: Loops, form: BlockForm, values: np.ndarray) -> None:
    made, tops = [], []
    for loops in (compiled, plain):
        codes = np.zeros(form.packed_len(values.size), np.uint8)
        scales = np.zeros(form.scales(values.size), "<u2")
        tops.append(loops.encode_blocks(values, form, codes, scales))
        made.append((codes, scales))
    if not np.isfinite(values).all():
        assert min(tops) >= INFINITY_BITS
        return
    assert tops[0] == tops[1] == plain.top(values)
    _same(made[0][0], made[1][0])
    _same(made[0][1], made[1][1])
    _check_decoded(compiled, form, *made[0], values.size)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f.code.name}-{f.block}")
@given(size=st.integers(1, 600), seed=st.integers(0, 2**32 - 1))
def test_any_codes(compiled: Loops, form: BlockForm, size: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    codes = draw.integers(0, 256, form.packed_len(size), np.uint8)
    scales = draw.integers(0, form.scale_max + 1, form.scales(size)).astype("<u2")
    _check_decoded(compiled, form, codes, scales, size)


def _check_decoded(
    compiled: Loops, form: BlockForm, codes: np.ndarray, scales: np.ndarray, size: int
) -> None:
    decoded, found = [], []
    for loops in (compiled, plain):
        out = np.empty(size, np.float32)
        found.append(loops.decode_blocks(codes, scales, form, out))
        decoded.append(out)
    assert found[0] is found[1]
    if found[0] is Found.GOOD:
        _same(*decoded)


@pytest.mark.parametrize(
    ("form", "codes", "found"),
    [
        (BlockForm(Code.INT8, 32, 127), [0x81, 0x7F], Found.GOOD),
        (BlockForm(Code.INT8, 32, 127), [0x80, 0x7F], Found.BAD_CODE),
        (BlockForm(Code.INT4, 32, 7), [0x1F, 0x01], Found.GOOD),
        (BlockForm(Code.INT4, 32, 7), [0x10, 0x01], Found.BAD_CODE),
        (BlockForm(Code.INT4, 32, 7), [0x11, 0x00], Found.BAD_CODE),
        (BlockForm(Code.INT4, 32, 7), [0x11, 0x21], Found.BAD_PADDING),
        (BlockForm(Code.E3M0, 32, 1), [0xF0, 0x07], Found.GOOD),
        (BlockForm(Code.E3M0, 32, 1), [0x81, 0x07], Found.BAD_CODE),
        (BlockForm(Code.E3M0, 32, 1), [0x11, 0x17], Found.BAD_PADDING),
    ],
)
def test_codes_that_there_are_not(compiled: Loops, form: BlockForm, codes: list[int], found: Found) -> None:
    packed = np.array(codes, np.uint8)
    out = np.empty(2 if form.code is Code.INT8 else 3, np.float32)
    for loops in (compiled, plain):
        assert loops.decode_blocks(packed, np.array([0x3F80], "<u2"), form, out) is found


@given(st.lists(BITS.map(lambda b: b if b & 0x7F800000 != 0x7F800000 else b & 0x807FFFFF), max_size=100))
@example([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF7FFFFF, 0x80000000, 1])
def test_bf16(compiled: Loops, bits: list[int]) -> None:
    values = _floats(bits)
    halves = [np.empty(len(bits), np.uint16) for _ in range(2)]
    compiled.to_bf16(values, halves[0])
    plain.to_bf16(values, halves[1])
    _same(*halves)
    for half, given_bits in zip(halves[0].tolist(), bits, strict=True):
        assert half >> 15 == given_bits >> 31
        size, wanted = half & 0x7FFF, _size(given_bits & 0x7FFFFFFF)
        near = [max(0, size - 1), size, min(0x7F7F, size + 1)]  # the largest finite one is the last
        errors = [abs(_size(one << 16) - wanted) for one in near]
        assert errors[1] == min(errors)
        ties = [one for one, error in zip(near, errors, strict=True) if error == errors[1] and one != size]
        assert not ties or size % 2 == 0


def _size(bits: int) -> float:
    return float(_floats([bits])[0])


@given(arrays.arrays(np.uint16, st.integers(0, 100)))
def test_values_of_bf16(compiled: Loops, halves: np.ndarray) -> None:
    values = [np.empty(halves.size, np.float32) for _ in range(2)]
    finite = not ((halves & 0x7F80) == 0x7F80).any()
    assert compiled.from_bf16(halves, values[0]) is plain.from_bf16(halves, values[1]) is finite
    if finite:
        _same(*values)


INCREASING = st.lists(st.integers(0, 3000), unique=True).map(sorted)


@given(INCREASING)
@example(list(range(0, 4 * LARGE, 3)))
@example([254, 255, 510, 1020, 5000])
def test_gaps(compiled: Loops, indices: list[int]) -> None:
    given = np.array(indices, np.int64)
    data = plain.write_gaps(given)
    assert compiled.write_gaps(given) == data
    n = indices[-1] + 1 if indices else 1
    assert len(data) <= gaps_max(len(indices), n)
    assert compiled.read_gaps(data, len(indices), n).tolist() == indices
    if indices:
        with pytest.raises(InvalidUpdate):
            compiled.read_gaps(data, len(indices), n - 1)


@given(st.binary(max_size=40), st.integers(0, 40), st.integers(0, 2000))
@example(b"\xff", 0, 400)
@example(b"", 0, 0)
def test_any_gaps(compiled: Loops, data: bytes, k: int, n: int) -> None:
    _same_answer(compiled.read_gaps, plain.read_gaps, data, k, n)


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(0, 41))
@example([1, 2**32 - 1], 2**32)
def test_numbers(compiled: Loops, numbers: list[int], n: int) -> None:
    _same_answer(
        compiled.read_numbers, plain.read_numbers, np.array(numbers, "<u4").tobytes(), len(numbers), n
    )


def _same_answer(one: object, other: object, data: bytes, k: int, n: int) -> None:
    answers = []
    for read in (one, other):
        assert callable(read)
        try:
            answers.append(read(memoryview(b"." + data)[1:], k, n).tolist())  # at an odd address
        except InvalidUpdate as error:
            answers.append(str(error))
    assert answers[0] == answers[1]
    if isinstance(answers[0], list):
        assert len(answers[0]) == k
        assert all(a < b for a, b in zip([-1, *answers[0]], [*answers[0], n], strict=True))


@given(arrays.arrays(np.float32, st.integers(0, 70), elements=MIXED), st.floats(-3, 3), st.data())
def test_adding(compiled: Loops, values: np.ndarray, scale: float, data: st.DataObject) -> None:
    size = values.size
    start = data.draw(arrays.arrays(np.float32, size, elements=MIXED))
    sums = [start.copy(), start.copy()]
    compiled.add_dense(sums[0], scale, values)
    plain.add_dense(sums[1], scale, values)
    _same(sums[0], sums[1])
    _same(sums[0], _sums_by_hand(start, np.float32(scale), values))
    places = np.array(
        data.draw(st.lists(st.integers(0, max(0, size - 1)), unique=True, max_size=size)), np.int64
    )
    sums = [start.copy(), start.copy()]
    compiled.add_sparse(sums[0], scale, places, values[places])
    plain.add_sparse(sums[1], scale, places, values[places])
    _same(*sums)


def _sums_by_hand(start: np.ndarray, scale: np.float32, values: np.ndarray) -> np.ndarray:
    """One after the other, each product rounded."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array([a + scale * b for a, b in zip(start, values, strict=True)], np.float32)


def test_adding_much_and_to_a_part(compiled: Loops) -> None:
    """What is not for the compiled loop is done all the same: another dtype, every second, an odd address."""
    values, whole = _normal(LARGE + 5), np.zeros(2 * LARGE + 10, np.float32)
    compiled.add_dense(whole[::2], 0.5, values)
    assert np.array_equal(whole[::2], np.float32(0.5) * values)
    assert not whole[1::2].any()
    out = np.zeros(LARGE + 5, np.float32)
    compiled.add_dense(out, 0.5, np.frombuffer(b"." + values.tobytes(), np.float32, offset=1))
    compiled.add_sparse(out, 0.5, np.arange(LARGE + 5), values)
    assert np.array_equal(out, values)
    double = np.zeros(3)
    compiled.add_dense(double, 0.1, np.ones(3))
    compiled.add_sparse(double, 0.1, np.array([1]), np.ones(1))
    assert double.tolist() == [0.1, 0.2, 0.1]


TOP = 1 << 24  # up to here float32 has every whole number


@given(arrays.arrays(np.float32, st.integers(0, 70), elements=MIXED), st.integers(-40, 40))
@example(np.array([0.6, 0.59, -0.6, -0.59, -0.0, 1e-45, 3.4e38, -3.4e38, 16777216.5], np.float32), 0)
@example(_normal(LARGE + 9), 4)
def test_levels(compiled: Loops, values: np.ndarray, exponent: int) -> None:
    """Those of a grid: a move of less than 0.6 units waits."""
    inverse, wanted = np.float32(2.0**exponent), []
    with np.errstate(over="ignore"):
        for value in values:
            size = np.floor(np.float32(np.abs(value) * inverse) + np.float32(0.4))
            wanted.append(int(min(size, np.float32(TOP))) * (-1 if value < 0 else 1))
        for loops in (compiled, plain):
            levels = np.empty(values.size, np.int32)
            loops.to_levels(values, 2.0**exponent, 0.4, TOP, levels)
            assert levels.tolist() == wanted


LEVELS = arrays.arrays(np.int32, st.integers(1, 70), elements=st.integers(-TOP, TOP))


@given(LEVELS, st.integers(-30, 30), st.sampled_from([-1, 1]))
@example(np.arange(-LARGE, LARGE, dtype=np.int32), -3, 1)
def test_adding_levels(compiled: Loops, levels: np.ndarray, exponent: int, sign: int) -> None:
    start, unit = _normal(levels.size), sign * 2.0**exponent
    wanted = start + levels.astype(np.float32) * np.float32(unit)
    for loops in (compiled, plain):
        out = start.copy()
        loops.add_levels(out, unit, levels)
        _same(out, wanted)
    wide = np.zeros(2 * levels.size, np.float32)
    compiled.add_levels(wide[::2], unit, levels)
    assert np.array_equal(wide[::2], levels * np.float32(unit))
    assert not wide[1::2].any()


@given(LEVELS, st.integers(1, 4))
@example(np.arange(-LARGE, LARGE + 7, dtype=np.int32), 3)
def test_planes_of_zigzag_numbers(compiled: Loops, levels: np.ndarray, planes: int) -> None:
    numbers = np.array([2 * q if q >= 0 else -2 * q - 1 for q in levels.tolist()])
    for loops in (compiled, plain):
        out = np.empty((planes, levels.size), np.uint8)
        loops.to_planes(levels, out)
        for plane in range(planes):
            assert np.array_equal(out[plane], (numbers >> 8 * plane) & 255)


@given(st.binary(min_size=16, max_size=16))
@example(bytes(16))
@example(b"\xff" * 4 + bytes(12))
def test_the_words_of_a_seed_are_numpys(compiled: Loops, entropy: bytes) -> None:
    expected = np.random.SeedSequence(int.from_bytes(entropy, "little")).generate_state(4, np.uint64)
    for loops in (compiled, plain):
        _same(loops.seed_words(entropy), expected)


@given(st.binary(min_size=16, max_size=16), st.integers(0, 300))
@example(bytes(16), LARGE + 1)
@example(b"\xff" * 16, 3)
def test_an_order_is_that_of_numpys_generator(compiled: Loops, entropy: bytes, count: int) -> None:
    expected = np.random.default_rng(int.from_bytes(entropy, "little")).permutation(count)
    for loops in (compiled, plain):
        _same(loops.permuted(entropy, count), expected)


def crc_of(data: bytes, crc: int) -> int:
    """By bits, as it is defined."""
    state = crc ^ 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0xEDB88320 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


@given(st.binary(max_size=400), BITS, st.integers(0, 20))
@example(b"123456789", 0, 0)
@example(bytes(range(200)), 0, 1)  # 64 and more: by products without carries
def test_checksums(compiled: Loops, data: bytes, crc: int, start: int) -> None:
    part = memoryview(data)[start:]
    assert compiled.crc32(part, crc) == plain.crc32(part, crc) == crc_of(data[start:], crc)


def test_checksums_of_much_and_the_known_one(compiled: Loops) -> None:
    data = np.random.default_rng(3).bytes(3 * LARGE + 41)
    assert compiled.crc32(b"123456789") == 0xCBF43926
    assert compiled.crc32(data) == plain.crc32(data) == compiled.crc32(data[100:], compiled.crc32(data[:100]))


@pytest.mark.parametrize("places", [[0, 3], [-4, 0]])
def test_no_place_beyond_the_end(compiled: Loops, places: list[int]) -> None:
    out = np.zeros(3, np.float32)
    for loops in (compiled, plain):
        with pytest.raises(IndexError):
            loops.add_sparse(out, 1.0, np.array(places), np.ones(2, np.float32))
    assert not out.any()


SAYS = "from anabranch.core.kernels.chosen import loops; print(loops.__name__.rpartition('.')[2])"


def test_numpy_where_it_is_asked_for() -> None:
    """By a variable that is no setting of a run, and that commands let stand."""
    environment = os.environ | {"ANABRANCH_KERNELS": "numpy"}
    for code, said in (
        (SAYS, "plain"),
        ("from anabranch.api.configuration import load_config; load_config()", ""),
    ):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert (done.stdout.strip(), done.stderr) == (said, "")
