"""Devices that push in the background are killed: what was acknowledged counts once, the rest goes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flaky_proxy import FlakyProxy
from live_server import live_server
from server_logs import records_of
from telling_device import device, told

from anabranch.client.operator import OperatorClient
from anabranch.client.outbox import Outbox
from anabranch.testing.federation import config, first_weights

DEVICE: dict[str, Any] = {"client_id": "a", "retry_base_s": 0.05, "retry_cap_s": 0.2}
OVERLAP: dict[str, dict[str, Any]] = {"client": {"push": "overlap"}, "server": {"tasks_per_client": 2}}


@pytest.mark.parametrize("moment", ["granted", "trained", "pushed"])
def test_a_device_that_is_killed_again_and_again_loses_no_result(moment: str, tmp_path: Path) -> None:
    box = tmp_path / "a" / "outbox"
    said: list[dict[str, Any]] = []
    with live_server(tmp_path, first_weights(), config(**OVERLAP)) as info:
        for count in (2, 3, 5):
            life = told(device(info.address, tmp_path / "a", moment, count, **DEVICE))
            assert life[-1]["kind"] == moment
            said += life
            held = Outbox(box).pending()
            assert len(held) <= 2, "more results than the server gives tasks"
        life = told(device(info.address, tmp_path / "a", tasks_max=4, **DEVICE))
        assert [event["update"] for event in life if event["kind"] == "pushed"][: len(held)] == held
        with OperatorClient(info.admin_address) as operator:
            status = operator.status()
    logged = records_of(tmp_path / "data", kind="update")
    tasks = {record["task_id"]: record["update_id"] for record in logged}
    assert len({*tasks.values()}) == len(tasks) == len(logged) == status.updates_applied
    assert status.updates_rejected == 0
    said += life
    assert {event["update"] for event in said if event["kind"] == "pushed"} <= {*tasks.values()}
    assert {event["task"] for event in said if event["kind"] == "trained"} <= tasks.keys()
    assert Outbox(box).pending() == []


def test_a_link_that_breaks_again_and_again_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with (
        live_server(tmp_path, first_weights(), config(**OVERLAP)) as info,
        FlakyProxy(info.address, [9_000, 14_000, 7_000, 21_000, 11_000]) as proxy,
    ):
        life = told(device(proxy.address, tmp_path / "a", tasks_max=12, **DEVICE))
        with OperatorClient(info.admin_address) as operator:
            status = operator.status()
    answers = [event["update"] for event in life if event["kind"] == "pushed"]
    assert len(set(answers)) == len(answers) == 12
    assert (status.updates_applied, status.updates_rejected) == (12, 0)
    assert proxy.connections > 5
