"""Simulated devices that train on, and meet the server now and then."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import config, recorded

from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.effects import Effect, Published
from anabranch.core.engine.invariants import violations
from anabranch.core.errors import AppError, ConfigError
from anabranch.core.model.updates import LocalPlan
from anabranch.simulation.promises import Promises
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import open_simulation, simulate
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.batches import batches

A = 0.5
MIXING = {"name": "fedasync", "alpha": A, "staleness": {"name": "constant"}}
EVERY_3 = {"push": "elastic", "push_when": "interval", "push_steps": 3, "batch_size": 16}
STEADY = {"clients": 1, "speed_ratio": 1.0, "step_time_s": 1.0, "latency_s": 0.1}
WAIT_S = 600.0


def elastic(**tables: dict[str, Any]) -> Config:
    """Devices that push every third step, to a server that mixes half of each update in."""
    base = {"strategy": MIXING, "client": EVERY_3, "fleet": {"clients": 3}, "run": {"virtual_s_max": 15.0}}
    return merge([("fleet", config("fedasync").to_json()), ("base", base), ("test", tables)])


class Counted(App):
    """`step` is added to all weights in each of the first `last` steps; every start of a training counts."""

    name = "counted"

    def __init__(self, last: int = 10**9) -> None:
        super().__init__()
        self.last = last
        self.starts: list[float] = []  # one for all devices

    def model(self) -> dict[str, Any]:
        return {"w": np.zeros(4, np.float32)}

    def data(self, shard: Shard) -> Examples:
        return Examples(np.full((64, 1), shard.index + 1, np.float32), np.zeros(64, np.int64))

    def step(self, examples: Examples) -> float:
        return 1.0

    def train(
        self, model: dict[str, Any], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        self.starts.append(float(examples.x[0, 0]))
        for n, _ in enumerate(batches(len(examples), plan, seed)):
            if n < self.last:
                model["w"] += np.float32(self.step(examples))
        return {}

    def evaluate(self, model: dict[str, Any], examples: Examples) -> dict[str, float]:
        return {"accuracy": 0.5, "loss": float(model["w"].mean())}


def vectors(settings: Config, app: App) -> list[list[float]]:
    """Each version that is published."""
    found: list[list[float]] = []

    def observe(event: ev.Event, effects: Sequence[Effect]) -> None:
        found.extend(e.vector.tolist() for e in effects if isinstance(e, Published))

    with open_simulation(settings, app=app) as simulation:
        simulation.world.observers.append(observe)
        simulation.run()
    return found


def versions(settings: Config, app: App) -> list[float]:
    """The first weight of each version that is published."""
    return [vector[0] for vector in vectors(settings, app)]


@pytest.mark.parametrize(("latency_s", "steps_away"), [(0.1, 1), (0.3, 2), (0.6, 3), (0.9, 4)])
def test_one_device_does_what_is_done_by_hand(latency_s: float, steps_away: int) -> None:
    """An exchange takes four latencies, a step one second: so many steps are made before the merge."""
    settings = elastic(fleet={**STEADY, "latency_s": latency_s}, run={"virtual_s_max": 40.0})
    live = center = np.float32(0.0)
    expected: list[float] = []
    since, away, snapshot = 0, -1, live
    for _ in range(int(40.0 - 7 * latency_s)):  # it begins after six latencies, the last push takes one
        live += np.float32(1.0)
        since += 1
        away -= 1
        if away == 0:
            live += np.float32(A) * (center - snapshot)
        if away <= 0 and since >= 3:
            center = np.float32(1 - A) * center + np.float32(A) * live
            expected.append(float(center))
            snapshot, since, away = live, 0, steps_away
    found = versions(settings, Counted())
    assert len(found) >= 7
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_seed_has_one_history_and_its_folder_replays(tmp_path: Path) -> None:
    rough = {"dropout": 0.3, "availability": 0.7, "availability_period_s": 6.0, "up_mbps": 1.0}
    settings = elastic(fleet=rough)
    first, again = simulate(settings, tmp_path), simulate(settings)
    other = simulate(elastic(fleet=rough, run={"seed": 1}))
    assert first.updates_applied > 3
    assert (first.model_sha256, first.journal_sha256) == (again.model_sha256, again.journal_sha256)
    assert first.journal_sha256 != other.journal_sha256
    assert replay_run(tmp_path).matches


def test_a_folder_without_payloads_replays_by_simulation(tmp_path: Path) -> None:
    simulate(elastic(run={"keep_payloads": False}), tmp_path)
    outcome = replay_run(tmp_path)
    assert outcome.way == "simulation"
    assert outcome.matches


def test_torch_models_live_side_by_side() -> None:
    settings = elastic(run={"workload": "digits", "virtual_s_max": 6.0}, client={"momentum": 0.9})
    first, again = simulate(settings), simulate(settings)
    assert first.updates_applied > 3
    assert first.model_sha256 == again.model_sha256


def test_a_training_begins_once_unless_its_device_vanishes() -> None:
    steady, away = Counted(), Counted()
    simulate(elastic(), app=steady)
    simulate(elastic(fleet={"availability": 0.6, "availability_period_s": 4.0}), app=away)
    assert sorted(steady.starts) == [1.0, 2.0, 3.0]
    assert len(away.starts) > 3


class Own(Counted):
    """Adds what its device's number is."""

    def step(self, examples: Examples) -> float:
        return float(examples.x[0, 0])


NETWORK = {"loss": 0.1, "duplication": 0.1, "reordering": 0.1, "delay": 0.1, "timeout_s": 2.0}
CRASHES = {
    "device_crash_every_s": 10.0,
    "device_down_s": 1.0,
    "server_crash_every_s": 6.0,
    "server_down_s": 0.5,
    "commit_s": 0.05,
    "clock_step_every_s": 9.0,
    "torn_tail": 0.5,
    "skew_s": 50.0,
    "drift": 0.05,
}


def test_no_exchange_is_lost_or_merged_twice_whatever_the_network_does() -> None:
    """(1 - a) w_PS + sum w_i changes by local steps alone: after them all models become one, a known one."""
    settings = elastic(
        client={"push_steps": 15, "merge_weight": A},
        fleet={"clients": 4, "step_time_s": 1.0, "speed_ratio": 1.5},
        server={"lease_s": 3000.0, "lease_max_s": 3000.0},
        faults=NETWORK,
        run={"virtual_s_max": 900.0},
    )
    app = Own(last=1)
    found = versions(settings, app)
    assert sorted(app.starts) == [1.0, 2.0, 3.0, 4.0], "each began once, from zero"
    assert found[-1] == pytest.approx((1 + 2 + 3 + 4) / (4 + 1 - A), rel=1e-4)


def test_what_was_promised_holds_with_faults_on() -> None:
    faults, server = {**NETWORK, **CRASHES, "until_s": 25.0}, {"snapshot_every_updates": 2}
    settings = elastic(faults=faults, server=server, run={"virtual_s_max": 40.0})
    digests = []
    for _ in range(2):
        with open_simulation(settings, app=Counted()) as simulation:
            promises = Promises(simulation)
            simulation.run()
            promises.look()
            assert violations(simulation.engine) == []
            result = simulation.result(0.0)
        assert promises.restarts > 1
        assert result.updates_applied > 5
        digests.append((result.model_sha256, result.journal_sha256))
    assert digests[0] == digests[1]


def test_the_servers_advice_brings_a_push_forward() -> None:
    """The slow device would wait for 40 steps; the fast one has made versions meanwhile."""
    settings = elastic(
        client={"push_when": "advised", "push_steps": 1, "push_steps_max": 40},
        fleet={"clients": 2, "speed_levels": 2, "speed_ratio": 4.0, "step_time_s": 0.2},
        server={"upload_now_versions": 1, "lease_s": 12.0},
        run={"virtual_s_max": 30.0},
    )
    steps: dict[str, list[int]] = {}

    def observe(event: ev.Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, ev.UpdateArrived):
            steps.setdefault(event.update.client_id, []).append(event.update.local_steps)

    with open_simulation(settings, app=Counted()) as simulation:
        simulation.world.observers.append(observe)
        simulation.run()
    first = sorted(told[0] for told in steps.values())
    assert first[0] < 40
    assert first[1] == 40


def test_what_an_app_raises_ends_the_run_and_names_the_device() -> None:
    class Raising(Counted):
        def step(self, examples: Examples) -> float:
            raise ZeroDivisionError("a bug of the App")

    with pytest.raises(AppError, match=r"Raising\.train .* on device-000.: ZeroDivisionError: a bug"):
        simulate(elastic(), app=Raising())


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"fleet": {"clients": 65}}, "at most 64 devices.*fleet.clients is 65"),
        ({"fleet": {"executor": "batched"}}, "fleet.executor is 'batched', set it to 'auto'"),
        ({"fleet": {"attackers": 0.5, "attack": "alie"}}, "take 'sign_flip'"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_the_reason(tables: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        simulate(elastic(**tables), app=Counted())


def test_a_server_that_adds_up_wants_all_of_its_progress_merged() -> None:
    settings = config("fedbuff", client=EVERY_3)
    with pytest.raises(ConfigError, match=r"client\.merge_weight = 1"):
        simulate(settings, app=Counted())
    whole = merge([("it", settings.to_json()), ("whole", {"client": {"merge_weight": 1.0}})])
    found = versions(merge([("it", whole.to_json()), ("time", {"run": {"virtual_s_max": 20.0}})]), Counted())
    assert found == sorted(found)
    assert found[-1] > 3.0


def test_a_part_of_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"submodel\.name = 'none'"):
        simulate(elastic(submodel={"name": "random"}))


def test_a_hostile_device_may_train_on() -> None:
    settings = elastic(fleet={"attackers": 0.4, "attack": "sign_flip"})
    assert min(versions(settings, Counted())) < 0


class Pair(Counted):
    """Two tensors: a device's steps add `step` to both."""

    def model(self) -> dict[str, Any]:
        return {"a": np.zeros(3, np.float32), "b": np.zeros(4, np.float32)}

    def train(
        self, model: dict[str, Any], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        for n, _ in enumerate(batches(len(examples), plan, seed)):
            for name in ("a", "b") if n < self.last else ():
                model[name] += np.float32(self.step(examples))
        return {}

    def evaluate(self, model: dict[str, Any], examples: Examples) -> dict[str, float]:
        return {"accuracy": 0.5}


def fragments(parts: int) -> dict[str, Any]:
    return {"name": "fragments", "parts": parts, "pattern": "strided"}


def test_one_fragment_is_the_whole_model() -> None:
    whole = vectors(elastic(), Pair())
    assert len(whole) > 3
    assert vectors(elastic(submodel=fragments(1)), Pair()) == whole


def test_fragments_are_exchanged_in_turn_and_all_is_trained_meanwhile() -> None:
    """A device alone, to a server that adds up: each exchange brings of a part all that was learned."""
    tables: dict[str, Any] = {
        "strategy": {"name": "fedbuff", "buffer_size": 1},
        "client": {**EVERY_3, "merge_weight": 1.0},
        "fleet": STEADY,
        "submodel": fragments(2),
        "run": {"virtual_s_max": 20.0},
    }
    settings = merge([("fleet", config("fedbuff").to_json()), ("test", tables)])
    found = vectors(settings, Pair())
    changed = []
    for before, after in pairwise([[0.0] * 7, *found]):
        moved = [a != b for a, b in zip(before, after, strict=True)]
        assert moved in ([True] * 3 + [False] * 4, [False] * 3 + [True] * 4)
        changed.append(moved[0])
    assert len(changed) > 4
    assert all(a != b for a, b in pairwise(changed))
    # At every third step all that there is, of the part whose turn it is: what was learned before, too.
    assert [max(vector) for vector in found] == [3.0 * (n + 1) for n in range(len(found))]


@pytest.mark.parametrize("rule", ["delta", "blend"])
def test_fragments_with_faults_have_one_history(rule: str) -> None:
    settings = elastic(
        submodel=fragments(2), client={**EVERY_3, "merge": rule}, faults={**NETWORK, "until_s": 25.0},
        run={"virtual_s_max": 40.0}, downlink={"codec": "log(2)"},
        uplink={"codec": "ef(0.9)|int4(256)|zstd"},
    )  # fmt: skip
    first, again = simulate(settings, app=Pair()), simulate(settings, app=Pair())
    assert first.updates_applied > 10
    assert (first.model_sha256, first.journal_sha256) == (again.model_sha256, again.journal_sha256)


def test_what_was_promised_of_fragments_holds_with_faults_on(tmp_path: Path) -> None:
    settings = elastic(submodel=fragments(2), faults={**NETWORK, "until_s": 25.0})
    assert recorded(settings, tmp_path)[0].updates_applied > 4


def test_fragments_of_a_folder_replay(tmp_path: Path) -> None:
    settings = elastic(
        submodel=fragments(2), fleet={"dropout": 0.3, "up_mbps": 1.0}, uplink={"codec": "int4"}
    )
    assert simulate(settings, tmp_path).updates_applied > 3
    assert replay_run(tmp_path).matches


STUBBORN = """
    import sys
    import anabranch.simulation.baton as baton
    from anabranch.core.config.tables import merge
    from anabranch.simulation.run import simulate
    from anabranch.workloads.batches import batches
    from anabranch.workloads.synthetic import Synthetic

    baton.JOIN_S = 0.1

    class Stubborn(Synthetic):
        def train(self, model, examples, plan, seed):
            while True:
                try:
                    for rows in batches(len(examples), plan, seed):
                        model["hidden.bias"] += 0.01
                except BaseException:
                    pass

    tables = {
        "run": {"virtual_s_max": 5.0},
        "fleet": {"clients": 2},
        "strategy": {"name": "fedasync"},
        "client": {"push": "elastic", "push_when": "interval", "push_steps": 3},
    }
    print(simulate(merge([("test", tables)]), app=Stubborn()).updates_applied)
"""


def test_a_thread_that_does_not_heed_its_end_does_not_keep_the_process(tmp_path: Path) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(textwrap.dedent(STUBBORN))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3
