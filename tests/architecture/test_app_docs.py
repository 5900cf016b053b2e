"""The page of the App's contract: every block of code is run, and what it defines learns as the page says."""

from __future__ import annotations

import re
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
from commands import command_line

from anabranch.client.checkup import FAIL, Checkup
from anabranch.core.config.tables import Config, FleetTable, merge
from anabranch.core.model.updates import LocalPlan
from anabranch.simulation.run import simulate
from anabranch.workloads.app import Shard, examples_of
from anabranch.workloads.calls import arrived_of
from anabranch.workloads.trainer import trainer_for

PAGE = (Path(__file__).parents[2] / "docs" / "app.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the blocks define, in a file from top to bottom."""
    file = tmp_path_factory.mktemp("page") / "page.py"
    file.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), encoding="utf-8")
    return run_path(str(file))


APPS = ("Mine", "Dealt", "Logistic", "Streaming", "Regression", "NextWord")


def test_every_app_of_the_page_is_known_here(written: dict[str, Any]) -> None:
    shown = set(re.findall(r"^class (\w+)\((?:anabranch\.App|Mine)\)", PAGE, re.MULTILINE))
    assert shown == {*APPS, "Sensor"}
    assert set(APPS) < set(written)


def test_the_split_counts_where_an_app_goes_by_it(written: dict[str, Any]) -> None:
    fleet = FleetTable(clients=4, split="dirichlet", dirichlet_alpha=0.1)
    sizes = {
        name: [len(examples_of(written[name]().data(Shard("train", i, 4, fleet)))) for i in range(4)]
        for name in ("Mine", "Dealt")
    }
    assert sum(sizes["Dealt"]) == sum(sizes["Mine"]) == 150
    assert max(sizes["Mine"]) - min(sizes["Mine"]) <= 1 < max(sizes["Dealt"]) - min(sizes["Dealt"])


def test_a_sensor_has_what_came_since_it_was_first_looked_at(written: dict[str, Any]) -> None:
    app = written["Sensor"]()
    examples = examples_of(app.data(Shard("train")))
    found = [arrived_of(app, examples, now) for now in (1e9, 1e9 + 2.5, 1e9 + 120, 1e9 + 1e6)]
    assert len(examples) > 102
    assert [0 if f is None else len(f) for f in found] == [0, 2, 100, 100]
    assert found[-1] is not None
    assert np.array_equal(found[-1].x, examples.x[-100:])


@pytest.mark.parametrize("name", APPS)
def test_what_the_page_shows_works_and_learns(name: str, written: dict[str, Any]) -> None:
    app = written[name]()
    findings = list(Checkup(app, Config().to_json(), LocalPlan(), 4))
    assert [f for f in findings if f.level == FAIL] == []
    tables = {
        "run": {"updates_max": 24, "evaluate_every_versions": 24},
        "fleet": {"clients": 4, "executor": "serial"},
        "client": {"steps": 8},
    }
    history = simulate(merge([("test", tables)]), app=app).history
    first, last = history[0].loss, history[-1].loss
    assert first is not None
    assert last is not None
    assert last < 0.9 * first


def test_a_device_works_in_the_same_process(written: dict[str, Any]) -> None:
    done, server = written["device"].summary, written["server"]
    assert (done.run_ended, done.applied, server.version) == (True, 20, 20)
    examples = written["Mine"]().data(Shard("test"))
    trainer = trainer_for(written["Mine"](), "cpu")
    vector = trainer.spec.flatten(written["weights"])
    found = trainer.evaluate(vector, {}, examples_of(examples))
    assert found["accuracy"] > 0.8  # two classes


def test_its_commands_are_there() -> None:
    assert set(re.findall(r"^\$ anabranch (\w+)", PAGE, re.MULTILINE)) <= set(command_line().commands)
