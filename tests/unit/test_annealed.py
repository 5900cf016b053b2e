"""Annealed buffers: their path by a reference of plain lists, how they grow, parts, what is remembered."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from machines import Bench, decision

import anabranch
from anabranch.core.engine.robust import RobustTable
from anabranch.core.errors import ConfigError
from anabranch.core.model.updates import Verdict
from anabranch.core.snapshot import restore, state_digest, take_snapshot
from anabranch.strategies.registry import make_strategy

Sent = tuple[int, list[float], list[int]]  # base version, values, coordinates
START, ALL = [0.5, -1.0, 2.0], [0, 1, 2]


def ends(count: int, least: int, rho: float) -> list[int]:
    """After how many updates there is a version."""
    found, taken = [0], 0
    while taken < count:
        size = least
        while size + 1 <= rho * taken:
            size += 1
        taken += size
        found.append(taken)
    return found


def script(count: int, least: int, rho: float, parts: bool) -> list[Sent]:
    """Updates of bases up to four versions old."""
    rng, found, borders = np.random.default_rng(7), [], ends(count, least, rho)
    for i in range(count):
        version = sum(border <= i for border in borders) - 1
        at = sorted(rng.permutation(3)[: rng.integers(1, 4)].tolist()) if parts else ALL
        base = version - int(rng.integers(0, min(4, version) + 1))
        found.append((base, rng.standard_normal(len(at)).tolist(), at))
    return found


def path(sent: list[Sent], borders: list[int], eta: float, mu: float, ahead: bool) -> list[list[float]]:
    """The versions, coordinate by coordinate; with mu by heavy ball's momentum, or Nesterov's `ahead`.

    What no update of a version covers stays, and so does its direction.
    """
    versions, moment = [START], [0.0] * 3
    for first, last in itertools.pairwise(borders):
        if last > len(sent):
            break
        sums, shares = [0.0] * 3, [0.0] * 3
        for base, values, at in sent[first:last]:
            weight = 1 / math.sqrt(1 + len(versions) - 1 - base)
            for j, value in zip(at, values, strict=True):
                sums[j] += weight * value
                shares[j] += weight
        version = list(versions[-1])
        for j, share in enumerate(shares):
            if share:
                mean = sums[j] / share
                moment[j] = mu * moment[j] + mean
                version[j] += eta * (mean + mu * moment[j] if ahead else moment[j])
        versions.append(version)
    return versions


def aggregated(sent: list[Sent], params: dict[str, Any]) -> Any:
    updates = [
        anabranch.Update(
            f"c{i % 4}",
            f"t{i}",
            base,
            1 + i,
            {"w": np.array(values)},
            submodel=None if at == ALL else {"w": np.array(at)},
        )
        for i, (base, values, at) in enumerate(sent)
    ]
    return anabranch.aggregate("annealed", params, {"w": np.array(START)}, updates)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize(
    ("least", "rho", "rule"),
    [
        (2, 0.25, {"server_lr": 1.0}),
        (1, 0.5, {"server_lr": 0.5}),
        (3, 0.0, {"server_lr": 1.0}),
        (2, 0.25, {"outer": {"name": "momentum", "lr": 0.4, "momentum": 0.8}}),
        (1, 0.3, {"outer": {"name": "nesterov", "lr": 0.4, "momentum": 0.8}}),
    ],
)
def test_golden_path(least: int, rho: float, rule: dict[str, Any], parts: bool) -> None:
    count, outer = 40, rule.get("outer", {})
    borders, sent = ends(count, least, rho), script(count, least, rho, parts)
    eta, mu = outer.get("lr", rule.get("server_lr")), outer.get("momentum", 0.0)
    expected = path(sent, borders, eta, mu, outer.get("name") == "nesterov")
    params = {"buffer_size": least, "growth": rho, **rule}
    for version, border in enumerate(borders[: len(expected)]):
        found = aggregated(sent[:border], params)
        assert found.version == version
        np.testing.assert_allclose(found.model["w"], expected[version], rtol=1e-10, atol=1e-12)


def test_a_buffer_is_a_fixed_part_of_what_came_before() -> None:
    assert ends(40, 2, 0.25) == [0, 2, 4, 6, 8, 10, 12, 15, 18, 22, 27, 33, 41]
    found = aggregated([(0, [1.0, 0.0, 0.0], ALL)] * 41, {"buffer_size": 2, "growth": 0.25})
    assert found.version == 12


def test_it_starts_as_fedbuff_whose_weights_are_divided_out() -> None:
    """Fresh updates weigh 1, so there is nothing to divide by but their number."""
    sent = [(i // 4, [float(i), 1.0, -0.5], ALL) for i in range(12)]
    updates = [anabranch.Update("a", f"t{i}", b, 1, {"w": np.array(v)}) for i, (b, v, _) in enumerate(sent)]
    other = anabranch.aggregate("fedbuff", {"buffer_size": 4}, {"w": np.array(START)}, updates)
    mine = aggregated(sent, {"buffer_size": 4, "growth": 0.02})
    np.testing.assert_allclose(mine.model["w"], other.model["w"], rtol=1e-12)


def test_staleness_makes_no_step_shorter() -> None:
    bench = Bench("annealed", buffer_size=1)
    bench.enrol("a", "late")
    bench.ask("late", "late")
    for n in range(3):
        bench.work("a", f"t{n}", (0, 0, 0, 0))
    assert decision(bench.push("late", "late", (2, 4, 6, 8))).weight == 0.5
    np.testing.assert_allclose(bench.engine.vector, [2, 4, 6, 8], rtol=1e-6)


def test_a_buffer_that_waited_is_divided_by_what_it_has_and_counts_as_much() -> None:
    bench = Bench("annealed", buffer_size=9, growth=0.5, flush_s=5.0)
    bench.enrol("a", "b")
    assert bench.work("a", "t", (1, 2, 3, 4), now=1.0).verdict is Verdict.HELD
    bench.tick(6.0)
    assert bench.engine.version == 1
    assert bench.engine.state.taken == 1
    np.testing.assert_allclose(bench.engine.vector, [1, 2, 3, 4], rtol=1e-6)


@pytest.mark.parametrize("outer", [{}, {"name": "nesterov", "lr": 0.3, "momentum": 0.7}])
def test_a_snapshot_in_the_middle_of_a_buffer_goes_on_alike(outer: dict[str, Any]) -> None:
    bench = Bench("annealed", buffer_size=2, growth=0.4, outer=outer)
    bench.enrol("a", "b")
    bench.ask("b", "late")
    for n in range(8):
        bench.work("a", f"t{n}", (n, -1, 0.5, 2))
    bench.push("b", "late", (9, -9, 9, 9))
    again, engine = Bench("annealed", buffer_size=2, growth=0.4, outer=outer), bench.engine
    again.engine = restore(take_snapshot(engine), engine.spec, engine.strategy, engine.settings)
    before = engine.version
    for each in (bench, again):
        for n in range(8, 14):
            each.work("a", f"t{n}", (3, -1, 4, n))
    assert bench.engine.version == before + 2, "buffers of three by now"
    assert state_digest(again.engine) == state_digest(bench.engine)


@pytest.mark.parametrize(
    ("params", "table", "words"),
    [
        ({"buffer_size": 0}, RobustTable(), "buffer_size must be at least 1"),
        ({"growth": 1.0}, RobustTable(), r"growth must be in \[0, 1\)"),
        ({"server_lr": 0.0}, RobustTable(), "server_lr must be greater than 0"),
        (
            {"server_lr": 0.7, "outer": {"name": "sgd"}},
            RobustTable(),
            "leave server_lr out, and write lr into outer",
        ),
        ({}, RobustTable(rule="median"), "'annealed' gathers no buffer that takes one"),
    ],
)
def test_what_it_cannot_have_is_named(params: dict[str, Any], table: RobustTable, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_strategy("annealed", params, table)
