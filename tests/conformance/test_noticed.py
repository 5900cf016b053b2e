"""The kits notice what is wrong in ways that a simulation and its replay do not show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import own_parts
import pytest
import wrong_parts as wrong

from anabranch.compress.registry import CODEC_STAGES, make_codec
from anabranch.core.errors import AppError
from anabranch.testing import RuleConformance, StageConformance, StrategyConformance

KIT = StrategyConformance()
EQUAL, RESTART = KIT.test_equal_calls_give_equal_results, KIT.test_a_restart_changes_nothing
LET_IN, DATA = KIT.test_somebody_is_let_in_where_nobody_trains, KIT.test_the_state_is_data
ELSEWHERE, ZEROS = KIT.test_another_process_comes_to_the_same, KIT.test_an_update_of_zeros_is_no_obstacle
GROWS = KIT.test_what_is_remembered_does_not_grow_with_the_updates


@pytest.mark.parametrize(
    ("strategy", "law", "noticed", "says"),
    [
        (wrong.KeepsTheModel, RESTART, AssertionError, "remember nothing but in the state"),
        (wrong.NumbersAsKeys, DATA, AssertionError, None),
        (wrong.DenseAlone, EQUAL, TypeError, None),
        (wrong.WritesTheUpdate, EQUAL, ValueError, "read-only"),
        (wrong.Counting, LET_IN, AssertionError, "refused for ever"),
        (wrong.CountsInSelf, RESTART, AssertionError, "remember nothing but in the state"),
        (wrong.ByHash, ELSEWHERE, AssertionError, "differ by process"),
        (wrong.InTheOrderOfASet, ELSEWHERE, AssertionError, "differ by process"),
        (wrong.Normalises, ZEROS, ZeroDivisionError, None),
        (wrong.KeepsAll, GROWS, AssertionError, "after 256 updates"),
        (wrong.ChangesWhatItHolds, EQUAL, AssertionError, "has changed the model"),
        (wrong.GrowsBeyondNumbers, EQUAL, AssertionError, "not finite"),
        (wrong.AnothersNumber, EQUAL, AppError, r"weight of np.float32\(0.5\)"),
    ],
)
def test_a_wrong_strategy_is_noticed(
    strategy: type[wrong.Plain], law: Any, noticed: type[Exception], says: str | None
) -> None:
    with pytest.raises(noticed, match=says):
        law(strategy())
    for each in (EQUAL, RESTART, LET_IN, DATA, ELSEWHERE, ZEROS, GROWS):
        each(wrong.Plain())


@pytest.fixture
def stages() -> Iterator[None]:
    with own_parts.forgotten():
        for stage in (wrong.Halves, wrong.Unscaled, wrong.Nothing, wrong.Backwards):
            CODEC_STAGES.let_in(f"wrong_parts:{stage.__name__}", stage)
        yield


@pytest.mark.usefixtures("stages")
@pytest.mark.parametrize("stage", [wrong.Unscaled, wrong.Nothing, wrong.Backwards])
def test_a_stage_by_which_something_else_arrives_is_noticed(stage: type[wrong.Halves]) -> None:
    law = StageConformance().test_what_arrives_is_of_the_direction_and_size_of_what_was_sent
    law(make_codec("halves"))
    with pytest.raises(AssertionError, match="another vector, or of another length"):
        law(make_codec(stage.name))


def test_a_rule_that_divides_by_the_length_of_a_row_is_noticed() -> None:
    with pytest.raises(AssertionError):
        RuleConformance().test_rows_of_zeros_are_no_error(wrong.UnitRows())
