"""What a tuning chooses from: points, ends, what lies beyond them, and how they are dealt."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from anabranch.api.configuration import load_config
from anabranch.api.tune_file import tune_table
from anabranch.api.tune_ranges import (
    TuneRange,
    deal,
    default_ranges,
    parse_range,
    read_range,
    settings_of,
    value_of,
)
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError
from anabranch.strategies.registry import STRATEGIES

RATE = "client.learning_rate"


@pytest.mark.parametrize(
    ("said", "points"),
    [
        ([0.3, 0.1], (0.1, 0.3)),
        (0.1, (0.1,)),
        ({"from": 0.01, "to": 1.0, "points": 3}, (0.01, 0.1, 1.0)),
        ({"from": 0.0, "to": 1.0, "points": 3}, (0.0, 0.5, 1.0)),
        ({"from": 1, "to": 16}, (1, 2, 4, 8, 16)),
        ({"from": 1, "to": 3}, (1, 2, 3)),
        ({"from": 1, "to": 9, "points": 3, "scale": "even"}, (1, 5, 9)),
        (["raw", "int8"], ("raw", "int8")),
    ],
)
def test_the_points_of_a_range(said: Any, points: tuple[Any, ...]) -> None:
    assert read_range(RATE, said).points == points


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("client.epochs=1..4", (1, 2, 3, 4)),
        ("client.epochs=1, 4", (1, 4)),
        ("uplink.codec=raw,topk(0.1)|int8", ("raw", "topk(0.1)|int8")),
    ],
)
def test_a_range_as_it_is_typed(text: str, points: tuple[Any, ...]) -> None:
    assert parse_range(text).points == points


@pytest.mark.parametrize(
    ("points", "scale", "beyond"),
    [
        ((0.1, 0.2, 0.4), "log", (0.05, 0.8)),
        ((0.01, 0.03, 0.1), "log", (0.0033, 0.33)),
        ((2, 4, 8), "log", (1, 16)),
        ((1, 2, 4), "log", (None, 8)),
        ((0.0, 0.5, 1.0), "even", (-0.5, 1.5)),
    ],
)
def test_what_lies_beyond_an_end(points: tuple[Any, ...], scale: Any, beyond: tuple[Any, Any]) -> None:
    its = TuneRange(RATE, points, scale)
    assert (its.beyond("least"), its.beyond("greatest")) == beyond
    assert [its.edge(p) for p in points] == ["least", "", "greatest"]


def test_a_list_has_no_ends() -> None:
    assert TuneRange("uplink.codec", ("raw", "int8"), "list").edge("raw") == ""


def test_each_point_is_dealt_as_often_as_any_other() -> None:
    ranges = [TuneRange("client.epochs", (1, 2, 4)), TuneRange(RATE, (0.1, 0.2, 0.3, 0.4))]
    dealt = deal(ranges, 12, seed=1)
    assert Counter(choice["client.epochs"] for choice in dealt) == {1: 4, 2: 4, 4: 4}
    assert Counter(choice[RATE] for choice in dealt) == {0.1: 3, 0.2: 3, 0.3: 3, 0.4: 3}
    assert dealt == deal(ranges, 12, seed=1) != deal(ranges, 12, seed=2)
    assert {deal(ranges, 1, seed=1, again=n)[0][RATE] for n in range(40)} == {0.1, 0.2, 0.3, 0.4}


@pytest.mark.parametrize("name", STRATEGIES.built_in)
@pytest.mark.parametrize("bytes_count", [False, True])
def test_every_default_can_be_set_and_has_what_is_set_among_it(name: str, bytes_count: bool) -> None:
    config = load_config(overrides=[f"strategy.name={name}"])
    ranges = default_ranges(config, bytes_count)
    assert RATE in {r.path for r in ranges}
    for r in ranges:
        assert value_of(config, r.path) in r.points
        for value in r.points:
            load_config(presets=[("config", config.to_json())], flags=tables(config, {r.path: value}))


def tables(config: Config, choice: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """A choice as layers."""
    paths = ((path.partition("."), value) for path, value in settings_of(config, choice).items())
    return [("choice", {table: {key: value}}) for (table, _, key), value in paths]


def test_what_is_tuned_of_a_strategy_is_what_it_has() -> None:
    def paths(*overrides: str, bytes_count: bool = False) -> set[str]:
        config = load_config(overrides=overrides)
        return {r.path.removeprefix("strategy.") for r in default_ranges(config, bytes_count)}

    local = {RATE, "client.epochs"}
    assert paths("strategy.name=fedasync") == local | {"alpha", "staleness.a"}
    assert paths("strategy.name=fedbuff") == local | {"buffer_size", "staleness.a"}
    assert paths("strategy.name=fedavg") == local | {"clients_per_round"}
    assert paths("strategy.name=teasq") == local | {"cache_fraction", "a"}
    assert paths("strategy.name=teasq", bytes_count=True) == local | {"cache_fraction", "a", "kept", "bits"}
    assert paths("strategy.name=fedavg", "client.steps=7") == {RATE, "client.steps", "clients_per_round"}


def test_a_key_of_a_table_leaves_the_rest_of_it() -> None:
    config = load_config(overrides=['strategy.staleness={ name = "hinge", a = 3.0, b = 2.0 }'])
    assert settings_of(config, {"strategy.staleness.b": 9.0, RATE: 0.5}) == {
        "strategy.staleness": {"name": "hinge", "a": 3.0, "b": 9.0},
        RATE: 0.5,
    }


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"trials": 1}, r"tune.trials = 1: .* at least 2"),
        ({"seeds": True}, r"tune.seeds = True"),
        ({"aim": "speed"}, r"tune.aim = 'speed': give one of auto, value, time"),
        ({"trails": 4}, r"unknown key 'trails' in \[tune\]"),
        ({"defaults": 1}, "give true or false"),
        ([], r"\[tune\] must be a table"),
        ({"ranges": [1]}, "tune.ranges must be a table"),
        ({"ranges": {"epochs": 1}}, "'epochs' is no setting"),
        ({"ranges": {RATE: []}}, f"{RATE} is empty: give at least one value"),
        ({"ranges": {RATE: {"from": 1.0, "to": 0.1}}}, f"{RATE} is empty: from = 1.0 must be less than"),
        ({"ranges": {RATE: {"from": 1.0, "two": 0.1}}}, "unknown key 'two'"),
        ({"ranges": {RATE: {"from": 1.0}}}, "give from and to"),
        ({"ranges": {RATE: {"from": 0.1, "to": 1.0, "points": 1}}}, "points = 1: .* at least 2"),
        ({"ranges": {RATE: {"from": 0.0, "to": 1.0, "scale": "log"}}}, "scale = 'log': give 'even'"),
    ],
)
def test_what_is_wrong_names_the_key_and_the_fix(said: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        tune_table(said)
