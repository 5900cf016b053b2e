"""SIGKILL at the update that ends a phase: after it the next phase goes on, and every update counts once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
from crash import write_model
from crash_writer import VALUES
from server_process import NotServing, Plan, ServerProcess
from wire import QUICK, Device

from anabranch.core.model.params import ParamSpec, digest
from anabranch.server.verify import verify


@contextmanager
def fleet(server: ServerProcess, spec: ParamSpec) -> Iterator[list[Device]]:
    with grpc.insecure_channel(server.address, options=QUICK) as channel:
        yield [Device(channel, spec, name) for name in "abcd"]


def start_armed(server: ServerProcess, point: str) -> None:
    """A server that dies when it next gets to this point, however often it was there while it started."""
    for nth in itertools.count(1):
        with suppress(NotServing):
            server.start(f"{point}:{nth}")
            return


@pytest.mark.parametrize("point", ["update_checked", "log_written", "log_flushed", "handled"])
def test_a_kill_at_the_switch(point: str, tmp_path: Path) -> None:
    """A round of three tasks; the second answer ends it, whether the server lives to say so or not."""
    plan = Plan(phases=True)
    spec = write_model(tmp_path, np.full(VALUES, 10, np.float32), plan)
    server = ServerProcess(tmp_path, plan)
    server.start()
    with fleet(server, spec) as devices:
        for device in devices:
            device.enrol()
        tasks = {device.client_id: device.task() for device in devices[:3]}
        assert devices[0].answer(tasks["a"], 1.0).decision.verdict == "held"
    server.kill()

    start_armed(server, point)
    with fleet(server, spec) as devices, pytest.raises(grpc.RpcError):
        devices[1].answer(tasks["b"], 3.0, update_id="last-of-the-round")
    server.kill()

    server.start()
    with fleet(server, spec) as devices:
        ended = devices[1].answer(tasks["b"], 3.0, update_id="last-of-the-round")
        assert (ended.decision.verdict, ended.version) == ("published", 1)
        late = devices[2].answer(tasks["c"], 4.0)
        assert (late.decision.verdict, late.decision.staleness) == ("held", 1)
        answer = devices[3].answer(devices[3].task(), 2.0)
        assert (answer.decision.verdict, answer.version) == ("published", 2)
    assert server.drain() == 0
    report = verify(server.data_dir, whole=True)
    weight = np.float32(0.7071067811865476)
    expected = np.float32(12) + np.float32(0.5) * (weight * np.float32(4) + np.float32(2))
    assert report.problems == ()
    assert report.version == 2
    assert report.model_sha256 == digest(np.full(VALUES, expected, np.float32))
