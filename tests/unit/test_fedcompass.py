"""FedCompass: who gets how many steps, when a group is applied, and the mix, by a reference of its own."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from machines import Bench, decision, vector

from anabranch.core.effects import Granted, Published
from anabranch.core.errors import ConfigError
from anabranch.core.model.updates import Verdict
from anabranch.core.snapshot import restore, state_digest, take_snapshot
from anabranch.strategies.registry import make_strategy

CONSTANT = {"name": "constant"}


def bench_of(*clients: str, **params: Any) -> Bench:
    """A fleet in training as `[client]` says, whose leases are long."""
    given = {
        "alpha": 1.0,
        "steps_min": 2,
        "steps_max": 8,
        "speed_momentum": 0.0,
        "staleness": CONSTANT,
        "latest_factor": 1.5,
    }
    bench = Bench("fedcompass", **{"lease_s": 1e3, "lease_min_s": 1e3, **given, **params})
    bench.enrol(*clients)
    return bench


def asked(bench: Bench, client: str, task: str, now: float) -> int:
    """The steps that a device is given; 0: as configured."""
    granted = bench.ask(client, task, now)[-1]
    assert isinstance(granted, Granted)
    return granted.task.local.steps


def learned(bench: Bench, client: str, step_s: float) -> None:
    """The server comes to know a device's speed, before second 0."""
    bench.ask(client, f"first-{client}", now=-10.0)
    bench.push(client, f"first-{client}", (0, 0, 0, 0), now=-10.0 + 4 * step_s, local_steps=4)


def version_of(effects: list[Any]) -> int | None:
    return next((e.version for e in effects if isinstance(e, Published)), None)


def test_a_device_whose_speed_is_not_known_trains_as_configured_and_nobody_is_waited_for() -> None:
    bench = bench_of("a", "b")
    assert [asked(bench, c, c, now=0.0) for c in "ab"] == [0, 0]
    assert version_of(bench.push("a", "a", (8, 0, 0, 0), now=1.0)) == 1
    np.testing.assert_array_equal(bench.engine.vector, vector(4, 0, 0, 0))  # half of the fleet
    assert asked(bench, "a", "a2", now=1.0) == 0, "it did not say how many steps it took"


def test_golden_group() -> None:
    """Speeds of 1, 2 and 5 s a step, Q from 2 to 8, lambda 1.5."""
    bench = bench_of("fast", "half", "slow")
    for client, step_s in (("fast", 1.0), ("half", 2.0), ("slow", 5.0)):
        learned(bench, client, step_s)
    before = bench.engine.version
    assert asked(bench, "fast", "f", now=0.0) == 8, "a new group: expected at 8, at the latest at 12"
    assert asked(bench, "half", "h", now=0.0) == 4, "to arrive at 8"
    # It would make 1 step until 8: fewer than 2. The fast one could be back at 12 + 8, after 4 of its steps.
    assert asked(bench, "slow", "s", now=0.0) == 4
    assert bench.engine.next_deadline() == 12.0
    assert version_of(bench.push("fast", "f", (3, 0, 0, 0), now=8.0, local_steps=8)) is None
    # The group of the slow one is expected at 20.
    assert asked(bench, "fast", "f2", now=8.0) == 2 + 6, "from 8 to 20 it could make 12, which is over 8"
    effects = bench.push("half", "h", (6, 0, 0, 0), now=8.5, local_steps=4)
    assert version_of(effects) == before + 1
    np.testing.assert_allclose(bench.engine.vector, vector(3, 0, 0, 0), rtol=1e-6)  # (3 + 6) / 3
    assert asked(bench, "half", "h2", now=8.5) == 5, "to arrive before 20: (20 - 8.5) / 2"


def reference(start: float, fleet: int, arrived: list[tuple[float, float, int]]) -> float:
    """The mean of the model and of what was reached, by w_base, Delta and tau of each."""
    weights = np.array([0.9 / fleet / np.sqrt(1 + tau) for _, _, tau in arrived])
    reached = np.array([base + delta for base, delta, _ in arrived])
    if weights.sum() >= 1:
        return float(np.average(reached, weights=weights))
    return float(start + weights @ (reached - start))


def run_fleet(
    speeds: Mapping[str, float], until_s: float, **more: Any
) -> tuple[Bench, list[list[tuple[str, float]]]]:
    """Devices that always ask again and take `step_s` for a step: who made each version, and when.

    Every version is compared with the reference, which is told nothing but bases, deltas and versions.
    """
    params = {"alpha": 0.9, "staleness": {"name": "polynomial", "a": 0.5}, **more}
    bench = bench_of(*speeds, **params)
    rng = np.random.default_rng(3)
    queue: list[tuple[float, int, str, str]] = []
    history = [bench.engine.vector.astype(float)]
    gathered: list[tuple[float, float, int]] = []
    versions: list[list[tuple[str, float]]] = [[]]
    number = 0

    def begin(client: str, now: float) -> None:
        nonlocal number
        number += 1
        steps = asked(bench, client, f"t{number}", now) or 4
        heapq.heappush(queue, (now + steps * speeds[client], number, client, f"t{number}"))

    def publish(effects: list[Any]) -> None:
        if version_of(effects) is not None:
            expected = reference(history[-1][0], len(speeds), gathered)
            assert bench.engine.vector[0] == pytest.approx(expected, rel=1e-4, abs=1e-4)
            history.append(bench.engine.vector.astype(float))
            gathered.clear()
            versions.append([])

    for client in speeds:
        begin(client, 0.0)
    while queue[0][0] < until_s:
        now, _, client, task_id = heapq.heappop(queue)
        while (due := bench.engine.next_deadline()) is not None and due < now:
            publish(bench.tick(due))
        task = bench.engine.ledger.tasks[task_id]
        steps = task.local.steps or 4
        delta = float(rng.integers(-8, 9))
        gathered.append((history[task.base_version][0], delta, bench.engine.version - task.base_version))
        versions[-1].append((client, now))
        publish(bench.push(client, task_id, (delta, 0, 0, 0), now=now, local_steps=steps))
        begin(client, now)
    return bench, versions[:-1]


def test_devices_of_different_speeds_come_to_arrive_together() -> None:
    """Steps of 1, 1.3, 2 and 3 s: with equal steps the fastest would come thrice as often as the slowest."""
    speeds = {"a": 1.0, "b": 1.3, "c": 2.0, "d": 3.0}
    bench, versions = run_fleet(speeds, until_s=400.0, latest_factor=1.05)
    settled = versions[len(versions) // 2 :]
    assert len(settled) > 10
    whole = [v for v in settled if {client for client, _ in v} == set(speeds)]
    assert len(whole) > 0.8 * len(settled)
    spread_s = [max(at for _, at in v) - min(at for _, at in v) for v in whole]
    assert np.median(spread_s) <= max(speeds.values()), "within a step of the slowest"
    accepted = [bench.engine.ledger.clients[c].accepted for c in speeds]
    assert max(accepted) <= 1.1 * min(accepted), "each is heard about as often"


def test_a_group_that_somebody_does_not_come_back_to_is_applied_at_its_time() -> None:
    bench = bench_of("a", "gone")
    for client in ("a", "gone"):
        learned(bench, client, 1.0)
    at = bench.engine.version
    assert [asked(bench, c, c, now=0.0) for c in ("a", "gone")] == [8, 8]
    bench.push("a", "a", (2, 0, 0, 0), now=8.0, local_steps=8)
    assert bench.engine.next_deadline() == 12.0
    bench.tick(11.9)
    assert bench.engine.version == at
    assert version_of(bench.tick(12.0)) == at + 1
    np.testing.assert_allclose(bench.engine.vector[0], 1.0)
    # It comes after all: into the next group where there is one.
    assert asked(bench, "a", "a2", now=13.0) == 8
    late = bench.push("gone", "gone", (4, 0, 0, 0), now=14.0, local_steps=8)
    assert version_of(late) is None
    assert version_of(bench.push("a", "a2", (0, 0, 0, 0), now=21.0, local_steps=8)) == at + 2
    # (1 - 1) w + (0 + 4) / 2 + (1 + 0) / 2
    np.testing.assert_allclose(bench.engine.vector[0], 2.5)


def test_who_is_lost_is_not_waited_for() -> None:
    bench = bench_of("a", "b", lease_max_s=50.0)
    for client in ("a", "b"):
        learned(bench, client, 5.0)
    for client in ("a", "b"):
        assert asked(bench, client, client, now=20.0) == 8
    bench.push("a", "a", now=60.0, local_steps=8)
    assert bench.engine.strategy.timer(bench.engine.state) == 80.0
    at = bench.engine.version
    assert version_of(bench.tick(70.0)) == at + 1, "with the lease of the other one"
    assert bench.engine.state.groups == {}


def test_a_group_that_nobody_is_left_of_is_gone_with_nothing_to_apply() -> None:
    bench = bench_of("a", lease_max_s=50.0)
    learned(bench, "a", 1.0)
    asked(bench, "a", "a", now=0.0)
    at = bench.engine.version
    assert version_of(bench.tick(100.0)) is None
    state = bench.engine.state
    assert (bench.engine.version, state.groups, state.running) == (at, {}, {})


def test_a_speed_is_a_mean_that_forgets() -> None:
    bench = bench_of("a", speed_momentum=0.75)
    learned(bench, "a", 1.0)
    asked(bench, "a", "a", now=0.0)
    bench.push("a", "a", now=40.0, local_steps=8)  # 5 s a step
    assert bench.engine.state.speeds == {"a": 0.75 * 1.0 + 0.25 * 5.0}


def test_many_updates_of_one_device_count_as_one_fleet_at_most() -> None:
    """A fleet of one, with two tasks: A = 2, so the model is the mean of what was reached."""
    bench = bench_of("a", tasks_per_client=3)
    learned(bench, "a", 1.0)
    assert [asked(bench, "a", task, now=0.0) for task in "xy"] == [8, 8]
    assert decided(bench, "x", 2.0) is Verdict.HELD
    assert decided(bench, "y", 6.0) is Verdict.PUBLISHED
    np.testing.assert_allclose(bench.engine.vector[0], 4.0)


def decided(bench: Bench, task: str, value: float) -> Verdict:
    return decision(bench.push("a", task, (value, 0, 0, 0), now=8.0, local_steps=8)).verdict


def test_a_restart_in_the_middle_of_a_group_changes_nothing() -> None:
    ends = []
    for restarts in (False, True):
        bench = bench_of("a", "b")
        for client in ("a", "b"):
            learned(bench, client, 1.0)
        for client in ("a", "b"):
            asked(bench, client, client, now=0.0)
        bench.push("a", "a", (2, 0, 0, 0), now=8.0, local_steps=8)
        if restarts:
            e = bench.engine
            bench.engine = restore(take_snapshot(e), e.spec, e.strategy, e.settings)
        bench.push("b", "b", (4, 0, 0, 0), now=8.0, local_steps=8)
        ends.append(state_digest(bench.engine))
        assert bench.engine.vector[0] == 3.0
    assert ends[0] == ends[1]


def test_steps_that_no_task_can_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"steps_max must be at least strategy\.steps_min = 9, not 3"):
        make_strategy("fedcompass", {"steps_min": 9, "steps_max": 3})
    with pytest.raises(ConfigError, match="latest_factor must be at least 1"):
        make_strategy("fedcompass", {"latest_factor": 0.5})
