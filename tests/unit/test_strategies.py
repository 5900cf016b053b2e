"""The arithmetic of the strategies: golden values, identities and rounds."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machines import Bench, decision, vector

import anabranch
from anabranch.core import events as ev
from anabranch.core.effects import Granted, Published, Refused
from anabranch.core.engine.strategy import Context, Plan, Step
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import Vector
from anabranch.core.model.updates import Ask, LocalPlan, Reason, Task, Update
from anabranch.strategies.buffer import BufferState
from anabranch.strategies.fedavg import FedAvg, FedAvgState
from anabranch.strategies.fedbuff import FedBuff
from anabranch.strategies.registry import make_strategy
from anabranch.strategies.staleness import make_staleness

CASES = json.loads((Path(__file__).parents[1] / "golden" / "sequences.json").read_text())["cases"]


def golden_update(u: Any, dtype: Any) -> anabranch.Update:
    """`keep` lists the coordinates of a sub-model: outside it nothing may change."""
    delta, submodel = np.array(u["delta"], dtype), None
    if "keep" in u:
        submodel = {"w": np.array(u["keep"])}
        delta = delta[u["keep"]]
    return anabranch.Update(
        u["client"], u["task"], u["base_version"], u["examples"], {"w": delta}, submodel=submodel
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-12)])
@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda c: (
        f"{c['strategy']}-{c['params'].get('staleness', {}).get('name', c['params'].get('cache_size'))}"
    ),
)
def test_golden_sequences(case: Any, dtype: Any, tolerance: Any) -> None:
    updates = [golden_update(u, dtype) for u in case["updates"]]
    start = {"w": np.array(case["start"], dtype)}
    for n, expected in enumerate(case["expected"], 1):
        result = anabranch.aggregate(case["strategy"], case["params"], start, updates[:n])
        assert result.version == expected["version"]
        assert result.model["w"].dtype == dtype
        np.testing.assert_allclose(result.model["w"], expected["model"], rtol=tolerance, atol=tolerance)
        assert [s.version for s in result.steps] == [e["version"] for e in case["expected"][:n]]


@pytest.mark.parametrize(
    ("params", "taus", "expected"),
    [
        ({"name": "constant"}, [0, 7, 1000], [1, 1, 1]),
        (
            {"name": "polynomial", "a": 0.5},
            [0, 1, 2, 3, 4, 5, 10],
            [1, 0.707107, 0.57735, 0.5, 0.447214, 0.408248, 0.301511],
        ),
        ({"name": "hinge", "a": 10, "b": 4}, [3, 4, 5, 6, 10], [1, 1, 0.090909, 0.047619, 0.016393]),
    ],
)
def test_golden_staleness(params: Any, taus: Any, expected: Any) -> None:
    s = make_staleness(params)
    assert [s(t) for t in taus] == pytest.approx(expected, abs=1e-6)


def scalar(strategy: Any, params: Any, start: Any, updates: Any) -> Any:
    """Aggregates scalars: (base version, delta) pairs."""
    sent = [
        anabranch.Update(f"c{i}", f"t{i}", base, 1, {"w": np.array([delta])})
        for i, (base, delta) in enumerate(updates)
    ]
    return anabranch.aggregate(strategy, params, {"w": np.array([start])}, sent)


def test_golden_fedbuff_mean() -> None:
    params = {"buffer_size": 3, "staleness": {"name": "constant"}}
    assert scalar("fedbuff", params, 10.0, [(0, 2.0), (0, -2.0), (0, 10.0)]).model["w"] == pytest.approx(
        13.333333
    )


def test_golden_fedbuff_with_staleness() -> None:
    """w = 10, deltas 2, -2, 10 of staleness 0, 1, 3: after three versions that change nothing."""
    quiet = [(v, 0.0) for v in range(3) for _ in range(3)]
    params = {"buffer_size": 3, "staleness": {"name": "polynomial", "a": 0.5}}
    result = scalar("fedbuff", params, 10.0, [*quiet, (3, 2.0), (2, -2.0), (0, 10.0)])
    assert [s.staleness for s in result.steps[-3:]] == [0, 1, 3]
    assert result.model["w"] == pytest.approx(11.861929)


def test_golden_fedasync_of_the_teasq_identity() -> None:
    """TEASQ with K = 1 equals FedAsync: w = 10, a model of 8 with staleness 1 gives 9.151472."""
    params = {"alpha": 0.6, "staleness": {"name": "polynomial", "a": 0.5}}
    sent = [
        anabranch.Update("a", "t0", 0, 100, model={"w": np.array([10.0])}),
        anabranch.Update("b", "t1", 0, 300, model={"w": np.array([8.0])}),
    ]
    result = anabranch.aggregate("fedasync", params, {"w": np.array([10.0])}, sent)
    assert result.model["w"] == pytest.approx(9.151472)


def test_fedbuff_of_one_fresh_update_is_replacement() -> None:
    result = scalar("fedbuff", {"buffer_size": 1}, 3.0, [(0, 4.5)])
    assert result.model["w"] == pytest.approx(7.5)


def test_fedbuff_with_momentum_follows_its_equation() -> None:
    """m1 = 2, w = 10 + 0.5 * 2; m2 = 0.9 * 2 + 4, w = 11 + 0.5 * 5.8."""
    params = {"buffer_size": 1, "server_lr": 0.5, "momentum": 0.9, "staleness": {"name": "constant"}}
    assert scalar("fedbuff", params, 10.0, [(0, 2.0), (1, 4.0)]).model["w"] == pytest.approx(13.9)


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox"])
def test_fedavg_weighs_by_examples(strategy: Any) -> None:
    sent = [
        anabranch.Update("a", "t0", 0, 100, {"w": np.array([2.0])}),
        anabranch.Update("b", "t1", 0, 300, {"w": np.array([-2.0])}),
    ]
    result = anabranch.aggregate(strategy, {"clients_per_round": 2}, {"w": np.array([10.0])}, sent)
    assert result.model["w"] == pytest.approx(9.0)
    assert [(s.decision, s.weight) for s in result.steps] == [("held", 100.0), ("published", 300.0)]


def test_fedprox_plans_the_proximal_term() -> None:
    bench = Bench("fedprox", mu=0.3)
    bench.enrol("a")
    assert bench.ask("a", "t0")[0].task.local.proximal_mu == 0.3


def test_fedasync_plans_the_proximal_term() -> None:
    bench = Bench("fedasync", rho=0.2)
    bench.enrol("a")
    assert bench.ask("a", "t0")[0].task.local.proximal_mu == 0.2


# --- rounds ------------------------------------------------------------------------------------


def rounds(**params: Any) -> Bench:
    bench = Bench("fedavg", **{"clients_per_round": 2, "over_selection": 1.5, "deadline_s": 60.0, **params})
    bench.enrol(*"abcdefgh")
    return bench


def test_over_selection_asks_more_devices_than_count() -> None:
    bench = rounds()
    granted = [c for c in "abcdefgh" if isinstance(bench.ask(c, f"t-{c}")[0], Granted)]
    assert granted == ["a", "b", "c"]


def test_a_straggler_of_a_round_is_not_used() -> None:
    bench = rounds()
    for c in "abc":
        bench.ask(c, f"t-{c}")
    bench.push("a", "t-a")
    bench.push("b", "t-b")
    model = bench.engine.vector.copy()
    late = decision(bench.push("c", "t-c"))
    assert late.reason is Reason.ROUND_OVER
    assert np.array_equal(bench.engine.vector, model)


def test_a_cohort_is_drawn_whoever_asks_first() -> None:
    bench = rounds()
    bench.work("a", "t-a")
    bench.work("b", "t-b")
    cohort = bench.engine.state.cohort
    assert len(cohort) == 3
    for c in "abcdefgh":
        effect = bench.ask(c, f"u-{c}")[0]
        assert isinstance(effect, Granted) == (c in cohort)


def test_every_device_is_drawn_about_equally_often() -> None:
    bench = rounds()
    drawn: dict[str, int] = dict.fromkeys("abcdefgh", 0)
    for round_ in range(400):
        cohort = bench.engine.state.cohort or ["a", "b"]
        for c in cohort[:2]:
            bench.work(c, f"{round_}-{c}")
        for c in cohort:
            drawn[c] += 1
    mean = sum(drawn.values()) / 8
    assert all(abs(n - mean) < 0.25 * mean for n in drawn.values())


def test_nobody_takes_part_in_a_round_twice() -> None:
    bench = rounds()
    bench.work("a", "t0")
    assert bench.ask("a", "t1")[0].reason is Reason.NOT_SELECTED


def test_a_deadline_ends_the_round_with_what_has_come() -> None:
    bench = rounds()
    for c in "abc":
        bench.ask(c, f"t-{c}", now=10.0)
    bench.push("a", "t-a", (4, 4, 4, 4), now=11.0)
    assert bench.engine.next_deadline() == 70.0
    published = [e for e in bench.tick(70.0) if isinstance(e, Published)]
    assert published[0].vector.tolist() == [4, 4, 4, 4]


def test_a_deadline_without_updates_asks_further_devices() -> None:
    bench = rounds(lease_s=1000.0)
    bench.work("a", "t-a")
    bench.work("b", "t-b")
    first = set(bench.engine.state.cohort)
    deadline = bench.engine.next_deadline()
    assert deadline is not None
    bench.tick(deadline)
    assert bench.engine.version == 1
    assert (len(first), first < set(bench.engine.state.cohort)) == (3, True)
    assert len(set(bench.engine.state.cohort)) == len(bench.engine.state.cohort) == 6
    assert bench.engine.next_deadline() == deadline + 60.0


def test_a_lost_device_frees_its_place() -> None:
    bench = rounds(lease_s=5.0)
    for c in "abc":
        bench.ask(c, f"t-{c}")
    assert isinstance(bench.ask("d", "t-d")[0], Refused)
    bench.tick(5.0)
    assert isinstance(bench.ask("d", "t-d", now=5.0)[0], Granted)


# --- parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("fedbuf", {}, "did you mean 'fedbuff'"),
        ("fedbuff", {"bufer_size": 3}, "did you mean 'buffer_size'"),
        ("fedbuff", {"buffer_size": 0}, "buffer_size must be at least 1"),
        ("fedbuff", {"buffer_size": 2.5}, "buffer_size must be int"),
        ("fedbuff", {"server_lr": 0}, "server_lr must be greater than 0"),
        ("fedbuff", {"momentum": 1.0}, "momentum must be in"),
        ("fedbuff", {"flush_s": -1.0}, "flush_s must not be negative"),
        ("fedasync", {"alpha": 0}, r"alpha must be in \(0, 1\]"),
        ("fedasync", {"rho": -1.0}, "rho must not be negative"),
        ("fedasync", {"staleness": {"name": "poly"}}, "staleness.name must be one of"),
        ("fedasync", {"staleness": {"name": "hinge", "c": 1}}, "unknown key"),
        ("fedasync", {"staleness": {"name": "hinge", "a": -1.0}}, "staleness.a must not be negative"),
        ("fedavg", {"clients_per_round": 0}, "clients_per_round must be at least 1"),
        ("fedavg", {"over_selection": 0.5}, "over_selection must be at least 1"),
        ("fedavg", {"deadline_s": -1.0}, "deadline_s must not be negative"),
        ("fedprox", {"mu": -1.0}, "mu must not be negative"),
    ],
)
def test_bad_parameters_name_the_field(name: Any, params: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_strategy(name, params)


def test_a_round_of_a_small_fleet_is_the_whole_fleet() -> None:
    bench = Bench("fedavg", clients_per_round=10, deadline_s=60.0)
    bench.enrol("a", "b")
    bench.work("a", "a0")
    bench.work("b", "b0")
    bench.tick(60.0)  # round 0 does not know the fleet yet
    assert bench.engine.version == 1
    bench.work("a", "a1", now=61.0)
    bench.work("b", "b1", now=61.0)
    assert bench.engine.version == 2


def test_a_late_model_is_mixed_with_a_base_that_no_live_task_trains_from() -> None:
    """The base is the newest model itself, which the strategy writes on: half of 8, and half of 8 + 4."""
    bench = Bench("fedasync", vector(8, 8, 8, 8), alpha=0.5, staleness={"name": "constant"}, lease_s=10.0)
    bench.enrol("a")
    bench.ask("a", "a0")
    bench.tick(20.0)
    assert bench.engine.ledger.live == 0
    bench.push("a", "a0", (4, 4, 4, 4), now=21.0)
    assert bench.engine.vector.tolist() == [10.0] * 4


def test_a_straggler_is_lost_when_its_round_ends() -> None:
    """What a strategy is told of it."""
    told = []

    class Noting(FedAvg):
        def on_lost(self, state: FedAvgState, task: Task, context: Context) -> FedAvgState:
            told.append((task.task_id, context.now, context.version))
            return super().on_lost(state, task, context)

    bench = Bench("fedavg", clients_per_round=1, over_selection=2.0)
    bench.engine.strategy = Noting(clients_per_round=1, over_selection=2.0)
    bench.enrol("a", "b")
    for client in "ab":
        bench.ask(client, f"{client}0")
    bench.push("a", "a0", now=3.0)
    assert told == [("b0", 3.0, 1)]


def test_a_strategy_is_told_an_age_of_updates_only() -> None:
    """What it is told at asks, updates and timers: version and staleness."""
    told: list[tuple[str, int, int]] = []

    class Noting(FedBuff):
        def plan(self, state: BufferState, ask: Ask, local: LocalPlan, context: Context) -> Plan:
            told.append(("ask", context.version, context.staleness))
            return super().plan(state, ask, local, context)

        def step(self, state: BufferState, vector: Vector, update: Update, context: Context) -> Step:
            told.append(("update", context.version, context.staleness))
            return super().step(state, vector, update, context)

        def on_timer(self, state: BufferState, vector: Vector, context: Context) -> Step:
            told.append(("timer", context.version, context.staleness))
            return super().on_timer(state, vector, context)

    bench = Bench(buffer_size=2, flush_s=5.0)
    bench.engine.strategy = Noting(buffer_size=2, flush_s=5.0)
    bench.enrol("slow", "fast")
    bench.ask("slow", "s")
    bench.work("fast", "f0")
    bench.work("fast", "f1")
    bench.push("slow", "s")
    bench.tick(100.0)
    asked, come = [("ask", 0, 0)], [("update", 0, 0)]
    assert told == [*asked, *asked, *come, *asked, *come, ("update", 1, 1), ("timer", 1, 0)]


def test_the_cohort_of_a_round_is_drawn_by_its_number() -> None:
    """By ranks that a reader can compute: those of the seed, the round and the client."""
    bench = rounds(deadline_s=0.0)
    bench.work("a", "t-a")
    bench.work("b", "t-b")

    def place(client: str) -> float:
        text = "\x1f".join(["0", "str:cohort", "int:1", "int:0", f"str:{client}"])
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        return (int.from_bytes(digest[:7], "little") >> 3) / 2.0**53

    assert bench.engine.version == 1
    assert bench.engine.strategy.selected(bench.engine.state) == sorted(sorted("abcdefgh", key=place)[:3])
    other = next(c for c in "abcdefgh" if c not in bench.engine.state.cohort)
    refused = bench.ask(other, "t-other")[0]
    assert isinstance(refused, Refused)
    assert refused.detail == "not among the 3 devices of round 1"


def test_who_has_its_task_of_a_round_is_not_among_those_who_may_have_one_until_that_is_lost() -> None:
    bench = rounds(deadline_s=0.0)
    bench.work("a", "t-a")
    bench.work("b", "t-b")

    def selected() -> list[str] | None:
        return bench.engine.strategy.selected(bench.engine.state)

    first, second, third = selected() or []
    bench.ask(second, "t-0")
    assert selected() == [first, third]
    bench.work(first, "t-1")
    assert selected() == [third]
    bench.ask(third, "t-2")
    assert selected() == []
    bench.do(ev.TaskDropped(1.0, third, "t-2", "no time"))
    assert selected() == [third]


def test_places_of_a_round_are_free_again_for_those_who_were_lost() -> None:
    strategy = FedAvg(clients_per_round=2)
    begun = strategy.init(vector(0, 0, 0, 0))
    state = replace(begun, members=["a", "b", "c"], answered=["b"])
    assert strategy.reopened(state, {"c", "z"}).members == ["b", "c"]
