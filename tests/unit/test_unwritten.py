"""Dataclasses that the type checker alone keeps from being written on: as frozen ones in all else."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import replace

import pytest

from anabranch.core.engine.strategy import Context, Plan, Refusal, Step
from anabranch.core.unwritten import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Thing:
    x: int


@dataclass(frozen=True)
class Named:
    x: int

    def __hash__(self) -> int:
        return 7


@dataclass
class Written:
    x: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int
    y: tuple[int, ...] = ()


def test_hash_equality_and_replace_are_those_of_a_frozen_one() -> None:
    assert hash(Point(1, (2,))) == hash(Frozen(1, (2,)))
    assert {Point(1): 3}[Point(1)] == 3
    assert Point(1) != Point(2)
    assert replace(Point(1), y=(5,)) == Point(1, (5,))
    assert copy.copy(Point(1, (2,))) == Point(1, (2,))


def test_what_is_compared_by_identity_or_hashes_itself_still_does() -> None:
    one, other = Thing(1), Thing(1)
    assert one != other
    assert len({one, other}) == 2
    assert hash(Named(1)) == 7


def test_one_that_is_not_frozen_has_no_hash() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(Written(1))


@pytest.mark.parametrize("seen", [Context, Plan, Refusal, Step])
def test_what_authors_of_strategies_see_is_frozen_by_python(seen: type) -> None:
    """No type checker need look at their code; and a frozen one may have fields of their own."""
    assert vars(seen)["__dataclass_params__"].frozen
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(object.__new__(seen), dataclasses.fields(seen)[0].name, None)
