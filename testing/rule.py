"""What every robust rule must do: strategies/robust/rule.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anabranch.core.parts import PartKind
from anabranch.strategies.robust.registry import RULES
from anabranch.strategies.robust.rows import Row, Rows
from anabranch.strategies.robust.rule import Rule
from anabranch.testing.kind import check_of_kind

SIZE = 6


def rows_of(matrix: Any) -> Rows:
    """The rows of a matrix (n, size)."""
    return Rows([Row(row.astype(np.float32)) for row in matrix], matrix.shape[1])


def check_order(rule: Rule, matrix: Any, seed: int) -> None:
    """The order of the rows does not matter. Not for ties between rows, which a rule may break by it."""
    start = np.zeros(matrix.shape[1])
    shuffled = np.random.default_rng(seed).permutation(matrix)
    first = rule.combine(rows_of(matrix), start)
    rounding = 1e-15 * float(np.abs(matrix).max(initial=0.0))  # of rows that are so large
    np.testing.assert_allclose(rule.combine(rows_of(shuffled), start), first, rtol=1e-6, atol=1e-6 + rounding)


class RuleConformance:
    """Write the fixture `rule`: yours, of whatever parameters."""

    kind: PartKind = RULES

    @pytest.fixture
    def rule(self) -> Rule:
        raise NotImplementedError("write the fixture `rule`, which returns yours")

    @pytest.fixture(params=range(5))
    def matrix(self, request: pytest.FixtureRequest) -> Any:
        """Honest rows round a common direction, and a few that are far away."""
        rng = np.random.default_rng(request.param)
        honest = rng.standard_normal(SIZE) + 0.3 * rng.standard_normal((7, SIZE))
        return np.concatenate([honest, 100.0 * rng.standard_normal((2, SIZE))])

    def test_it_has_what_a_rule_has(self, rule: Rule) -> None:
        check_of_kind(self.kind, type(rule))

    def test_equal_calls_give_equal_results_and_nothing_is_written_to(self, rule: Rule, matrix: Any) -> None:
        before = np.zeros(SIZE)
        first = rule.combine(rows_of(matrix), before)
        assert np.array_equal(rule.combine(rows_of(matrix), before), first)
        assert first.shape == (SIZE,)
        assert np.isfinite(first).all()
        assert not before.any()

    def test_what_it_has_heard_is_a_share_of_each_row_if_it_says_so(self, rule: Rule, matrix: Any) -> None:
        rows = rows_of(matrix)
        rule.combine(rows, np.zeros(SIZE))
        if rows.heard is not None:
            assert rows.heard.shape == (len(matrix),)
            assert np.isfinite(rows.heard).all()

    def test_the_order_of_the_rows_does_not_matter(self, rule: Rule, matrix: Any) -> None:
        check_order(rule, matrix, 1)

    def test_one_row_is_no_error(self, rule: Rule, matrix: Any) -> None:
        assert np.isfinite(rule.combine(rows_of(matrix[:1]), np.zeros(SIZE))).all()

    def test_rows_of_zeros_are_no_error(self, rule: Rule) -> None:
        """Devices may have learned nothing: such rows have no length to be divided by."""
        for rows in (np.zeros((5, SIZE)), np.concatenate([np.zeros((3, SIZE)), np.ones((4, SIZE))])):
            assert np.isfinite(rule.combine(rows_of(rows), np.zeros(SIZE))).all()
        assert not rule.combine(rows_of(np.zeros((5, SIZE))), np.zeros(SIZE)).any()

    def test_a_coordinate_that_no_row_covers_is_zero(self, rule: Rule, matrix: Any) -> None:
        covered = np.arange(SIZE - 2)
        rows = [Row(row[: SIZE - 2].astype(np.float32), covered) for row in matrix]
        assert not rule.combine(Rows(rows, SIZE), np.zeros(SIZE))[SIZE - 2 :].any()

    def test_the_state_of_a_run_needs_one_result_at_most(self, rule: Rule, matrix: Any) -> None:
        """What it starts from is the last result: so a run that was restored goes on to the same bits."""
        last = rule.combine(rows_of(matrix), np.zeros(SIZE))
        again = rule.combine(rows_of(matrix), last)
        assert np.array_equal(rule.combine(rows_of(matrix), last.copy()), again)
