"""Every built-in codec stage, in some chain, keeps what a stage promises."""

from __future__ import annotations

import pytest

from anabranch.testing import StageConformance
from anabranch.testing.payloads import CHAINS


class TestStages(StageConformance):
    @pytest.fixture(params=CHAINS)
    def chain(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)
