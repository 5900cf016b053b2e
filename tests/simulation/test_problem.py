"""The payload of a raw update: the values where they lie, or a copy where they are part of more."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from fleets import Ones, config

from anabranch.compress.feedback import Memory
from anabranch.core.model.params import Vector
from anabranch.core.model.updates import LocalPlan, Task
from anabranch.simulation.executors.base import Job, LocalResult
from anabranch.simulation.problem import Problem
from anabranch.workloads.trainer import TrainResult

VALUES = np.arange(4, dtype=np.float32)


def job(uplink: str = "raw", memory: Memory | None = None) -> Job:
    task = Task("t", "device-0000", 0, 0.0, 60.0, 60.0, 1, LocalPlan(), uplink)
    return Job(0, np.zeros(4, np.float32), task, memory, 1.0)


def payload_of(delta: Vector, uplink: str = "raw", memory: Memory | None = None) -> LocalResult:
    problem = Problem(config(), Ones())
    return problem.finish(job(uplink, memory), [TrainResult(delta, 1, {})])


def lies_in(payload: Any, delta: Vector) -> bool:
    return np.shares_memory(np.frombuffer(payload, np.uint8), delta)


def test_a_raw_update_is_not_copied_and_not_written_on_any_more() -> None:
    delta = VALUES.copy()
    result = payload_of(delta)
    assert bytes(result.payload) == VALUES.tobytes()
    assert len(result.payload) == 16
    assert lies_in(result.payload, delta)
    with pytest.raises(ValueError, match="read-only"):
        delta += 1.0
    assert not np.frombuffer(result.payload, np.float32).flags.writeable


@pytest.mark.parametrize("uplink", ["raw", "int8"])
def test_what_is_part_of_more_is_copied_and_may_be_written_on(uplink: str) -> None:
    stack = np.tile(VALUES, (3, 1))
    result = payload_of(stack[1], uplink)
    expected = bytes(result.payload)
    stack += 1.0
    assert bytes(result.payload) == expected
    assert (expected == VALUES.tobytes()) == (uplink == "raw")


def test_a_result_travels_to_another_process() -> None:
    result = payload_of(VALUES.copy())
    came = copy.deepcopy(result)  # as a process does that sends it
    assert type(came.payload) is bytes
    assert {**vars(came)} == {**vars(result), "payload": VALUES.tobytes()}


def test_what_stages_remember_outlives_a_raw_update() -> None:
    memory = Memory(np.empty(0, np.float32), 0, notes={"step": 0.5})
    result = payload_of(VALUES.copy(), memory=memory)
    assert bytes(result.payload) == VALUES.tobytes()
    assert result.memory is not None
    assert result.memory.notes == {"step": 0.5}
