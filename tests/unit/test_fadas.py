"""FADAS: its path by sums over all versions so far, what delay costs, its identities, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machines import Bench

import anabranch
from anabranch.core.engine.robust import RobustTable
from anabranch.core.errors import ConfigError
from anabranch.core.snapshot import restore, state_digest, take_snapshot
from anabranch.strategies.registry import make_strategy

Array = np.ndarray[Any, np.dtype[np.float64]]
START = np.array([0.5, -1.0, 2.0])


def sent(count: int, size: int, seed: int = 3) -> tuple[list[anabranch.Update], list[int]]:
    """Updates of all ages up to four versions in buffers of `size`, and their staleness."""
    rng, made, taus = np.random.default_rng(seed), [], []
    for i in range(count):
        tau = int(rng.integers(0, min(4, i // size) + 1))
        delta = rng.standard_normal(3) * rng.choice([0.01, 1.0])
        made.append(anabranch.Update(f"c{i % 4}", f"t{i}", i // size - tau, 1, {"w": delta}))
        taus.append(tau)
    return made, taus


def by_sums(means: Array, taus: Array, eta: float, beta_1: float, beta_2: float, delay_max: int) -> Array:
    """Where the model is after each version, (T, n), of means (T, n) and delays (T,): nothing is recursive.

    m_t and v_t are sums over s of (1 - beta) beta^(t-s) of what came at s.
    """
    ends, w = [], START.copy()
    for t in range(1, len(means) + 1):
        back = np.arange(t)[::-1, None]
        m = ((1 - beta_1) * beta_1**back * means[:t]).sum(axis=0)
        v = [
            ((1 - beta_2) * beta_2 ** np.arange(s)[::-1, None] * means[:s] ** 2).sum(axis=0)
            for s in range(1, t + 1)
        ]
        tau = taus[t - 1]
        eta_t = eta / tau if delay_max and tau > delay_max else eta
        root = np.sqrt(np.max(v, axis=0)) / np.sqrt(1 - beta_2**t)
        w = w + eta_t * m / (1 - beta_1**t) / (root + 1e-8)
        ends.append(w)
    return np.array(ends)


@pytest.mark.parametrize(
    ("size", "params"),
    [
        (3, {}),
        (1, {"server_lr": 0.05}),
        (2, {"server_lr": 0.1, "momentum": 0.0, "beta2": 0.5}),
        (2, {"server_lr": 0.1, "momentum": 0.5, "beta2": 0.0, "delay_max": 0}),
        (4, {"server_lr": 0.3, "delay_max": 2}),
    ],
)
def test_golden_path(size: int, params: dict[str, Any]) -> None:
    updates, taus = sent(10 * size, size)
    deltas = np.array([u.delta["w"] for u in updates if u.delta is not None])
    said = {"server_lr": 0.001, "momentum": 0.9, "beta2": 0.99, "delay_max": 1, **params}
    expected = by_sums(
        deltas.reshape(10, size, 3).mean(axis=1),
        np.array(taus).reshape(10, size).max(axis=1),
        *(said[key] for key in ("server_lr", "momentum", "beta2", "delay_max")),
    )
    assert max(taus) > 2, "otherwise there is nothing to see of the delay"
    for version in range(1, 11):
        given = {"buffer_size": size, **params}
        result = anabranch.aggregate("fadas", given, {"w": START}, updates[: version * size])
        assert result.version == version
        np.testing.assert_allclose(result.model["w"], expected[version - 1], rtol=1e-12)


def test_the_first_step_is_as_long_as_the_rate_whatever_comes() -> None:
    deltas = np.array([300.0, -0.02, 1e-4])
    result = anabranch.aggregate(
        "fadas",
        {"buffer_size": 1, "server_lr": 0.25, "eps": 1e-30},
        {"w": START},
        [anabranch.Update("a", "t", 0, 1, {"w": deltas})],
    )
    np.testing.assert_allclose(result.model["w"] - START, 0.25 * np.sign(deltas), rtol=1e-9)


def test_where_squares_only_grow_it_is_adam() -> None:
    """Each mean is longer than the one before, so the greatest square is the newest."""
    updates = [anabranch.Update("a", f"t{i}", i, 1, {"w": 2.0**i * np.array([1, -1, 3])}) for i in range(6)]
    adam = {"name": "adam", "lr": 0.01}
    mine = anabranch.aggregate("fadas", {"buffer_size": 1, "server_lr": 0.01}, {"w": START}, updates)
    other = anabranch.aggregate("fedbuff", {"buffer_size": 1, "outer": adam}, {"w": START}, updates)
    np.testing.assert_array_equal(mine.model["w"], other.model["w"])


def test_after_a_large_update_small_ones_move_less_than_by_adam() -> None:
    lengths = [100.0] + [0.01] * 60
    updates = [anabranch.Update("a", f"t{i}", i, 1, {"w": np.full(3, s)}) for i, s in enumerate(lengths)]
    adam = {"name": "adam", "lr": 0.01, "momentum": 0.0, "beta2": 0.5}
    params = {"buffer_size": 1, "server_lr": 0.01, "momentum": 0.0, "beta2": 0.5}
    mine = anabranch.aggregate("fadas", params, {"w": START}, updates)
    other = anabranch.aggregate("fedbuff", {"buffer_size": 1, "outer": adam}, {"w": START}, updates)
    assert (mine.model["w"] - START < 0.0101).all()
    assert (other.model["w"] - START > 0.1).all()


@pytest.mark.parametrize(("delay_max", "share"), [(0, 1.0), (1, 1 / 3), (2, 1 / 3), (3, 1.0)])
def test_the_oldest_update_of_a_buffer_divides_its_rate(delay_max: int, share: float) -> None:
    """Three versions of nothing, then a buffer of staleness 3 and 0; the one after it is fresh again."""
    params: dict[str, Any] = {"server_lr": 1.0, "momentum": 0.0, "beta2": 0.0, "delay_max": delay_max}
    bench = Bench("fadas", buffer_size=2, **params)
    bench.enrol("slow", "fast")
    bench.ask("slow", "old")
    for n in range(6):
        bench.work("fast", f"quiet-{n}", (0, 0, 0, 0))
    assert bench.engine.version == 3
    bench.push("slow", "old", (1, -2, 3, 4))
    assert bench.engine.state.delay == 3
    bench.work("fast", "new", (1, -2, 3, 4))
    assert bench.engine.state.delay == 0
    assert bench.engine.vector.tolist() == pytest.approx([share, -share, share, share])
    for n in range(2):
        bench.work("fast", f"fresh-{n}", (1, -2, 3, 4))
    assert bench.engine.vector.tolist() == pytest.approx([share + 1, -share - 1, share + 1, share + 1])


def test_a_rules_direction_takes_the_place_of_the_mean() -> None:
    """By the median of 2, 2 and 900, which the first step takes by its sign, as long as the rate."""
    bench = Bench("fadas", buffer_size=3, server_lr=0.5, robust={"rule": "median"})
    bench.enrol("a")
    for n, delta in enumerate((2, -900, 2)):
        bench.work("a", f"t{n}", (delta,) * 4)
    assert bench.engine.vector.tolist() == pytest.approx([0.5] * 4)
    assert bench.engine.state.greatest.tolist() == pytest.approx([0.01 * 4] * 4)


def test_what_it_remembers_is_in_a_snapshot_taken_in_the_middle_of_a_buffer() -> None:
    bench = Bench("fadas", buffer_size=2)
    bench.enrol("a", "b")
    bench.ask("b", "late")
    for n in range(5):
        bench.work("a", f"t{n}", (n, -1, 0.5, 2))
    bench.push("b", "late", (9, 9, 9, 9))
    bench.work("a", "half", (1, 1, 1, 1))
    snapshot = take_snapshot(bench.engine)
    assert snapshot.arrays["strategy/greatest"].shape == (4,)
    again = Bench("fadas", buffer_size=2)
    again.engine = restore(snapshot, bench.engine.spec, bench.engine.strategy, bench.engine.settings)
    for each in (bench, again):
        each.work("a", "last", (3, -1, 4, 1))
    assert bench.engine.version == 4
    assert state_digest(again.engine) == state_digest(bench.engine)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"buffer_size": 0}, "buffer_size must be at least 1"),
        ({"server_lr": 0.0}, "server_lr must be greater than 0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"beta2": 1.0}, r"beta2 must be in \[0, 1\)"),
        ({"eps": 0.0}, "eps must be greater than 0"),
        ({"delay_max": -1}, "delay_max must not be negative"),
        ({"flush_s": -1.0}, "flush_s must not be negative"),
        ({"outer": {"name": "sgd"}}, "such as 'fedbuff' or 'fedavg'"),
    ],
)
def test_bad_parameters_name_the_field_and_the_fix(params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_strategy("fadas", params, RobustTable())
