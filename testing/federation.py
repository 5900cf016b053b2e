"""A small federation for tests of devices: its configuration, its App, and its first weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.client.outbox import UpdateEntry
from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core.config.tables import Config, merge
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import Task
from anabranch.workloads.synthetic import Synthetic
from anabranch.workloads.trainer import trainer_for

BASE: dict[str, dict[str, Any]] = {
    "run": {"name": "test", "workload": "synthetic"},
    "fleet": {"clients": 4},
    "strategy": {"name": "fedasync"},
    "server": {"retry_after_min_s": 0.01, "retry_after_max_s": 0.02},
    "client": {"steps": 3, "batch_size": 8},
}


def config(**tables: dict[str, Any]) -> Config:
    """The small federation's configuration, with other keys where the test names them."""
    return merge([("test", BASE), ("this test", tables)])


def first_weights() -> dict[str, npt.NDArray[Any]]:
    """The synthetic App's."""
    return trainer_for(Synthetic()).initial(0)


def result_of(task: Task, spec: ParamSpec, update_id: str, value: float = 0.5, **changes: Any) -> UpdateEntry:
    """The result of a task, a delta of one value everywhere, as a device has it: with a view of its file."""
    delta = np.full(spec.size, value, spec.vector_dtype)
    fields: dict[str, Any] = {
        "update_id": update_id,
        "task_id": task.task_id,
        "manifest_sha256": spec.layout_hash,
        "base_version": task.base_version,
        "examples": 10,
        "local_steps": 3,
        "codec": "raw",
        "values": spec.size,
        "payload": make_codec("raw").encode(delta, Layout.of(spec)),
        "metrics": {"loss": 1.5},
    }
    entry = UpdateEntry(**(fields | changes))
    return replace(entry, payload=memoryview(entry.payload))
