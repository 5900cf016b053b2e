"""The parts of examples/extending, loaded by their paths, keep what the parts of their kinds promise."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import own_parts
import pytest
from live_server import live_server
from own_parts import ALL, FOLDER, Own

from anabranch import Update, aggregate
from anabranch.client.transport import Transport
from anabranch.core.config.tables import FleetTable, merge
from anabranch.core.engine.robust import RobustTable
from anabranch.core.engine.strategy import Context, Plan, Strategy
from anabranch.core.limits import Limits
from anabranch.core.model.updates import Ask, LocalPlan
from anabranch.server.store.base import Store
from anabranch.server.store.factory import open_store
from anabranch.simulation.attacks import Attack, hostile_devices
from anabranch.simulation.run import simulate
from anabranch.strategies.registry import make_strategy
from anabranch.strategies.robust.registry import make_rule
from anabranch.strategies.robust.rule import Rule
from anabranch.strategies.schedulers.registry import make_scheduler
from anabranch.strategies.schedulers.scheduler import Scheduler
from anabranch.strategies.staleness import make_staleness
from anabranch.testing import (
    AppConformance,
    ExecutorConformance,
    PlannerConformance,
    RuleConformance,
    SchedulerConformance,
    StageConformance,
    StoreConformance,
    StrategyConformance,
    TrackerConformance,
    TransportConformance,
)
from anabranch.testing.federation import config, first_weights
from anabranch.testing.transport import SETTINGS, Connect
from anabranch.workloads import App, load_app
from anabranch.workloads.splits import partition

LINES_MAX = 40


@pytest.fixture(scope="module", autouse=True)
def let_in_for_these_tests() -> Iterator[None]:
    """No other test knows of these parts."""
    with own_parts.forgotten():
        yield


class TestStrategy(StrategyConformance):
    @pytest.fixture(params=[1, 5])
    def strategy(self, request: pytest.FixtureRequest) -> Strategy:
        own_parts.STRATEGY.let_in()
        return make_strategy(own_parts.STRATEGY.place, {"warm_up": request.param})


class TestScheduler(SchedulerConformance):
    @pytest.fixture(params=[{}, {"rest_s": 30.0}], ids=len)
    def scheduler(self, request: pytest.FixtureRequest) -> Scheduler:
        own_parts.SCHEDULER.let_in()
        return make_scheduler({"name": own_parts.SCHEDULER.place, **request.param})

    def test_a_device_rests_after_each_task(self) -> None:
        own_parts.SCHEDULER.let_in()
        of = make_scheduler({"name": "resting", "rest_s": 3.0})
        state, had = of.init(), list[float]()
        for now in (0.0, 1.0, 2.9, 3.0, 5.0, 6.5):
            ask, context = Ask("a", f"t{now}"), Context(now, 0, 7, ("a",))
            if of.admit(state, ask, context) is None:
                state, had = of.plan(state, ask, Plan(None, LocalPlan()), context).state, [*had, now]
        assert had == [0.0, 3.0, 6.5]


class TestComposition(StrategyConformance):
    @pytest.fixture(params=[{}, {"buffer_size": 2, "staleness": {"name": "constant"}}], ids=len)
    def strategy(self, request: pytest.FixtureRequest) -> Strategy:
        own_parts.COMPOSITION.let_in()
        return make_strategy(own_parts.COMPOSITION.place, request.param)

    def test_it_takes_the_steps_of_nesterovs_momentum(self) -> None:
        """Means of 1, -2 and 4 from two updates each, at eta = 0.7 and mu = 0.9."""
        own_parts.COMPOSITION.let_in()
        deltas = [0.0, 2.0, -3.0, -1.0, 4.0, 4.0]
        sent = [
            Update(f"c{i}", f"t{i}", i // 2, 1, {"w": np.array([delta])}) for i, delta in enumerate(deltas)
        ]
        reached = [
            aggregate("nesterov_buffer", {"buffer_size": 2}, {"w": np.array([10.0])}, sent[:n]).model["w"]
            for n in (2, 4, 6)
        ]
        assert np.concatenate(reached) == pytest.approx([11.33, 9.237, 13.9333])


class TestStage(StageConformance):
    stage = own_parts.STAGE.part

    @pytest.fixture(params=["signs", "signs|zstd"])
    def chain(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)


class TestTracker(TrackerConformance):
    tracker = own_parts.TRACKER.part

    def read(self, folder: Path) -> list[tuple[int, dict[str, float]]]:
        with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        told = [[cell.partition("=")[::2] for cell in row[1:]] for row in rows]
        return [(int(row[0]), {n: float(v) for n, v in pairs}) for row, pairs in zip(rows, told, strict=True)]


class TestRule(RuleConformance):
    @pytest.fixture
    def rule(self) -> Rule:
        own_parts.RULE.let_in()
        found = make_rule(RobustTable(rule=own_parts.RULE.place))
        assert found is not None
        return found


class TestPlanner(PlannerConformance):
    planner = own_parts.PLANNER.part


class TestExecutor(ExecutorConformance):
    executor = own_parts.EXECUTOR.part


class TestApp(AppConformance):
    @pytest.fixture
    def app(self) -> App:
        return load_app(own_parts.APP.place)


class TestStore(StoreConformance):
    @pytest.fixture
    def reopen(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Store]:
        monkeypatch.setenv("STORE_FOLDER", str(tmp_path / "elsewhere"))
        limits = Limits(inline_bytes_max=64, free_disk_bytes_min=0)
        return lambda: open_store(own_parts.STORE.place, tmp_path / "data", limits)


@pytest.mark.usefixtures("patient")
class TestTransport(TransportConformance):
    @pytest.fixture
    def connect(self, tmp_path: Path) -> Iterator[Connect]:
        opened: list[Any] = []
        with live_server(tmp_path, first_weights(), config(**SETTINGS)) as info:
            (tmp_path / "server").write_text(info.address)

            def from_file(client_id: str) -> Transport:
                opened.append(own_parts.TRANSPORT.let_in().of(f"file://{tmp_path}/server", client_id, None))
                found: Transport = opened[-1]
                return found

            yield from_file
            for transport in opened:
                transport.close()


def test_a_staleness_function_is_that_of_its_table() -> None:
    own_parts.HALF_LIFE.let_in()
    function = make_staleness({"name": own_parts.HALF_LIFE.place, "half_life": 4})
    assert [function(tau) for tau in (0, 4, 8)] == [1.0, 0.5, 0.25]


def test_a_split_deals_all_examples() -> None:
    own_parts.SPLIT.let_in()
    labels = np.arange(300) % 10
    parts = partition(labels, 3, FleetTable(split=own_parts.SPLIT.place), 5)
    assert [len(rows) for rows in parts] == [50, 100, 150]
    assert sorted(np.concatenate(parts).tolist()) == list(range(300))
    again = partition(labels, 3, FleetTable(split="steps"), 5)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True)), "by its name too"


def test_an_attack_is_made_of_what_its_colluders_know() -> None:
    own_parts.ATTACK.let_in()
    fleet = FleetTable(clients=10, attackers=0.4, attack=own_parts.ATTACK.place)
    attack = Attack(fleet, 1)
    hostile = hostile_devices(fleet, 1)
    assert len(attack.helpers(hostile[0])) == 3
    poisoned = attack.poisoned([np.full(3, value, np.float32) for value in (1.0, 5.0, 2.0)])
    assert poisoned.tolist() == [-4.0] * 3
    assert poisoned.dtype == np.float32


@pytest.mark.parametrize("own", [*ALL, own_parts.COMPOSITION], ids=lambda own: own.file)
def test_one_file_of_under_forty_lines(own: Own) -> None:
    lines = (FOLDER / own.file).read_text(encoding="utf-8").splitlines()
    assert len(lines) < LINES_MAX
    assert "anabranch" in "\n".join(lines) or own.kind.word == "staleness function"


def test_a_simulation_of_all_of_them_repeats_itself() -> None:
    """A strategy, a stage, a split, an attack, an executor, by path: the same digest twice."""
    fleet = {
        "clients": 6,
        "attackers": 0.2,
        "split": own_parts.SPLIT.place,
        "attack": own_parts.ATTACK.place,
        "executor": own_parts.EXECUTOR.place,
    }
    tables = {
        "run": {"workload": "synthetic", "updates_max": 12},
        "fleet": fleet,
        "strategy": {"name": own_parts.STRATEGY.place, "warm_up": 3},
        "uplink": {"codec": "signs", "stages": [own_parts.STAGE.place]},
    }
    one, again = (simulate(merge([("test", tables)])) for _ in range(2))
    assert one.updates_applied == 12
    assert one.uplink_bytes < one.uplink_bytes_raw / 8
    assert (one.model_sha256, one.journal_sha256) == (again.model_sha256, again.journal_sha256)
    assert one.config["fleet"]["executor"] == "serial", "it says that it comes to the same bits"
