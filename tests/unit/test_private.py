"""A private run: what one device can do to a sum, who is heard how often, and what is told of it."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_lists import lists_up_to
from machines import SPEC, decision, vector
from private_bench import KEY, PrivateBench, private_config

from anabranch.core import events as ev
from anabranch.core.config.tables import merge
from anabranch.core.effects import Decided, Finished, Published, Refused
from anabranch.core.engine.settable import differences, typed
from anabranch.core.errors import ConfigError, StoreCorrupt
from anabranch.core.model.params import ParamSpec, SparseVector, Vector
from anabranch.core.model.updates import Reason, Update, Verdict
from anabranch.core.privacy.mechanism import Mechanism, PrivateSums, length_of, version_key
from anabranch.core.privacy.normals import normals
from anabranch.core.snapshot import state_digest, take_snapshot
from anabranch.host.build import Blueprint
from anabranch.host.private import doubts
from anabranch.host.rollback import check_rollback
from anabranch.strategies.registry import strategy_of

VALUES = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1e-45, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan, 1.0, -1.0]),
    st.floats(-4.0, 4.0, width=32),
)
UPDATES = st.lists(VALUES, min_size=4, max_size=4)
MECHANISMS = st.builds(
    Mechanism,
    clip=st.floats(1e-6, 1e6),
    noise=st.one_of(st.floats(1e-3, 50.0), st.sampled_from([0.5, 1.0, 2.0])),
)


def squared(values: Vector) -> Fraction:
    """Exactly."""
    return sum((Fraction(float(v)) ** 2 for v in values), Fraction(0))


# --- sums ------------------------------------------------------------------------------------------------


@settings(max_examples=500, deadline=None)
@given(MECHANISMS, UPDATES, st.floats(-3.0, 3.0))
def test_no_update_adds_more_than_the_clip_whatever_it_is(
    mechanism: Mechanism, values: list[float], weight: float
) -> None:
    part = mechanism.part(np.asarray(values, np.float32), weight, 4)
    assert squared(part) <= Fraction(mechanism.clip) ** 2, "exactly, not nearly"
    assert all(Fraction(float(v)) % Fraction(mechanism.grid) == 0 for v in part)


@settings(max_examples=200, deadline=None)
@given(MECHANISMS, st.lists(UPDATES, min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_a_sum_is_exact_in_any_order(mechanism: Mechanism, rows: list[list[float]], random: Any) -> None:
    parts = [mechanism.part(np.asarray(row, np.float32), 1.0, 4) for row in rows]
    exact = [sum((Fraction(float(p[i])) for p in parts), Fraction(0)) for i in range(4)]
    random.shuffle(parts)
    total = np.zeros(4)
    for part in parts:
        total = total + part
    assert [Fraction(float(v)) for v in total] == exact


@pytest.mark.parametrize("size", [1, 3, 1000, 65_537])
def test_a_long_update_comes_to_nearly_the_clip_and_a_short_one_to_itself(size: int) -> None:
    mechanism, rng = Mechanism(clip=0.7, noise=1.3), np.random.default_rng(size)
    x = rng.standard_normal(size).astype(np.float32)
    direction = x / np.linalg.norm(x.astype(np.float64))
    rounding = mechanism.grid * math.sqrt(size)
    assert np.linalg.norm(mechanism.part(x * 1e6, 1.0, size) - 0.7 * direction) < 2 * rounding
    short = (0.3 * direction).astype(np.float32)
    assert np.linalg.norm(mechanism.part(short, 1.0, size) - short) < rounding
    assert np.linalg.norm(mechanism.part(short, 0.25, size) - 0.25 * short) < rounding
    assert length_of(x.astype(np.float64)) == pytest.approx(math.sqrt(math.fsum(float(v) ** 2 for v in x)))


def test_a_sparse_update_counts_as_its_dense_one() -> None:
    mechanism = Mechanism(clip=1.0, noise=1.0)
    sparse = SparseVector(np.array([3, 1]), vector(5.0, -2.0), 4)
    assert np.array_equal(mechanism.part(sparse, 0.5, 4), mechanism.part(vector(0, -2, 0, 5), 0.5, 4))


@pytest.mark.parametrize(("clip", "noise"), [(1.0, 1.0), (0.5, 3.0), (0.3, 0.01), (1e-4, 0.9)])
def test_the_grid_is_fine_beside_clip_and_noise(clip: float, noise: float) -> None:
    grid, least = Mechanism(clip, noise).grid, min(clip, noise * clip)
    assert math.log2(grid) == int(math.log2(grid))
    assert grid * 2**20 <= least < grid * 2**21


# --- noise -----------------------------------------------------------------------------------------------


def test_independent_noise_is_the_normals_of_its_version_on_the_grid() -> None:
    sums = PrivateSums(Mechanism(clip=0.5, noise=3.0), 1001, KEY)
    for version in (1, 2, 9):
        exact = 1.5 * normals(version_key(KEY, version), 1001)
        noise = sums.noise(version)
        assert np.abs(noise - exact).max() <= sums.mechanism.grid / 2
        sums.published(version)
        assert np.array_equal(noise, sums.noise(version)), "nothing is remembered"
    assert sums.history == []
    untouched = PrivateSums(Mechanism(clip=0.5, noise=3.0), 1001, KEY)
    assert sums.noise(3).size == 1001
    assert sums == untouched, "what was made last is no part of it"
    assert repr(sums) == repr(untouched)
    assert untouched.updates_needed == 1


def test_the_variance_of_correlated_noise_is_what_the_matrix_says() -> None:
    bands, releases, paths = 3, 6, 100_000
    sums = PrivateSums(Mechanism(clip=1.0, noise=2.0, bands=bands), paths, KEY)
    found = []
    for version in range(1, releases + 1):
        found.append(sums.noise(version))
        sums.published(version)
        assert len(sums.history) == min(version, bands - 1)
    c = np.zeros((releases, releases))
    for j, value in enumerate((1.0, 0.5, 0.375)):
        c += np.diag([value] * (releases - j), -j)
    inverse = np.linalg.inv(c)
    assert inverse[:, 0] == pytest.approx([1, -0.5, -0.125, 0.25, -0.078125, -0.0546875])
    covariance = np.cov(np.stack(found))
    assert np.abs(covariance - 4.0 * inverse @ inverse.T).max() < 0.02 * 4.0


def test_a_version_is_the_noised_mean_of_its_parts() -> None:
    b = PrivateBench()
    b.enrol("a", "b")
    b.work("a", "a0", (0.5, -1, 0, 1))
    b.work("b", "b0", (30, 0, 40, 0))  # cut to 2
    noise = np.rint(normals(version_key(KEY, 1), 4) * 2**20) / 2**20  # z C = 1, whose grid is 2^-20
    wanted = (np.array([0.5, -1, 0, 1]) + np.array([1.2, 0, 1.6, 0]) + noise) / 2
    assert b.engine.vector == pytest.approx(wanted, abs=1e-5)
    assert Mechanism(2.0, 0.5).grid == 2.0**-20


def test_a_part_buffer_is_divided_as_a_full_one() -> None:
    b = PrivateBench(private_config({"name": "fedbuff", "buffer_size": 4, "flush_s": 5.0}))
    b.enrol("a")
    b.work("a", "a0", (1, 1, 1, 1))
    assert b.engine.version == 0
    b.tick(10.0)
    noise = normals(version_key(KEY, 1), 4)
    assert b.engine.vector == pytest.approx((1 + noise) / 4, abs=1e-5)


def test_a_stale_update_weighs_less_and_never_more_than_the_clip() -> None:
    b = PrivateBench(private_config(privacy={"participations": 9}))
    b.enrol("a", "b", "c")
    b.ask("a", "a0")
    b.work("b", "b0")
    b.work("c", "c0")
    before = b.engine.vector.copy()
    assert decision(b.push("a", "a0", (0, 0, 0, 4))).staleness == 1
    b.work("b", "b1", (0, 0, 0, 0))
    noise = normals(version_key(KEY, 2), 4)
    wanted = (np.array([0, 0, 0, 2 / math.sqrt(2)]) + noise) / 2
    assert b.engine.vector - before == pytest.approx(wanted, abs=1e-5)


def test_rounds_count_every_device_once_whatever_examples_it_claims() -> None:
    rounds = {"name": "fedavg", "clients_per_round": 3, "over_selection": 1.0}
    b = PrivateBench(private_config(rounds))
    b.enrol("a", "b", "c")
    for i, client in enumerate("abc"):
        b.ask(client, f"{client}0")
        b.push(client, f"{client}0", (i, 0, 0, 0), examples=10**i)
    noise = normals(version_key(KEY, 1), 4)
    assert b.engine.version == 1
    assert b.engine.vector == pytest.approx((np.array([3, 0, 0, 0]) + noise) / 3, abs=1e-5)


# --- one device in and zeroed ----------------------------------------------------------------------------

WORK = lists_up_to(24, st.tuples(st.sampled_from("abcdef"), UPDATES, st.booleans()))


@settings(max_examples=150, deadline=None)
@given(WORK, st.sampled_from(["fedbuff", "fedavg"]))
def test_what_a_device_sends_changes_its_sums_by_the_clip_and_nothing_else_of_the_run(
    work: Sequence[tuple[str, list[float], bool]], name: str
) -> None:
    """Adjacency: all values of device a are zero, and when it asks and answers stays as it is."""
    rounds = {"name": "fedavg", "clients_per_round": 2, "over_selection": 3.0}
    strategy = rounds if name == "fedavg" else None
    one, other = (PrivateBench(private_config(strategy, {"participations": 2})) for _ in range(2))
    for bench in (one, other):
        bench.enrol(*"abcdef")
    for number, (client, values, unreadable) in enumerate(work):
        answers = []
        for bench, sent in ((one, values), (other, [0.0] * 4 if client == "a" else values)):
            bad = not np.isfinite(np.asarray(sent, np.float32)).all() or (unreadable and sent is values)
            bench.ask(client, f"t{number}")
            effects = bench.push(client, f"t{number}", sent, flaw="not to be read" if bad else "")
            answers.append([type(e) for e in effects])
        assert answers[0] == answers[1]
        assert (one.engine.version, one.engine.pending) == (other.engine.version, other.engine.pending)
        sums = [b.engine.strategy.total(b.engine.state) for b in (one, other)]  # type: ignore[attr-defined]
        assert squared(sums[0] - sums[1]) <= Fraction(2.0) ** 2
    assert [r.decision.verdict for r in one.engine.ledger.receipts.values()] == [
        r.decision.verdict for r in other.engine.ledger.receipts.values()
    ]


def test_an_update_that_cannot_be_read_counts_as_one_of_zeros() -> None:
    b = PrivateBench()
    b.enrol("a", "b")
    b.ask("a", "a0")
    assert decision(b.push("a", "a0", (9, 9, 9, 9), flaw="value 0 is not finite")).verdict is Verdict.HELD
    b.work("b", "b0", (1, 0, 0, 0))
    noise = normals(version_key(KEY, 1), 4)
    assert b.engine.vector == pytest.approx((np.array([1, 0, 0, 0]) + noise) / 2, abs=1e-5)


def test_nobody_hears_what_a_device_measured() -> None:
    b = PrivateBench()
    b.enrol("a")
    b.ask("a", "a0")
    task = b.engine.ledger.tasks["a0"]
    update = Update("u", "a0", "a", task.base_version, 3, vector(1, 0, 0, 0), None, 2, {"loss": 0.25})
    effects = b.do(ev.UpdateArrived(1.0, update, ev.Payload("00" * 32, 16)))
    assert next(e for e in effects if isinstance(e, Decided)).metrics == {}


# --- who is heard how often ------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    lists_up_to(
        60, st.tuples(st.sampled_from("abcdef"), st.sampled_from(["work", "ask", "late", "resend", "wait"]))
    ),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_participations_and_separation_hold_under_every_schedule(
    schedule: Sequence[tuple[str, str]], most: int, apart: int
) -> None:
    privacy = {"participations": most, "separation": apart, "bands": 1}
    b = PrivateBench(private_config({"name": "fedbuff", "buffer_size": 2}, privacy))
    b.enrol(*"abcdef")
    now, folded = 0.0, dict[str, list[int]]()
    asked: dict[str, list[str]] = {}
    for number, (client, what) in enumerate(schedule):
        now += 1.0
        if what == "wait":
            b.tick(now := now + 1000.0)  # leases end; a late answer may still come
        elif what in ("ask", "work"):
            b.ask(client, f"t{number}", now)
            asked.setdefault(client, []).append(f"t{number}")
        if what in ("work", "late", "resend") and asked.get(client):
            task = asked[client][-1 if what != "late" else 0]
            known = f"update-of-{task}" in b.engine.ledger.receipts
            before = b.engine.version
            verdict = decision(b.push(client, task, now=now)).verdict
            if verdict is not Verdict.REJECTED and not known:
                folded.setdefault(client, []).append(before + 1)  # the version that it is in
        if number % 20 == 19:
            b.engine = b.restored(take_snapshot(b.engine))
    for client, versions in folded.items():
        assert len(versions) <= most, client
        assert all(later - earlier >= apart for earlier, later in itertools.pairwise(versions))
    assert Counter({c: r.accepted for c, r in b.engine.ledger.clients.items()}) == Counter(
        {c: len(v) for c, v in folded.items()}
    )


def test_who_has_given_all_hears_so() -> None:
    b = PrivateBench(private_config(privacy={"participations": 1}))
    b.enrol(*"abc")
    b.work("a", "a0")
    (refused,) = b.ask("a", "a1")
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.detail) == (
        Reason.OVER_SHARE,
        "has given the 1 updates that [privacy] lets one device give",
    )


def test_a_lost_task_is_no_update() -> None:
    b = PrivateBench(private_config(privacy={"participations": 1}))
    b.enrol("a")
    b.ask("a", "a0")
    b.do(ev.TaskDropped(1.0, "a", "a0", "no power"))
    assert decision([*b.ask("a", "a1"), *b.push("a", "a1")]).verdict is Verdict.HELD


def test_the_run_ends_when_its_devices_can_give_no_further_version() -> None:
    b = PrivateBench(private_config(privacy={"participations": 1}, fleet={"clients": 5}))
    b.enrol(*"abcd")
    ends: list[Finished] = []
    for client in "abcd":
        ends += [e for e in [*b.ask(client, client), *b.push(client, client)] if isinstance(e, Finished)]
    assert not ends, "a fifth device is still to come"
    assert b.engine.version == 2
    b = PrivateBench(private_config(privacy={"participations": 1}, fleet={"clients": 5}))
    b.enrol(*"abcde")
    effects = [e for c in "abcde" for e in [*b.ask(c, c), *b.push(c, c)]]
    assert [e.why for e in effects if isinstance(e, Finished)] == [
        "the run ended at version 2: [privacy] lets 1 devices give another update"
    ]
    assert [e.version for e in effects if isinstance(e, Published)] == [1, 2]


# --- state -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bands", [1, 3])
def test_a_snapshot_goes_on_with_the_same_noise(bands: int) -> None:
    privacy = {"participations": 9, "separation": 3, "bands": bands}
    b = PrivateBench(private_config(privacy=privacy))
    digests: list[list[str]] = []
    for restarts in (False, True):
        b.engine = b.restored(None)
        b.enrol(*"abcdef")
        digests.append([])
        for turn in range(4):
            for client in "abcdef":
                b.work(client, f"{client}{turn}", (turn, 1, 2, 3))
                digests[-1].append(state_digest(b.engine))
                if restarts:
                    b.engine = b.restored(take_snapshot(b.engine))
    assert digests[0] == digests[1]
    assert b.engine.version == 12
    other = PrivateBench(private_config(privacy=privacy), key=bytes(32))
    other.enrol(*"abcdef")
    for client in "ab":
        other.work(client, f"{client}0", (0, 1, 2, 3))
    assert state_digest(other.engine) != digests[0][1], "the key decides"


def test_the_noise_of_a_snapshot_must_be_that_of_its_model() -> None:
    b = PrivateBench(private_config(privacy={"separation": 3, "participations": 9}))
    b.enrol("a", "b")
    b.work("a", "a0")
    b.work("b", "b0")
    whole = take_snapshot(b.engine)
    snapshot = replace(whole, arrays={n: a for n, a in whole.arrays.items() if n != "noise/0"})
    assert len(snapshot.arrays) == len(whole.arrays) - 1
    with pytest.raises(StoreCorrupt, match="noise/0"):
        b.restored(snapshot)


# --- what its people should know ---------------------------------------------------------------------------

INT8, TOPK = {"codec": "int8(256)"}, {"codec": "ef(0.9)|topk(0.5)|int8(256)|gaps|zstd"}
DOUBTS: dict[str, tuple[dict[str, Any], str]] = {
    "delta": ({"privacy": {"delta": 0.2}}, "who publishes all that one of them has.*much less than 0.2"),
    "chain": ({"uplink": TOPK}, "updates travel as 'ef.*': how long one is follows of its values"),
    "qafel": ({"strategy": {"name": "qafel", "buffer_size": 2}}, r"updates travel as 'int4\(256,sr\)|zstd'"),
    "fixed": ({"uplink": INT8}, ""),
    "qafel, fixed": ({"strategy": {"name": "qafel", "buffer_size": 2}, "uplink": INT8}, ""),
    "not private": ({"privacy": {"clip": 0.0, "noise": 0.0, "delta": 0.9}, "uplink": TOPK}, ""),
    "plain": ({}, ""),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_what_is_not_hidden_is_said(name: str) -> None:
    tables, words = DOUBTS[name]
    config = private_config(
        tables.get("strategy"), tables.get("privacy"), uplink=tables.get("uplink", {"codec": "auto"})
    )
    found = list(doubts(config, strategy_of(config)))
    assert len(found) == bool(words)
    assert re.search(words, "".join(found))


# --- what cannot be ---------------------------------------------------------------------------------------

ROUNDS = {"name": "fedavg", "clients_per_round": 2}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fedasync": ({"strategy": {"name": "fedasync"}}, "'fedasync' cannot be private.*fedbuff"),
    "asyncdrop": ({"strategy": {"name": "asyncdrop"}}, "'asyncdrop' cannot be private"),
    "ca2fl": ({"strategy": {"name": "ca2fl"}}, "'ca2fl' cannot be private"),
    "phased": ({"strategy": {"name": "phased"}}, "'phased' cannot be private"),
    "scheduler": (
        {"strategy": {"name": "fedbuff", "scheduler": {"name": "capped"}}},
        r"strategy\.scheduler 'capped' with \[privacy\] or \[secagg\]: .*leave the scheduler out",
    ),
    "rule": ({"robust": {"rule": "median"}}, "robust.rule = 'median' looks at single updates"),
    "clip": ({"robust": {"clip": 3.0}}, "robust.clip cuts by the median"),
    "buffer_max": ({"robust": {"buffer_max": 2}}, "robust.buffer_max is set"),
    "window_max": ({"robust": {"window_max": 2}}, "robust.window_max is set"),
    "flaws_max": ({"robust": {"flaws_max": 3}}, "robust.flaws_max is set"),
    "submodel": ({"strategy": ROUNDS, "submodel": {"name": "heterofl"}}, "submodel.name = 'heterofl'"),
    "deadline": ({"strategy": {**ROUNDS, "deadline_s": 0.0}}, "strategy.deadline_s = 0"),
    "fleet": ({"fleet": {"clients": 1}}, "fleet.clients is 1, but sums of 2 updates.*need 2 devices"),
    "separation": ({"privacy": {"separation": 4}}, "fleet.clients is 6.*need 8 devices"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_private_is_refused_with_the_reason(name: str) -> None:
    tables, words = REFUSED[name]
    config = private_config(
        tables.get("strategy"),
        tables.get("privacy"),
        **{table: keys for table, keys in tables.items() if table not in ("strategy", "privacy")},
    )
    with pytest.raises(ConfigError, match=words):
        Blueprint.of(config, SPEC, key=KEY)


@pytest.mark.parametrize("name", ["fedbuff", "qafel", "fedavg", "fedprox"])
def test_strategies_that_add_sums_can_be_private(name: str) -> None:
    size = "clients_per_round" if name in ("fedavg", "fedprox") else "buffer_size"
    assert Blueprint.of(private_config({"name": name, size: 3}), SPEC, key=KEY).sums() is not None


def test_a_models_buffers_must_stay_on_the_devices() -> None:
    tensors = {"w": np.zeros(3, np.float32), "mean": np.zeros(2, np.float32)}
    spec = ParamSpec.of(tensors, (), ["mean"])
    with pytest.raises(ConfigError, match=r"model\.buffers = 'average' publishes what a device has measured"):
        Blueprint.of(private_config(), spec, key=KEY)
    assert Blueprint.of(private_config(model={"buffers": "local"}), spec, key=KEY).sums() is not None


def test_without_a_key_there_is_no_private_run() -> None:
    with pytest.raises(ConfigError, match="there is no key for the noise here"):
        Blueprint.of(private_config(), SPEC)


BAD = {
    "both": ({"clip": 1.0, "noise": 1.0, "epsilon": 1.0}, "say one of the two"),
    "neither": ({"clip": 1.0}, "say one of the two"),
    "noise alone": ({"noise": 1.0}, "privacy.noise is set and privacy.clip is not"),
    "epsilon alone": ({"epsilon": 1.0}, "privacy.epsilon is set and privacy.clip is not"),
    "delta 0": ({"clip": 1.0, "noise": 1.0, "delta": 0.0}, "privacy.delta must be between 0 and 1"),
    "delta 1": ({"clip": 1.0, "noise": 1.0, "delta": 1.0}, "privacy.delta must be between 0 and 1"),
    "never": ({"clip": 1.0, "noise": 1.0, "participations": 0}, "privacy.participations must be at least 1"),
    "at once": ({"clip": 1.0, "noise": 1.0, "separation": 0}, "privacy.separation must be at least 1"),
    "bands": ({"clip": 1.0, "noise": 1.0, "separation": 2, "bands": 3}, "privacy.bands must be at most"),
    "negative": ({"clip": -1.0}, "privacy.clip must not be negative"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_table_that_promises_nothing_is_refused(name: str) -> None:
    table, words = BAD[name]
    with pytest.raises(ConfigError, match=words):
        merge([("test", {"privacy": table})])


@pytest.mark.parametrize("key", ["clip", "buffer_max", "window_max", "window_versions", "flaws_max"])
def test_no_operator_loosens_the_bounds_of_a_private_run(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"robust\.{key} cannot be changed in a private run"):
        typed(private_config(), {f"robust.{key}": 0})
    assert typed(merge([]), {f"robust.{key}": 1})
    with pytest.raises(ConfigError, match=r"privacy\.participations cannot be changed in a run"):
        typed(private_config(), {"privacy.participations": 9})


def test_a_restart_may_not_say_another_table() -> None:
    was, now = private_config(), private_config(privacy={"noise": 0.1})
    assert list(differences(was, now)) == [("privacy.noise", 0.5, 0.1)]


def test_a_private_run_is_not_rolled_back() -> None:
    b = PrivateBench()
    b.enrol("a")
    with pytest.raises(ConfigError, match="a private run cannot be rolled back"):
        check_rollback(b.engine, ev.RolledBack(1.0, 0, 0, ("a",)))


def test_a_run_that_is_not_private_says_nothing_of_it() -> None:
    plain = merge([])
    assert "privacy" not in plain.to_json()
    assert Blueprint.of(plain, SPEC).sums() is None
    assert "noise" not in take_snapshot(Blueprint.of(plain, SPEC).engine({"w": np.zeros(4, np.float32)})).meta
