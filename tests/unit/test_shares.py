"""Fractions of a count are what their decimals say; in runs of older releases they are what they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from machines import Bench

from anabranch.core.config.tables import Config, merge
from anabranch.core.effects import Granted
from anabranch.core.engine.planner import Applicant
from anabranch.core.engine.strategy import Context
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.units import Member, UnitGroup
from anabranch.core.rules import NEWEST
from anabranch.core.shares import ceil_of, floor_of
from anabranch.host.build import Blueprint, device_tables
from anabranch.strategies.annealed import Annealed
from anabranch.strategies.registry import make_strategy, strategy_of
from anabranch.strategies.submodels.registry import make_planner

HUNDREDTHS = [f"{n / 100:.2f}" for n in range(1, 151)]
LONG: dict[str, Any] = {"lease_s": 1e9, "lease_min_s": 1e9, "lease_max_s": 1e9, "receipts_max": 1000}


@pytest.mark.parametrize("count", [1, 7, 10, 50, 99, 100, 365, 1000, 100_000, 2_600_000])
def test_a_fraction_is_what_is_written(count: int) -> None:
    exact = [Fraction(text) * count for text in HUNDREDTHS]
    assert [ceil_of(float(text), count) for text in HUNDREDTHS] == [math.ceil(e) for e in exact]
    assert [floor_of(float(text), count) for text in HUNDREDTHS] == [math.floor(e) for e in exact]


def granted(rules: int, strategy: str, **options: Any) -> int:
    """How many of 100 that ask get a task."""
    bench = Bench(strategy, rules=rules, **LONG, **options)
    bench.enrol(*(f"c{i}" for i in range(100)))
    return sum(isinstance(bench.ask(f"c{i}", f"t{i}")[-1], Granted) for i in range(100))


def answers(rules: int, strategy: str, **options: Any) -> int:
    """How many answers of 100 that train make the first version."""
    bench = Bench(strategy, rules=rules, **LONG, **options)
    bench.enrol(*(f"c{i}" for i in range(100)))
    for i in range(100):
        bench.ask(f"c{i}", f"t{i}")
    taken = 0
    while not bench.engine.version:
        bench.push(f"c{taken}", f"t{taken}")
        taken += 1
    return taken


ROUNDS = {"clients_per_round": 50, "over_selection": 1.1}
CAPPED = {"scheduler": {"name": "capped", "fraction": 0.07, "least": 1}, "buffer_size": 99}


@pytest.mark.parametrize(
    ("found", "today", "before"),
    [
        (lambda rules: granted(rules, "fedavg", **ROUNDS), 55, 56),
        (lambda rules: granted(rules, "teasq", concurrency_fraction=0.07, cache_size=99), 7, 8),
        (lambda rules: granted(rules, "fedbuff", **CAPPED), 7, 8),
        (lambda rules: answers(rules, "teasq", cache_fraction=0.07, cap=100), 7, 8),
        (lambda rules: answers(rules, "waves", share=0.55), 55, 56),
    ],
    ids=["fedavg", "teasq-cap", "capped", "teasq-cache", "waves"],
)
def test_a_run_has_its_part_of_the_fleet(found: Callable[[int], int], today: int, before: int) -> None:
    assert (found(NEWEST), found(0)) == (today, before)


@pytest.mark.parametrize(("rules", "size"), [(NEWEST, 29), (0, 28)])
def test_a_buffer_grows_by_its_part_of_the_updates(rules: int, size: int) -> None:
    strategy = Annealed(buffer_size=1, growth=0.29)
    state = replace(strategy.init(np.zeros(4, np.float32)), taken=100)
    counts = [n for n in range(40) if strategy.full(replace(state, count=n), Context(0, 1, 0, rules=rules))]
    assert counts[0] == size


@pytest.mark.parametrize(("rules", "last"), [(NEWEST, 7), (0, 8)])
def test_a_phase_ends_with_its_part_of_the_updates(rules: int, last: int) -> None:
    phases = [
        {"strategy": "fedbuff", "buffer_size": 1, "until_updates": 0.07},
        {"strategy": "fedasync"},
    ]
    config = merge(
        [("test", {"run": {"updates_max": 100}, "strategy": {"name": "phased", "phases": phases}})]
    )
    bench = Bench(rules=rules, **LONG)
    bench.engine.strategy = strategy_of(config)
    bench.engine.state = bench.engine.strategy.init(bench.engine.vector)
    bench.enrol("a")
    taken = 0
    while not bench.engine.state.phase:
        bench.work("a", f"t{taken}")
        taken += 1
    assert taken == last


@pytest.mark.parametrize("name", ["random", "hetero"])
@pytest.mark.parametrize(("rules", "kept"), [(NEWEST, 71), (0, 72)])
def test_a_device_leaves_out_its_part_of_the_units(name: str, rules: int, kept: int) -> None:
    spec = ParamSpec.of({"w": np.zeros(100, np.float32)}, [UnitGroup("g", 100, (Member("w", 0, 1, 1),))])
    config = merge([("test", {"submodel": {"name": name, "drop": 0.29}})])
    planner = make_planner(spec, make_strategy("asyncdrop", {}), config)
    assert planner is not None
    zeros = np.zeros(100, np.float32)
    _, part = planner.plan(planner.init(zeros), zeros, Applicant(0.5, 0, 1, rules=rules))
    assert part is not None
    assert part.size == kept


def test_a_run_computes_by_the_rules_that_it_was_begun_with() -> None:
    """One of an older release says nothing of any, and nothing is added to its record."""
    spec, first = ParamSpec.of({"w": np.zeros(3, np.float32)}), {"w": np.zeros(3, np.float32)}
    older, new = Config.from_json({"run": {"name": "then"}}), merge([])
    assert "rules" not in older.to_json()["run"]
    assert Config.from_json(new.to_json()).run.rules == NEWEST
    assert [Blueprint.of(c, spec).engine(first).context(0.0).rules for c in (older, new)] == [0, NEWEST]
    assert "rules" not in device_tables(new)["run"], "an older device knows no such key"


def test_rules_of_a_newer_release_are_refused() -> None:
    with pytest.raises(ConfigError, match=rf"run\.rules must be at most {NEWEST}, not {NEWEST + 1}"):
        merge([("test", {"run": {"rules": NEWEST + 1}})])
