"""Codec chains: what comes back, how large it was, and what is refused."""

from __future__ import annotations

import re

import codec_golden as golden
import numpy as np
import pytest

from anabranch.compress.chain import _dense
from anabranch.compress.feedback import Uplink
from anabranch.compress.grid import PLANES, DenseLevels, Grid
from anabranch.compress.layout import Group, Layout
from anabranch.compress.registry import STAGES, make_codec, simulated_stages, stages
from anabranch.compress.selectors import Threshold, _sampled, _stride, kept_count
from anabranch.compress.stage import BLOCK, Dense, StageContext
from anabranch.core.errors import InvalidUpdate, UnknownCodec
from anabranch.core.kernels.chosen import loops
from anabranch.core.model.chains import parse_chain
from anabranch.core.model.params import ParamSpec, SparseVector, Vector, add_scaled, dense
from anabranch.core.model.submodels import Coordinates
from anabranch.testing.payloads import CHAINS, laplace, model

SPEC = model()
LAYOUT = Layout.of(SPEC)
MAIN, SMALL = LAYOUT.groups
# The most that a value may be off, in parts of the largest one: half a step, or a step at random.
ERRORS = {"f32": 0.0, "bf16": 2**-8, "int8": 0.51 / 127, "int4": 0.51 / 7, "e3m0": 0.255, "deadzone": 1.0}
SELECTORS = ("topk", "threshold", "mask", "deadzone")


def tolerance(text: str, x: Vector) -> float:
    """The largest error of a value that a chain keeps."""
    stages = {stage.name: stage.arguments for stage in parse_chain(text)}
    name = next((n for n in ERRORS if n in stages), "f32")
    return float(np.abs(x).max(initial=0)) * ERRORS[name] * (2.01 if "sr" in stages.get(name, ()) else 1)


def off(text: str, found: Vector, wanted: Vector) -> float:
    """The largest error: of every value, or of those that a chain has chosen."""
    errors = np.abs(found.astype(np.float64) - wanted)
    return float((errors[found != 0] if text.startswith(SELECTORS) else errors).max(initial=0))


def group_values(x: Vector, group: Group = MAIN) -> Vector:
    return np.array(group.gather(x), np.float32)


def round_trip(text: str, x: Vector, layout: Layout = LAYOUT, seed: int = 7) -> Vector:
    codec = make_codec(text)
    data = codec.encode(x, layout, seed)
    assert len(data) <= codec.bytes_max(layout)
    assert codec.encode(x, layout, seed) == data
    decoded = codec.decode(data, layout)
    if isinstance(decoded, SparseVector):
        assert decoded.indices.dtype == np.int64
        assert len(set(decoded.indices.tolist())) == decoded.indices.size == decoded.values.size
    found = dense(decoded)
    assert found.dtype == layout.dtype
    assert found.shape == (layout.size,)
    out = np.full(layout.size, 0.5, layout.dtype)
    add_scaled(out, 0.25, decoded)
    assert np.allclose(out, 0.5 + 0.25 * found, rtol=1e-6, atol=1e-6)
    return found


@pytest.mark.parametrize("kept", [0, 1, 10, 1000, 10**9], ids=["none", "one", "0.1 %", "10 %", "all"])
@pytest.mark.parametrize("text", CHAINS)
def test_what_comes_back_is_near_what_went_in(text: str, kept: int) -> None:
    x = laplace(SPEC.size)
    x[np.random.default_rng(0).permutation(x.size)[kept:]] = 0
    found, wanted = group_values(round_trip(text, x)), group_values(x)
    assert off(text, found, wanted) <= tolerance(text, wanted)
    assert np.allclose(group_values(x, SMALL), group_values(round_trip(text, x), SMALL), rtol=2**-8, atol=0)


def test_bf16_takes_the_even_neighbour_of_two_that_are_as_near() -> None:
    for value, expected in ((1 + 2**-8, 1.0), (1 + 3 * 2**-8, 1 + 2**-6), (1 + 2**-8 + 2**-20, 1 + 2**-7)):
        found = group_values(round_trip("bf16", np.full(SPEC.size, value, np.float32)))
        assert set(found.tolist()) == {expected}


@pytest.mark.parametrize("text", CHAINS)
@pytest.mark.parametrize("value", [1e-45, 1e-38, 1e-32, 3.4028235e38, -3.4028235e38, 1.0])
def test_tiny_and_huge_values_stay_finite(text: str, value: float) -> None:
    x = np.full(SPEC.size, value, np.float32)
    x[::3] *= np.float32(0.25)
    found = group_values(round_trip(text, x))
    assert np.isfinite(found).all()
    assert off(text, found, group_values(x)) <= max(1.01 * tolerance(text, x), 1e-30)


@pytest.mark.parametrize("size", [1, 2, 31, 255, 256, 257, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 100])
@pytest.mark.parametrize(
    "text", ["int8", "int4", "int4(32,sr)", "e3m0(32)", "bf16", "topk(0.3)|int4|gaps|zstd"]
)
def test_every_size(text: str, size: int) -> None:
    layout = Layout.of(ParamSpec.of({"w": np.zeros((1, size), np.float32)}))
    x = laplace(size)
    found = round_trip(text, x, layout)
    assert off(text, found, x) <= tolerance(text, x)
    assert found.any()


@pytest.mark.parametrize("text", CHAINS)
def test_models_of_float64_are_sent_as_float32(text: str) -> None:
    spec = model(dtype=np.float64)
    layout = Layout.of(spec)
    x = laplace(spec.size, dtype=np.float64)
    found = round_trip(text, x, layout)
    assert found.dtype == np.float64
    assert np.array_equal(found, round_trip(text, x.astype(np.float32)).astype(np.float64))


@pytest.mark.parametrize("text", CHAINS)
def test_a_sub_model_is_its_own_layout_and_costs_no_indices(text: str) -> None:
    covered = np.flatnonzero(np.random.default_rng(1).random(SPEC.size) < 0.4)
    layout = Layout.of(SPEC, Coordinates(covered))
    x = laplace(SPEC.size)[covered]
    found, wanted = (group_values(values, layout.groups[0]) for values in (round_trip(text, x, layout), x))
    assert off(text, found, wanted) <= tolerance(text, wanted)
    dense_bytes = len(make_codec("int8").encode(x, layout))
    assert dense_bytes < 1.02 * covered.size + 300


def test_one_model_cannot_be_decoded_as_another() -> None:
    data = make_codec("int8").encode(laplace(SPEC.size), LAYOUT)
    other = Layout.of(SPEC, Coordinates(np.arange(1, SPEC.size)))
    with pytest.raises(InvalidUpdate, match="another layout"):
        make_codec("int8").decode(data, other)


def test_the_raw_chain_changes_no_bit() -> None:
    x = laplace(SPEC.size)
    x[:4] = [-0.0, 1e-45, 3.4e38, -1e-38]
    for text in ("raw", "f32", "f32|zstd"):
        codec = make_codec(text)
        decoded = dense(codec.decode(codec.encode(x, LAYOUT), LAYOUT))
        kept = slice(None) if text == "raw" else slice(*MAIN.runs[0])
        assert np.array_equal(decoded[kept].view(np.uint32), x[kept].view(np.uint32))
    assert make_codec("raw").encode(x, LAYOUT) == x.tobytes()


def test_who_goes_through_blocks_hears_of_errors_as_before() -> None:
    """Wide values are narrowed without a warning, inside alone."""
    spec = model(dtype=np.float64)
    group, before = Layout.of(spec).groups[0], np.geterr()
    for block in _dense(np.full(spec.size, 1e300), group).blocks():
        assert np.geterr() == before
        assert np.isinf(block).all()


@pytest.mark.parametrize("n", [2, 8192, 9000, 300_000])
@pytest.mark.parametrize("rho", [0.001, 0.01, 0.1, 0.9, 1.0])
def test_top_k_is_exact(n: int, rho: float) -> None:
    layout = Layout.of(ParamSpec.of({"w": np.zeros((1, n), np.float32)}))
    for x in (laplace(n), np.round(laplace(n), 3), np.repeat(np.array([1, -1], np.float32), n // 2)):
        k = kept_count(rho, n)
        codec = make_codec(f"topk({rho:g})")
        found = codec.decode(codec.encode(x, layout), layout)
        assert isinstance(found, SparseVector)
        wanted = np.sort(np.argsort(-np.abs(x), kind="stable")[:k])
        wanted = wanted[x[wanted] != 0]
        assert np.array_equal(found.indices, wanted)
        assert np.array_equal(found.values, x[wanted])


def test_the_guess_of_a_threshold_may_be_wrong() -> None:
    """All that is large is where the sample looks, so the guess is far too high."""
    n = 200_000
    x = np.full(n, 0.5, np.float32)
    layout = Layout.of(ParamSpec.of({"w": np.zeros((1, n), np.float32)}))
    for start in range(0, n, BLOCK):
        block = x[start : start + BLOCK]
        block[:] = np.arange(block.size)
        sampled = _sampled(block, _stride(n)).astype(int)
        block[:] = 0.5
        block[sampled] = 2.0
    codec = make_codec("topk(0.5)")
    found = codec.decode(codec.encode(x, layout), layout)
    assert isinstance(found, SparseVector)
    assert found.indices.size == n // 2
    assert (dense(found)[x == 2.0] == 2.0).all()


def test_random_rounding_is_unbiased() -> None:
    x = np.full(40_000, 0.3, np.float32)
    x[::256] = 1.0
    layout = Layout.of(ParamSpec.of({"w": np.zeros((1, x.size), np.float32)}))
    for text, step in (("int8(256,sr)", 1 / 127), ("int4(256,sr)", 1 / 7)):
        codec = make_codec(text)
        found = np.mean([dense(codec.decode(codec.encode(x, layout, s), layout))[1::256] for s in range(40)])
        assert abs(found - 0.3) < 0.02 * step
        assert codec.encode(x, layout, 1) != codec.encode(x, layout, 2)


def test_a_threshold_is_kept_between_updates_and_follows_the_density() -> None:
    codec, notes = make_codec("threshold(0.1)|f32|gaps"), dict[str, float]()
    wanted, sizes, taus = kept_count(0.1, MAIN.size), [], []
    for task in range(40):
        x = laplace(SPEC.size) * np.float32(1.02**task)
        decoded = codec.decode(codec.encode(x, LAYOUT, notes=notes), LAYOUT)
        assert isinstance(decoded, SparseVector)
        sizes.append((decoded.indices.size - SMALL.size) / wanted)
        taus.append(notes["tau"])
        assert notes["tasks"] == task % 32 + 1
    assert sizes[0] == 1.0 == sizes[32]
    assert 0.7 <= min(sizes) < max(sizes) <= 1.3
    assert len(set(taus)) > 30


@pytest.mark.parametrize("tau", [float("nan"), float("inf"), -1.0, 0.0, 1e30, 1e-30])
def test_a_threshold_that_does_not_fit_is_taken_anew(tau: float) -> None:
    notes = {"tau": tau, "tasks": 3.0}
    make_codec("threshold(0.1)").encode(laplace(SPEC.size), LAYOUT, notes=notes)
    assert 0 < notes["tau"] < 1
    assert notes["tasks"] == 1
    make_codec("threshold(0.1)").encode(np.zeros(SPEC.size, np.float32), LAYOUT, notes=notes)
    assert notes["tau"] == 0


def test_a_mask_is_of_its_seed_and_its_values_are_not_scaled() -> None:
    codec, x = make_codec("mask(0.1)|f32"), laplace(SPEC.size)
    found = [codec.decode(codec.encode(x, LAYOUT, seed), LAYOUT) for seed in (1, 1, 2, -1)]
    values = [group_values(dense(f)) for f in found]
    places = [np.flatnonzero(v).tolist() for v in values]
    assert places[0] == places[1] != places[2]
    for v, kept in zip(values, places, strict=True):
        assert len(kept) == kept_count(0.1, MAIN.size)
        assert np.array_equal(v[kept], group_values(x)[kept])


def test_a_dead_zone_keeps_about_its_share_and_errs_less_than_its_step() -> None:
    x = laplace(SPEC.size)
    for rho in (0.01, 0.1, 0.5):
        codec = make_codec(f"deadzone({rho})|gaps|huffman")
        found, wanted = group_values(dense(codec.decode(codec.encode(x, LAYOUT), LAYOUT))), group_values(x)
        kept = found != 0
        step = np.abs(found[kept]).min()
        assert 0.97 * rho <= kept.mean() <= 1.03 * rho
        assert np.abs(found - wanted).max() <= 0.61 * step
        assert np.allclose(found / step, np.rint(found / step), atol=1e-3)


def test_sizes() -> None:
    """A model of 100,000 values: the framing is small change."""
    spec = ParamSpec.of({"w": np.zeros((100, 990), np.float32), "b": np.zeros(1000, np.float32)})
    layout, x = Layout.of(spec), laplace(100_000)
    for text, most in (
        ("int8", 1.012),
        ("topk(0.1)|int8(256)|gaps|zstd", 0.165),
        ("topk(0.1)|int4(256)|gaps|zstd", 0.115),
        ("deadzone(0.1)|gaps|huffman", 0.095),
    ):
        size = len(make_codec(text).encode(x, layout)) - 2 * 1000
        assert size <= most * 99_000, text
    empty = make_codec("topk(0.1)|int8(256)|gaps|zstd").encode(0 * x, layout)
    assert len(empty) < 2 * 1000 + 100


@pytest.mark.parametrize("text", CHAINS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_sent(text: str, bad: float) -> None:
    for at in (0, MAIN.runs[0][1] - 1, SMALL.runs[0][0]):
        x = laplace(SPEC.size)
        x[at] = bad
        with pytest.raises(InvalidUpdate, match="not finite"):
            make_codec(text).encode(x, LAYOUT)
    wide = model(dtype=np.float64)
    y = laplace(wide.size, dtype=np.float64)
    y[5] = 1e300
    with pytest.raises(InvalidUpdate, match="not finite"):
        make_codec(text).encode(y, Layout.of(wide))


def test_a_vector_of_another_length_is_not_encoded() -> None:
    with pytest.raises(InvalidUpdate, match="shape"):
        make_codec("int8").encode(np.zeros(3, np.float32), LAYOUT)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raw|zstd", "raw stands alone"),
        ("ring(32,20)|zstd", "ring stands alone"),
        ("topk(0.1)|ring(32,20)", "ring stands alone"),
        ("ring", "as in ring(32,20)"),
        ("ring(32)", "as in ring(32,20)"),
        ("ring(32,20,1)", "as in ring(32,20)"),
        ("ring(32,-2)", "as in ring(32,20)"),
        ("ring(24,20)", "numbers of 32 or 16 bits"),
        ("ring(16,17)", "of which a value has 2 or more"),
        ("ring(16,1)", "of which a value has 2 or more"),
        ("f16", "unknown stage 'f16'; known: raw, topk"),
        ("topk", "topk(0.1)"),
        ("topk(0)", "(0, 1]"),
        ("topk(1.5)", "(0, 1]"),
        ("topk(nan)", "(0, 1]"),
        ("topk(0.1,3)", "too many arguments for topk, at most 1"),
        ("threshold(0.1,0)", "from 1 to 10000"),
        ("deadzone(step)", "the step is a number"),
        ("deadzone(step,-1)", "the step is a number"),
        ("int8(100)", "a block is of (32, 64, 128, 256) values"),
        ("int8(sr,64)", "sr comes after it"),
        ("zstd(30)", "from 1 to 19"),
        ("int8|topk(0.1)", "topk comes before int8"),
        ("topk(0.1)|zstd|gaps", "gaps comes before zstd"),
        ("topk(0.1)|mask(0.1)", "one of topk, threshold, mask"),
        ("topk(0.1)|deadzone(0.1)", "leave topk out"),
        ("deadzone(0.1)|int8", "one of f32, bf16"),
        ("e3m0(256,sr)", "too many arguments for e3m0, at most 1"),
        ("e3m0(100)", "a block is of (32, 64, 128, 256) values"),
        ("int4|gaps", "no indices to code, leave gaps out"),
        ("mask(0.1)|int4|bitmap", "leave bitmap out"),
    ],
)
def test_chains_that_make_no_sense_are_refused_with_the_fix(text: str, words: str) -> None:
    with pytest.raises(UnknownCodec, match=re.escape(words)):
        make_codec(text)


def test_every_stage_is_announced_with_its_version() -> None:
    covered = {stage.name for text in CHAINS for stage in parse_chain(text)}
    spoken_for = {"raw", "ef", "momentum", "log", "logparts"}
    assert {name.partition(":")[0] for name in stages()} - spoken_for == covered
    assert all(re.fullmatch(r"[a-z0-9]+:[0-9]+", name) for name in stages())


def test_a_simulated_device_says_later_stages_where_its_run_has_them() -> None:
    """Else the log of a simulation would not be what it was before there were any."""
    assert simulated_stages("auto") == simulated_stages("ef(0.9)|int4(256)|zstd") == STAGES
    assert not {"e3m0:1", "momentum:1"} & {*STAGES}
    assert simulated_stages("ef(0.9)|e3m0(256)|zstd") == (*STAGES, "e3m0:1")
    assert simulated_stages("momentum(0.9)|e3m0") == (*STAGES, "e3m0:1", "momentum:1")
    assert simulated_stages("momentum(0.9)|e3m0(256)|logparts") == stages()


def test_masked_numbers_travel_as_they_are() -> None:
    for bits, kind in ((32, "<u4"), (16, "<u2")):
        codec = make_codec(f"ring({bits},9)")
        numbers = np.arange(LAYOUT.size).astype(kind) * np.array(1_000_003 % 2**bits, kind)
        data = codec.encode(numbers, LAYOUT)
        assert data == numbers.tobytes()
        assert len(data) == codec.bytes_max(LAYOUT) == LAYOUT.size * bits // 8
        decoded = codec.decode(data, LAYOUT)
        assert isinstance(decoded, np.ndarray)
        assert (decoded.dtype, decoded.tobytes()) == (np.dtype(kind), data)
        for wrong in (data[:-1], data + b"\0", b""):
            with pytest.raises(InvalidUpdate, match=f"{LAYOUT.size} numbers need"):
                codec.decode(wrong, LAYOUT)
        for not_masked in (numbers.astype(np.float32), numbers.astype("<i4"), numbers[1:]):
            with pytest.raises(InvalidUpdate, match=r"runs with \[secagg\]"):
                codec.encode(not_masked, LAYOUT)
    with pytest.raises(UnknownCodec, match="leave ef out"):
        Uplink("ef(0.9)|ring(32,20)")


def test_gaps() -> None:
    for indices in ([], [0], [254], [255], [256], [510], [0, 1, 2], [3, 3 + 256, 10_000], [70_000]):
        given = np.array(indices, np.int64)
        assert loops.read_gaps(loops.write_gaps(given), given.size, 70_001).tolist() == indices
    many = np.flatnonzero(np.random.default_rng(0).random(3 * BLOCK) < 0.7)
    assert np.array_equal(loops.read_gaps(loops.write_gaps(many), many.size, 3 * BLOCK), many)


@pytest.mark.parametrize("text", ["f32", "f32|zstd", "topk(1)|f32|bitmap"])
def test_the_identity_chain_is_no_chain(text: str) -> None:
    x = golden.vector()
    decoded = dense(make_codec(text).decode(make_codec(text).encode(x, golden.LAYOUT), golden.LAYOUT))
    raw = make_codec("raw").decode(make_codec("raw").encode(x, golden.LAYOUT), golden.LAYOUT)
    assert decoded.tobytes() == dense(raw).tobytes()


# --- what a layout puts together, and what a stage takes ---------------------------------------


def test_matrices_side_by_side_are_one_run() -> None:
    """Of a whole model, and of what any set of coordinates covers of it."""
    shapes = {"a": (4, 5), "b": (3, 5), "bias": (2,), "c": (6, 5)}
    spec = ParamSpec.of({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    main, small = Layout.of(spec).groups
    assert (main.runs, small.runs) == (((0, 35), (37, 67)), ((35, 37),))
    covered = Coordinates(np.array([0, 1, 19, 20, 36, 40, 66]))
    main, small = Layout.of(spec, covered).groups
    assert (main.runs, small.runs) == (((0, 4), (5, 7)), ((4, 5),))


@pytest.mark.parametrize(("top", "streams"), [(0, 1), (127, 1), (-128, 1), (128, 2), (2**15, 3)])
def test_levels_take_as_many_bytes_as_the_largest_needs(top: int, streams: int) -> None:
    levels = np.array([0, top, -1, 1], np.int32)
    coded = DenseLevels().encode(Grid(levels, -3), StageContext(4))
    assert len([role for role in coded.streams if role in PLANES]) == streams
    assert np.array_equal(DenseLevels().decode(coded, StageContext(4)).levels, levels)


def test_a_first_threshold_is_none_at_all() -> None:
    """A tenth and a little more are over 1: only the largest tenth of them is sent."""
    x = np.concatenate([np.linspace(1.5, 3.0, 120), np.full(880, 0.5)]).astype(np.float32)
    found = Threshold(0.1).encode(Dense.of(x), StageContext(x.size))
    assert np.array_equal(found.indices, np.arange(20, 120))


@pytest.mark.parametrize(
    ("text", "most"),
    [("int8(64,sr,1)", 2), ("int4(64,sr,1)", 2), ("zstd(3,4)", 1), ("bf16(1)", 0), ("topk(0.1,2)", 1)],
)
def test_a_stage_says_how_many_arguments_it_takes(text: str, most: int) -> None:
    with pytest.raises(UnknownCodec, match=f"at most {most}$"):
        make_codec(text)
