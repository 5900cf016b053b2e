"""Ends of a run in the arena: rates that fall, rounds after buffers; by hand, on one number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from machines import Bench, decision, vector
from measuring import benchmark
from own_parts import forgotten

from anabranch.core.effects import Granted
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.model.updates import Reason, Verdict
from anabranch.strategies.registry import make_strategy, strategy_of
from anabranch.testing.strategy import check_equal, run

endings = benchmark("arena.endings")
rows = benchmark("arena.rows")
cells = benchmark("arena.cells")


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    """They are known here, and to no other test."""
    with forgotten():
        for name in endings.ENDINGS:
            endings.let_in(name)
        yield


ROUNDS = {"strategy": "fedavg", "clients_per_round": 2, "over_selection": 1.0, "deadline_s": 0.0}
BUFFER = {"strategy": "fedbuff", "buffer_size": 3}


@pytest.mark.parametrize(
    ("now", "rate"), [(0.0, 1.0), (25.0, 0.853553), (50.0, 0.5), (100.0, 0.0), (120.0, 0.0)]
)
def test_a_cosine_falls_from_one_to_nothing(now: float, rate: float) -> None:
    assert endings.cosine(now, 100.0) == pytest.approx(rate, abs=1e-6)


def bench_of(name: str, **params: Any) -> Bench:
    bench = Bench(name, vector(0, 0, 0, 0), **params)
    bench.enrol(*"abcd")
    return bench


def test_golden_buffer_by_a_cosine() -> None:
    """Updates of 4 at the beginning, at half and at the end: 4, then 2, then nothing."""
    bench, found = bench_of("cosine_buffer", buffer_size=1, horizon_s=100.0), []
    for n, now in enumerate((0.0, 50.0, 100.0)):
        bench.work("a", f"t{n}", (4,) * 4, now=now)
        found.append(float(bench.engine.vector[0]))
    assert found == pytest.approx([4.0, 6.0, 6.0])


def test_golden_buffer_by_versions() -> None:
    """Updates of 6, decay 0.5: 6 / 1, 6 / 1.5, 6 / 2."""
    bench, found = bench_of("decaying_buffer", buffer_size=1, decay=0.5), []
    for n in range(3):
        bench.work("a", f"t{n}", (6,) * 4)
        found.append(float(bench.engine.vector[0]))
    assert found == pytest.approx([6.0, 10.0, 13.0])


def test_golden_rounds_by_a_cosine_with_momentum() -> None:
    """Nesterov, lr 1, momentum 0.5: m = 4, w = 4 + 2; then r D = 2, m = 4, w = 6 + 2 + 2."""
    outer = {"name": "nesterov", "lr": 1.0, "momentum": 0.5}
    bench = bench_of(
        "cosine_rounds", clients_per_round=1, over_selection=4.0, deadline_s=0.0, outer=outer, horizon_s=100.0
    )
    bench.work("a", "t0", (4,) * 4)
    assert bench.engine.vector.tolist() == [6.0] * 4
    bench.work("a", "t1", (4,) * 4, now=50.0)
    assert bench.engine.vector == pytest.approx([10.0] * 4)


def test_a_tasks_rate_falls_by_sixteenths_and_the_servers_does_not() -> None:
    bench, rates = bench_of("cosine_tasks", buffer_size=1, horizon_s=160.0), []
    for now, task in ((0.0, "t0"), (9.9, "t1"), (80.0, "t2"), (500.0, "t3")):
        granted = next(e for e in bench.ask("a", task, now) if isinstance(e, Granted))
        rates.append(granted.task.local.learning_rate / EngineSettings().local.learning_rate)
        bench.push("a", task, (2,) * 4, now=now)
    assert rates == pytest.approx([(1 + math.cos(math.pi * (k + 0.5) / 16)) / 2 for k in (0, 0, 8, 15)])
    assert bench.engine.vector.tolist() == [8.0] * 4


def test_rounds_begin_in_time_and_nothing_that_is_held_is_lost() -> None:
    """Two of three at 60 s, of 100: their mean, 3, is a version; then a round of two, of 5 and 7."""
    bench = bench_of("closing", phases=[BUFFER, ROUNDS], last=0.4, horizon_s=100.0)
    for client in "abcd":
        bench.ask(client, f"t-{client}")
    assert decision(bench.push("a", "t-a", (2,) * 4, now=59.0)).verdict is Verdict.HELD
    assert decision(bench.push("b", "t-b", (4,) * 4, now=60.0)).verdict is Verdict.PUBLISHED
    assert (bench.engine.vector.tolist(), bench.engine.state.phase) == ([3.0] * 4, 1)
    late = decision(bench.push("c", "t-c", (100,) * 4, now=61.0))
    assert (late.verdict, late.reason) == (Verdict.REJECTED, Reason.ROUND_OVER)
    bench.work("a", "t-a2", (5,) * 4, now=62.0)
    last = bench.work("b", "t-b2", (7,) * 4, now=63.0)
    assert (last.verdict, bench.engine.vector.tolist()) == (Verdict.PUBLISHED, [9.0] * 4)


def test_without_last_rounds_it_is_the_first_strategy() -> None:
    bench = bench_of("closing", phases=[BUFFER, ROUNDS], last=0.0, horizon_s=100.0)
    for n in range(7):
        bench.work("abcd"[n % 4], f"t{n}", (n,) * 4, now=10.0 * n)
    assert (bench.engine.state.phase, bench.engine.vector.tolist()) == (0, [5.0] * 4)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("cosine_buffer", {"buffer_size": 2, "horizon_s": 6.0, "momentum": 0.9}),
        ("cosine_rounds", {"clients_per_round": 1, "horizon_s": 6.0}),
        ("decaying_buffer", {"buffer_size": 2, "decay": 0.3}),
        ("cosine_tasks", {"buffer_size": 2, "horizon_s": 6.0}),
        ("closing", {"phases": [BUFFER, ROUNDS], "last": 0.5, "horizon_s": 12.0}),
    ],
)
def test_a_restart_changes_nothing(name: str, params: dict[str, Any]) -> None:
    strategy = make_strategy(name, params)
    check_equal(strategy, run(strategy, 12), run(strategy, 12, restarts=True))


def test_a_run_is_told_its_own_length() -> None:
    cell = next(each for each in cells.CELLS if each.name == "digits/iid/compute/steady")
    row = next(each for each in rows.ROWS if each.name == "fedbuff, cosine/raw")
    for share in (0.25, 1.0):
        config = row.point(cell, (0.1, 5.0), share).config(1, "test")
        strategy: Any = strategy_of(config)
        assert strategy.horizon_s == config.run.virtual_s_max == 200.0 * share
