"""TEASQ-Fed as lists of events, its schedule and its search; QAFeL's identity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from machines import Bench, decision, vector

import anabranch
from anabranch.compress.registry import STAGES
from anabranch.core import events as ev
from anabranch.core.config.goal import Goal
from anabranch.core.effects import Granted, Published, Refused
from anabranch.core.engine.robust import RobustTable
from anabranch.core.engine.strategy import Context
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import SparseVector
from anabranch.core.model.updates import Capability, Reason, Update, Verdict
from anabranch.strategies.compression_schedule import Schedule, Strength
from anabranch.strategies.compression_search import Trial, search_compression
from anabranch.strategies.registry import make_strategy
from anabranch.strategies.teasq import Teasq


def bench(**options: Any) -> Bench:
    made = Bench("teasq", **{"concurrency_fraction": 1.0, "kept": 1.0, "bits": 32, **options})
    made.enrol("a", "b", "c", "d")
    return made


def granted(effects: Any) -> list[Granted]:
    return [e for e in effects if isinstance(e, Granted)]


# --- admission -----------------------------------------------------------------------------------


def test_at_most_a_fraction_of_the_fleet_trains_and_a_lease_frees_its_place() -> None:
    b = bench(concurrency_fraction=0.3, mode="paper", lease_s=10.0)  # ceil(0.3 * 4) = 2
    assert granted(b.ask("a", "a1"))
    assert granted(b.ask("b", "b1"))
    (refused,) = b.ask("c", "c1")
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.detail) == (Reason.AT_CAPACITY, "2 of 2 devices are in training")
    assert granted(b.ask("a", "a2", now=1.0)), "a device may give up its own task for another"
    b.push("b", "b1")
    assert granted(b.ask("c", "c2"))
    assert not granted(b.ask("d", "d1"))
    b.tick(11.5)
    assert granted(b.ask("d", "d2", now=12.0)), "the leases of a and c have expired"


@pytest.mark.parametrize(
    ("options", "places"),
    [({}, 4), ({"mode": "paper"}, 1), ({"cap": 2}, 2), ({"cap": 5, "mode": "paper"}, 5)],
)
def test_a_few_devices_train_however_small_the_fraction(options: dict[str, Any], places: int) -> None:
    b = bench(concurrency_fraction=0.01, **options)
    b.enrol("e", "f")
    taken = [bool(granted(b.ask(client, f"{client}1"))) for client in "abcdef"]
    assert taken == [n < places for n in range(6)]


def test_a_fraction_of_a_large_fleet_is_more_than_a_few() -> None:
    b = bench(concurrency_fraction=0.1)
    names = [f"device-{n}" for n in range(47)]
    b.enrol(*names)  # ceil(0.1 * 51) = 6
    assert sum(bool(granted(b.ask(name, f"task-{name}"))) for name in names) == 6


# --- the cache -----------------------------------------------------------------------------------


def test_the_kth_update_empties_the_cache_into_the_model() -> None:
    b = bench(cache_size=2, a=0.5)
    b.ask("a", "a1")
    b.ask("b", "b1")
    assert decision(b.push("a", "a1", (1, 1, 1, 1), examples=100)).verdict is Verdict.HELD
    assert decision(b.push("b", "b1", (4, 4, 4, 4), examples=300)).verdict is Verdict.PUBLISHED
    assert b.engine.vector.tolist() == pytest.approx([3.25] * 4)


def test_the_size_of_the_cache_follows_the_fleet() -> None:
    b = bench(cache_fraction=0.5)  # ceil(0.5 * 4) = 2
    assert b.work("a", "a1").verdict is Verdict.HELD
    assert b.work("b", "b1").verdict is Verdict.PUBLISHED


def test_a_decision_has_the_weight_of_its_staleness() -> None:
    b = bench(cache_size=2, a=0.5)
    b.ask("a", "a1")
    assert b.work("b", "b1").weight == 1.0
    b.work("c", "c1")  # version 1
    waiting = decision(b.push("a", "a1", base=0))
    assert waiting.verdict is Verdict.HELD
    assert waiting.weight == pytest.approx(2**-0.5)
    last = b.work("d", "d1")
    assert (last.verdict, last.weight) == (Verdict.PUBLISHED, 1.0)


def test_a_rule_goes_from_the_newest_model_to_those_that_are_mixed() -> None:
    """Half of 4, then half of what leads from 10 to 8 + 6."""
    b = bench(cache_size=2, start=vector(8, 8, 8, 8), alpha=0.5, a=0.0, robust={"rule": "median"})
    for client in "ab":
        b.ask(client, f"{client}1")
    for client in "cd":
        b.work(client, f"{client}1", (4, 4, 4, 4))
    assert b.engine.vector.tolist() == pytest.approx([10.0] * 4)
    for client in "ab":
        b.push(client, f"{client}1", (6, 6, 6, 6), base=0)
    assert b.engine.vector.tolist() == pytest.approx([12.0] * 4)


def test_the_papers_mode_mixes_by_six_tenths_unless_said_otherwise() -> None:
    for alpha, expected in ((0.0, 0.6), (0.25, 0.25)):
        b = bench(cache_size=1, mode="paper", alpha=alpha)
        b.work("a", "a1", (1, 1, 1, 1))
        assert b.engine.vector.tolist() == pytest.approx([expected] * 4)


def test_other_numbers_of_versions_are_those_of_its_bases_too() -> None:
    """As a rollback gives them."""
    b = bench(cache_size=2, alpha=0.5)
    b.work("a", "a1")
    strategy, state = b.engine.strategy, b.engine.state
    assert list(state.bases) == ["0"]
    later = strategy.shifted(state, 7)
    assert [entry.base_version for entry in later.cache] == [7]
    assert {version: base.tolist() for version, base in later.bases.items()} == {"7": [0.0] * 4}


def test_the_newest_update_of_a_device_and_version_counts() -> None:
    b = bench(cache_size=2)
    b.work("a", "a1", (8, 8, 8, 8))
    b.work("a", "a2", (2, 2, 2, 2))
    b.ask("b", "b1")
    (published,) = [e for e in b.push("b", "b1", (4, 4, 4, 4)) if isinstance(e, Published)]
    assert published.update_ids == ("update-of-a2", "update-of-b1")
    assert b.engine.vector.tolist() == pytest.approx([3.0] * 4)


def test_a_device_may_have_updates_of_two_versions_in_the_cache() -> None:
    b = bench(cache_size=2, tasks_per_client=2)
    b.ask("a", "a1")
    b.work("b", "b1")
    b.work("c", "c1")  # version 1
    b.push("a", "a1", base=0)
    assert b.work("a", "a2").verdict is Verdict.PUBLISHED
    assert b.engine.version == 2


def test_an_old_cache_is_flushed() -> None:
    b = bench(cache_size=3, flush_s=5.0)
    b.work("a", "a1", (2, 2, 2, 2), now=1.0)
    assert b.engine.next_deadline() == 6.0
    assert [e.version for e in b.tick(6.0) if isinstance(e, Published)] == [1]
    assert b.engine.vector.tolist() == [2.0] * 4


def test_the_time_to_flush_counts_from_the_oldest() -> None:
    b = bench(cache_size=3, flush_s=5.0)
    b.work("a", "a1", now=1.0)
    b.work("b", "b1", now=4.0)
    assert b.engine.next_deadline() == 6.0
    assert b.tick(5.9) == []
    assert [e.version for e in b.tick(6.0) if isinstance(e, Published)] == [1]


def test_a_rule_remembers_from_one_cache_to_the_next() -> None:
    """The centre goes 1 towards (10, 0, 0, 0) at each version: 1, then 2."""
    rule = {"rule": "centred_clipping", "radius": 1.0, "iterations": 1}
    b = bench(cache_size=2, robust=rule)
    for turn in range(2):
        for client in "ab":
            b.work(client, f"{client}{turn}", (10, 0, 0, 0))
    assert b.engine.vector.tolist() == pytest.approx([3.0, 0.0, 0.0, 0.0])


def test_an_update_over_the_bound_is_not_used() -> None:
    b = bench(cache_size=1, staleness_max=1)
    b.ask("a", "a1")
    b.work("b", "b1")
    b.work("c", "c1")
    found = decision(b.push("a", "a1", base=0))
    assert (found.verdict, found.reason, found.staleness) == (Verdict.REJECTED, Reason.STALE, 2)


@pytest.mark.parametrize(("bound", "verdict"), [(1, Verdict.REJECTED), (2, Verdict.PUBLISHED)])
def test_its_own_bound_is_the_last_that_is_taken(bound: int, verdict: Verdict) -> None:
    b = bench(cache_size=1)
    strategy = b.engine.strategy
    assert isinstance(strategy, Teasq)
    b.engine.strategy = replace(strategy, staleness_max=bound)
    b.ask("a", "a1")
    b.work("b", "b1")
    b.work("c", "c1")
    assert decision(b.push("a", "a1", base=0)).verdict is verdict


def test_a_sparse_update_waits_sparse_and_counts_as_its_dense_one() -> None:
    b = bench(cache_size=2)
    for client in "ab":
        b.ask(client, f"{client}1")
    sparse = SparseVector(np.array([2]), np.array([3], np.float32), 4)
    update = Update("u", "a1", "a", 0, 1, sparse)
    b.do(ev.UpdateArrived(0.0, update, ev.Payload("00" * 32, 8)))
    (entry,) = b.engine.state.cache
    assert entry.delta.values.size == 1
    b.push("b", "b1", (1, 1, 1, 1))
    assert b.engine.vector.tolist() == pytest.approx([0.5, 0.5, 2.0, 0.5])


@pytest.mark.parametrize(("mode", "expected"), [("robust", 4.0), ("paper", 1000.0)])
def test_an_update_that_has_exploded_is_cut_in_the_robust_mode(mode: str, expected: float) -> None:
    b = bench(cache_size=1, mode=mode, alpha=1.0)
    for i in range(12):
        b.work("a", f"a{i}", (1, 0, 0, 0))
    before = float(b.engine.vector[1])
    found = b.work("b", "b1", (0, 1000, 0, 0))
    assert found.verdict is Verdict.PUBLISHED
    assert found.detail == ("shortened to 0.004 of its length" if mode == "robust" else "")
    assert float(b.engine.vector[1]) - before == pytest.approx(expected)
    if mode == "robust":
        assert b.engine.guard.lengths[-1] == 1000.0, "the median is of the lengths as they came"


# --- values and identities -----------------------------------------------------------------------


def test_the_golden_scalar_of_one_update() -> None:
    idle = anabranch.Update("i", "i", 0, 1, delta={"w": np.zeros(1)})
    stale = anabranch.Update("c", "c", 0, 300, model={"w": np.array([8.0])})  # tau = 1
    params = {"cache_size": 1, "alpha": 0.6, "a": 0.5}
    result = anabranch.aggregate("teasq", params, {"w": np.array([10.0])}, [idle, stale])
    assert float(result.model["w"][0]) == pytest.approx(9.151472, abs=1e-6)


def test_the_golden_scalar_of_three_updates() -> None:
    strategy = make_strategy("teasq", {"cache_size": 3, "alpha": 0.6, "a": 0.5})
    state, w = strategy.init(np.array([10.0])), np.array([10.0])
    for i, (tau, n, trained) in enumerate([(0, 100, 12.0), (1, 300, 8.0), (3, 100, 20.0)]):
        context = Context(0.0, 3, 0, ("a",), 0, tau, np.array([10.0]))
        update = Update(f"u{i}", f"t{i}", f"c{i}", 3 - tau, n, np.array([trained - 10.0]))
        step = strategy.step(state, w, update, context)
        state = step.state
    assert step.vector is not None
    assert float(step.vector[0]) == pytest.approx(10.299081, abs=1e-6)


@pytest.mark.parametrize("rule", ["none", "median"])
def test_a_cache_is_weighed_to_the_same_bits_by_every_python(rule: str) -> None:
    """Summed from the oldest on, each sum rounded; the built-in of Python 3.12 gives other bits of these."""
    strategy = make_strategy("teasq", {"cache_size": 6}, RobustTable(rule=rule))
    state, start = strategy.init(np.zeros(6)), np.zeros(6)
    one_hot = np.eye(6) if rule == "none" else np.ones((6, 6))
    taus, examples = [6, 3, 0, 7, 6, 5], [700, 300, 100, 200, 500, 200]
    for i, (tau, n) in enumerate(zip(taus, examples, strict=True)):
        update = Update(f"u{i}", f"t{i}", f"c{i}", 7 - tau, n, one_hot[i])
        step = strategy.step(state, start, update, Context(0.0, 7, 0, ("a",), 0, tau, None))
        state = step.state
    scales = [(1 + tau) ** -0.5 for tau in taus]
    shares = [s * n for s, n in zip(scales, examples, strict=True)] if rule == "none" else scales
    total = 0.0
    for share in shares:
        total += share
    pull = (1 + 27 / 6) ** -0.5
    expected = [pull * (share / total) for share in shares]
    if rule == "median":
        expected = [pull * float(np.median([share / (total / 6) for share in shares]))] * 6
    assert step.vector is not None
    assert step.vector.tolist() == expected


@pytest.mark.parametrize("mode", ["robust", "paper"])
def test_with_a_cache_of_one_and_no_codec_it_is_fedasync(mode: str) -> None:
    rng = np.random.default_rng(3)
    start = {"w": rng.standard_normal(7).astype(np.float32)}
    updates = [
        anabranch.Update(
            f"c{i % 3}",
            f"t{i}",
            max(0, i - i % 4),
            5 + i,
            delta={"w": rng.standard_normal(7).astype(np.float32)},
        )
        for i in range(12)
    ]
    params = {"cache_size": 1, "alpha": 0.6, "a": 0.5, "mode": mode}
    mine = anabranch.aggregate("teasq", params, start, updates)
    theirs = anabranch.aggregate("fedasync", {"alpha": 0.6}, start, updates)
    assert np.array_equal(mine.model["w"], theirs.model["w"])
    assert [s.staleness for s in mine.steps] == [s.staleness for s in theirs.steps]
    assert max(s.staleness for s in mine.steps) > 0


def test_qafel_without_quantisers_is_fedbuff() -> None:
    rng = np.random.default_rng(4)
    start = {"w": rng.standard_normal(7).astype(np.float32)}
    updates = [
        anabranch.Update(
            f"c{i}",
            f"t{i}",
            max(0, i // 3 - i % 2),
            1,
            delta={"w": rng.standard_normal(7).astype(np.float32)},
        )
        for i in range(9)
    ]
    results = [anabranch.aggregate(s, {"buffer_size": 3}, start, updates) for s in ("qafel", "fedbuff")]
    assert np.array_equal(results[0].model["w"], results[1].model["w"])


# --- what a task travels by ------------------------------------------------------------------------


def uplink_of(**options: Any) -> str:
    b = Bench("teasq", **options)
    b.do(ev.Enrolled(0.0, "a", Capability(codecs=STAGES)))
    (effect,) = granted(b.ask("a", "a1"))
    assert effect.task.local.proximal_mu == 0.005
    return effect.task.uplink


@pytest.mark.parametrize(
    ("options", "uplink", "downlink"),
    [
        ({}, "ef(0.9)|topk(0.05)|int4(256)|gaps|zstd", "log(2)"),
        ({"kept": 0.25, "bits": 8}, "ef(0.9)|topk(0.25)|int8(256)|bitmap|zstd", "log(2)"),
        ({"kept": 1.0}, "ef(0.9)|int4(256)|zstd", "log(2)"),
        ({"bits": 32, "downlink_step": 1.0}, "ef(0.9)|topk(0.05)|f32|gaps|zstd", "log(1)"),
        ({"feedback_decay": 0.0, "bits": 16}, "topk(0.05)|bf16|gaps|zstd", "log(2)"),
        ({"kept": 1.0, "bits": 32}, "raw", "raw"),
        ({"mode": "paper"}, "topk(0.05)|int4(256)|gaps|zstd", "int8(256)|zstd"),
        (
            {"mode": "paper", "downlink_kept": 0.5},
            "topk(0.05)|int4(256)|gaps|zstd",
            "topk(0.5)|int8(256)|bitmap|zstd",
        ),
    ],
)
def test_the_codecs_of_a_mode(options: dict[str, Any], uplink: str, downlink: str) -> None:
    assert uplink_of(**options) == uplink
    assert make_strategy("teasq", options).downlink(0) == downlink


def test_a_schedule_takes_list_steps_over_versions() -> None:
    milder = Schedule(Strength(0.05, 4), every=10, direction="milder", steps=7)
    found = [(milder.at(v).kept, milder.at(v).bits) for v in (0, 9, 10, 20, 40, 50, 60, 70, 999)]
    assert found == [
        (0.05, 4),
        (0.05, 4),
        (0.1, 4),
        (0.25, 4),
        (1.0, 4),
        (1.0, 8),
        (1.0, 16),
        (1.0, 32),
        (1.0, 32),
    ]
    stronger = Schedule(Strength(0.1, 16), every=5, direction="stronger", steps=3)
    assert [(stronger.at(v).kept, stronger.at(v).bits) for v in (0, 5, 10, 15, 20)] == [
        (0.1, 16), (0.1, 8), (0.1, 4), (0.05, 4), (0.05, 4),
    ]  # fmt: skip
    assert Schedule(Strength(0.1, 4)).at(10**6) == Strength(0.1, 4)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"mode": "rubust"}, "mode must be one of robust, paper"),
        ({"kept": 0.0}, "kept must be in"),
        ({"bits": 5}, "bits must be one of"),
        ({"decay_direction": "down"}, "decay_direction must be one of"),
        ({"decay_every": -1}, "decay_every must not be negative"),
        ({"concurrency_fraction": 0.0}, "concurrency_fraction must be greater than 0"),
        ({"cache_fraction": 1.5}, "cache_fraction must be in"),
        ({"alpha": 1.5}, "alpha must be in"),
        ({"downlink_step": 3.0}, "downlink_step must be in"),
        ({"downlink_bits": 7}, "downlink_bits must be one of"),
        ({"keep": 0.1}, "did you mean 'kept'"),
    ],
)
def test_bad_parameters_are_named(params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_strategy("teasq", params)


# --- the search --------------------------------------------------------------------------------------


def test_the_search_takes_the_step_that_saves_most_within_the_loss() -> None:
    looked: list[Strength] = []

    def measure(s: Strength) -> Trial:
        looked.append(s)
        accuracy = 0.9 - 0.02 * (s.kept < 0.25) - 0.05 * (s.bits < 8)
        return Trial(s, accuracy, 1000 * s.kept * s.bits)

    found = search_compression(
        measure, 0.01, Goal("accuracy", "max"), kept=(1.0, 0.5, 0.25, 0.1), bits=(32, 16, 8, 4)
    )
    assert found.found == Strength(0.25, 8)
    assert len(looked) == len(set(looked)), "no pair is measured twice"
    taken = [d.trial.strength for d in found.decisions if d.taken]
    assert taken[0] == Strength(1.0, 32)
    assert taken[-1] == found.found
    refused = [d for d in found.decisions if not d.taken and "more than" in d.why]
    assert {d.trial.strength for d in refused} >= {Strength(0.1, 8), Strength(0.25, 4)}
    assert found.decisions[0].to_json()["kept"] == 1.0


def test_without_room_for_loss_the_mildest_pair_stays() -> None:
    found = search_compression(lambda s: Trial(s, s.kept * s.bits / 32, 1.0), 0.0, Goal("accuracy", "max"))
    assert found.found == Strength(1.0, 32)


def test_what_is_whole_stays_whole_however_strong() -> None:
    """Fewer bits is what a schedule may take of it; values are not left out."""
    whole = Schedule(Strength(1.0, 8), every=1, direction="stronger", steps=9)
    assert [whole.at(version) for version in (0, 1, 9)] == [
        Strength(1.0, 8),
        Strength(1.0, 4),
        Strength(1.0, 4),
    ]
