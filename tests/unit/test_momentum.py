"""Momentum on the uplink: what each update is, by hand, alone and before a codec, whole and in parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anabranch.compress.feedback import AGE_MAX, Memory, Uplink
from anabranch.compress.layout import Layout
from anabranch.core.errors import InvalidUpdate, UnknownCodec
from anabranch.core.model.chains import payload_codec
from anabranch.core.model.params import ParamSpec, dense
from anabranch.core.model.submodels import Coordinates

SPEC = ParamSpec.of({"w": np.zeros((2, 2), np.float32)})
FIRST, SECOND = np.array([8, -4, 0, 1], np.float32), np.array([4, 4, 4, 1], np.float32)


def sent(text: str, delta: Any, memory: Memory | None = None, base: int = 0, part: Any = None) -> Any:
    """What the server decodes, and the memory that is then pending."""
    uplink = Uplink(text)
    data, pending = uplink.encode(delta, SPEC, part, memory, 7, base)
    return dense(uplink.codec.decode(data, Layout.of(SPEC, part))), pending


def test_the_first_goes_as_it_is_and_the_next_is_mixed_into_it() -> None:
    first, memory = sent("momentum(0.75)", FIRST)
    assert first.tolist() == FIRST.tolist()
    second, memory = sent("momentum(0.75)", SECOND, memory)
    assert second.tolist() == [7, -2, 4, 1]  # three quarters of the first; the third was nothing yet
    third, _ = sent("momentum(0.75)", FIRST, memory)
    assert third.tolist() == [7.25, -2.5, 3, 1]


def test_without_a_share_it_is_the_chain_behind_it() -> None:
    _, memory = sent("momentum(0)|bf16", FIRST)
    assert sent("momentum(0)|bf16", SECOND, memory)[0].tolist() == sent("bf16", SECOND)[0].tolist()


def test_the_memory_is_of_what_was_meant_and_not_of_what_the_codec_made_of_it() -> None:
    text, values = "momentum(0.5)|topk(0.25)|int8(32)|gaps", np.array([3, -2, 1, 0.5], np.float32)
    _, memory = sent(text, values)
    assert memory.residual.tolist() == values.tolist()
    _, after = sent(text, -values, memory)
    assert after.residual.tolist() == [0, 0, 0, 0]
    assert memory.residual.tolist() == values.tolist(), "what is pending is another array"


def test_a_part_has_its_own_coordinates_and_the_others_stay() -> None:
    _, memory = sent("momentum(0.5)", FIRST)
    part = Coordinates(np.array([0, 3]))
    values, after = sent("momentum(0.5)", np.array([2, 3], np.float32), memory, part=part)
    assert values.tolist() == [5, 2]
    assert after.residual.tolist() == [5, -4, 0, 2]


@pytest.mark.parametrize("base", [AGE_MAX + 1, -1])
def test_what_is_too_old_does_not_count(base: int) -> None:
    _, memory = sent("momentum(0.5)", FIRST)
    assert sent("momentum(0.5)", SECOND, memory, base)[0].tolist() == SECOND.tolist()
    assert sent("momentum(0.5)", SECOND, memory, AGE_MAX)[0].tolist() == [6, 0, 4, 1]
    other = Memory(np.ones(3, np.float32), 0)  # of another model
    assert sent("momentum(0.5)", SECOND, other)[0].tolist() == SECOND.tolist()


def test_buffers_are_those_of_the_newest_task() -> None:
    spec = ParamSpec.of({"w": np.zeros(3, np.float32), "mean": np.zeros(1, np.float32)}, buffers=("mean",))
    uplink, memory = Uplink("momentum(0.5)|int8(32)"), None
    for values in (FIRST, SECOND):
        data, memory = uplink.encode(values, spec, None, memory, 7, 0)
    at = spec.slices["mean"]
    assert dense(uplink.codec.decode(data, Layout.of(spec)))[at].tolist() == SECOND[at].tolist()


def test_a_model_of_doubles_keeps_them() -> None:
    spec = ParamSpec.of({"w": np.zeros(1, np.float64)})
    uplink, third = Uplink("momentum(0.5)"), np.array([1 / 3])
    data, memory = uplink.encode(third, spec, None, None, 7, 0)
    assert dense(uplink.codec.decode(data, Layout.of(spec))).tolist() == third.tolist()
    data, _ = uplink.encode(third, spec, None, memory, 7, 0)
    found = dense(uplink.codec.decode(data, Layout.of(spec)))
    assert found.dtype == np.float64
    assert found.tolist() == pytest.approx([1 / 3], rel=1e-7)


def test_a_diverged_training_sends_nothing() -> None:
    with pytest.raises(InvalidUpdate, match="not finite"):
        sent("momentum(0.5)", np.array([1, np.inf, 0, 0], np.float32))


def test_the_server_reads_the_chain_behind_it() -> None:
    assert payload_codec("momentum(0.5)") == Uplink("momentum(0.5)").codec.text == "raw"
    assert payload_codec("momentum(0.5)|int8") == "int8"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *(
            (f"momentum{words}", r"write momentum\(share\)")
            for words in ("", "(1)", "(-0.1)", "(x)", "(0.1,2)")
        ),
        ("momentum(0.9)|ef(0.9)|int8", "a device has one memory"),
        ("ef(0.9)|momentum(0.9)|int8", "momentum"),
        ("momentum(0.9)|", "write stages as"),
        ("momentum(0.9)|ring(32,20)", "leave momentum out"),
        ("int8|momentum(0.9)", "momentum"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(UnknownCodec, match=said):
        Uplink(text)
