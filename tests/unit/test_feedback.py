"""Error feedback: nothing that a codec leaves out is lost, and nothing counts before the server says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.compress.feedback import AGE_MAX, LENGTH_MAX, Memory, Uplink
from anabranch.compress.layout import Layout
from anabranch.core.errors import InvalidUpdate, UnknownCodec
from anabranch.core.model.params import ParamSpec, dense
from anabranch.core.model.submodels import Coordinates

SPEC = ParamSpec.of({"w": np.zeros((40, 30), np.float32), "b": np.zeros(30, np.float32)})
LOSSY = "topk(0.1)|int8(64)|gaps|zstd"


def delta(seed: int, size: int = SPEC.size) -> Any:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def encode(text: str, x: Any, memory: Memory | None = None, base: int = 0, **more: Any) -> Any:
    submodel = more.pop("submodel", None)
    uplink = Uplink(text)
    data, pending = uplink.encode(x, SPEC, submodel, memory, 7, base)
    return dense(uplink.codec.decode(data, Layout.of(SPEC, submodel))), pending


@settings(max_examples=30)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6))
def test_what_was_sent_and_what_is_left_are_what_was_trained(seeds: list[int]) -> None:
    memory, sent = None, np.zeros(SPEC.size, np.float64)
    for seed in seeds:
        values, memory = encode(f"ef(1)|{LOSSY}", delta(seed), memory)
        sent += values
    assert memory is not None
    trained = sum(delta(seed).astype(np.float64) for seed in seeds)
    assert np.allclose(sent + memory.residual, trained, atol=1e-3)


def test_the_decay_shrinks_what_is_carried() -> None:
    _, memory = encode(f"ef(0.5)|{LOSSY}", delta(1))
    values, after = encode(f"ef(0.5)|{LOSSY}", np.zeros(SPEC.size, np.float32), memory)
    assert np.allclose(values + after.residual, 0.5 * memory.residual, atol=1e-6)


def test_equal_inputs_give_equal_bytes_and_the_memory_is_not_written() -> None:
    _, memory = encode(f"ef(0.9)|{LOSSY}", delta(1))
    before = memory.residual.copy()
    uplink = Uplink(f"ef(0.9)|{LOSSY}")
    first, second = (uplink.encode(delta(2), SPEC, None, memory, 7, 0)[0] for _ in range(2))
    assert first == second
    assert np.array_equal(memory.residual, before)


def test_outside_a_submodel_the_residual_stays() -> None:
    _, memory = encode(f"ef(0.9)|{LOSSY}", delta(1))
    covered = Coordinates(np.arange(0, SPEC.size, 3))
    _, after = encode(f"ef(0.9)|{LOSSY}", delta(2, covered.indices.size), memory, submodel=covered)
    outside = np.setdiff1d(np.arange(SPEC.size), covered.indices)
    assert np.array_equal(after.residual[outside], memory.residual[outside])
    assert not np.array_equal(after.residual[covered.indices], memory.residual[covered.indices])


@pytest.mark.parametrize("base", [AGE_MAX + 1, -1])
def test_an_old_residual_is_forgotten(base: int) -> None:
    _, memory = encode(f"ef(0.9)|{LOSSY}", delta(1), base=0)
    fresh, _ = encode(f"ef(0.9)|{LOSSY}", delta(2), None, base=base)
    aged, _ = encode(f"ef(0.9)|{LOSSY}", delta(2), memory, base=base)
    young, _ = encode(f"ef(0.9)|{LOSSY}", delta(2), memory, base=AGE_MAX)
    assert np.array_equal(fresh, aged)
    assert not np.array_equal(fresh, young)


def test_a_residual_of_another_model_is_forgotten() -> None:
    other = Memory(np.ones(3, np.float32), 0, 1.0)
    assert np.array_equal(encode(f"ef(0.9)|{LOSSY}", delta(1), other)[0], encode(LOSSY, delta(1))[0])


def test_a_residual_is_cut_to_ten_mean_lengths() -> None:
    huge = Memory(np.full(SPEC.size, 1e6, np.float32), 0, 1.0)
    _, after = encode(f"ef(1)|{LOSSY}", delta(1), huge)
    assert np.linalg.norm(after.residual) == pytest.approx(LENGTH_MAX * after.length_mean, rel=1e-4)


def test_a_diverged_training_sends_nothing() -> None:
    bad = delta(1)
    bad[5] = np.nan
    for text in (f"ef(0.9)|{LOSSY}", LOSSY):
        with pytest.raises(InvalidUpdate, match="not finite"):
            encode(text, bad)


def test_a_chain_without_feedback_remembers_only_what_its_stages_note() -> None:
    assert encode(LOSSY, delta(1))[1] is None
    assert Uplink("raw").encode(delta(1), SPEC, None, None, 7, 0)[1] is None
    _, memory = encode("threshold(0.1,4)|int8|gaps", delta(1))
    assert memory.residual.size == 0
    assert memory.notes["tau"] > 0
    _, again = encode("threshold(0.1,4)|int8|gaps", delta(2), memory)
    assert again.notes["tasks"] == 2


@pytest.mark.parametrize(
    "text", ["ef(2)|int8", "ef|int8", "ef(0.9)", "ef(0.9)|", "ef(x)|int8", "ef(0.9)|nothing"]
)
def test_bad_texts_are_named(text: str) -> None:
    with pytest.raises(UnknownCodec):
        Uplink(text)


def test_what_a_dense_chain_rounds_away_is_carried() -> None:
    """Of every value; and a stage behind the feedback has its notes, from update to update."""
    sent, memory = encode("ef(1)|int8(64)", delta(1))
    assert np.array_equal(memory.residual, delta(1) - sent)
    _, first = encode("ef(0)|threshold(0.1,4)|int8|gaps", delta(1))
    _, second = encode("ef(0)|threshold(0.1,4)|int8|gaps", delta(2), first)
    assert (first.notes["tasks"], second.notes["tasks"]) == (1, 2)


def test_of_buffers_nothing_is_carried() -> None:
    """They travel as they are, also beside a coarse chain."""
    tensors = {"w": np.zeros((40, 30), np.float32), "mean": np.zeros(30, np.float32)}
    spec, uplink = ParamSpec.of(tensors, buffers=("mean",)), Uplink("ef(1)|int4(64)")
    data, memory = uplink.encode(delta(1, spec.size), spec, None, None, 7, 0)
    at, sent = spec.slices["mean"], dense(uplink.codec.decode(data, Layout.of(spec)))
    assert memory is not None
    assert np.array_equal(sent[at], delta(1, spec.size)[at])
    assert not memory.residual[at].any()
    assert memory.residual.any()


@pytest.mark.parametrize("chain", ["raw", "f32", "int8(64)", "topk(0.1)|int8(64)|gaps"])
def test_of_a_model_of_float64_what_is_sent_and_what_is_left_are_what_was_trained(chain: str) -> None:
    """Raw is exact; of the others what float32 rounds away is left, too."""
    spec, uplink = ParamSpec.of({"w": np.zeros((40, 30), np.float64)}), Uplink(f"ef(1)|{chain}")
    trained = np.random.default_rng(1).standard_normal(spec.size)
    data, memory = uplink.encode(trained, spec, None, None, 7, 0)
    sent = dense(uplink.codec.decode(data, Layout.of(spec)))
    assert memory is not None
    assert sent.dtype == np.float64
    assert memory.residual.dtype == np.float32
    assert np.allclose(sent + memory.residual, trained, rtol=0, atol=1e-12 if chain == "f32" else 1e-6)
    assert np.array_equal(sent, trained) is (chain == "raw")
    assert memory.residual.any() == (chain != "raw")
