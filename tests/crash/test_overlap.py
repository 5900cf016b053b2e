"""Devices that push in the background are killed: what was acknowledged counts once, the rest goes again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from federations import config, first_weights
from flaky_proxy import FlakyProxy
from live_server import live_server

from anabranch.client.operator import OperatorClient
from anabranch.client.outbox import Outbox

DEVICE = """
import json, os, signal, sys
from pathlib import Path
from anabranch.client.run import ClientOptions, run_client

address, folder, tasks_max, kind_to_die_at, count = sys.argv[1:]
heard = []

def hear(kind, **data):
    heard.append(kind)
    sys.stdout.write(json.dumps({"kind": kind, **data}) + "\\n")
    sys.stdout.flush()
    if kind == kind_to_die_at and heard.count(kind) == int(count):
        os.kill(os.getpid(), signal.SIGKILL)

run_client(
    ClientOptions("synthetic", address, "a", state_dir=Path(folder), tasks_max=int(tasks_max),
                  retry_base_s=0.05, retry_cap_s=0.2),
    hear,
)
"""
OVERLAP: dict[str, dict[str, Any]] = {"client": {"push": "overlap"}, "server": {"tasks_per_client": 2}}


def live(
    address: str, folder: Path, tasks_max: int, die_at: str = "", count: int = 1
) -> tuple[int, list[Any]]:
    """One life of a device process: its exit code, and what it told."""
    command = [sys.executable, "-c", DEVICE, address, str(folder), str(tasks_max), die_at, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("moment", ["granted", "trained", "pushed"])
def test_a_device_that_is_killed_again_and_again_loses_no_result(moment: str, tmp_path: Path) -> None:
    box = tmp_path / "a" / "outbox"
    pushed: list[dict[str, Any]] = []
    with live_server(tmp_path, first_weights(), config(**OVERLAP)) as info:
        for count in (2, 3, 5):
            code, told = live(info.address, tmp_path / "a", 0, moment, count)
            assert code == -signal.SIGKILL
            pushed += [event for event in told if event["kind"] == "pushed"]
            held = Outbox(box).pending()
            assert len(held) <= 2, "more results than the server gives tasks"
        _, told = live(info.address, tmp_path / "a", 4)
        last = [event for event in told if event["kind"] == "pushed"]
        assert [event["update"] for event in last][: len(held)] == held
        with OperatorClient(info.admin_address) as operator:
            status = operator.status()
    pushed += last
    assert not [event for event in pushed if event["verdict"] == "rejected"]
    assert status.updates_applied >= len({event["update"] for event in pushed})
    assert status.updates_rejected == 0
    assert Outbox(box).pending() == []


def test_a_link_that_breaks_again_and_again_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with (
        live_server(tmp_path, first_weights(), config(**OVERLAP)) as info,
        FlakyProxy(info.address, [9_000, 14_000, 7_000, 21_000, 11_000]) as proxy,
    ):
        _, told = live(proxy.address, tmp_path / "a", 12)
        with OperatorClient(info.admin_address) as operator:
            status = operator.status()
    answers = [event["update"] for event in told if event["kind"] == "pushed"]
    assert len(set(answers)) == len(answers) == 12
    assert (status.updates_applied, status.updates_rejected) == (12, 0)
    assert proxy.connections > 5
