"""Which values the parameters of strategies may have, at the bounds; and what is made of them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
from machines import SPEC as PLAIN
from own_parts import forgotten

import anabranch as ab
from anabranch.core.config.tables import build, merge
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import ParamSpec
from anabranch.strategies.fedbuff import FedBuff
from anabranch.strategies.registry import STRATEGIES, make_strategy, strategy_of
from anabranch.strategies.submodels.registry import make_planner
from anabranch.testing.models import GROUPS, tensors

LEAST = 2.0**-20
UNITS = ParamSpec.of(tensors(), GROUPS)


def step(staleness: str, **more: float) -> dict[str, Any]:
    return {"staleness": {"name": staleness, **more}}


@pytest.mark.parametrize(
    ("strategy", "params"),
    [
        ("fedasync", {"alpha": LEAST}),
        ("fedasync", {"alpha": 1.0, "rho": 0.0}),
        ("fedasync", step("hinge", a=0.0, b=0.0)),
        ("fedbuff", {"buffer_size": 1, "server_lr": LEAST, "momentum": 1 - LEAST, "flush_s": LEAST}),
        ("fedavg", {"clients_per_round": 1, "over_selection": 1.0, "deadline_s": 0.0}),
        ("fedprox", {"mu": 0.0}),
        ("qafel", {"uplink_bits": 8}),
        ("asyncdrop", {"alpha": LEAST}),
        ("asyncdrop", {"alpha": 1.0}),
        ("teasq", {"concurrency_fraction": LEAST, "cache_fraction": LEAST, "server_lr": LEAST}),
        ("teasq", {"concurrency_fraction": 2.0, "cache_fraction": 1.0, "alpha": 1.0, "a": 0.0}),
        ("teasq", {"downlink_step": 2.0, "downlink_kept": 1.0, "downlink_bits": 32, "feedback_decay": 1.0}),
        (
            "teasq",
            {"downlink_step": LEAST, "downlink_kept": LEAST, "feedback_decay": 0.0},
        ),
        ("teasq", {"cap": 1, "cache_size": 1, "mu": 0.0, "staleness_max": 1, "flush_s": LEAST}),
        ("teasq", {"kept": LEAST, "bits": 32, "decay_every": 0, "decay_steps": 0}),
        ("teasq", {"kept": 1.0, "bits": 16, "decay_every": 1, "decay_direction": "stronger"}),
    ],
)
def test_what_is_just_within(strategy: str, params: dict[str, Any]) -> None:
    made = make_strategy(strategy, params)
    assert {key: getattr(made, key) for key in params} == params


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("fedbuff", {"staleness": "polynomial"}, "strategy.staleness must be a table, not 'polynomial'"),
    ("fedbuff", {"outer": "adam"}, "strategy.outer must be a table, not 'adam'"),
    ("fedavg", {"outer": ["adam"]}, "strategy.outer must be a table, not ['adam']"),
    ("fedbuff", {"buffer_size": "4"}, "strategy.buffer_size must be int, not '4'"),
    ("fedbuff", {"buffer_size": 4.0}, "strategy.buffer_size must be int, not 4.0"),
    ("fedbuff", {"buffer_size": True}, "strategy.buffer_size must be int, not True"),
    ("fedasync", {"alpha": "0.5"}, "strategy.alpha must be float, not '0.5'"),
    ("fedbuff", {"server_lr": None}, "strategy.server_lr must be float, not None"),
    ("fedbuff", {"server_lr": float("inf")}, "strategy.server_lr must be a finite number, not inf"),
    ("ace", {"memory": 3}, "strategy.memory must be str, not 3"),
]


@pytest.mark.parametrize(("strategy", "params", "words"), WRONG)
def test_a_value_of_another_type_is_named_in_a_table_and_in_an_object(
    strategy: str, params: dict[str, Any], words: str
) -> None:
    for made in (partial(make_strategy, strategy, params), partial(STRATEGIES.find(strategy), **params)):
        with pytest.raises(ConfigError, match=f"^{re.escape(words)}$"):
            made()


def test_numbers_of_numpy_are_parameters_of_objects() -> None:
    drawn: dict[str, Any] = {"buffer_size": np.int64(4), "server_lr": np.float32(0.5), "momentum": 0}
    assert FedBuff(**drawn).buffer_size == 4


@dataclass(frozen=True)
class Schedule:
    """No plain value: of a table a class makes it itself."""

    rounds: int = 3


@dataclass(frozen=True)
class Scheduled(FedBuff):
    """Has parameters of its own kinds."""

    name: ClassVar[str] = "of this file"
    schedule: Schedule = Schedule()
    bound: float | None = None


class Kind(StrEnum):
    """A parameter's values, as people write them."""

    A = "a"
    B = "b"


@dataclass(frozen=True)
class Lenient(FedBuff):
    """Its defaults are no values that a table could have."""

    name: ClassVar[str] = "of this file too"
    bound: float = math.inf
    limit: float = None  # type: ignore[assignment]
    kind: str = Kind.A
    made: int = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "made", self.buffer_size + 1)


@pytest.mark.parametrize("said", [{}, {"bound": math.inf}, {"limit": None}, {"kind": Kind.B}])
def test_a_class_of_ones_own_has_the_defaults_that_it_says(said: dict[str, Any]) -> None:
    of_own = {"bound": math.inf, "limit": None, "kind": Kind.A, "made": 5} | said
    found = Lenient(buffer_size=4, **said)
    assert {key: getattr(found, key) for key in of_own} == of_own
    with forgotten():
        assert strategy_of(ab.configure("synthetic", strategy=found)) == found


@pytest.mark.parametrize(("key", "value"), [("bound", -math.inf), ("limit", "1"), ("kind", 3)])
def test_what_is_no_default_of_it_is_looked_at(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^strategy.{key} must be "):
        Lenient(**{key: value})


def test_what_is_no_plain_value_is_as_its_class_has_it() -> None:
    assert Scheduled(schedule=Schedule(4), bound=2.0).schedule == Schedule(4)
    made = build(Scheduled, {"schedule": {"rounds": 4}}, "strategy")
    assert made == Scheduled(schedule=Schedule(4))


@pytest.mark.parametrize(
    ("strategy", "params", "words"),
    [
        ("fedasync", {"alpha": 1 + LEAST}, "alpha must be in (0, 1]"),
        ("fedasync", {"rho": -LEAST}, "rho must not be negative"),
        ("fedasync", step("hinge", b=-LEAST), "staleness.b must not be negative"),
        ("fedasync", step("constant", a=1.0), "unknown key in [strategy.staleness]: 'a'"),
        ("fedasync", {"staleness": {}}, "strategy.staleness.name must be one of constant, polynomial, hinge"),
        ("fedbuff", {"momentum": -LEAST}, "momentum must be in [0, 1)"),
        ("fedbuff", {"flush_s": -LEAST}, "flush_s must not be negative"),
        ("fedbuff", step("hinge", a=-LEAST), "staleness.a must not be negative"),
        ("fedavg", {"over_selection": 1 - LEAST}, "over_selection must be at least 1"),
        ("fedprox", {"clients_per_round": 0}, "clients_per_round must be at least 1"),
        ("fedprox", {"mu": -LEAST}, "mu must not be negative"),
        ("qafel", {"uplink_bits": 16}, "uplink_bits must be 4 or 8"),
        ("qafel", {"buffer_size": 0}, "buffer_size must be at least 1"),
        ("asyncdrop", {"alpha": 0.0}, "alpha must be in (0, 1]"),
        ("asyncdrop", {"alpha": 1 + LEAST}, "alpha must be in (0, 1]"),
        ("teasq", {"mode": "paperlike"}, "mode must be one of robust, paper"),
        ("teasq", {"downlink_step": 0.0}, "downlink_step must be in (0, 2]"),
        ("teasq", {"downlink_step": 2 + LEAST}, "downlink_step must be in (0, 2]"),
        ("teasq", {"downlink_bits": 5}, "downlink_bits must be one of"),
        ("teasq", {"concurrency_fraction": 0.0}, "concurrency_fraction must be greater than 0"),
        ("teasq", {"server_lr": 0.0}, "server_lr must be greater than 0"),
        ("teasq", {"cache_fraction": 0.0}, "cache_fraction must be in (0, 1]"),
        ("teasq", {"cache_fraction": 1 + LEAST}, "cache_fraction must be in (0, 1]"),
        ("teasq", {"downlink_kept": 0.0}, "downlink_kept must be in (0, 1]"),
        ("teasq", {"downlink_kept": 1 + LEAST}, "downlink_kept must be in (0, 1]"),
        ("teasq", {"alpha": -LEAST}, "alpha must be in [0, 1]"),
        ("teasq", {"alpha": 1 + LEAST}, "alpha must be in [0, 1]"),
        ("teasq", {"feedback_decay": -LEAST}, "feedback_decay must be in [0, 1]"),
        ("teasq", {"feedback_decay": 1 + LEAST}, "feedback_decay must be in [0, 1]"),
        *(
            ("teasq", {key: -1}, f"{key} must not be negative")
            for key in ("cap", "cache_size", "mu", "staleness_max", "flush_s", "decay_every", "decay_steps")
        ),
        ("teasq", {"a": -LEAST}, "must not be negative"),
        ("teasq", {"kept": 0.0}, "kept must be in (0, 1]"),
        ("teasq", {"kept": 1 + LEAST}, "kept must be in (0, 1]"),
        ("teasq", {"bits": 5}, "bits must be one of"),
        ("teasq", {"decay_direction": "sideways"}, "decay_direction must be one of"),
        ("teasq_drop", {"mode": "paperlike"}, "mode must be one of"),
    ],
)
def test_what_is_just_beyond(strategy: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_strategy(strategy, params)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, "log(2)"),
        ({"downlink_step": 0.5}, "log(0.5)"),
        ({"kept": 1.0, "bits": 32}, "raw"),
        ({"kept": 1.0, "bits": 32, "mode": "paper"}, "raw"),
        ({"mode": "paper"}, "int8(256)|zstd"),
        ({"mode": "paper", "downlink_bits": 32}, "raw"),
        ({"mode": "paper", "downlink_kept": 0.1, "downlink_bits": 16}, "topk(0.1)|bf16|gaps|zstd"),
        ({"mode": "paper", "downlink_kept": 0.25}, "topk(0.25)|int8(256)|bitmap|zstd"),
    ],
)
def test_the_way_down_of_teasq(params: dict[str, Any], expected: str) -> None:
    strategy = make_strategy("teasq", params)
    assert [strategy.downlink(version) for version in (0, 10**6)] == [expected] * 2


@pytest.mark.parametrize(
    ("strategy", "table", "name"),
    [
        ("fedavg", {}, None),
        ("fedavg", {"name": "none"}, None),
        ("asyncdrop", {"name": "none"}, None),
        ("asyncdrop", {}, "hetero"),
        ("fedavg", {"name": "random", "drop": 0.5}, "random"),
        ("fedavg", {"name": "heterofl"}, "heterofl"),
        ("fedavg", {"name": "fedrolex"}, "fedrolex"),
        ("fedavg", {"name": "fjord"}, "fjord"),
        ("fedavg", {"name": "ist", "parts": 2}, "ist"),
    ],
)
def test_who_chooses_the_parts(strategy: str, table: dict[str, Any], name: str | None) -> None:
    config = merge([("test", {"strategy": {"name": strategy}, "submodel": table})])
    planner = make_planner(UNITS, strategy_of(config), config)
    assert (planner and planner.name) == name
    if planner is not None:
        planner.init(np.zeros(UNITS.size, np.float32))


@pytest.mark.parametrize(
    ("strategy", "spec", "words"),
    [
        ("fadas", UNITS, "submodel.name is 'ist', but strategy 'fadas' takes whole models only"),
        ("fedavg", PLAIN, "submodel.name is 'ist', but no units that may be left out are known"),
        ("fedavg", UNITS, "'lstm'"),  # three units for four parts
    ],
)
def test_parts_that_cannot_be_chosen(strategy: str, spec: ParamSpec, words: str) -> None:
    config = merge([("test", {"strategy": {"name": strategy}, "submodel": {"name": "ist"}})])
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_planner(spec, strategy_of(config), config)
