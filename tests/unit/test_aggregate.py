"""The public `aggregate`: what comes in by name, and what bad input becomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anabranch import Update, aggregate
from anabranch.core.errors import ConfigError, InvalidUpdate
from anabranch.strategies import FedBuff

MODEL: dict[str, Any] = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bias": np.zeros(2, np.float32),
    "seen": np.array(7, np.int64),
}
ZERO = {"weight": np.zeros((2, 3), np.float32), "bias": np.zeros(2, np.float32)}


def one(strategy: Any = "fedbuff", params: Any = None, **update: Any) -> Any:
    params = {"buffer_size": 1} if params is None else params
    return aggregate(strategy, params, MODEL, [Update("c", "t", **{"base_version": 0, **update})])


def test_names_shapes_and_dtypes_come_back() -> None:
    result = one(delta={**ZERO, "bias": np.ones(2, np.float32)})
    assert {n: (a.shape, a.dtype) for n, a in result.model.items()} == {
        n: (a.shape, a.dtype) for n, a in MODEL.items()
    }
    assert result.model["bias"].tolist() == [1, 1]


def test_counters_are_never_averaged() -> None:
    result = one(delta={**ZERO, "seen": np.array(100, np.int64)})
    assert result.model["seen"] == 7


def test_a_model_instead_of_a_delta() -> None:
    assert one(model={"weight": MODEL["weight"] + 2, "bias": MODEL["bias"]}).model["weight"][0, 0] == 2
    # From version 0, 3.0, to 10: 7 more, on version 1, which is 5.0.
    updates = [
        Update("a", "t0", 0, delta={"w": np.array([2.0])}),
        Update("b", "t1", 0, model={"w": np.array([10.0])}),
    ]
    params = {"buffer_size": 1, "staleness": {"name": "constant"}}
    assert aggregate("fedbuff", params, {"w": np.array([3.0])}, updates).model["w"] == 12


def test_any_earlier_version_may_be_a_base() -> None:
    updates = [Update(f"c{i}", f"t{i}", b, delta={"w": np.ones(1)}) for i, b in enumerate([0, 1, 0, 2, 1])]
    result = aggregate("fedbuff", {"buffer_size": 1}, {"w": np.zeros(1)}, updates)
    assert [s.staleness for s in result.steps] == [0, 0, 2, 1, 3]
    assert result.version == 5


def test_the_input_is_left_alone() -> None:
    start = {"w": np.zeros(3)}
    aggregate("fedbuff", {"buffer_size": 1}, start, [Update("c", "t", 0, delta={"w": np.ones(3)})])
    assert start["w"].tolist() == [0, 0, 0]


def test_a_submodel_by_flat_indices() -> None:
    start = {"a": np.zeros((2, 2)), "b": np.zeros(2)}
    update = Update("c", "t", 0, delta={"a": np.array([5.0, 6.0])}, submodel={"a": np.array([1, 2])})
    result = aggregate("fedasync", {"alpha": 1.0}, start, [update])
    assert result.model["a"].tolist() == [[0, 5], [6, 0]]
    assert result.model["b"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"delta": {"weight": np.zeros((2, 3), np.float32)}}, "'bias' is missing"),
        ({"delta": {**ZERO, "extra": np.zeros(1)}}, "'extra' is not in the model"),
        ({"delta": {**ZERO, "bias": np.zeros(3, np.float32)}}, r"'bias' has shape \(3,\)"),
        ({"delta": {**ZERO, "weight": np.zeros((3, 2), np.float32)}}, r"'weight' has shape \(3, 2\)"),
        (
            {"delta": {**ZERO, "bias": np.array([np.nan, 0], np.float32)}},
            "not finite, the first in tensor 'bias'",
        ),
        ({"delta": {**ZERO, "weight": np.full((2, 3), np.inf, np.float32)}}, "6 values that are not finite"),
        ({"delta": ZERO, "examples": 0}, "at least 1 example"),
        ({"delta": ZERO, "base_version": 1}, "future_base"),
        ({"delta": ZERO, "base_version": -1}, "wrong_base"),
        ({"model": ZERO, "base_version": 3}, "base_version 3"),
    ],
)
def test_an_update_that_cannot_be_used_is_a_rejected_step(update: Any, words: str) -> None:
    import re

    result = one(**update)
    (step,) = result.steps
    assert (step.decision, step.weight, result.version) == ("rejected", None, 0)
    assert re.search(words, step.reason), step.reason
    assert all(np.array_equal(result.model[n], MODEL[n]) for n in MODEL)


@pytest.mark.parametrize(
    ("submodel", "words"),
    [
        ({"bias": np.array([1, 0])}, "strictly increasing"),
        ({"bias": np.array([0, 0])}, "strictly increasing"),
        ({"bias": np.array([0, 2])}, "within 0..1"),
        ({"bias": np.array([-1, 0])}, "within 0..1"),
        ({"bias": np.array([0.0, 1.0])}, "must be integers"),
        ({"bias": np.array([0])}, r"needed is \(2,\) or \(1,\)"),
        ({"nonsense": np.array([0])}, "not in the model"),
    ],
)
def test_a_bad_submodel_is_a_rejected_step(submodel: Any, words: str) -> None:
    import re

    sent = {"bias": np.array([1.0, 2.0], np.float32)}
    result = one("fedasync", {}, delta=sent, submodel=submodel)
    assert result.version == 0
    assert re.search(words, result.steps[0].reason), result.steps[0].reason


def test_the_same_task_counts_once() -> None:
    updates = [Update("c", "t", 0, delta={"w": np.ones(1)})] * 2
    result = aggregate("fedbuff", {"buffer_size": 1}, {"w": np.zeros(1)}, updates)
    assert [s.decision for s in result.steps] == ["published", "rejected"]
    assert result.steps[1].reason.startswith("duplicate_task")
    assert result.model["w"] == 1


def test_what_is_wrong_with_the_call_itself_raises() -> None:
    with pytest.raises(InvalidUpdate, match="either delta or model"):
        one()
    with pytest.raises(InvalidUpdate, match="either delta or model"):
        one(delta=ZERO, model=ZERO)
    with pytest.raises(InvalidUpdate, match="no float tensor"):
        aggregate("fedbuff", {}, {"n": np.array(1)}, [])
    with pytest.raises(ConfigError, match="did you mean 'fedbuff'"):
        one("fedbuf", delta=ZERO)


@pytest.mark.parametrize(("clip", "moved"), [(2.0, [1.2, 1.6]), (0.0, [30.0, 40.0])])
def test_an_update_is_cut_to_so_many_lengths_of_those_before_it(clip: float, moved: list[float]) -> None:
    deltas = [*[[1.0, 0.0], [-1.0, 0.0]] * 5, [30.0, 40.0]]
    updates = [Update("c", f"t{i}", i, delta={"w": np.array(delta)}) for i, delta in enumerate(deltas)]
    result = aggregate("fedbuff", {"buffer_size": 1}, {"w": np.zeros(2)}, updates, robust={"clip": clip})
    assert result.model["w"] == pytest.approx(moved)


def test_numbers_of_numpy_are_numbers() -> None:
    versions: Any = np.arange(2)
    updates = [Update("c", f"t{v}", v, examples=v + 1, delta={"w": np.ones(1)}) for v in versions]
    result = aggregate("fedbuff", {"buffer_size": 1}, {"w": np.zeros(1)}, updates)
    assert [s.decision for s in result.steps] == ["published"] * 2
    assert result.model["w"] == 2


def test_rounds_take_whoever_the_call_names() -> None:
    updates = [
        Update(f"c{(2 * r + i) % 6}", f"t{r}-{i}", r, delta={"w": np.ones(1)})
        for r in range(3)
        for i in range(2)
    ]
    result = aggregate("fedavg", {"clients_per_round": 2}, {"w": np.zeros(1)}, updates)
    assert [s.decision for s in result.steps] == ["held", "published"] * 3
    assert result.model["w"] == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_version": "0"}, "base_version must be a whole number"),
        ({"base_version": True}, "base_version must be a whole number"),
        ({"client": 3}, "client must be text"),
        ({"task": None}, "task must be text"),
        ({"delta": np.ones(3)}, "delta is a ndarray: give a dict of arrays by name"),
        ({"submodel": [0, 1]}, "submodel is a list: give a dict of arrays by name"),
    ],
)
def test_a_field_of_the_wrong_type_raises(change: Any, words: str) -> None:
    with pytest.raises(InvalidUpdate, match=words):
        aggregate(
            "fedbuff",
            {},
            MODEL,
            [Update(**{"client": "c", "task": "t", "base_version": 0, "delta": ZERO, **change})],
        )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"strategy": FedBuff()}, ConfigError, "strategy is a FedBuff: give its name"),
        ({"strategy": None}, ConfigError, "strategy is a NoneType: give its name"),
        ({"params": None}, ConfigError, "params is a NoneType"),
        ({"model": [1.0, 2.0]}, InvalidUpdate, "model is a list: give a dict of arrays by name"),
        ({"model": {"w": [[1.0], [1.0, 2.0]]}}, InvalidUpdate, "tensor 'w' is a list that is no array"),
        ({"updates": Update("c", "t", 0, delta=ZERO)}, InvalidUpdate, "updates is a Update: give a list"),
        ({"updates": [{"client": "c"}]}, InvalidUpdate, r"updates has a dict: give Update\("),
    ],
)
def test_an_argument_of_the_wrong_type_is_named(change: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        aggregate(**{"strategy": "fedbuff", "params": {}, "model": MODEL, "updates": [], **change})


def test_parameters_of_torch_may_require_a_gradient() -> None:
    torch = pytest.importorskip("torch")
    start = {"w": torch.zeros(2, requires_grad=True)}
    sent = [Update("c", "t", 0, model={"w": torch.full((2,), 3.0, requires_grad=True)})]
    assert aggregate("fedbuff", {"buffer_size": 1}, start, sent).model["w"].tolist() == [3.0, 3.0]
    with pytest.raises(InvalidUpdate, match=r"tensor 'w' is a Tensor that is no array: .*BFloat16"):
        aggregate("fedbuff", {}, {"w": torch.zeros(2, dtype=torch.bfloat16)}, [])


def test_updates_may_come_from_a_generator() -> None:
    sent = (Update("c", f"t{i}", i, delta={"w": np.ones(1)}) for i in range(3))
    assert aggregate("fedbuff", {"buffer_size": 1}, {"w": np.zeros(1)}, sent).model["w"] == 3


def test_a_model_that_is_not_finite_raises() -> None:
    with pytest.raises(InvalidUpdate, match="not finite"):
        aggregate("fedbuff", {}, {"w": np.array([np.nan])}, [])


def test_no_updates_give_the_model_back() -> None:
    result = aggregate("fedasync", {}, MODEL, [])
    assert (result.version, result.steps) == (0, ())
    assert np.array_equal(result.model["weight"], MODEL["weight"])


SECAGG = {"mode": "keeper", "keepers": ["a", "b"], "clip": 4.0, "cohort_min": 2}


def masked(updates: list[Update], **secagg: Any) -> Any:
    return aggregate("fedbuff", {"buffer_size": 2}, {"w": np.zeros(3)}, updates, secagg={**SECAGG, **secagg})


def test_masked_sums_are_those_of_the_specification_s_weights() -> None:
    """By hand: an update of staleness 1 counts 11 steps of 16; two make a version, each with eta 1."""
    first, second = np.array([1.0, -2.0, 0.5]), np.array([0.25, 1.0, 3.0])
    late, fresh = np.array([2.0, 0.0, -1.0]), np.array([-1.0, 1.5, 0.75])
    deltas = [(first, 0), (second, 0), (late, 0), (fresh, 1)]
    updates = [Update(f"c{i}", f"t{i}", base, delta={"w": d}) for i, (d, base) in enumerate(deltas)]
    result = masked(updates)
    assert [(s.version, s.decision, s.staleness) for s in result.steps] == [
        (0, "held", 0),
        (1, "held", 0),
        (1, "held", 1),
        (2, "held", 0),
    ]
    assert [s.weight for s in result.steps] == [1, 1, 11 / 16, 1]
    expected = (first + second) / 2 + (11 / 16 * late + fresh) / 2
    assert np.abs(result.model["w"] - expected).max() < 3 * 4.0 / 2**19
    assert np.array_equal(result.model["w"], masked(updates).model["w"])  # whatever the masks were


def test_masked_updates_are_cut_to_the_length_of_the_table() -> None:
    updates = [Update(f"c{i}", f"t{i}", 0, delta={"w": np.array([30.0, 40.0, 0.0])}) for i in range(2)]
    result = masked(updates, clip=5.0, keepers=["a"])
    assert np.abs(result.model["w"] - [3.0, 4.0, 0.0]).max() < 3 * 5.0 / 2**19


def test_a_masked_sum_has_each_device_once_and_whole() -> None:
    one = {"w": np.ones(3)}
    part = Update("d", "t2", 0, delta={"w": np.ones(1)}, submodel={"w": np.array([1])})
    steps = masked([Update("c", "t0", 0, delta=one), Update("c", "t1", 0, delta=one), part]).steps
    assert [s.decision for s in steps] == ["held", "rejected", "rejected"]
    assert "1 updates of the 1 that one client may have" in steps[1].reason
    assert "masked sums take 3 numbers" in steps[2].reason


def test_what_cannot_be_masked_is_refused_by_name() -> None:
    updates = [Update("c", "t", 0, delta={"w": np.ones(3)})]
    with pytest.raises(ConfigError, match=r"'fedasync' cannot have masked sums"):
        aggregate("fedasync", {}, {"w": np.zeros(3)}, updates, secagg=SECAGG)
    with pytest.raises(ConfigError, match=r"secagg\.keepers"):
        masked(updates, keepers=[])
