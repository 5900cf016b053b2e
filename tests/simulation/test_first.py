"""Simulated devices that build version 0: the same run, without the bytes of a first contact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from frozen_apps import BASE_BYTES, HEAD_SIZE, Head

from anabranch.core.errors import ConfigError
from anabranch.reports.result import Result
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import open_simulation, simulate
from anabranch.testing.federation import config
from anabranch.workloads.app import App
from anabranch.workloads.synthetic import Synthetic
from anabranch.workloads.trainer import trainer_for

RUN = {"seed": 3, "updates_max": 60, "keep_payloads": True}
CASES: dict[str, dict[str, Any]] = {
    "raw": {},
    "log": {"downlink": {"codec": "log(1)"}},
    "chain": {"downlink": {"codec": "int8(64)"}},
    "sub-models, log": {"strategy": {"name": "asyncdrop"}, "downlink": {"codec": "log(1)"}},
    "elastic": {"client": {"push": "elastic", "steps": 3}, "submodel": {"name": "none"}},
    "overlap": {"client": {"push": "overlap", "steps": 3}, "server": {"tasks_per_client": 2}},
}


def run(folder: Path, initial: str, app: App | None = None, **tables: Any) -> Result:
    settings = config(**{"run": {**RUN, "initial": initial}} | tables)
    return simulate(settings, folder, app or Synthetic())


def first_contacts(folder: Path) -> list[int]:
    """The bytes of the first download of each device."""
    first: dict[str, int] = {}
    for event in map(json.loads, (folder / "events.jsonl").read_text().splitlines()):
        if event["kind"] == "downloaded":
            first.setdefault(event["client"], event["bytes"])
    return list(first.values())


@pytest.mark.parametrize("tables", CASES.values(), ids=CASES.keys())
def test_a_first_contact_costs_nothing(tables: dict[str, Any], tmp_path: Path) -> None:
    """All devices meet version 0 at once, over links that take no time, so that nothing else differs."""
    tables = {"fleet": {"latency_s": 0.0}} | tables
    sent, built = (run(tmp_path / initial, initial, **tables) for initial in ("sent", "built"))
    spared = first_contacts(tmp_path / "sent")
    assert len(spared) == 4
    assert built.model_sha256 == sent.model_sha256
    assert built.downlink_bytes == sent.downlink_bytes - sum(spared)
    assert built.uplink_bytes == sent.uplink_bytes
    again = replay_run(tmp_path / "built")
    assert (again.way, again.matches) == ("payloads", True)


def test_what_is_frozen_is_built_as_well(tmp_path: Path) -> None:
    sent, built = (run(tmp_path / initial, initial, Head()) for initial in ("sent", "built"))
    assert sent.downlink_bytes - built.downlink_bytes == 4 * (BASE_BYTES + 4 * HEAD_SIZE)


@pytest.mark.parametrize("codec", ["raw", "log(2)"])
def test_a_fleet_with_crashes_and_a_server_that_goes_back(codec: str, tmp_path: Path) -> None:
    """Versions are named by their heads there: version 0 as well."""
    faults = {"restore_every_s": 8.0, "restore_age_s": 3.0, "device_crash_every_s": 10.0, "lost_tail": 0.5}
    faults |= {"server_crash_every_s": 9.0, "server_down_s": 0.5}
    tables: dict[str, Any] = {"faults": faults, "downlink": {"codec": codec}}
    limits = {**RUN, "initial": "built", "virtual_s_max": 60.0}
    result = run(tmp_path / "run", "built", run=limits, **tables)
    assert result.updates_applied > 10
    assert replay_run(tmp_path / "run").matches


def test_given_weights_are_refused() -> None:
    weights = trainer_for(Synthetic()).initial(0)
    settings = config(run={**RUN, "initial": "built"})
    with (
        pytest.raises(ConfigError, match=r"run.initial = 'built': the first weights were given"),
        open_simulation(settings, app=Synthetic(), start=weights),
    ):
        pass
