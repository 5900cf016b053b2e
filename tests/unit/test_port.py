"""PORT: its path by a reference of plain lists, what age and direction count, parts, what is remembered."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from machines import Bench, decision

import anabranch
from anabranch.core import events as ev
from anabranch.core.config.tables import merge
from anabranch.core.engine.robust import RobustTable
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import Ask, Capability, Reason, Update, Verdict
from anabranch.core.rules import NEWEST
from anabranch.core.snapshot import restore, state_digest, take_snapshot
from anabranch.host.build import Blueprint
from anabranch.strategies.registry import make_strategy

Sent = tuple[int, int, list[float], list[int]]  # base version, examples, values, coordinates
ALL = [0, 1, 2]


def cosine(x: list[float], y: list[float]) -> float:
    length = math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))
    return sum(a * b for a, b in zip(x, y, strict=True)) / length if length else 1.0


def path(sent: list[Sent], size: int, bound: float, a: float, b: float) -> list[list[float]]:
    """The versions, coordinate by coordinate."""
    versions = [[0.5, -1.0, 2.0]]
    for first in range(0, len(sent), size):
        now, sums, shares = versions[-1], [0.0] * 3, [0.0] * 3
        for base, examples, values, at in sent[first : first + size]:
            went = [now[j] - versions[base][j] for j in at]
            fresh = bound / (len(versions) - 1 - base + bound)
            p = examples * (a * (1 + cosine(values, went)) / 2 + b * fresh)
            for j, value in zip(at, values, strict=True):
                sums[j] += p * value
                shares[j] += p
        versions.append([w + (s / p if p else 0.0) for w, s, p in zip(now, sums, shares, strict=True)])
    return versions


def script(count: int, size: int, parts: bool, seed: int) -> list[Sent]:
    rng, found = np.random.default_rng(seed), []
    for i in range(count):
        age = int(rng.integers(0, min(5, i // size) + 1))
        at = sorted(rng.permutation(3)[: rng.integers(1, 4)].tolist()) if parts else ALL
        values = rng.standard_normal(len(at)).tolist()
        found.append((i // size - age, int(rng.integers(1, 300)), values, at))
    return found


def aggregated(sent: list[Sent], params: dict[str, Any]) -> Any:
    updates = [
        anabranch.Update(
            f"c{i % 4}",
            f"t{i}",
            base,
            examples,
            {"w": np.array(values)},
            submodel=None if at == ALL else {"w": np.array(at)},
        )
        for i, (base, examples, values, at) in enumerate(sent)
    ]
    return anabranch.aggregate("port", params, {"w": np.array([0.5, -1.0, 2.0])}, updates)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize(
    ("size", "bound", "a", "b"), [(3, 10.0, 1.0, 3.0), (1, 2.0, 5.0, 0.5), (4, 1.0, 0.0, 1.0)]
)
def test_golden_path(size: int, bound: float, a: float, b: float, parts: bool) -> None:
    sent = script(12 * size, size, parts, seed=size)
    expected = path(sent, size, bound, a, b)
    params = {"buffer_size": size, "staleness_bound": bound, "similarity_weight": a, "staleness_weight": b}
    for version in range(1, 13):
        found = aggregated(sent[: version * size], params)
        assert found.version == version
        np.testing.assert_allclose(found.model["w"], expected[version], rtol=1e-10, atol=1e-12)


def test_golden_shares() -> None:
    """One of 100 examples that is fresh, one of 200 that is 5 versions old and half against the way."""
    ways = [(i // 2, 1, [1.0, 0.0, 0.0], ALL) for i in range(10)]
    against = [-0.5, 0.0, math.sqrt(0.75)]
    found = aggregated([*ways, (5, 100, [0.0, 1.0, 0.0], ALL), (0, 200, against, ALL)], {"buffer_size": 2})
    assert found.version == 6
    moved = found.model["w"] - np.array([5.5, -1.0, 2.0])
    assert moved[1] == pytest.approx(0.470588, abs=1e-6)
    assert np.linalg.norm(moved[[0, 2]]) == pytest.approx(0.529412, abs=1e-6)


def test_a_device_is_told_what_age_and_direction_have_left_of_its_update() -> None:
    bench = Bench("port", buffer_size=1)
    bench.enrol("a", "b", "c", "d")
    for late in "bcd":
        bench.ask(late, late)
    assert bench.work("a", "first", (2, 0, 0, 0)).weight == 4.0, "fresh"
    with_it, against = (
        decision(bench.push(c, c, delta)) for c, delta in (("b", (1, 0, 0, 0)), ("c", (-1, 0, 0, 0)))
    )
    assert with_it.weight == pytest.approx(1 + 3 * 10 / 11)
    assert against.weight == pytest.approx(0 + 3 * 10 / 12)
    assert decision(bench.push("d", "d", (0, 0, 0, 0))).weight == pytest.approx(1 + 3 * 10 / 13), "nothing"


@pytest.mark.parametrize("codec", ["log(1)", "log(2)", "int4(256)"])
@pytest.mark.parametrize(("rules", "is_full"), [(NEWEST, True), (0, False)])
def test_what_the_downlink_has_rounded_is_no_direction(codec: str, rules: int, is_full: bool) -> None:
    """An update of the newest version weighs a + b, as where versions travel as they are."""
    rng = np.random.default_rng(0)
    first = {"w": rng.standard_normal((64, 64)).astype(np.float32)}
    tables = {"run": {"rules": rules}, "strategy": {"name": "port", "buffer_size": 1}}
    config = merge([("test", {**tables, "downlink": {"codec": codec}})])
    engine = Blueprint.of(config, ParamSpec.of(first)).engine(first)
    engine.handle(ev.Enrolled(0.0, "a", Capability()))
    weights = []
    for i in range(6):
        engine.handle(ev.TaskAsked(0.0, Ask("a", f"t{i}")))
        delta = (0.01 * rng.standard_normal(4096)).astype(np.float32)
        update = Update(f"u{i}", f"t{i}", "a", engine.version, 1, delta)
        told = decision(engine.handle(ev.UpdateArrived(0.0, update, ev.Payload("", 1))))
        assert (told.verdict, told.staleness) == (Verdict.PUBLISHED, 0)
        weights.append(told.weight)
    assert (weights == [4.0] * 6) is is_full


@pytest.mark.parametrize("unit", [1e25, 1e-25])
def test_a_direction_is_that_of_any_length(unit: float) -> None:
    """Their squares are no numbers of a float32, in which the model is."""
    bench = Bench("port", buffer_size=1)
    bench.enrol("a", "b")
    bench.ask("b", "late")
    bench.work("a", "t", (unit, 0, 0, 0))
    weight = decision(bench.push("b", "late", (-unit, 0, 0, unit))).weight
    assert weight == pytest.approx((1 - math.sqrt(0.5)) / 2 + 3 * 10 / 11)


def test_without_the_two_shares_it_is_the_mean_by_examples() -> None:
    sent = [(i // 3, 10 * (i + 1), [float(i), -1.0, 0.5], ALL) for i in range(9)]
    flat = {"similarity_weight": 0.0, "staleness_bound": 1e12}
    found = aggregated(sent, {"buffer_size": 3, **flat}).model["w"]
    expected = np.array([0.5, -1.0, 2.0])
    for some in (sent[:3], sent[3:6], sent[6:]):
        expected += np.average([s[2] for s in some], axis=0, weights=[s[1] for s in some])
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_a_buffer_that_waited_is_divided_by_what_it_has() -> None:
    bench = Bench("port", buffer_size=9, flush_s=5.0)
    bench.enrol("a", "b")
    assert bench.work("a", "t", (1, 2, 3, 4), now=1.0).verdict is Verdict.HELD
    bench.tick(6.0)
    assert bench.engine.version == 1
    np.testing.assert_allclose(bench.engine.vector, [1, 2, 3, 4], rtol=1e-6)


def test_a_snapshot_in_the_middle_of_a_buffer_goes_on_alike() -> None:
    bench = Bench("port", buffer_size=3)
    bench.enrol("a", "b")
    bench.ask("b", "late")
    for n in range(4):
        bench.work("a", f"t{n}", (n, -1, 0.5, 2))
    bench.push("b", "late", (9, -9, 9, 9))
    again = Bench("port", buffer_size=3)
    engine = bench.engine
    again.engine = restore(take_snapshot(engine), engine.spec, engine.strategy, engine.settings)
    for each in (bench, again):
        each.work("a", "last", (3, -1, 4, 1))
    assert bench.engine.version == 2
    assert state_digest(again.engine) == state_digest(bench.engine)


def test_who_trains_on_keeps_nothing_of_its_own_since_updates_are_added() -> None:
    spec = ParamSpec.of({"w": np.zeros(4, np.float32)})
    tables = {"strategy": {"name": "port"}, "client": {"push": "elastic", "merge_weight": 0.5}}
    with pytest.raises(ConfigError, match=r"which adds updates up, needs client\.merge_weight = 1"):
        Blueprint.of(merge([("test", tables)]), spec)


def test_an_update_whose_base_is_gone_is_refused() -> None:
    bench = Bench("port", buffer_size=1, lease_s=5.0, lease_min_s=5.0)
    bench.enrol("a", "late")
    bench.ask("late", "late")
    bench.tick(100.0)
    bench.work("a", "t", now=101.0)
    assert decision(bench.push("late", "late", now=102.0)).reason is Reason.BASE_GONE


@pytest.mark.parametrize(
    ("params", "table", "words"),
    [
        ({"buffer_size": 0}, RobustTable(), "buffer_size must be at least 1"),
        ({"staleness_bound": 0.0}, RobustTable(), "staleness_bound must be greater than 0"),
        ({"similarity_weight": -1.0}, RobustTable(), "similarity_weight must not be negative"),
        ({"staleness_weight": 0.0}, RobustTable(), "staleness_weight must be greater than 0"),
        ({}, RobustTable(rule="median"), "'port' gathers no buffer that takes one"),
    ],
)
def test_what_it_cannot_have_is_named(params: dict[str, Any], table: RobustTable, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_strategy("port", params, table)
