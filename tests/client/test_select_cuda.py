"""The choice of the largest by thresholds that are halved: the result, as it is computed on a processor."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from fleets import Ones
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from anabranch.client.select_cuda import VALUES_MIN, chooser, largest_places, selecting
from anabranch.client.trainer import LocalTrainer
from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.compress.selectors import choosing, largest
from anabranch.compress.stage import Dense
from anabranch.core.config.tables import ClientTable
from anabranch.core.errors import InvalidUpdate
from anabranch.core.model.params import ParamSpec, SparseVector
from anabranch.core.model.updates import LocalPlan, Task
from anabranch.workloads.app import Shard

Array = npt.NDArray[Any]
FLOATS = st.floats(-1e6, 1e6, width=32)
HERE = chooser("cpu", values_min=1)
ASKED = [  # a device's kind, its uplink, and whether it asks its GPU
    ("cuda", "topk(0.01)|int8", True),
    ("cuda", "ef(0.9)|topk(0.25)", True),
    ("cuda", "topk(0.3)|int8", False),
    ("cuda", "threshold(0.01)|int8", False),
    ("cuda", "int8", False),
    ("cpu", "topk(0.01)|int8", False),
    ("mps", "topk(0.01)|int8", False),
]


class Wide(Ones):
    """As many values as are worth a GPU, in two dimensions."""

    def model(self) -> dict[str, Any]:
        return {"w": np.zeros((1 << 10, VALUES_MIN >> 10), np.float32)}


def places(values: Array, k: int) -> list[int]:
    found: list[int] = largest_places(torch.from_numpy(values), k).tolist()
    return found


def heavy(n: int, seed: int = 0) -> Array:
    """With a long tail, as deltas have."""
    return np.random.default_rng(seed).standard_t(3, n).astype(np.float32)


def test_the_specification_s_golden_values() -> None:
    """The mean is 2.25; of the two that are 3 long the first is kept."""
    x = np.array([5, -4, 3, -3, 2, 1, 0, 0], np.float32)
    assert places(x, 3) == [0, 1, 2]
    assert places(x, 4) == [0, 1, 2, 3]
    assert places(x[::-1].copy(), 3) == [4, 6, 7]


@given(arrays.arrays(np.float32, st.integers(4, 60), elements=FLOATS), st.data())
def test_it_keeps_exactly_k_and_nothing_that_is_clearly_smaller(x: Array, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, x.size // 4))
    found = places(x, k)
    assert len(found) == k
    assert found == sorted(set(found))
    kept, left = np.abs(x[found]), np.abs(np.delete(x, found))
    apart = np.abs(x).max() * 2.0**-22  # what so many halvings and float32 do not tell apart
    assert kept.min() >= left.max(initial=0) - apart


@pytest.mark.parametrize("k", [1, 10, 24, 25, 250])
def test_where_the_mean_is_over_the_k_th_value_that_one_is_found(k: int) -> None:
    x = np.linspace(0.001, 1, 1000, dtype=np.float32)
    x[:5] = 1e6
    exact = np.sort(np.argsort(-np.abs(x), kind="stable")[:k])
    assert places(x, k) == exact.tolist()


@pytest.mark.parametrize("value", [0.0, -2.5])
def test_of_equal_ones_the_first_are_kept(value: float) -> None:
    assert places(np.full(40, value, np.float32), 7) == list(range(7))


@pytest.mark.parametrize("rho", [0.001, 0.01, 0.1, 0.25])
def test_it_keeps_the_energy_of_the_exact_choice(rho: float) -> None:
    x = heavy(1_000_000)
    k = int(rho * x.size)
    found = x[places(x, k)]
    exact = np.partition(np.abs(x), x.size - k)[-k:]
    assert float(np.square(found, dtype=float).sum()) >= 0.9999 * float(np.square(exact, dtype=float).sum())


def test_a_payload_of_it_decodes_as_any() -> None:
    spec = ParamSpec.of({"w": np.zeros((300, 70), np.float32), "b": np.zeros(9, np.float32)})
    layout, x = Layout.of(spec), heavy(spec.size)
    codec = make_codec("topk(0.05)|gaps|zstd")
    with choosing(HERE):
        data = codec.encode(x, layout)
    decoded, plain = codec.decode(data, layout), codec.decode(codec.encode(x, layout), layout)
    assert isinstance(decoded, SparseVector)
    assert isinstance(plain, SparseVector)
    assert decoded.indices.size == plain.indices.size
    inside = decoded.indices < 21_000
    np.testing.assert_array_equal(decoded.values[inside], x[decoded.indices[inside]])
    assert len(set(decoded.indices.tolist()) ^ set(plain.indices.tolist())) <= 4


def test_zeros_are_not_sent() -> None:
    x = np.zeros(100, np.float32)
    x[[3, 50]] = 2.0, -1.0
    found = HERE(Dense.of(x), 20)
    assert found is not None
    exact = largest(Dense.of(x), 20)
    assert found.indices.tolist() == exact.indices.tolist() == [3, 50]
    assert found.values.tolist() == exact.values.tolist() == [2.0, -1.0]


def test_the_exact_choice_is_made_of_few_values_of_many_kept_and_of_none_that_can_be_sent() -> None:
    x = heavy(100)
    assert HERE(Dense.of(x), 25) is not None
    assert HERE(Dense.of(x), 26) is None
    assert chooser("cpu")(Dense.of(x), 5) is None
    assert chooser("cpu")(Dense.of(heavy(VALUES_MIN)), 5) is not None
    spec = ParamSpec.of({"w": np.zeros((10, 10), np.float32)})
    for bad in (np.nan, np.inf):
        x[7] = bad
        assert HERE(Dense.of(x), 5) is None
        with choosing(HERE), pytest.raises(InvalidUpdate):
            make_codec("topk(0.05)|int8").encode(x, Layout.of(spec))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would do it")
@pytest.mark.parametrize(("device", "uplink", "asked"), ASKED)
def test_a_device_asks_its_gpu_of_large_models_and_few_kept_values(
    device: str, uplink: str, asked: bool
) -> None:
    """There is none here, and whoever asks it is told so."""

    class On(LocalTrainer):
        accelerator = device

    trainer = On(Wide(), ClientTable())
    trainer.load(Shard("train"))
    vector = np.zeros(VALUES_MIN, np.float32)
    task = Task("t", "a", 0, 0.0, 60.0, 60.0, 1, LocalPlan(), uplink)
    packing = partial(trainer.pack, task, "u", vector, heavy(VALUES_MIN), 1, {}, None, "")
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA") if asked else nullcontext():
        assert len(packing()[0].payload) > 1000


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_is_what_it_is_here() -> None:
    x = heavy(1 << 22)
    spec = ParamSpec.of({"w": np.zeros((1 << 11, 1 << 11), np.float32)})
    codec, layout = make_codec("topk(0.01)"), Layout.of(spec)
    with selecting("cuda"):
        there = codec.decode(codec.encode(x, layout), layout)
    with choosing(HERE):
        here = codec.decode(codec.encode(x, layout), layout)
    assert isinstance(there, SparseVector)
    assert isinstance(here, SparseVector)
    assert len(set(there.indices.tolist()) ^ set(here.indices.tolist())) <= 4
