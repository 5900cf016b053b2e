"""Any vector comes back within its codec's error; any damaged payload is refused or of finite values."""

from __future__ import annotations

import logging
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.compress.chain import Chain
from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core.model.params import ParamSpec, dense
from anabranch.testing.payloads import CHAINS, damaged, laplace, model
from anabranch.testing.stage import verdict

SPEC = model()
LAYOUT = Layout.of(SPEC)
PAYLOADS = {text: make_codec(text).encode(laplace(SPEC.size), LAYOUT, 3) for text in CHAINS}
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MEMORY_BYTES_MAX = 16_000_000
SPARSE = ("topk", "threshold", "deadzone", "mask")
SCALED = 1.02  # a scale of bf16 is up to 2^-7 larger than it need be
# How far a value that is sent may be off, as a share of the largest one: half a level, or, drawn, a level.
ERRORS: dict[str, float] = {
    **dict.fromkeys(["f32", "topk(0.1)", "mask(0.5)|f32|zstd"], 0.0),
    **dict.fromkeys(["bf16", "bf16|zstd", "topk(0.01)|bf16|u32|zstd"], 2**-8),
    **dict.fromkeys(
        ["int8", "topk(0.1)|int8(256)|gaps|zstd", "threshold(0.1)|int8(128)|gaps|huffman"], SCALED / 254
    ),
    "int8(32,sr)|zstd": SCALED / 127,
    **dict.fromkeys(["int4|huffman", "topk(0.25)|int4|bitmap|zstd(3)", "mask(0.1)|int4"], SCALED / 14),
    "int4(64,sr)": SCALED / 7,
    **dict.fromkeys(["e3m0(64)", "topk(0.25)|e3m0|gaps|zstd"], SCALED / 4),
    **dict.fromkeys(["deadzone(0.1)|gaps|huffman", "deadzone(step,0.01)|bitmap|zstd"], 1.0),
}


@settings(max_examples=200)
@given(st.data())
def test_any_vector_survives_any_chain(data: Any) -> None:
    text = data.draw(st.sampled_from(CHAINS))
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    spec = ParamSpec.of({"w": np.zeros((rows, columns), np.float32), "b": np.zeros(rows, np.float32)})
    x = np.zeros(spec.size, np.float32)
    values = data.draw(st.lists(FINITE, max_size=spec.size))
    x[: len(values)] = values
    x = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(x)
    layout, codec = Layout.of(spec), make_codec(text)
    payload = codec.encode(x, layout, data.draw(st.integers(-(2**63), 2**64)))
    assert len(payload) <= codec.bytes_max(layout)
    assert verdict(codec, payload, layout) == "taken"
    found = dense(codec.decode(payload, layout)).astype(np.float64)
    apart, top = np.abs(found - x), float(np.abs(x).max())
    # A dead zone's step covers 2^22 levels at least, so the rest can be far below it.
    assert (apart <= top + 1e-30).all()
    sent = found != 0 if text.startswith(SPARSE) else np.ones(x.size, bool)
    assert (apart[sent] <= ERRORS[text] * top + 1e-30).all()


@given(st.sampled_from(CHAINS), st.binary(max_size=300))
def test_noise_is_refused(text: str, noise: bytes) -> None:
    assert verdict(make_codec(text), noise, LAYOUT) in ("InvalidUpdate", "TooLarge")
    grafted = PAYLOADS[text][: len(PAYLOADS[text]) // 2] + noise
    assert verdict(make_codec(text), grafted, LAYOUT) in ("InvalidUpdate", "TooLarge")


@settings(max_examples=300)
@given(st.sampled_from(CHAINS), st.integers(0, 2**32))
def test_damaged_payloads_are_refused_or_of_finite_values(text: str, seed: int) -> None:
    payload = damaged(PAYLOADS[text], np.random.default_rng(seed))
    verdict(make_codec(text), payload, LAYOUT)


def batter(layout: Layout, payloads: dict[str, bytes], count: int) -> tuple[Counter[str], int]:
    """What became of so many damaged payloads, and the most memory that any of them took."""
    draw, texts, verdicts = np.random.default_rng(20_260_101), list(payloads), Counter[str]()
    tracemalloc.start()
    try:
        for i in range(count):
            text = texts[i % len(texts)]
            verdicts[verdict(make_codec(text), damaged(payloads[text], draw), layout)] += 1
        return verdicts, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_two_thousand_damaged_payloads() -> None:
    verdicts, peak = batter(LAYOUT, PAYLOADS, 2_000)
    assert set(verdicts) == {"InvalidUpdate", "TooLarge", "taken"}
    assert verdicts["InvalidUpdate"] > 1_000
    assert peak < MEMORY_BYTES_MAX


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_damaged_payloads() -> None:
    """With `--log-cli-level=info` it says what became of them."""
    spec = ParamSpec.of({"w": np.zeros((99, 1000), np.float32), "b": np.zeros(1000, np.float32)})
    layout = Layout.of(spec)
    payloads = {text: make_codec(text).encode(laplace(spec.size), layout, 3) for text in CHAINS}
    verdicts, peak = batter(layout, payloads, 100_000)
    logging.getLogger(__name__).info("%s, at most %.2f MB", dict(verdicts), peak / 1e6)
    assert verdicts["InvalidUpdate"] + verdicts["TooLarge"] > 50_000
    assert peak < MEMORY_BYTES_MAX


def test_every_chain_of_these_tests_is_a_chain() -> None:
    assert all(isinstance(make_codec(text), Chain) for text in CHAINS)
    assert ERRORS.keys() == set(CHAINS)
