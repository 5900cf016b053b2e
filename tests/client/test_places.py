"""A device whose program dies at every task, beside honest ones where places are few: real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from federations import config, first_weights
from live_server import live_server

from anabranch.client.operator import OperatorClient

TASKS = 8
DEVICE = """
import os, signal, sys
from pathlib import Path
from anabranch.client.run import ClientOptions, run_client

address, name, folder, tasks_max, dies = sys.argv[1:]

def hear(kind, **data):
    if dies and kind == "granted":
        os.kill(os.getpid(), signal.SIGKILL)

run_client(ClientOptions("synthetic", address, name, state_dir=Path(folder), tasks_max=int(tasks_max)), hear)
"""


def device(address: str, folder: Path, name: str, tasks_max: int, dies: bool = False) -> list[str]:
    """The command line of a device process, which perhaps kills itself as soon as it has a task."""
    arguments = [address, name, str(folder / name), str(tasks_max), "dies" if dies else ""]
    return [sys.executable, "-c", DEVICE, *arguments]


@pytest.mark.parametrize("strategy", [{}, {"cap": 1}], ids=["as it comes", "one place"])
def test_teasq_goes_on_beside_a_device_that_dies_at_every_task(
    strategy: dict[str, int], tmp_path: Path
) -> None:
    settings = config(strategy={"name": "teasq", **strategy})
    with live_server(tmp_path, first_weights(), settings) as info, ExitStack() as stack:

        def begin(name: str, tasks_max: int, dies: bool = False) -> subprocess.Popen[bytes]:
            command = device(info.address, tmp_path, name, tasks_max, dies)
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
            return process

        crashing = begin("crashing", 0, dies=True)
        assert crashing.wait(300) == -signal.SIGKILL  # and has a place
        honest = [begin("a", TASKS), begin("b", TASKS)]
        while any(process.poll() is None for process in honest):
            if crashing.poll() is not None:
                assert crashing.returncode == -signal.SIGKILL
                crashing = begin("crashing", 0, dies=True)
            with suppress(subprocess.TimeoutExpired):
                crashing.wait(0.1)
        assert [process.returncode for process in honest] == [0, 0]
        with OperatorClient(info.admin_address) as operator:
            status = operator.status()
    assert status.updates_applied >= 2 * TASKS
    assert status.version > 0
