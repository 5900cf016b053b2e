"""Schedulers: who gets a task, of how many steps and by which chain, beside any strategy.

FedLuck is compared with a reference of its own, which knows times alone: exact fractions and plain loops.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_state import Tables, config_of
from machines import SPEC, Bench

from anabranch.aggregation import aggregate
from anabranch.api.tune_ranges import value_of
from anabranch.compress.registry import make_codec
from anabranch.core import events as ev
from anabranch.core.effects import Granted, Refused
from anabranch.core.engine.robust import RobustTable
from anabranch.core.engine.strategy import Context, Plan
from anabranch.core.errors import ConfigError
from anabranch.core.model.updates import Ask, Capability, LocalPlan, Reason, Task, Update, Verdict
from anabranch.core.snapshot import restore, state_digest, take_snapshot
from anabranch.host.build import Blueprint
from anabranch.strategies.registry import make_strategy
from anabranch.strategies.scheduled import Scheduled, unscheduled
from anabranch.strategies.schedulers.fedluck import FedLuck
from anabranch.strategies.schedulers.paces import UNANSWERED_MAX, Paces
from anabranch.strategies.schedulers.scheduler import OpenScheduler

PRIVATE = {"clip": 1.0, "noise": 1.0, "participations": 4}
MASKED = {"mode": "keeper", "keepers": ["ab" * 32], "clip": 1.0}
KEPT = ["1", "0.5", "0.1"]
LONG = {"lease_s": 1e4, "lease_min_s": 1e4, "lease_max_s": 1e4}
CODECS = ("ef", "topk", "f32", "gaps", "bitmap", "zstd")


def bench_of(*clients: str, strategy: str = "fedbuff", **options: Any) -> Bench:
    bench = Bench(strategy, **{"uplink": "auto", **LONG, **options})
    for client in clients:
        bench.do(ev.Enrolled(0.0, client, Capability(codecs=CODECS)))
    return bench


def asked(bench: Bench, client: str, task: str, now: float) -> Task:
    granted = bench.ask(client, task, now)[-1]
    assert isinstance(granted, Granted), granted
    return granted.task


def answered(bench: Bench, task: Task, now: float, train_s: float, steps: int = 0) -> list[Any]:
    """With the steps of the task, or, where it has none, with `steps`."""
    delta = np.ones(4, np.float32)
    ids = (f"u-{task.task_id}", task.task_id, task.client_id)
    update = Update(*ids, task.base_version, 1, delta, None, task.local.steps or steps, {"train_s": train_s})
    return bench.do(ev.UpdateArrived(now, update, ev.Payload("00" * 32, 16), ""))


def schedule(bench: Bench) -> Any:
    return bench.engine.state.schedule


# --- the door --------------------------------------------------------------------------------


def test_a_strategy_without_one_is_what_it_was() -> None:
    assert type(make_strategy("fedbuff", {})).__name__ == "FedBuff"
    inner = make_strategy("fedbuff", {"buffer_size": 3})
    made = make_strategy("fedbuff", {"buffer_size": 3, "scheduler": {"name": "capped"}})
    assert isinstance(made, Scheduled)
    assert unscheduled(made) == inner == unscheduled(inner)
    assert made.name == "fedbuff"


def test_a_cap_is_a_part_of_the_fleet() -> None:
    """Half of nine devices, rounded up; who loses its task makes room."""
    clients = [f"c{i}" for i in range(9)]
    bench = bench_of(*clients, scheduler={"name": "capped", "fraction": 0.5})
    granted = [bench.ask(c, f"t-{c}", now=1.0)[-1] for c in clients]
    assert [isinstance(g, Granted) for g in granted] == [True] * 5 + [False] * 4
    refused = granted[5]
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.detail) == (Reason.AT_CAPACITY, "5 of 5 devices are in training")
    answered(bench, bench.engine.ledger.tasks["t-c0"], 2.0, 0.5)
    assert isinstance(bench.ask("c5", "again", now=2.0)[-1], Granted)


def test_both_have_to_admit() -> None:
    """TEASQ's own cap is four here, the scheduler's nine, and the other way round."""
    for least, own, expected in ((9, 4, 4), (2, 8, 2)):
        bench = bench_of(*"abcdefgh", strategy="teasq", cap=own, scheduler={"name": "capped", "least": least})
        granted = [isinstance(bench.ask(c, f"t-{c}", now=1.0)[-1], Granted) for c in "abcdefgh"]
        assert sum(granted) == expected


def test_what_was_made_beforehand_counts_as_long_as_nothing_has_changed() -> None:
    """A cap learns nothing, so an ask leaves the state as it is; who learns has another."""
    for table, same in (({"name": "capped"}, True), ({"name": "equal_time"}, False)):
        bench = bench_of("a", scheduler=table)
        before = bench.engine.state
        asked(bench, "a", "t", now=1.0)
        assert (bench.engine.state is before) == same


def test_each_devices_task_takes_as_long() -> None:
    """T = 12: of 1 s a step and 2 on the way 10 steps; of 5 and 1, two; of 100 one; of 0.1 the most."""
    bench = bench_of(*"abcd", scheduler={"name": "equal_time", "task_s": 12.0, "steps_max": 40})
    for client, step_s, way_s in (("a", 1.0, 2.0), ("b", 5.0, 1.0), ("c", 100.0, 1.0), ("d", 0.1, 0.0)):
        task = asked(bench, client, f"first-{client}", now=0.0)
        assert task.local.steps == 0, "its speed is not known"
        answered(bench, task, now=3 * step_s + way_s, train_s=3 * step_s, steps=3)
    now = 1000.0
    assert [asked(bench, c, f"next-{c}", now).local.steps for c in "abcd"] == [10, 2, 1, 40]


def test_half_of_what_was_known_stays() -> None:
    bench = bench_of("a", scheduler={"name": "equal_time", "task_s": 60.0})
    now = 0.0
    for step_s in (1.0, 3.0):
        task = asked(bench, "a", f"t{step_s}", now)
        steps = task.local.steps or 10
        now += steps * step_s
        answered(bench, task, now, train_s=steps * step_s, steps=steps)
    assert asked(bench, "a", "next", now).local.steps == 30  # of 2 s each


def test_what_is_lost_teaches_nothing_and_what_is_rejected_is_not_remembered_for_ever() -> None:
    bench = bench_of(
        "a", "b", strategy="fedbuff", staleness_max=1, scheduler={"name": "equal_time"}, lease_s=10.0
    )
    asked(bench, "a", "lost", now=0.0)
    assert schedule(bench).begun.keys() == {"a"}
    bench.tick(2e4)
    assert schedule(bench) == Paces()
    made = make_strategy("aced", {"staleness_max": 1, "scheduler": {"name": "equal_time"}})
    state = made.init(np.zeros(4, np.float32))
    context = bench.engine.context(0.0)
    for number in range(50):
        now = replace(context, now=float(number))
        state = made.plan(state, Ask("a", f"t{number}"), LocalPlan(), now).state
    assert list(state.schedule.begun["a"]) == [f"t{n}" for n in range(50 - UNANSWERED_MAX, 50)]
    update = Update("u", "t48", "a", 0, 1, np.ones(4, np.float32), None, 4)
    state = made.step(state, np.zeros(4, np.float32), update, replace(context, now=60.0)).state
    assert list(state.schedule.begun["a"]) == ["t49"], "those before it are not waited for"
    assert state.schedule.known["a"].step_s == 3.0


def test_rejected_updates_teach_nothing() -> None:
    made = make_strategy("teasq", {"staleness_max": 1, "scheduler": {"name": "equal_time"}})
    bench = bench_of("a")
    state = made.init(np.zeros(4, np.float32))
    update = Update("u", "t", "a", 0, 1, np.ones(4, np.float32), None, 4)
    step = made.step(state, np.zeros(4, np.float32), update, replace(bench.engine.context(5.0), staleness=9))
    assert step.decision is not None
    assert step.decision.verdict is Verdict.REJECTED
    assert step.state is state


# --- FedLuck ---------------------------------------------------------------------------------


def cost(k: int, delta: Fraction, alpha: Fraction, beta: Fraction) -> Fraction:
    return ((k * alpha + delta * beta) ** 2 * (2 - delta) + 1) / (k * delta)


def best(alpha: Fraction, beta: Fraction, most: int, kept: list[str]) -> list[tuple[int, Fraction]]:
    """All choices that cost the least."""
    found: dict[tuple[int, Fraction], Fraction] = {}
    for k in range(1, most + 1):
        for text in kept:
            found[k, Fraction(text)] = cost(k, Fraction(text), alpha, beta)
    least = min(found.values())
    return [choice for choice, value in found.items() if value == least]


def test_golden_choices() -> None:
    """alpha = 0.02, at most 200 steps: all at beta = 10, a sixth at 30, where k_max is in the way."""
    fine = FedLuck(steps_max=200, kept=[i / 100 for i in range(1, 101)])
    assert fine.chosen(0.02, 10.0)[1] == 1.0
    assert fine.chosen(0.02, 30.0) == (200, 0.16)
    # Free of k_max, k = sqrt((delta beta)^2 + 1 / (2 - delta)) / alpha: a step costs what it gains.
    free = FedLuck(steps_max=5000)
    assert free.chosen(0.02, 30.0) == (1501, 1.0)
    assert free.chosen(0.5, 1.0) == (3, 1.0)  # sqrt(2) / 0.5 = 2.83


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 400), st.integers(0, 4000), st.integers(1, 30))
def test_no_choice_costs_less(alpha: int, beta: int, most: int) -> None:
    a, b = Fraction(alpha, 64), Fraction(beta, 64)
    found = FedLuck(steps_max=most, kept=[float(x) for x in KEPT]).chosen(float(a), float(b))
    choices = best(a, b, most, KEPT)
    least = cost(*choices[0], a, b)
    assert cost(found[0], Fraction(str(found[1])), a, b) <= least * (1 + Fraction(1, 10**12))


@pytest.mark.parametrize(
    ("uplink", "codecs", "travels", "delta"),
    [
        ("auto", ("raw",), "raw", Fraction(1)),  # a device that lacks the stages
        ("raw", CODECS, "raw", Fraction(1)),
        ("topk(0.01)|f32|gaps|zstd", CODECS, "topk(0.01)|f32|gaps|zstd", Fraction(1, 100)),
        # How many values it keeps nobody knows before.
        ("deadzone(step,0.01)|gaps", (*CODECS, "deadzone"), "deadzone(step,0.01)|gaps", Fraction(1)),
    ],
)
def test_steps_are_chosen_by_what_travels_not_by_what_was_wished(
    uplink: str, codecs: tuple[str, ...], travels: str, delta: Fraction
) -> None:
    """A step of 0.5 s, a way of 100 s, a period of 8 s: what the way says of the link depends on delta."""
    table = {"name": "fedluck", "period_s": 8.0, "steps_max": 400, "kept": [float(k) for k in KEPT]}
    bench = bench_of(scheduler=table, uplink=uplink)
    bench.do(ev.Enrolled(0.0, "a", Capability(codecs=codecs)))
    now = Fraction(0)
    alpha, beta = Fraction(1, 16), Fraction(100) / (1 + delta) / 8
    costs = {k: cost(k, delta, alpha, beta) for k in range(1, 401)}
    for number in range(5):
        task = asked(bench, "a", f"t{number}", float(now))
        assert task.uplink == travels
        if number:
            assert costs[task.local.steps] == min(costs.values())
        steps = task.local.steps or 4
        now += 100 + Fraction(steps, 2)
        answered(bench, task, float(now), steps / 2, steps=4)
    assert schedule(bench).known["a"].sent == float(delta)


class Luck:
    """FedLuck by its paper's symbols: told when tasks began and ended, it says what the next one is."""

    def __init__(self, period: Fraction, most: int, down: Fraction) -> None:
        self.period, self.most, self.down = period, most, down
        self.known: dict[str, tuple[Fraction, Fraction, Fraction]] = {}

    def choice(self, client: str) -> tuple[int, Fraction]:
        if client not in self.known:
            return 0, Fraction(1)
        step, way, sent = self.known[client]
        (found,) = best(step / self.period, way / (self.down + sent) / self.period, self.most, KEPT)
        return found

    def ended(self, client: str, took: Fraction, trained: Fraction, steps: int, sent: Fraction) -> None:
        new = (trained / steps, took - trained, sent)
        old = self.known.get(client, new)
        self.known[client] = ((old[0] + new[0]) / 2, (old[1] + new[1]) / 2, (old[2] + new[2]) / 2)


def play(
    fleet: Mapping[str, tuple[Fraction, Fraction]], tasks: int, **params: Any
) -> tuple[Bench, list[tuple[str, int, str]]]:
    """Devices of (seconds of a step, seconds of the way of a whole model) that always ask again.

    Each task is compared with the reference's.
    """
    table = {
        "name": "fedluck",
        "period_s": 8.0,
        "steps_max": 12,
        "kept": [float(k) for k in KEPT],
        "down": 0.5,
    }
    bench = bench_of(*fleet, buffer_size=3, scheduler={**table, **params})
    luck = Luck(Fraction(8), 12, Fraction(1, 2))
    queue: list[tuple[Fraction, int, Task, Fraction, Fraction]] = []
    dealt: list[tuple[str, int, str]] = []

    def begin(client: str, now: Fraction) -> None:
        task = asked(bench, client, f"t{len(dealt)}", float(now))
        steps, sent = luck.choice(client)
        assert task.local.steps == steps
        assert task.uplink == chain_of(sent)
        dealt.append((client, steps, task.uplink))
        step_s, way_s = fleet[client]
        trained = (steps or 4) * step_s
        took = trained + (Fraction(1, 2) + sent) * way_s
        heapq.heappush(queue, (now + took, len(dealt), task, trained, sent))

    for client in fleet:
        begin(client, Fraction(0))
    for _ in range(tasks):
        now, _, task, trained, sent = heapq.heappop(queue)
        answered(bench, task, float(now), float(trained), steps=4)
        began = Fraction(task.granted_at)
        luck.ended(task.client_id, now - began, trained, task.local.steps or 4, sent)
        begin(task.client_id, now)
    return bench, dealt


def chain_of(kept: Fraction) -> str:
    return {
        "1": "ef(1)|raw",
        "1/2": "ef(1)|topk(0.5)|f32|bitmap|zstd",
        "1/10": "ef(1)|topk(0.1)|f32|gaps|zstd",
    }[str(kept)]


FLEET = {
    "fast": (Fraction(1, 4), Fraction(1, 2)),
    "slow": (Fraction(4), Fraction(1, 2)),
    "narrow": (Fraction(1, 4), Fraction(64)),
    "lame": (Fraction(2), Fraction(128)),
}


def test_golden_sequence() -> None:
    """Fast devices on good links take many steps and send all; a narrow link sends a part."""
    bench, dealt = play(FLEET, tasks=120)
    assert bench.engine.version > 30
    last = {client: (steps, chain) for client, steps, chain in dealt}
    assert last["fast"] == (12, "ef(1)|raw")
    assert last["slow"] == (2, "ef(1)|raw")
    assert last["narrow"] == (12, "ef(1)|topk(0.1)|f32|gaps|zstd")
    assert {client: {steps for c, steps, _ in dealt if c == client} for client in FLEET} == {
        "fast": {0, 12},
        "slow": {0, 2},
        "narrow": {0, 12},
        "lame": {0, 12},
    }


def test_every_chain_is_one() -> None:
    for bits in (4, 8, 16, 32):
        for kept in (1.0, 0.5, 0.01):
            for decay in (0.0, 1.0):
                made = FedLuck(bits=bits, kept=[kept], feedback_decay=decay)
                head, _, chain = made.chain(kept).partition("|") if decay else ("ef(1)", "", made.chain(kept))
                assert head == "ef(1)"  # which is the device's, and no part of the codec
                make_codec(chain)


def test_a_wide_range_of_steps_is_no_long_search() -> None:
    """All of 2 ** 40 steps would take days."""
    wide = FedLuck(steps_max=2**40)
    assert wide.chosen(0.02, 30.0) == (1501, 1.0)
    assert wide.chosen(1e-300, 1.0)[0] == 2**40


@pytest.mark.parametrize("name", ["equal_time", "fedluck"])
@pytest.mark.parametrize("train_s", [5e-324, 1e-309, 1e308])
def test_whatever_a_device_says_of_its_time_it_gets_a_task(name: str, train_s: float) -> None:
    """A denormal number is a finite one, and what it divides is infinite."""
    bench = bench_of("a", scheduler={"name": name, "steps_max": 40})
    for number in range(4):
        task = asked(bench, "a", f"t{number}", float(number))
        assert 0 <= task.local.steps <= 40
        answered(bench, task, number + 0.5, train_s=train_s, steps=1)


def test_a_standstill_of_the_server_is_not_a_devices_way() -> None:
    """A task that was out over an hour's stop: the device is given steps again soon."""
    bench = bench_of("a", scheduler={"name": "equal_time", "task_s": 10.0})
    now, steps = 0.0, []
    for number in range(8):
        task = asked(bench, "a", f"t{number}", now)
        took = (task.local.steps or 4) * 1.0 + 1.0 + (3600.0 if number == 3 else 0.0)
        now += took
        answered(bench, task, now, train_s=took - 1.0 - (3600.0 if number == 3 else 0.0), steps=4)
        steps.append(task.local.steps)
    assert steps[1:4] == [9, 9, 9]
    assert steps[4:] == [5, 7, 8, 8]


# --- a server's life -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table", [{"name": "fedluck"}, {"name": "equal_time", "task_s": 4.0}, {"name": "capped", "fraction": 1.0}]
)
@pytest.mark.parametrize("strategy", ["fedbuff", "fedasync", "teasq", "fedavg"])
def test_a_restart_goes_on_to_the_same_bits(strategy: str, table: dict[str, Any]) -> None:
    """A restart after every event."""
    bench = bench_of("a", "b", "c", strategy=strategy, scheduler=table)
    rng = np.random.default_rng(5)
    for number in range(30):
        client, now = "abc"[number % 3], float(number)
        granted = bench.ask(client, f"t{number}", now)[-1]
        if isinstance(granted, Granted):
            answered(bench, granted.task, now + float(rng.random()), train_s=0.25, steps=3)
        engine = bench.engine
        again = restore(take_snapshot(engine), SPEC, engine.strategy, engine.settings)
        assert state_digest(again) == state_digest(engine)
        bench.engine = again
    replayed = bench_of(strategy=strategy, scheduler=table)
    for event in bench.log:
        replayed.engine.handle(event)
    assert state_digest(replayed.engine) == state_digest(bench.engine)


def test_a_rule_goes_to_the_strategy() -> None:
    made = make_strategy("fedbuff", {"scheduler": {"name": "capped"}}, RobustTable(rule="median"))
    assert made.keeps_updates
    with pytest.raises(ConfigError, match="'fedasync' gathers no buffer that takes one"):
        make_strategy("fedasync", {"scheduler": {"name": "capped"}}, RobustTable(rule="median"))


def test_each_phase_has_its_own() -> None:
    phases = [
        {
            "strategy": "fedavg",
            "until_versions": 2,
            "clients_per_round": 1,
            "scheduler": {"name": "equal_time"},
        },
        {"strategy": "fedbuff", "scheduler": {"name": "fedluck", "bits": 8}},
    ]
    made: Any = make_strategy("phased", {"phases": phases})
    assert [part.scheduler.name for part in made.parts] == ["equal_time", "fedluck"]
    with pytest.raises(ConfigError, match="each phase has a scheduler of its own"):
        make_strategy("phased", {"phases": phases, "scheduler": {"name": "capped"}})


def test_updates_that_are_at_hand_need_no_schedule() -> None:
    from anabranch import Update as Sent

    sent = [Sent(f"c{i}", f"t{i}", base_version=0, delta={"w": np.ones(3)}) for i in range(9)]
    table = {"name": "capped", "fraction": 0.1, "least": 1}
    found = aggregate("fedasync", {"scheduler": table}, {"w": np.zeros(3)}, sent)
    assert len(found.steps) == 9


def test_nor_in_phases() -> None:
    from anabranch import Update as Sent

    table = {"name": "capped", "fraction": 0.1, "least": 1}
    first = {"strategy": "fedavg", "until_versions": 1, "clients_per_round": 3, "scheduler": table}
    phases = [first, {"strategy": "fedasync", "scheduler": table}]
    sent = [Sent(f"c{i}", f"t{i}", base_version=0, delta={"w": np.ones(3)}) for i in range(3)]
    found = aggregate("phased", {"phases": phases}, {"w": np.zeros(3)}, sent)
    np.testing.assert_allclose(found.model["w"], np.ones(3))


def test_who_deals_steps_takes_no_scheduler() -> None:
    with pytest.raises(ConfigError, match="'fedcompass' deals steps itself"):
        make_strategy("fedcompass", {"scheduler": {"name": "capped"}})


@dataclass(frozen=True)
class Careless(OpenScheduler):
    """Whose tasks are none."""

    name: ClassVar[str] = "careless"

    steps: int = -3
    chain: str = "raw"

    def plan(self, state: Any, ask: Ask, plan: Plan, context: Context) -> Plan:
        return Plan(state, replace(plan.local, steps=self.steps), self.chain)


@pytest.mark.parametrize("of", [Careless(), Careless(4, "topk(0.1"), Careless(4, "")])
def test_what_is_no_task_is_the_strategys_own(of: Careless) -> None:
    bench = bench_of("a")
    made = Scheduled(make_strategy("fedbuff", {}), of)
    state = made.init(np.zeros(4, np.float32))
    plan = made.plan(state, Ask("a", "t"), LocalPlan(steps=7), bench.engine.context(0.0))
    assert (plan.local.steps, plan.uplink) == (7, "raw")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("capped", r"strategy.scheduler must be a table with a name"),
        ({"fraction": 0.5}, r"must be a table with a name"),
        ({"name": "caped"}, "capped"),
        ({"name": "capped", "part": 0.5}, r"part"),
        ({"name": "capped", "fraction": 0.0}, r"strategy.scheduler.fraction must be in \(0, 1\], not 0"),
        ({"name": "equal_time", "task_s": 0.0}, r"strategy.scheduler.task_s must be greater than 0"),
        ({"name": "equal_time", "steps_min": 9, "steps_max": 8}, r"steps_max must be at least steps_min = 9"),
        ({"name": "fedluck", "kept": []}, r"strategy.scheduler.kept must list fractions"),
        ({"name": "fedluck", "kept": [0.5, 1.5]}, r"strategy.scheduler.kept must list fractions"),
        ({"name": "fedluck", "bits": 7}, r"strategy.scheduler.bits must be one of"),
    ],
)
def test_what_is_wrong_is_said_with_its_key(table: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_strategy("fedbuff", {"scheduler": table})


@pytest.mark.parametrize("private", [{"privacy": PRIVATE}, {"secagg": MASKED}], ids=["noise", "masks"])
def test_private_runs_have_none(private: Tables) -> None:
    strategy = {"strategy": {"name": "fedbuff", "scheduler": {"name": "fedluck"}}}
    with pytest.raises(ConfigError, match="leave the scheduler out"):
        Blueprint.of(config_of("", {**strategy, **private}), SPEC, key=bytes(32), masks=True)


def test_its_parameters_can_be_tuned() -> None:
    config = config_of(
        "", {"strategy": {"name": "fedbuff", "scheduler": {"name": "fedluck", "steps_max": 9}}}
    )
    assert value_of(config, "strategy.scheduler.steps_max") == 9
    assert value_of(config, "strategy.scheduler.bits") == 32
    assert value_of(config, "strategy.buffer_size") == 10
