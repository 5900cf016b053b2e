"""What of a configuration the engine goes by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anabranch.core.config.tables import Config, merge
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.limits import Limits
from anabranch.core.model.updates import LocalPlan

# Values that are no defaults, and no two the same: the key of a configuration, the engine's name for it.
KEYS: dict[str, tuple[str, Any]] = {
    "run.seed": ("seed", 2),
    "run.versions_max": ("versions_max", 3),
    "run.updates_max": ("updates_max", 4),
    "run.rejections_max": ("rejections_max", 5),
    "server.concurrency": ("concurrency", 6),
    "server.staleness_max": ("staleness_max", 7),
    "server.lease_s": ("lease_s", 71.0),
    "server.lease_min_s": ("lease_min_s", 9.0),
    "server.lease_max_s": ("lease_max_s", 3001.0),
    "server.tasks_per_client": ("tasks_per_client", 12),
    "server.tenure_leases": ("tenure_leases", 13.0),
    "server.upload_now_versions": ("upload_now_versions", 14),
    "uplink.codec": ("uplink", "int8"),
    "model.buffers": ("buffers", "local"),
    "robust.clip": ("clip", 1.5),
    "robust.buffer_max": ("buffer_max", 16),
    "robust.window_max": ("window_max", 17),
    "robust.window_versions": ("window_versions", 18),
    "robust.tasks_per_minute": ("tasks_per_minute", 19.0),
    "robust.flaws_max": ("flaws_max", 22),
}
LOCAL: dict[str, Any] = {
    "epochs": 2,
    "steps": 3,
    "batch_size": 4,
    "learning_rate": 0.5,
    "momentum": 0.25,
    "weight_decay": 0.125,
}


def test_every_key_is_what_the_engine_goes_by() -> None:
    tables: dict[str, dict[str, Any]] = {"client": dict(LOCAL)}
    for path, (_, value) in KEYS.items():
        table, _, key = path.partition(".")
        tables.setdefault(table, {})[key] = value
    tables["server"] |= {"retry_after_min_s": 0.75, "retry_after_max_s": 8.5}
    tables["strategy"] = {"name": "fedbuff", "buffer_size": 40}
    found = EngineSettings.of(merge([("test", tables)]), Limits(receipts_max=23))
    wanted = dict(KEYS.values())
    assert found == EngineSettings(
        **wanted, retry_after_s=(0.75, 8.5), receipts_max=23, local=LocalPlan(**LOCAL)
    )


def test_an_engine_by_itself_goes_by_the_same_but_forgives() -> None:
    """Replays and aggregations by hand judge nobody."""
    found = EngineSettings.of(Config())
    assert (found.flaws_max, found.rejections_max) == (10, 100)
    assert replace(found, flaws_max=0, rejections_max=0) == EngineSettings()


@pytest.mark.parametrize(
    ("task_s", "lease_s"), [(None, 60.0), (0.0, 10.0), (3.0, 10.0), (4.0, 12.0), (30.0, 90.0), (31.0, 90.0)]
)
def test_a_lease_is_three_times_a_clients_task_within_bounds(task_s: float | None, lease_s: float) -> None:
    assert EngineSettings(lease_s=60.0, lease_min_s=10.0, lease_max_s=90.0).lease_of(task_s) == lease_s


@pytest.mark.parametrize(
    ("budget", "version", "applied", "spent"),
    [
        ({}, 10**6, 10**6, ""),
        ({"versions_max": 3}, 2, 99, ""),
        ({"versions_max": 3}, 3, 0, "at version 3, its budget"),
        ({"versions_max": 1}, 2, 0, "at version 2, its budget"),
        ({"updates_max": 3}, 99, 2, ""),
        ({"updates_max": 1}, 0, 1, "after 1 updates, its budget"),
        ({"updates_max": 3}, 0, 4, "after 4 updates, its budget"),
    ],
)
def test_a_budget_is_spent(budget: dict[str, Any], version: int, applied: int, spent: str) -> None:
    assert EngineSettings(**budget).spent(version, applied) == (spent and f"the run ended {spent}")
