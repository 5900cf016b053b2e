"""Arrays in Flower's messages: the bytes that flwr itself makes, read and written without it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'anabranch[flower]'")

from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as some

from anabranch.core.errors import AppError
from anabranch.flower.records import array_record, arrays_of

ARRAYS = some.arrays(
    st.sampled_from(["float16", "float32", "float64", "int64", "uint8", "bool", ">f4"]),
    some.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


@given(array=ARRAYS, fortran=st.booleans())
def test_an_array_is_read_as_flower_reads_it(array: Any, fortran: bool) -> None:
    theirs = Array(np.array(array, order="F" if fortran else "C"))
    found = arrays_of(ArrayRecord({"w": theirs}))["w"]
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.tobytes() == theirs.numpy().tobytes() == array.tobytes()


@given(array=ARRAYS)
def test_an_array_is_written_as_flower_writes_it(array: Any) -> None:
    theirs, ours = Array(array), array_record({"w": array})["w"]
    assert (ours.dtype, ours.shape, ours.stype, ours.data) == (
        theirs.dtype,
        theirs.shape,
        theirs.stype,
        theirs.data,
    )


def test_a_transposed_array_is_written_in_the_order_of_its_indices() -> None:
    array = np.arange(6.0).reshape(2, 3).T
    assert array_record({"w": array})["w"].numpy().tolist() == array.tolist()


def test_every_other_value_of_an_array_is_written_without_those_between() -> None:
    array = np.arange(7.0)[::2]
    assert array_record({"w": array})["w"].numpy().tolist() == [0.0, 2.0, 4.0, 6.0]


def objects() -> Array:
    head = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n"
    data = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + b"x"
    return Array("object", (1,), "numpy.ndarray", data)


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (Array("uint8", (2,), "ours.q8", b"ab"), "no numpy array but 'ours.q8'"),
        (Array("float32", (2,), "numpy.ndarray", b""), "cannot be read"),
        (Array("float32", (2,), "numpy.ndarray", b"\x93NUMPY\x02\x00\x00\x00"), "version"),
        (Array("float32", (2,), "numpy.ndarray", Array(np.ones(2)).data[:-1]), "cannot be read"),
        (objects(), "Python objects"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(array: Array, why: str) -> None:
    with pytest.raises(AppError, match=f"array 'w'.*{why}"):
        arrays_of(ArrayRecord({"w": array}))
