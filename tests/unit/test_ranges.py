"""Which values the keys of a configuration may have, at the bounds."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from anabranch.core.config.ranges import BELOW_ONE, CHOICES, FRACTIONS, IN_A_TASK, POSITIVE
from anabranch.core.config.tables import TABLES, Config, merge
from anabranch.core.errors import ConfigError
from anabranch.protos.v1 import model_pb2 as model

LEAST = 2.0**-20
# What some values need beside them.
BESIDE: dict[str, dict[str, dict[str, Any]]] = {
    "fleet.leavers": {"run": {"virtual_s_max": 10.0}},
    "client.push": {"server": {"tasks_per_client": 2}},
    "run.mode": {"run": {"metric": "loss"}},
    "fleet.split": {"fleet": {"examples_per_client": 5}},
    "fleet.arrival = stream": {"fleet": {"arrival_rate": 1.0}},
    "fleet.arrival_drift": {"fleet": {"arrival": "stream", "arrival_rate": 1.0}},
    "fleet.speed = measured": {"fleet": {"step_times_s": [0.1]}},
    "fleet.speed = traced": {"fleet": {"trace": "phones.csv"}},
    "fleet.availability_swing": {"fleet": {"availability": 0.5}},
    "fleet.availability_zones": {"fleet": {"availability": 0.5, "availability_swing": 0.5}},
    "secagg.mode = keeper": {"secagg": {"keepers": ["north"], "clip": 1.0}},
    "server.lease_max_s": {"server": {"lease_min_s": LEAST}},
    "server.retry_after_max_s": {"server": {"retry_after_min_s": LEAST}},
}


def measured(**values: list[float]) -> dict[str, Any]:
    """Two devices of which something is known."""
    return {"fleet": {"speed": "measured", "step_times_s": [0.1, 0.2], **values}}


def with_value(path: str, value: Any) -> Config:
    table, _, key = path.partition(".")
    beside = BESIDE.get(f"{path} = {value}") or BESIDE.get(path, {})
    return merge([("beside", beside), ("test", {table: {key: value}})])


def refused(path: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{path} {words}")):
        with_value(path, value)


def kind(path: str) -> Any:
    table, _, key = path.partition(".")
    return type(getattr(TABLES[table](), key))


@pytest.mark.parametrize("path", POSITIVE)
def test_what_must_be_greater_than_0(path: str) -> None:
    refused(path, kind(path)(0), "must be greater than 0, not 0")
    with_value(path, 1 if kind(path) is int else LEAST)


@pytest.mark.parametrize("path", IN_A_TASK)
def test_what_travels_with_a_task_has_32_bits(path: str) -> None:
    refused(path, 2**32, "must be at most 4294967295, not 4294967296")
    name = path.partition(".")[2]
    most = with_value(path, 2**32 - 1)
    assert getattr(model.LocalPlan(**{name: getattr(most.client, name)}), name) == 2**32 - 1


@pytest.mark.parametrize("path", FRACTIONS)
def test_what_is_a_fraction(path: str) -> None:
    refused(path, -LEAST, "must be")
    refused(path, 1 + LEAST, "must be from 0 to 1")
    if path not in (*POSITIVE, "fleet.availability"):
        with_value(path, 0.0)
    if path not in BELOW_ONE:
        with_value(path, 1.0)


@pytest.mark.parametrize("path", BELOW_ONE)
def test_what_must_be_less_than_1(path: str) -> None:
    refused(path, 1.0, f"must be less than 1, not 1.0: {BELOW_ONE[path]}")
    with_value(path, 1 - LEAST)


@pytest.mark.parametrize("path", CHOICES)
def test_what_is_one_of_some_words(path: str) -> None:
    for word in CHOICES[path]:
        table, _, key = path.partition(".")
        assert getattr(getattr(with_value(path, word), table), key) == word
    refused(path, "another", "must be one of")


@pytest.mark.parametrize("table", [t for t in TABLES if t != "strategy"])
def test_no_number_may_be_negative(table: str) -> None:
    for field in fields(TABLES[table]):
        path = f"{table}.{field.name}"
        if kind(path) in (int, float):
            refused(path, kind(path)(-1), "must")


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"fleet": {"speed_ratio": 1.0}}, ""),
        ({"fleet": {"speed_ratio": 1 - LEAST}}, "fleet.speed_ratio must be at least 1"),
        ({"fleet": {"split": "draws", "examples_per_client": 1}}, ""),
        ({"fleet": {"examples_per_client": 0}}, ""),
        ({"fleet": {"availability": 0.0}}, "fleet.availability must be greater than 0"),
        ({"fleet": {"leavers": 0.5}}, "fleet.leavers needs run.virtual_s_max"),
        ({"fleet": {"latencies_s": [0.1]}}, "fleet.latencies_s is for fleet.speed = 'measured'"),
        ({"fleet": {"speed": "measured"}}, "needs fleet.step_times_s"),
        ({"fleet": {"speed": "traced"}}, "fleet.speed = 'traced' needs fleet.trace"),
        ({"fleet": {"availability_zones": 0.5}}, "fleet.availability_zones needs fleet.availability_swing"),
        ({"fleet": {"availability": 0.5, "availability_swing": 1.0}}, ""),
        ({"fleet": {"availability": 0.5 + LEAST, "availability_swing": 1.0}}, "Lower it to"),
        (measured(latencies_s=[0.1]), "fleet.latencies_s has 1 numbers and fleet.step_times_s 2"),
        (measured(step_times_s=[0.1, 0.0]), r"fleet.step_times_s has 0.0: no device is as quick"),
        (measured(up_rates_mbps=[1.0, -LEAST]), "fleet.up_rates_mbps has -"),
        (measured(step_spreads=[0.0, 1.0]), "fleet.step_spreads must be from 0 to below 1, not 1.0"),
        ({"submodel": {"widths": [1, 0.5]}}, ""),
        ({"submodel": {"widths": [1 + LEAST]}}, "submodel.widths must be fractions"),
        ({"submodel": {"widths": [0]}}, "submodel.widths must be fractions"),
        ({"submodel": {"widths": [0.5, "half"]}}, "submodel.widths[1] must be float"),
        ({"client": {"epochs": 0, "steps": 1}}, ""),
        ({"client": {"epochs": 1, "steps": 0}}, ""),
        ({"client": {"epochs": 0, "steps": 0}}, "client.epochs or client.steps must be greater than 0"),
        ({"server": {"lease_min_s": 5, "lease_max_s": 5}}, ""),
        ({"server": {"lease_min_s": 5.5, "lease_max_s": 5}}, "lease_min_s must not be over lease_max_s, 5"),
        ({"server": {"retry_after_min_s": 5, "retry_after_max_s": 5}}, ""),
        ({"server": {"retry_after_min_s": 6, "retry_after_max_s": 5}}, "must not be over retry_after_max_s"),
        ({"client": {"push_steps": 4, "push_steps_max": 4}}, ""),
        (
            {"client": {"push_steps": 5, "push_steps_max": 4}},
            "must not be under push_steps, 5",
        ),
        ({"client": {"push": "elastic"}, "submodel": {"name": "none"}}, ""),
        ({"client": {"push": "elastic"}, "submodel": {"name": "auto"}}, ""),
        ({"client": {"push": "elastic"}, "submodel": {"name": "ist"}}, "trains the whole model"),
        ({"client": {"push": "task"}, "submodel": {"name": "ist"}}, ""),
        ({"client": {"push": "overlap"}, "server": {"tasks_per_client": 2}}, ""),
        (
            {"client": {"push": "overlap"}, "server": {"tasks_per_client": 1}},
            "server.tasks_per_client of",
        ),
        ({"server": {"keep": "versions:3"}}, ""),
        ({"server": {"keep": "some"}}, "server.keep"),
        ({"robust": {"rule": "krum", "attackers": -1}}, "robust.attackers must"),
    ],
)
def test_what_goes_together(tables: dict[str, dict[str, Any]], words: str) -> None:
    if not words:
        merge([("test", tables)])
        return
    with pytest.raises(ConfigError, match=re.escape(words)):
        merge([("test", tables)])


@pytest.mark.parametrize("availability", [0.55, 0.6, 0.7, 0.95])
def test_the_swing_that_is_said_to_be_small_enough_is(availability: float) -> None:
    def with_swing(swing: float) -> Config:
        return merge([("t", {"fleet": {"availability": availability, "availability_swing": swing}})])

    with pytest.raises(ConfigError) as refused:
        with_swing(1.0)
    most = float(re.search(r"Lower it to ([0-9.]+)", str(refused.value))[1])  # type: ignore[index]
    assert with_swing(most).fleet.availability_swing == pytest.approx(1 / availability - 1, abs=1e-4)
