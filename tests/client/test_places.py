"""A device whose program dies at every task, beside honest ones where places are few: real processes."""

from __future__ import annotations

import signal
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from live_server import live_server
from nursery import Process
from telling_device import device

from anabranch.client.operator import OperatorClient
from anabranch.testing.federation import config, first_weights

TASKS = 8


@pytest.mark.parametrize("strategy", [{}, {"cap": 1}], ids=["as it comes", "one place"])
def test_teasq_goes_on_beside_a_device_that_dies_at_every_task(
    strategy: dict[str, int], tmp_path: Path
) -> None:
    settings = config(strategy={"name": "teasq", **strategy})
    with live_server(tmp_path, first_weights(), settings) as info, ExitStack() as stack:

        def begin(name: str, die_at: str = "", **more: int) -> Process:
            process = device(info.address, tmp_path / name, die_at, client_id=name, **more)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        crashing = begin("crashing", "granted")
        assert crashing.wait(300) == -signal.SIGKILL  # and has a place
        honest = [begin(name, tasks_max=TASKS) for name in ("a", "b")]
        while any(process.poll() is None for process in honest):
            if crashing.poll() is not None:
                assert crashing.returncode == -signal.SIGKILL
                crashing = begin("crashing", "granted")
            with suppress(subprocess.TimeoutExpired):
                crashing.wait(0.1)
        assert [process.returncode for process in honest] == [0, 0]
        with OperatorClient(info.admin_address) as operator:
            status = operator.status()
    assert status.updates_applied >= 2 * TASKS
    assert status.version > 0
