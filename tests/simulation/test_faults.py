"""Runs in which everything goes wrong: every promise is kept, and a seed has one history."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
from fleets import Ones, config
from rough import MADE_MIN, STRATEGIES, Proved, prove, prove_twice, restored, rough

from anabranch.core.config.faults import Fate, FaultKind, FaultsTable, MessageFaults, length_s
from anabranch.core.config.ranges import LOT
from anabranch.core.config.tables import Config, merge
from anabranch.core.engine.engine import Engine
from anabranch.core.errors import ConfigError, LogLost
from anabranch.simulation.clock import VirtualClock
from anabranch.simulation.disk import Disk
from anabranch.simulation.faults import DeviceClock, Faults
from anabranch.simulation.run import Simulation, open_simulation, simulate
from anabranch.simulation.server import Process

SHORT, CLIENTS = len(STRATEGIES), 12
LONG, AT_ONCE = int(os.environ.get("ANABRANCH_PROVE_SEEDS", "500")), 25
EVERY_FAULT = {
    "lost",
    "duplicated",
    "delayed",
    "reordered",
    "partition",
    "partitioned",
    "swizzle",
    "clogged",
    "device-crash",
    "server-crash",
}


def short(seed: int) -> Config:
    """A run of a few devices."""
    return restored(rough(seed, clients=CLIENTS), 3)


@lru_cache
def proved_of(seed: int) -> Proved:
    """What such a run came to, with every promise looked at after every event."""
    return prove(short(seed))


@pytest.mark.parametrize("seed", range(SHORT))
def test_every_promise_is_kept_whatever_goes_wrong(seed: int) -> None:
    proved = proved_of(seed)
    assert proved.versions > 5
    assert proved.restarts == proved.faults["server-crash"] > 3
    assert proved.orders % 2 == 0, "an order was not taken back"


@pytest.mark.parametrize("seed", range(SHORT))
def test_a_seed_has_one_history_with_all_its_faults(seed: int) -> None:
    assert prove(short(seed), every=50) == proved_of(seed)


REMEMBERING = pytest.mark.parametrize(
    ("seed", "strategy"),
    [
        (400, {"name": "fadas", "buffer_size": 3, "server_lr": 0.01}),
        (408, {"name": "ca2fl", "buffer_size": 3}),
        (416, {"name": "ace"}),
        (424, {"name": "aced", "staleness_max": 12}),
        (432, {"name": "delayed_nesterov", "buffer_size": 4}),
        (440, {"name": "fedcompass", "steps_min": 1}),
        (448, {"name": "port", "buffer_size": 3}),
        (456, {"name": "fedfa", "window_size": 4}),
        (472, {"name": "fedbuff", "buffer_size": 3, "scheduler": {"name": "fedluck"}}),
        (464, {"name": "annealed", "buffer_size": 2, "growth": 0.05}),
        (488, {"name": "waves", "share": 0.5}),
    ],
)


@REMEMBERING
def test_what_a_strategy_remembers_is_kept_whatever_goes_wrong(seed: int, strategy: dict[str, Any]) -> None:
    first = prove(_remembering(seed, strategy), every=5)
    assert first.versions > MADE_MIN
    assert first.restarts > 3


@pytest.mark.prove
@REMEMBERING
def test_what_a_strategy_remembers_has_one_history(seed: int, strategy: dict[str, Any]) -> None:
    settings = _remembering(seed, strategy)
    assert prove(settings, every=50) == prove(settings, every=50)


def _remembering(seed: int, strategy: dict[str, Any]) -> Config:
    """In the place of a seed of FedAsync, which has no parameters and no rule."""
    assert rough(seed).strategy.name == "fedasync"
    base = restored(rough(seed, clients=8), 1)
    return merge([("rough", base.to_json()), ("mine", {"strategy": strategy})])


ROUNDS_FIRST = {"strategy": "fedavg", "clients_per_round": 6}


PHASES = pytest.mark.parametrize(
    ("seed", "phases"),
    [
        (440, [{**ROUNDS_FIRST, "until_updates": 12}, {"strategy": "fedbuff", "buffer_size": 3}]),
        (
            448,
            [
                {**ROUNDS_FIRST, "until_versions": 2},
                {"strategy": "fedbuff", "buffer_size": 3, "until_versions": 6},
                {"strategy": "fedasync"},
            ],
        ),
        (
            456,
            [
                {"strategy": "ca2fl", "buffer_size": 3, "until_updates": 10},
                {"strategy": "teasq", "cache_size": 3, "concurrency_fraction": 0.5},
            ],
        ),
    ],
)


@PHASES
def test_phases_follow_each_other_whatever_goes_wrong(seed: int, phases: list[dict[str, Any]]) -> None:
    ended: list[Ended] = []
    first = prove(_phased(seed, phases), every=5, notes=[lambda simulation: Ended(simulation, ended)])
    assert ended[0].phase == len(phases) - 1
    assert first.restarts > 3


@pytest.mark.prove
@PHASES
def test_phases_have_one_history(seed: int, phases: list[dict[str, Any]]) -> None:
    settings = _phased(seed, phases)
    assert prove(settings, every=50) == prove(settings, every=50)


def _phased(seed: int, phases: list[dict[str, Any]]) -> Config:
    mine = {
        "strategy": {"name": "phased", "phases": phases},
        # What is one for the whole run.
        "downlink": {"codec": "raw"},
        "submodel": {"name": "none"},
        "robust": {"clip": 0.0},
    }
    return merge([("rough", restored(rough(seed, clients=12), 1).to_json()), ("mine", mine)])


@dataclass
class Ended:
    """The phase in which a run of phases ended."""

    simulation: Simulation
    of: list[Ended]
    phase: int = -1

    def end(self) -> None:
        """The run is over."""
        self.phase = self.simulation.engine.state.phase
        self.of.append(self)


def test_another_seed_has_another_history() -> None:
    of_the_same_strategy = prove(short(len(STRATEGIES)), every=50)
    assert proved_of(0).digests != of_the_same_strategy.digests


def test_every_fault_happens() -> None:
    found: Counter[str] = Counter()
    for seed in range(4):
        found.update(proved_of(seed).faults)
    assert set(found) == EVERY_FAULT


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    """A process for each core."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(1000, 1000 + LONG, AT_ONCE))
def test_hundreds_of_seeds(first: int, workers: ProcessPoolExecutor, figure: Callable[[str], None]) -> None:
    seeds, began = range(first, min(first + AT_ONCE, 1000 + LONG)), time.monotonic()
    proofs = list(workers.map(prove_twice, seeds))
    faults: Counter[str] = Counter()
    for proved in proofs:
        faults.update(proved.faults)
    figure(
        f"{len(seeds)} seeds, each twice with the same digests, in {time.monotonic() - began:.0f} s: "
        f"{sum(p.events for p in proofs)} events, all invariants after each; "
        f"{sum(p.applied for p in proofs)} updates, {sum(p.restarts for p in proofs)} restarts, "
        f"{sum(p.orders for p in proofs)} orders, {sum(p.barred for p in proofs)} hostile devices barred; "
        f"{dict(sorted(faults.items()))}"
    )
    assert set(faults) == EVERY_FAULT


# --- the proof has teeth -------------------------------------------------------------------------


def test_a_disk_that_forgets_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Disk.rebuild

    def forgets(disk: Disk, before: Engine) -> Engine:
        disk.lose(0.0)
        return honest(disk, before)

    monkeypatch.setattr(Disk, "rebuild", forgets)
    with pytest.raises(LogLost, match="before the one that was acknowledged last"):
        prove(rough(2, clients=16))


def test_updates_that_were_acknowledged_and_are_lost_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Disk.rebuild

    def forgets(disk: Disk, before: Engine) -> Engine:
        engine = honest(disk, before)
        engine.ledger.receipts.pop(next(reversed(engine.ledger.receipts)), None)
        return engine

    monkeypatch.setattr(Disk, "rebuild", forgets)
    with pytest.raises(AssertionError, match="acknowledged and is lost"):
        prove(rough(2, clients=16))


def test_versions_that_were_published_and_are_lost_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Disk.rebuild

    def forgets(disk: Disk, before: Engine) -> Engine:
        engine = honest(disk, before)
        engine.version -= 1
        return engine

    monkeypatch.setattr(Disk, "rebuild", forgets)
    with pytest.raises(AssertionError, match="was published"):
        prove(rough(2, clients=16))


def test_devices_that_get_no_task_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Process, "_restart", lambda self: None)  # the server does not come back
    with pytest.raises(AssertionError, match="got no task after the faults were over"):
        prove(rough(2, clients=16))


def test_devices_that_wait_for_others_mishaps_are_found_out() -> None:
    """As in simulations of older releases, where one lost lease was enough to share a few places by lot."""
    settings = rough(1026)
    older = merge([("base", settings.to_json()), ("older", {"server": {"lapsed": LOT}})])
    with pytest.raises(AssertionError, match="got no task after the faults were over"):
        prove(older, every=1_000)
    assert prove(settings, every=1_000).versions > MADE_MIN


# --- the parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["fixed", "uniform", "exponential", "lognormal"])
def test_delays_have_the_mean_that_was_asked_for(shape: str) -> None:
    quantiles = [(n + 0.5) / 20_000 for n in range(20_000)]
    assert sum(length_s(shape, 3.0, u) for u in quantiles) / len(quantiles) == pytest.approx(3.0, rel=0.02)


def test_a_heavy_tail_is_heavy() -> None:
    assert length_s("pareto", 3.0, 0.0) == 1.5
    assert length_s("pareto", 3.0, 0.9999) == pytest.approx(150.0)
    assert all(math.isfinite(length_s(s, 1.0, 0.0)) for s in ("lognormal", "pareto", "exponential"))


def test_a_link_has_its_own_draws() -> None:
    table = FaultsTable(loss=0.2, duplication=0.2, delay=0.3, reordering=0.2)
    faults, again = MessageFaults(table, 7), MessageFaults(table, 7)
    fates = [faults.fate("a up", n) for n in range(2000)]
    assert fates == [again.fate("a up", n) for n in range(2000)]
    assert fates != [again.fate("b up", n) for n in range(2000)]
    kinds = Counter(kind for fate in fates for kind in fate.kinds)
    assert kinds[FaultKind.LOST] == pytest.approx(400, rel=0.15)
    assert kinds[FaultKind.DUPLICATED] == pytest.approx(320, rel=0.2)
    assert MessageFaults(FaultsTable(), 7).fate("a up", 1) == Fate()


class Post:
    """A network with faults, and the letters that arrived."""

    def __init__(self, **table: Any) -> None:
        self.clock = VirtualClock()
        self.faults = Faults(FaultsTable(**table), 3, self.clock, ["a", "b", "c", "d"])
        self.got: list[tuple[float, str]] = []

    def send(self, at: float, link: str, text: str, takes_s: float = 1.0) -> None:
        """Send at this time."""
        arrive = lambda: self.got.append((round(self.clock.now, 6), text))  # noqa: E731
        client_id, _, way = link.partition(" ")
        self.clock.at(at, lambda: self.faults.send(client_id, way, at + takes_s, arrive))


def test_a_lost_message_does_not_come_and_a_duplicate_comes_twice() -> None:
    lossy, doubling = Post(loss=0.999999), Post(duplication=1.0)
    for post in (lossy, doubling):
        post.send(0.0, "a up", "x")
        post.clock.run()
    assert (lossy.got, doubling.got) == ([], [(1.0, "x"), (1.0, "x")])


def test_a_message_that_is_held_is_overtaken_by_the_next() -> None:
    post = Post(reordering=0.5, delay_s=50.0)
    fates = [post.faults._messages.fate("a up", n).held for n in range(1, 9)]
    for n in range(8):
        post.send(float(n), "a up", str(n))
    post.clock.run()
    order = [int(text) for _, text in post.got]
    assert sorted(order) == list(range(8))
    assert (order != sorted(order)) == any(fates[:-1])


def test_a_partition_cuts_some_off_and_heals() -> None:
    post = Post(partition_every_s=10.0, partition_s=10.0, partition_fraction=0.5)
    post.faults.begin(lambda _, __: None, lambda _: None)
    for n in range(200):
        for name in "abcd":
            post.send(float(n), f"{name} up", name)
    post.clock.run(until_s=300.0)
    got = Counter(name for _, name in post.got)
    assert post.faults.counts["partition"] > 3
    assert all(40 < got[name] < 200 for name in "abcd")
    assert sum(got.values()) + post.faults.counts["partitioned"] == 800


def test_a_swizzle_loses_nothing() -> None:
    post = Post(swizzle_every_s=10.0, swizzle_s=10.0, swizzle_fraction=0.75)
    post.faults.begin(lambda _, __: None, lambda _: None)
    for n in range(200):
        for name in "abcd":
            post.send(float(n), f"{name} up", f"{name} {n}")
    post.clock.run(until_s=400.0)
    assert len(post.got) == 800
    assert post.faults.counts["clogged"] > 50
    assert any(at > int(text.split()[1]) + 1.0 for at, text in post.got)


def test_nothing_goes_wrong_after_the_end() -> None:
    post = Post(loss=0.9, partition_every_s=1.0, until_s=50.0)
    post.faults.begin(lambda _, __: None, lambda _: None)
    for n in range(50, 150):
        post.send(float(n), "a up", "x")
    post.clock.run(until_s=200.0)
    assert len(post.got) == 100


def test_a_clock_that_is_wrong_is_wrong_in_both_directions() -> None:
    time = DeviceClock(-3.0, 1.1)
    assert time.local(10.0) == pytest.approx(8.0)
    assert time.true(time.local(123.0)) == pytest.approx(123.0)
    post = Post(skew_s=5.0, drift=0.1)
    clocks = [post.faults.clock_of(name) for name in "abcd"]
    assert all(abs(c.offset_s) <= 5.0 and abs(c.rate - 1.0) <= 0.1 for c in clocks)
    assert len(set(clocks)) == 4


def test_without_faults_there_is_no_trace_of_them() -> None:
    silent = config(faults={"delay_s": 9.0, "timeout_s": 1.0, "until_s": 30.0})
    assert simulate(silent, app=Ones()).model_sha256 == simulate(config(), app=Ones()).model_sha256
    with open_simulation(config(), app=Ones()) as simulation:
        assert simulation.faults is None


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"loss": 1.0}, "faults.loss must be less than 1"),
        ({"drift": 1.0}, "faults.drift must be less than 1"),
        ({"delay": 1.5}, "faults.delay must be from 0 to 1"),
        ({"timeout_s": 0.0}, "faults.timeout_s must be greater than 0"),
        ({"delay_shape": "square"}, "faults.delay_shape must be one of fixed"),
        ({"until_s": -1.0}, "faults.until_s must not be negative"),
    ],
)
def test_settings_that_make_no_sense_are_refused(table: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(faults=table)
