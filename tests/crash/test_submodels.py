"""SIGKILL between the grant of a sub-model and its update: after it everything is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from crash import ROWS, write_model
from crash_writer import VALUES
from server_process import Plan, ServerProcess
from wire import QUICK, Device

from anabranch.compress.registry import STAGES
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import UnitMap
from anabranch.server.verify import verify

NAMES = ("slow", "middle", "fast")
BEARS = 0.2  # of the units


@contextmanager
def fleet(server: ServerProcess, spec: ParamSpec) -> Iterator[list[Device]]:
    """The devices, on a connection of their own."""
    with grpc.insecure_channel(server.address, options=QUICK) as channel:
        yield [Device(channel, spec, name, STAGES) for name in NAMES]


@pytest.mark.parametrize("compressed", [False, True], ids=["raw", "compressed"])
def test_tasks_of_sub_models_outlive_a_kill(compressed: bool, tmp_path: Path) -> None:
    plan = Plan(units=True, compressed=compressed)
    spec = write_model(tmp_path, np.arange(VALUES, dtype=np.float32), plan)
    server = ServerProcess(tmp_path, plan)
    server.start()
    granted, payloads = {}, {}
    with fleet(server, spec) as devices:
        for device in devices:
            device.enrol()
        for slowness, device in enumerate(devices[::-1], 1):  # the planner learns who is fast
            took = {"train_s": float(slowness)}
            assert device.answer(device.task(), metrics=took, local_steps=1).version == slowness
        for device in devices:
            task = granted[device.client_id] = device.task()
            fields = {"version": task.base_version, "submodel": task.submodel, "codecs": STAGES}
            payloads[device.client_id] = device.fetch(**fields)
        assert len({task.submodel.SerializeToString() for task in granted.values()}) == len(NAMES)
        assert device.answer(granted["fast"]).decision.verdict == "published"
    server.kill()
    before = verify(server.data_dir)

    server.start()
    with fleet(server, spec) as devices:
        for device in devices[:-1]:
            task = granted[device.client_id]
            assert device.ask(task.task_id).task.submodel == task.submodel
            fields = {"version": task.base_version, "submodel": task.submodel, "codecs": STAGES}
            (header, data), (was, had) = device.fetch(**fields), payloads[device.client_id]
            assert (header.part, header.part_only, data) == (was.part, not compressed, had)
    server.kill()
    after = verify(server.data_dir)
    # Two asked again, and the server had come back, which renews the leases.
    assert (after.problems, after.version, after.events) == ((), 4, before.events + 3)
    assert after.model_sha256 == before.model_sha256

    server.start()
    with fleet(server, spec) as devices:
        for version, device in enumerate(devices[:-1], 5):
            answer = device.answer(granted[device.client_id])
            assert (answer.decision.verdict, answer.version) == ("published", version)
    assert server.drain() == 0
    assert verify(server.data_dir).problems == ()


def test_what_a_device_bears_outlives_a_kill_and_a_drain(tmp_path: Path) -> None:
    """The log has it, and then the rows of a snapshot: the device does not say it again."""
    plan = Plan(units=True)
    spec = write_model(tmp_path, np.arange(VALUES, dtype=np.float32), plan)
    server = ServerProcess(tmp_path, plan)
    for life, end in enumerate((server.kill, server.drain, server.kill)):
        server.start()
        with fleet(server, spec) as (narrow, _, whole):
            if not life:
                narrow.enrol(width_max=BEARS)
                whole.enrol()
            kept = {device.client_id: device.submodel(device.task()) for device in (narrow, whole)}
            counts = {name: len(part.kept[0]) for name, part in kept.items() if isinstance(part, UnitMap)}
            assert counts["slow"] == ROWS * BEARS < counts["fast"]
        end()
    assert verify(server.data_dir).problems == ()
