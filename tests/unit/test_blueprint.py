"""The engine of a run from its configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anabranch.compress.delta_log import DeltaLog
from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.errors import ConfigError
from anabranch.core.limits import Limits
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import Capability
from anabranch.core.snapshot import state_digest, take_snapshot
from anabranch.host import build
from anabranch.host.build import WHOLE, Blueprint, device_tables
from anabranch.testing.models import SPEC as UNITS
from anabranch.testing.models import tensors

WEIGHTS = {"w": np.array([1, 2, 3, 4], np.float32)}
SPEC = ParamSpec.of(WEIGHTS)


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """What other tests' configurations were warned of, these are warned of again."""
    build.said.forget()


def config(strategy: str = "fedasync", **tables: Any) -> Config:
    return merge([("test", {"strategy": {"name": strategy}, **tables})])


def test_an_engine_begins_with_its_weights_and_settings() -> None:
    made = Blueprint.of(config(server={"lease_s": 7.0}), SPEC, Limits(receipts_max=3))
    engine = made.engine(WEIGHTS)
    assert (engine.version, engine.vector.tolist()) == (0, [1, 2, 3, 4])
    assert (engine.settings.lease_s, engine.settings.receipts_max) == (7.0, 3)
    assert engine.strategy.name == "fedasync"
    assert (engine.broadcast, engine.planner) == (None, None)


def test_an_engine_goes_on_from_a_snapshot_with_downlink_and_planner() -> None:
    tables: dict[str, Any] = {"downlink": {"codec": "log"}, "submodel": {"name": "hetero", "drop": 0.5}}
    made = Blueprint.of(config(**tables), UNITS)
    before = made.engine(tensors())
    before.handle(ev.Enrolled(0.0, "a", Capability()))
    after = made.engine(tensors(seed=1), take_snapshot(before))
    for engine in (before, after):
        assert isinstance(engine.broadcast, DeltaLog)
        assert engine.planner is not None
    assert state_digest(after) == state_digest(before)
    assert "a" in after.ledger.clients
    assert made.codec_at(0) == made.codec_at(9) == "log"


def test_tables_of_whole_models_as_they_are() -> None:
    strategy = {"cache_size": 2, "concurrency_fraction": 1.0, "name": "teasq_drop"}
    engine = Blueprint.of(merge([("test", {"strategy": strategy}), ("whole", WHOLE)]), SPEC).engine(WEIGHTS)
    assert (engine.broadcast, engine.planner) == (None, None)


@pytest.mark.parametrize(
    ("strategy", "client", "fits"),
    [
        ("fedbuff", {"push": "elastic", "merge_weight": 0.5}, False),
        ("fedbuff", {"push": "elastic", "merge_weight": 1.0}, True),
        ("fedasync", {"push": "elastic", "merge_weight": 0.5}, True),
        ("fedbuff", {"push": "overlap", "merge_weight": 0.5}, True),
    ],
)
def test_what_a_device_keeps_is_not_added_again(strategy: str, client: dict[str, Any], fits: bool) -> None:
    table = config(strategy, client=client, server={"tasks_per_client": 2})
    if fits:
        Blueprint.of(table, SPEC)
        return
    with pytest.raises(ConfigError, match=r"client\.merge_weight = 1"):
        Blueprint.of(table, SPEC)


@pytest.mark.parametrize("strategy", ["asyncdrop", "teasq_drop"])
def test_who_trains_on_has_no_sub_models_that_its_strategy_chooses(strategy: str) -> None:
    tables = {"client": {"push": "elastic", "merge_weight": 1.0}}
    with pytest.raises(ConfigError, match=rf"'{strategy}' chooses sub-models \(.+ trains the whole model"):
        Blueprint.of(config(strategy, **tables), UNITS)
    for name in ("none", "fragments"):
        Blueprint.of(config(strategy, **tables, submodel={"name": name}), UNITS)


@pytest.mark.parametrize(
    ("params", "doubtful"),
    [
        ({"buffer_size": 1, "momentum": 0.5}, True),
        ({"buffer_size": 1, "outer": {"name": "adam", "momentum": 0.7}}, True),
        ({"buffer_size": 1, "outer": {"name": "nesterov", "momentum": 0.0}}, False),
        ({"buffer_size": 1}, False),
        ({"buffer_size": 2, "momentum": 0.9}, False),
    ],
)
def test_momentum_of_one_update_at_a_time_is_warned_of_once(
    params: dict[str, Any], doubtful: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        Blueprint.of(merge([("test", {"strategy": {"name": "fedbuff", **params}})]), SPEC)
    told = [r.message for r in caplog.records]
    assert len(told) == doubtful
    assert all("buffer_size = 1" in line and "'delayed_nesterov'" in line for line in told)


@pytest.mark.parametrize(
    ("params", "doubtful"),
    [
        ({"cache_size": 4}, True),
        ({"cache_size": 5, "scheduler": {"name": "equal_time"}}, True),
        ({"cache_size": 3}, False),
        ({"cache_size": 4, "flush_s": 60.0}, False),
        ({"cache_fraction": 1.0}, False),
    ],
)
def test_a_cache_that_its_devices_never_fill_is_warned_of(
    params: dict[str, Any], doubtful: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tables = {"strategy": {"name": "teasq", **params}, "fleet": {"clients": 3}}
    Blueprint.of(merge([("test", tables)]), SPEC)
    told = [r.message for r in caplog.records if "budget without a version" in r.message]
    assert len(told) == doubtful, caplog.text


PHASES = [{"strategy": "fedavg", "until_versions": 1, "clients_per_round": 3}, {"strategy": "fedbuff"}]


@pytest.mark.parametrize(
    ("strategy", "share", "doubtful"),
    [
        ({"name": "fedbuff", "buffer_size": 7}, 2, True),
        ({"name": "annealed", "buffer_size": 7, "scheduler": {"name": "equal_time"}}, 2, True),
        ({"name": "phased", "phases": PHASES}, 3, True),
        ({"name": "fedbuff", "buffer_size": 6}, 2, False),
        ({"name": "fedbuff", "buffer_size": 7}, 0, False),
        ({"name": "fedbuff", "buffer_size": 7, "flush_s": 9.0}, 2, False),
        ({"name": "fedavg", "clients_per_round": 3}, 1, False),
        ({"name": "waves"}, 1, False),
        ({"name": "fedasync"}, 1, False),
    ],
)
def test_a_buffer_that_devices_with_a_bounded_share_never_fill_is_warned_of(
    strategy: dict[str, Any], share: int, doubtful: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tables = {"strategy": strategy, "fleet": {"clients": 3}, "robust": {"buffer_max": share}}
    Blueprint.of(merge([("test", tables)]), SPEC)
    told = [r.message for r in caplog.records if "they never fill a buffer" in r.message]
    assert len(told) == doubtful, caplog.text


@pytest.mark.parametrize(
    ("strategy", "run", "doubtful"),
    [
        ("waves", {"updates_max": 60}, True),
        ("annealed", {"updates_max": 60}, True),
        ("waves", {"updates_max": 60, "versions_max": 20}, False),
        ("fedbuff", {"updates_max": 60}, False),
    ],
)
def test_a_model_that_grows_by_versions_whose_number_nobody_knows_is_warned_of(
    strategy: str, run: dict[str, Any], doubtful: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Blueprint.of(config(strategy, run=run, submodel={"name": "progressive"}), SPEC)
    told = [r.message for r in caplog.records if "run.versions_max, or stages" in r.message]
    assert len(told) == doubtful, caplog.text


@pytest.mark.parametrize(
    ("strategy", "policy", "buffers", "doubtful"),
    [
        ({"name": "fadas"}, "average", ("w",), True),
        ({"name": "fedbuff", "outer": {"name": "adam"}}, "average", ("w",), True),
        ({"name": "fedbuff", "outer": {"name": "adam"}}, "latest", ("w",), False),
        ({"name": "fadas"}, "local", ("w",), False),
        ({"name": "fadas"}, "average", (), False),
        ({"name": "fedbuff"}, "average", ("w",), False),
    ],
)
def test_buffers_that_follow_the_steps_of_adam_are_warned_of(
    strategy: dict[str, Any],
    policy: str,
    buffers: tuple[str, ...],
    doubtful: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tables = {"strategy": strategy, "model": {"buffers": policy}}
    spec = replace(ParamSpec.of({**WEIGHTS, "v": WEIGHTS["w"]}), buffers=buffers)
    Blueprint.of(merge([("test", tables)]), spec)
    told = [r.message for r in caplog.records if "take 'latest'" in r.message]
    assert len(told) == doubtful, caplog.text


def test_a_device_is_told_its_own_tables_and_no_others() -> None:
    url = "postgresql://me:secret@host/db"
    tables: dict[str, Any] = {
        "server": {"database": url, "tasks_per_client": 3},
        "client": {"epochs": 7},
        "robust": {"clip": 2.0},
    }
    told = device_tables(config(**tables))
    assert set(told) == {"run", "fleet", "client", "flower", "server", "limits"}
    assert (told["client"]["epochs"], told["server"]) == (7, {"tasks_per_client": 3})
    assert "host/db" not in str(told)
    assert device_tables(config(model={"buffers": "local"}))["model"]["buffers"] == "local"
