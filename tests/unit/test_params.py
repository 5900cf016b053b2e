"""Layouts and vectors."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.compress.codec import Raw
from anabranch.compress.model import decode_model, encode_model
from anabranch.compress.registry import make_codec
from anabranch.core.errors import InvalidUpdate, ManifestMismatch, UnknownCodec
from anabranch.core.limits import Limits
from anabranch.core.model.arrays import BLOCK
from anabranch.core.model.params import ParamSpec, SparseVector, add_scaled, digest
from anabranch.core.model.submodels import Coordinates
from anabranch.core.model.updates import find_flaw

MODEL: dict[str, Any] = {
    "conv": np.arange(12, dtype=np.float32).reshape(3, 2, 2),
    "seen": np.array(5, np.int64),
    "bias": np.array([0.5, -0.5, 0.25], np.float32),
    "mask": np.array([True, False]),
}
SPEC = ParamSpec.of(MODEL)
ONE_OVER = "delta has 1 values that are over 8, the first in tensor 'bias'"
NOT_FINITE = "delta has 1 values that are not finite, the first in tensor 'bias'"
FLAWS_AT_THE_BOUNDS = [
    (1, 8.0, ""),
    (5, -8.0, ""),
    (0, 0.0, "at least 1 example, at most 5"),
    (6, 0.0, "at least 1 example, at most 5"),
    (1, 8.0 + 2.0**-20, ONE_OVER),
    (1, -8.0 - 2.0**-20, ONE_OVER),
    (1, -np.inf, NOT_FINITE),
    (1, np.nan, NOT_FINITE),
]


def test_floats_are_the_vector_and_the_rest_is_frozen() -> None:
    assert SPEC.size == 15
    assert SPEC.slices == {"conv": slice(0, 12), "bias": slice(12, 15)}
    assert sorted(SPEC.frozen(MODEL)) == ["mask", "seen"]


def test_flatten_and_unflatten_are_inverse() -> None:
    back = SPEC.unflatten(SPEC.flatten(MODEL), SPEC.frozen(MODEL))
    assert list(back) == list(MODEL)
    assert all(np.array_equal(back[n], MODEL[n]) and back[n].dtype == MODEL[n].dtype for n in MODEL)


def test_half_precision_travels_as_float32_and_comes_back() -> None:
    spec = ParamSpec.of({"w": np.array([0.1, 0.2], np.float16)})
    assert spec.vector_dtype == np.float32
    assert spec.unflatten(spec.flatten({"w": np.array([0.1, 0.2], np.float16)}))["w"].dtype == np.float16


def test_the_layout_hash_is_of_names_shapes_and_dtypes() -> None:
    assert ParamSpec.from_json(SPEC.to_json()) == SPEC
    assert SPEC.layout_hash == ParamSpec.of({n: a + a for n, a in MODEL.items()}).layout_hash
    for other in ({"w": np.zeros(3)}, {"w": np.zeros(4, np.float32)}, {"v": np.zeros(3, np.float32)}):
        assert ParamSpec.of(other).layout_hash != ParamSpec.of({"w": np.zeros(3, np.float32)}).layout_hash


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.pop("bias"), "'bias' is missing"),
        (lambda m: m.update(extra=np.zeros(1)), "'extra' is not in the manifest"),
        (
            lambda m: m.update(bias=np.zeros(4, np.float32)),
            r"'bias' has shape \(4,\), the manifest says \(3,\)",
        ),
    ],
)
def test_another_model_is_refused(change: Any, words: str) -> None:
    model = dict(MODEL)
    change(model)
    with pytest.raises(ManifestMismatch, match=words):
        SPEC.flatten(model)


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800", 0, ("layer", "w")])
def test_a_name_that_no_file_holds(name: Any) -> None:
    tensors: Any = {"": np.zeros(2), name: np.zeros(2)}
    with pytest.raises(InvalidUpdate, match=r"no tensor can be called|name it by a str"):
        ParamSpec.of(tensors)


def test_a_dtype_that_cannot_travel() -> None:
    with pytest.raises(InvalidUpdate, match="'c' is complex128"):
        ParamSpec.of({"c": np.zeros(2, np.complex128)})


@given(st.integers(0, 3 * BLOCK + 7), st.floats(-3, 3, width=32))
def test_add_scaled_is_the_plain_expression(size: Any, scale: Any) -> None:
    rng = np.random.default_rng(size)
    out, x = rng.standard_normal((2, size)).astype(np.float32)
    expected = out + np.float32(scale) * x
    add_scaled(out, scale, x)
    assert np.array_equal(out, expected)


def test_the_digest_is_of_the_little_endian_bytes() -> None:
    x = np.arange(3, dtype=np.float32)
    assert digest(x) == digest(x.astype(">f4")) == hashlib.sha256(x.tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("delta", "submodel", "examples", "words"),
    [
        (np.zeros(15, np.float32), None, 1, None),
        (np.zeros(2, np.float32), Coordinates(np.array([3, 9])), 1, None),
        (np.full(15, 1e11, np.float32), None, 1, None),
        (np.full(15, 3e38, np.float32), None, 1, "15 values that are over 1e"),
        (np.zeros(15, np.float32), None, 10**9 + 1, "at most 1000000000"),
        (np.zeros(15, np.float32), None, float("nan"), "examples is nan"),
        (np.zeros(14, np.float32), None, 1, r"shape \(14,\)"),
        (np.zeros((15, 1), np.float32), None, 1, r"shape \(15, 1\)"),
        (np.zeros(15, np.float64), None, 1, "float64"),
        (np.zeros(15, np.float32), None, 0, "at least 1 example"),
        (np.zeros(3, np.float32), Coordinates(np.array([3, 9])), 1, r"needs \(2,\)"),
        (np.array([0, np.inf], np.float32), Coordinates(np.array([3, 13])), 1, "tensor 'bias'"),
        (np.zeros(2, np.float32), Coordinates(np.array([9, 3])), 1, "strictly increasing"),
        (np.zeros(2, np.float32), Coordinates(np.array([3, 15])), 1, "within 0..14"),
        (np.zeros(0, np.float32), Coordinates(np.array([], np.int64)), 1, "non-empty"),
    ],
)
def test_flaws(delta: Any, submodel: Any, examples: Any, words: str) -> None:
    import re

    flaw = find_flaw(SPEC, delta, examples, submodel)
    assert flaw is None if words is None else flaw is not None and re.search(words, flaw)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("examples", "value", "words"), FLAWS_AT_THE_BOUNDS)
def test_flaws_at_the_bounds(examples: int, value: float, words: str, sparse: bool) -> None:
    limits = Limits(examples_max=5, delta_abs_max=8.0)
    delta: Any = np.zeros(15, np.float32)
    delta[13] = value
    if sparse:
        delta = SparseVector(np.array([2, 13]), delta[[2, 13]], 15)
    flaw = find_flaw(SPEC, delta, examples, None, limits)
    assert (flaw or "").endswith(words)
    assert bool(flaw) == bool(words)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_no_bound_is_wide_enough_for_what_is_not_finite(value: float) -> None:
    """One beyond all float32 would be infinite as such."""
    delta = np.zeros(15, np.float32)
    delta[13] = value
    flaw = find_flaw(SPEC, delta, 1, None, Limits(delta_abs_max=1e300))
    assert flaw == "delta has 1 values that are not finite, the first in tensor 'bias'"
    assert find_flaw(SPEC, np.full(15, -3.4e38, np.float32), 1, None, Limits(delta_abs_max=1e300)) is None


def test_models_of_equal_tensors_have_one_spec() -> None:
    """What is kept for a spec is found at once for the next run's, too."""
    again = {name: array.copy() for name, array in MODEL.items()}
    assert ParamSpec.of(again) is ParamSpec.of(MODEL)
    assert ParamSpec.of({**again, "more": np.zeros(2, np.float32)}) is not ParamSpec.of(MODEL)


def test_a_models_bytes_hold_the_frozen_tensors_too() -> None:
    vector, frozen = SPEC.flatten(MODEL), SPEC.frozen(MODEL)
    data = encode_model(Raw(), SPEC, vector, frozen)
    assert len(data) == 15 * 4 + 8 + 2
    back, back_frozen = decode_model(Raw(), SPEC, data)
    assert np.array_equal(back, vector)
    assert all(np.array_equal(back_frozen[n], frozen[n]) for n in frozen)
    for wrong in (data[:-1], data + b"x", b""):
        with pytest.raises(InvalidUpdate):
            decode_model(Raw(), SPEC, wrong)


def test_an_unknown_codec_names_the_known_ones() -> None:
    with pytest.raises(UnknownCodec, match="known: raw"):
        make_codec("rar")
