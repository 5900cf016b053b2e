"""Runs of which a part is frozen: the same learning as of the small model, and no byte of it in an update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from frozen_apps import BASE_BYTES, HEAD_SIZE, Head, Small, base
from safetensors.numpy import load_file

from anabranch.reports.result import Result
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import simulate
from anabranch.testing.federation import config

RUN = {"seed": 3, "updates_max": 100, "keep_payloads": True}
CASES: dict[str, dict[str, Any]] = {
    "fedasync": {"strategy": {"name": "fedasync"}},
    "fedbuff": {"strategy": {"name": "fedbuff", "buffer_size": 3}},
    "int8, error feedback": {"uplink": {"codec": "ef(1)|int8(64)"}},
    "delta log": {"downlink": {"codec": "log(1)"}},
    "elastic": {"client": {"steps": 3, "push": "elastic"}, "submodel": {"name": "none"}},
    "overlap": {"client": {"steps": 3, "push": "overlap"}, "server": {"tasks_per_client": 2}},
}


def run(app: Any, folder: Path, **tables: Any) -> Result:
    return simulate(config(**({"run": RUN} | tables)), folder, app)


@pytest.mark.parametrize("tables", CASES.values(), ids=CASES.keys())
def test_the_trained_part_learns_as_a_model_of_its_own(tables: dict[str, Any], tmp_path: Path) -> None:
    """The small model never heard of frozen tensors: it is the oracle, to the bit."""
    head, small = run(Head(), tmp_path / "head", **tables), run(Small(), tmp_path / "small", **tables)
    assert head.model_sha256 == small.model_sha256
    assert head.uplink_bytes == small.uplink_bytes
    final = load_file(tmp_path / "head" / "final.safetensors")
    plain = load_file(tmp_path / "small" / "final.safetensors")
    assert {n: final[n].tobytes() for n in plain} == {n: a.tobytes() for n, a in plain.items()}
    assert {n: final[n].tobytes() for n in base()} == {n: a.tobytes() for n, a in base().items()}


def test_an_update_has_what_is_trained_and_a_device_gets_the_rest_once(tmp_path: Path) -> None:
    head, small = run(Head(), tmp_path / "head"), run(Small(), tmp_path / "small")
    assert head.uplink_bytes == 100 * 4 * HEAD_SIZE
    assert head.downlink_bytes - small.downlink_bytes == 4 * BASE_BYTES, "four devices"
    lines = (tmp_path / "head" / "events.jsonl").read_text().splitlines()
    sizes: dict[str, list[int]] = {}
    for event in map(json.loads, lines):
        if event["kind"] == "downloaded":
            sizes.setdefault(event["client"], []).append(event["bytes"])
    assert all(first == BASE_BYTES + 4 * HEAD_SIZE for first, *_ in sizes.values())
    assert {size for _, *later in sizes.values() for size in later} == {4 * HEAD_SIZE}


def test_where_it_is_local_nothing_of_it_travels(tmp_path: Path) -> None:
    local = run(Head(), tmp_path / "local", run={**RUN, "frozen": "local"})
    small = run(Small(), tmp_path / "small")
    assert (local.uplink_bytes, local.downlink_bytes) == (small.uplink_bytes, small.downlink_bytes)
    assert local.model_sha256 == small.model_sha256
    assert replay_run(tmp_path / "local").matches


def test_a_journal_replays(tmp_path: Path) -> None:
    run(Head(), tmp_path / "run")
    again = replay_run(tmp_path / "run")
    assert (again.way, again.matches) == ("payloads", True)
