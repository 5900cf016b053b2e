"""Every built-in robust rule keeps what a rule promises."""

from __future__ import annotations

import pytest

from anabranch.core.engine.robust import RobustTable
from anabranch.strategies.robust.registry import BUILT_IN, make_rule
from anabranch.strategies.robust.rule import Rule
from anabranch.testing import RuleConformance


class TestRules(RuleConformance):
    @pytest.fixture(params=BUILT_IN)
    def rule(self, request: pytest.FixtureRequest) -> Rule:
        found = make_rule(RobustTable(rule=request.param, attackers=0.2, iterations=12))
        assert found is not None
        return found
