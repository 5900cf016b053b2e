"""Whether a state outlives a restart: what is no data is named, and what comes back as something else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import AppError
from anabranch.core.kept_state import check_kept, lost

MODEL = np.zeros(3, np.float32)


@dataclass(frozen=True)
class Loose:
    """One field, which does not say what it has."""

    of: Any = None


@dataclass(frozen=True)
class Said:
    """Fields that say it."""

    by_device: dict[str, float] = field(default_factory=dict)
    newest: tuple[int, ...] = ()
    mean: np.ndarray[Any, Any] | None = None


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({1}, "state/of is of type set, which is no data"),
        (np.int64(3), "state/of is of type numpy.int64, which is no data"),
        ({"a": [1, np.float32(2)]}, "state/of/a/1 is of type numpy.float32, which is no data"),
        ({3: 1}, "state.of has the key 3 (int), which comes back as a text"),
        ({"a": (1, 2)}, "state.of['a'] is a tuple and comes back as a list"),
    ],
)
def test_what_a_restart_would_change_is_named(value: Any, told: str) -> None:
    assert lost(Loose(value), Loose, MODEL) == told
    with pytest.raises(AppError, match="strategy 'mine': the state would not outlive a restart: state"):
        check_kept("strategy 'mine'", Loose(value), Loose, MODEL)


def test_fields_that_say_what_they_have_come_back() -> None:
    state = Said({"a": 0.5}, (1, 2), np.arange(3, dtype=np.float32))
    assert lost(state, Said, MODEL) == ""
    check_kept("strategy 'mine'", state, Said, MODEL)


def test_a_state_that_has_the_models_own_array_is_named() -> None:
    """Momentum by the last model: nothing until a restart, and something from then on."""
    told = "state/mean is the model's own array, on which later steps write: keep a copy of it"
    assert lost(Said(mean=MODEL), Said, MODEL) == lost(Said(mean=MODEL[1:]), Said, MODEL) == told
    assert lost(Said(mean=MODEL.copy()), Said, MODEL) == ""


@dataclass(frozen=True)
class ByNumber:
    """JSON has no such keys."""

    of: dict[int, int]


def test_a_dictionary_by_numbers_is_none_even_where_its_field_says_so() -> None:
    assert lost(ByNumber({3: 1}), ByNumber, MODEL) == "of['3'] must be int, not '3'"


def test_a_state_of_another_type_is_named() -> None:
    with pytest.raises(AppError, match="the state is a dict, and state_type says Said"):
        check_kept("strategy 'mine'", {}, Said, MODEL)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_characters="$")), inner),
    max_leaves=8,
)
STRANGE = st.recursive(
    PLAIN | st.tuples(st.integers()) | st.dictionaries(st.integers(), st.integers(), min_size=1),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=8,
)


def _as_json(value: Any) -> Any:
    """JSON's own round, and whether types stay: the oracle."""
    return json.loads(json.dumps(value))


def _same(one: Any, back: Any) -> bool:
    if type(one) is not type(back):
        return False
    if isinstance(one, Mapping):
        return list(one) == list(back) and all(_same(one[k], back[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(back) and all(map(_same, one, back))
    return bool(one == back)


@given(STRANGE)
def test_exactly_what_json_gives_back_as_it_was_is_kept(value: Any) -> None:
    assert (lost(Loose(value), Loose, MODEL) == "") == _same(value, _as_json(value))
