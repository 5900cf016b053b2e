"""What every stage of a codec chain must do: compress/stage.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anabranch.compress.codec import Codec
from anabranch.compress.layout import Layout
from anabranch.compress.registry import CODEC_STAGES, make_codec
from anabranch.core.errors import InvalidUpdate, TooLarge
from anabranch.core.model.chains import parse_chain
from anabranch.core.model.params import SparseVector, Vector, dense
from anabranch.core.parts import PartKind
from anabranch.testing.kind import check_of_kind
from anabranch.testing.payloads import damaged, laplace, model

SPEC = model()
LAYOUT = Layout.of(SPEC)
CODED = np.concatenate([np.arange(*run) for run in LAYOUT.groups[0].runs])  # the rest travels as it is
DAMAGES = 200
ROUGHLY = 0.35


def verdict(codec: Codec, data: bytes, layout: Layout) -> str:
    """What becomes of a payload. Only the two errors of a decoder may come out; values are checked."""
    try:
        decoded = codec.decode(data, layout)
    except (InvalidUpdate, TooLarge) as error:
        return type(error).__name__
    values = decoded.values if isinstance(decoded, SparseVector) else decoded
    assert np.isfinite(values).all()
    if isinstance(decoded, SparseVector):
        indices = np.sort(decoded.indices)
        assert decoded.indices.shape == decoded.values.shape
        assert (np.diff(indices) > 0).all()
        assert 0 <= indices[0] <= indices[-1] < layout.size
    assert dense(decoded).shape == (layout.size,)
    return "taken"


def how_far_off(codec: Codec, x: Vector) -> float:
    """By which part of itself what arrives is too long or too short, to be as near as it can be.

    Or on average, where that is less: a stage that draws may send what is long, and right in the mean.
    """
    arrived = dense(codec.decode(codec.encode(x, LAYOUT), LAYOUT))
    sent, found = x[CODED].astype(np.float64), arrived[CODED].astype(np.float64)
    along = float(found @ sent)
    if not along:
        return 1.0
    return min(abs(along / float(found @ found) - 1), abs(along / float(sent @ sent) - 1))


class StageConformance:
    """Say `stage`, your class, and write the fixture `chain`: the text of a chain that has it."""

    kind: PartKind = CODEC_STAGES
    stage: type[Any] | None = None

    @pytest.fixture
    def chain(self) -> str:
        raise NotImplementedError("write the fixture `chain`: the text of a chain that has your stage")

    @pytest.fixture
    def codec(self, chain: str) -> Codec:
        if self.stage is not None and self.stage.name not in self.kind.names():
            self.kind.let_in(f"{self.stage.__module__}:{self.stage.__name__}", self.stage)
        return make_codec(chain)

    def test_it_has_what_a_stage_has_and_the_chain_has_it(self, chain: str) -> None:
        if self.stage is not None:
            check_of_kind(self.kind, self.stage)
            assert self.stage.name in [stage.name for stage in parse_chain(chain)]

    @pytest.mark.parametrize("seed", range(4))
    def test_any_vector_survives(self, codec: Codec, seed: int) -> None:
        x = laplace(SPEC.size, seed) * np.float32(10.0 ** (3 * seed))
        given = x.copy()
        payload = codec.encode(x, LAYOUT, seed)
        assert len(payload) <= codec.bytes_max(LAYOUT)
        assert verdict(codec, payload, LAYOUT) == "taken"
        found = dense(codec.decode(payload, LAYOUT)).astype(np.float64)
        np.testing.assert_array_equal(x, given, "the values to be encoded have changed")
        assert (np.abs(found - x) <= np.abs(x).astype(np.float64).max() + 1e-30).all()

    def test_what_arrives_is_of_the_direction_and_size_of_what_was_sent(self, codec: Codec) -> None:
        """Of values of one size at least: a stage may have a step of its own, or bounds."""
        off = [how_far_off(codec, laplace(SPEC.size, s) * np.float32(10.0 ** (3 * s))) for s in range(4)]
        assert min(off) < ROUGHLY, "what arrives is another vector, or of another length: is its scale sent?"

    def test_zeros_stay_zeros(self, codec: Codec) -> None:
        zeros = np.zeros(SPEC.size, np.float32)
        assert not dense(codec.decode(codec.encode(zeros, LAYOUT), LAYOUT)).any()

    def test_equal_calls_give_equal_bytes(self, codec: Codec) -> None:
        x = laplace(SPEC.size)
        assert codec.encode(x, LAYOUT, 7) == codec.encode(x.copy(), LAYOUT, 7)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_not_finite_is_not_sent(self, codec: Codec, value: float) -> None:
        x = laplace(SPEC.size)
        x[SPEC.slices["first.weight"].start + 5] = value
        with pytest.raises(InvalidUpdate):
            codec.encode(x, LAYOUT)

    def test_damaged_payloads_are_refused_or_of_finite_values(self, codec: Codec) -> None:
        payload, draw = codec.encode(laplace(SPEC.size), LAYOUT, 3), np.random.default_rng(1)
        for _ in range(DAMAGES):
            verdict(codec, damaged(payload, draw), LAYOUT)

    def test_what_breaks_off_is_refused(self, codec: Codec) -> None:
        payload = codec.encode(laplace(SPEC.size), LAYOUT, 3)
        for length in range(0, len(payload), max(1, len(payload) // 40)):
            assert verdict(codec, payload[:length], LAYOUT) != "taken"
