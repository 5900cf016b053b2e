"""Simulated devices that train their next task while the result of the last one is on its way."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleets import Diverging, Ones, config, events
from rough import STRATEGIES, prove, restored, rough

from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.engine.invariants import violations
from anabranch.simulation.checkers import Checker
from anabranch.simulation.run import open_simulation, simulate

# A task takes 2 steps of 1 s, its result 2 s to leave: what can be hidden is half of the time.
SLOW_UPLINK = {"clients": 4, "speed_ratio": 1.0, "step_time_s": 1.0, "up_mbps": 0.128, "latency_s": 0.0}
SIZE = 8_000  # 32 kB


def overlapping(settings: Config, held: int = 2) -> Config:
    """The same run, with pushes in the background."""
    more = {"client": {"push": "overlap"}, "server": {"tasks_per_client": held}}
    return merge([("base", settings.to_json()), ("overlap", more)])


def test_the_next_task_is_trained_while_the_result_is_on_its_way() -> None:
    settings = config("fedasync", fleet=SLOW_UPLINK, run={"virtual_s_max": 100.0})
    alone = simulate(settings, app=Ones(SIZE)).updates_applied
    together = simulate(overlapping(settings), app=Ones(SIZE)).updates_applied
    assert 1.8 * alone < together <= 2 * alone + 4


def test_a_push_under_way_is_seen_in_the_events(tmp_path: Path) -> None:
    settings = overlapping(config("fedasync", fleet={**SLOW_UPLINK, "clients": 1}))
    simulate(settings, tmp_path, app=Ones(SIZE))
    kinds = [event["kind"] for event in events(tmp_path, "granted", "decided")]
    assert kinds[:4] == ["granted", "granted", "decided", "granted"]


def test_where_the_link_is_slower_than_the_training_nothing_is_dropped() -> None:
    slow = {**SLOW_UPLINK, "up_mbps": 0.032}
    settings = overlapping(config("fedasync", fleet=slow, run={"virtual_s_max": 100.0}), held=3)
    with open_simulation(settings, app=Ones(SIZE)) as simulation:
        simulation.world.observers.append(Checker(simulation.engine).observe)
        simulation.run()
        engine = simulation.engine
        waiting = [len(device.view.tasks) for device in simulation.devices]
    assert (engine.counters.rejected, engine.counters.leases_lost) == (0, 0)
    assert max(waiting) == 3
    assert violations(engine) == []


def test_a_task_that_fails_is_given_back() -> None:
    given_back: list[ev.Event] = []
    settings = overlapping(config("fedasync", uplink={"codec": "int8(256)"}))  # which takes no infinities
    with open_simulation(settings, app=Diverging()) as simulation:
        simulation.world.observers.append(
            lambda event, _: given_back.append(event) if isinstance(event, ev.TaskDropped) else None
        )
        simulation.run()
        engine = simulation.engine
    assert engine.counters.granted - engine.ledger.live <= len(given_back) <= engine.counters.granted
    assert len(given_back) > 10


@pytest.mark.parametrize("workers", [0, 2])
def test_a_seed_has_one_history(workers: int) -> None:
    settings = overlapping(config("teasq", server={"lease_s": 30.0}, run={"virtual_s_max": 20.0}))
    first = simulate(settings, workers=0)
    again = simulate(settings, workers=workers)
    assert (first.model_sha256, first.journal_sha256) == (again.model_sha256, again.journal_sha256)


@pytest.mark.parametrize("seed", range(len(STRATEGIES)))
def test_every_promise_is_kept_whatever_goes_wrong(seed: int) -> None:
    proved = prove(overlapping(restored(rough(seed, clients=12), 3)), every=5)
    assert proved.versions > 5
    assert proved.restarts > 3


@pytest.mark.prove
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_a_hundred_seeds(first: int) -> None:
    for seed in range(first, first + 10):
        settings = overlapping(rough(3_000 + seed))
        proved = prove(settings, every=20)
        assert proved.versions > 5, seed
        assert prove(settings, every=1_000) == proved, seed
