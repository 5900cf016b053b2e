"""Settings that change nothing are told, and those that count are not."""

from __future__ import annotations

from typing import Any

import pytest

import anabranch as ab
from anabranch.core.config.tables import merge
from anabranch.host.idle import CONDITIONS, idle
from anabranch.strategies.registry import strategy_of

TEASQ = {"name": "teasq"}
PAPER = {**TEASQ, "mode": "paper"}
# Tables; the keys of them that change nothing.
IDLE: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"fleet": {"attack": "alie", "attack_strength": 2.0}}, ["fleet.attack", "fleet.attack_strength"]),
    ({"fleet": {"attack": "alie", "attackers": 0.2}}, []),
    ({"fleet": {"attack": "scale", "attackers": 0.1, "clients": 4}}, ["fleet.attackers", "fleet.attack"]),
    ({"fleet": {"dirichlet_alpha": 0.1}}, ["fleet.dirichlet_alpha"]),
    ({"fleet": {"dirichlet_alpha": 0.1, "split": "dirichlet"}}, []),
    ({"fleet": {"dirichlet_alpha": 0.1, "shards_per_client": 1, "split": "my.py:split"}}, []),
    ({"fleet": {"shards_per_client": 1}}, ["fleet.shards_per_client"]),
    ({"fleet": {"shards_per_client": 1, "split": "speed-shards"}}, []),
    ({"fleet": {"speed_ratio": 9.0, "speed": "fadas-mild"}}, ["fleet.speed_ratio"]),
    ({"fleet": {"availability_period_s": 9.0}}, ["fleet.availability_period_s"]),
    ({"fleet": {"availability_period_s": 9.0, "availability": 0.5}}, []),
    ({"fleet": {"availability_period_s": 9.0, "dropout": 0.1}}, []),
    ({"client": {"epochs": 3, "steps": 2}}, ["client.epochs"]),
    ({"client": {"push_steps": 5, "merge": "blend"}}, ["client.push_steps", "client.merge"]),
    ({"client": {"push_steps": 5, "merge": "blend", "push": "elastic"}}, []),
    ({"client": {"gradient_queries": 4}}, ["client.gradient_queries"]),
    ({"robust": {"attackers": 0.1, "radius": 2.0}}, ["robust.attackers", "robust.radius"]),
    ({"robust": {"attackers": 0.1, "rule": "krum"}}, []),
    ({"privacy": {"delta": 1e-4, "participations": 3}}, ["privacy.delta", "privacy.participations"]),
    ({"secagg": {"bits": 16}}, ["secagg.bits"]),
    ({"faults": {"torn_tail": 0.5, "partition_s": 1.0}}, ["faults.partition_s", "faults.torn_tail"]),
    ({"faults": {"torn_tail": 0.5, "server_crash_every_s": 9.0}}, []),
    ({"faults": {"server_down_s": 2.0, "loss": 0.1}}, ["faults.server_down_s"]),
    ({"faults": {"server_down_s": 2.0, "restore_every_s": 9.0}}, []),
    ({"faults": {"delay_s": 2.0, "delay_shape": "pareto", "reordering": 0.1}}, ["faults.delay_shape"]),
    ({"downlink": {"parts": "own"}}, ["downlink.parts"]),
    ({"submodel": {"drop": 0.5, "coverage_versions": 5}}, ["submodel.drop", "submodel.coverage_versions"]),
    ({"submodel": {"drop": 0.5}, "strategy": {"name": "asyncdrop"}}, []),
    ({"submodel": {"parts": 2}, "strategy": {"name": "asyncdrop"}}, ["submodel.parts"]),
    ({"submodel": {"drop": 0.5, "name": "my.py:Planner"}}, []),
    ({"strategy": {**TEASQ, "kept": 0.5}}, []),
    ({"strategy": {**TEASQ, "kept": 0.5}, "uplink": {"codec": "int8"}}, ["strategy.kept"]),
    ({"strategy": {**TEASQ, "downlink_bits": 4}}, ["strategy.downlink_bits"]),
    ({"strategy": {**PAPER, "downlink_bits": 4}}, []),
    ({"strategy": {**PAPER, "server_lr": 0.5}}, ["strategy.server_lr"]),
    ({"strategy": {**TEASQ, "cap": 3, "concurrency_fraction": 0.5}}, ["strategy.concurrency_fraction"]),
    ({"strategy": {**TEASQ, "cache_size": 3, "cache_fraction": 0.5}}, ["strategy.cache_fraction"]),
    ({"strategy": {"name": "qafel", "uplink_bits": 8}, "uplink": {"codec": "raw"}}, ["strategy.uplink_bits"]),
]


def told(tables: dict[str, Any]) -> list[str]:
    config = merge([("test", tables)])
    return list(idle(config, strategy_of(config)))


@pytest.mark.parametrize(("tables", "keys"), IDLE, ids=str)
def test_settings_that_change_nothing_are_told(tables: dict[str, Any], keys: list[str]) -> None:
    lines = told(tables)
    assert [line.split(" = ")[0] for line in lines] == keys
    assert all(" changes nothing: it counts with " in line for line in lines)


def test_what_is_told_to_change_nothing_changes_no_model(caplog: pytest.LogCaptureFixture) -> None:
    """The tables above, against the simulator: it is asked, not the module's own conditions."""
    plain: dict[str, str] = {}
    for tables, keys in IDLE:
        if not keys:
            continue
        others = {
            f"{table}.{key}": value
            for table, values in tables.items()
            for key, value in values.items()
            if f"{table}.{key}" not in keys
        }
        idles = {k: tables[k.split(".")[0]][k.split(".")[1]] for k in keys}
        if str(others) not in plain:
            plain[str(others)] = _model(others)
        assert _model({**others, **idles}) == plain[str(others)], keys
        assert keys[0] in caplog.text
        caplog.clear()


def _model(settings: dict[str, Any]) -> str:
    fleet = {"fleet.clients": 4, "run.updates_max": 8, "run.evaluate_every_versions": 100}
    named = {"strategy.buffer_size": 2} if "strategy.name" not in settings else {}
    return ab.simulate("synthetic", settings={**fleet, **named, **settings}).result.model_sha256


def test_every_key_of_the_conditions_is_one_of_its_table() -> None:
    config = merge([])
    for condition in CONDITIONS:
        assert all(hasattr(getattr(config, condition.table), key) for key in condition.keys)
