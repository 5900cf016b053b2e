"""A run that learns nothing, or slowly, says so as soon as there is a version."""

from __future__ import annotations

from typing import Any

import pytest
from fleets import Ones, config

from anabranch.core.model.updates import LocalPlan
from anabranch.host import build
from anabranch.simulation.run import simulate
from anabranch.workloads.app import App, Examples


class Aside(Ones):
    """Computes new weights, and puts them nowhere."""

    def train(
        self, model: dict[str, Any], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        model = {"w": model["w"] + 1.0}
        return {"loss": float(model["w"].sum())}


class Late(Ones):
    """Learns something from version 2 on."""

    def train(
        self, model: dict[str, Any], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        model["w"] += self.version > 1
        return {}


@pytest.mark.parametrize(("app", "said"), [(Aside(), True), (Late(), True), (Ones(), False)])
def test_a_train_that_changes_nothing_is_told_once(
    app: App, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    result = simulate(config(), app=app)
    assert result.versions > 3
    told = [record.getMessage() for record in caplog.records if "no update has moved" in record.getMessage()]
    assert [text.startswith("version 1 has the weights that the run began with") for text in told] == [
        True
    ] * said


@pytest.mark.parametrize(("clients", "times"), [(2, 1), (3, 0)])
def test_a_buffer_that_is_large_beside_its_fleet_is_told_once(
    clients: int, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It gathers three. A sweep has many runs of one fleet, in one process."""
    build.said.forget()
    for seed in range(2):
        result = simulate(config(fleet={"clients": clients}, run={"seed": seed}), app=Ones())
        assert result.versions > 2
    told = [text for r in caplog.records if "devices are enrolled" in (text := r.getMessage())]
    assert len(told) == times
    assert all(text.startswith("version 1 took 3 updates, and 2 devices are enrolled") for text in told)
