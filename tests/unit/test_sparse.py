"""Sparse deltas, the grammar of codec chains, and who can do which."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import UnknownCodec
from anabranch.core.model.chains import StageText, lacks, parse_chain
from anabranch.core.model.params import ParamSpec, SparseVector, add_scaled, dense
from anabranch.core.model.submodels import Coordinates
from anabranch.core.model.updates import find_flaw

SPEC = ParamSpec.of({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)})


def sparse(indices: Any, values: Any, size: int = 10, dtype: Any = np.float32) -> SparseVector:
    return SparseVector(np.array(indices, np.int64), np.array(values, dtype), size)


def test_a_chain_is_stages_with_arguments() -> None:
    assert parse_chain("topk(0.1)|int8(256,sr)|gaps|zstd") == (
        StageText("topk", ("0.1",)),
        StageText("int8", ("256", "sr")),
        StageText("gaps"),
        StageText("zstd"),
    )


@pytest.mark.parametrize("text", ["", "|", "topk(0.1", "TOPK", "int8 (3)", "a(b(c))", "raw|", "x" * 300])
def test_what_is_no_chain_is_refused(text: str) -> None:
    with pytest.raises(UnknownCodec, match="codec"):
        parse_chain(text)


def test_a_device_lacks_the_stages_that_it_does_not_name() -> None:
    assert lacks(("topk:1", "gaps:1"), "topk(0.1)|int8(256)|gaps") == ["int8"]
    assert lacks((), "raw") == []
    assert lacks(("ef", "raw"), "ef(0.9)|raw") == []


@given(st.data())
def test_adding_a_sparse_vector_is_adding_it_dense(data: Any) -> None:
    size = data.draw(st.integers(1, 40))
    indices = data.draw(st.lists(st.integers(0, size - 1), unique=True))
    finite = st.floats(-1e3, 1e3, width=32)
    x = sparse(indices, data.draw(st.lists(finite, min_size=len(indices), max_size=len(indices))), size)
    expected = np.linspace(-1, 1, size, dtype=np.float32)
    found = expected.copy()
    add_scaled(expected, 0.7, dense(x))
    add_scaled(found, 0.7, x)
    assert np.array_equal(expected, found)


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (sparse([1, 2], [1.0, 2.0]), None),
        (sparse([], []), None),
        (sparse([1], [1.0], size=9), "shape"),
        (sparse([1], [1.0], dtype=np.float64), "float64"),
        (sparse([1, 8], [1.0, np.nan]), "not finite, the first in tensor 'b'"),
        (sparse([3], [1e30]), "over 1e\\+12, the first in tensor 'a'"),
    ],
)
def test_flaws_of_sparse_deltas(delta: SparseVector, words: str | None) -> None:
    flaw = find_flaw(SPEC, delta, 5, None)
    if words is None:
        assert flaw is None
    else:
        assert flaw is not None
        assert re.search(words, flaw)


def test_a_flaw_of_a_sparse_delta_of_a_submodel_names_the_tensor() -> None:
    submodel = Coordinates(np.array([4, 7, 9], np.int64))
    flaw = find_flaw(SPEC, sparse([1], [np.inf], size=3), 5, submodel)
    assert flaw is not None
    assert "tensor 'b'" in flaw
