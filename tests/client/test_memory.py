"""What a device remembers, crash after crash: each life is a new object on the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.client.base_model import BaseModel
from anabranch.client.held import keep_model, kept_model
from anabranch.client.memory import Memories
from anabranch.compress.feedback import Memory
from anabranch.core.model.params import ParamSpec

RUN, LAYOUT = "run-1", "aa" * 32
SPEC = ParamSpec.of({"w": np.zeros(4, np.float32), "n": np.zeros(1, np.int64)})


def memory(value: float, base: int = 3) -> Memory:
    return Memory(np.full(4, value, np.float32), base, 0.5, {"tau": 0.25})


def value(memories: Memories, run: str = RUN, layout: str = LAYOUT) -> float | None:
    found = memories.load(run, layout)
    return None if found is None else float(found.residual[0])


def test_a_memory_counts_once_its_update_was_taken(tmp_path: Path) -> None:
    first = Memories(tmp_path)
    assert value(first) is None
    first.put("u1", memory(1.0), RUN, LAYOUT)
    assert value(first) is None
    first.commit("u1")
    first.put("u2", memory(2.0, base=4), RUN, LAYOUT)
    assert value(first) == 1.0
    first.drop("u2")  # rejected
    first.commit("u2")  # nothing is left to commit
    assert value(first) == 1.0
    found = first.load(RUN, LAYOUT)
    assert found is not None
    assert (found.base_version, found.length_mean, dict(found.notes)) == (3, 0.5, {"tau": 0.25})


def test_a_restart_before_the_answer_keeps_what_is_pending(tmp_path: Path) -> None:
    Memories(tmp_path).put("u1", memory(1.0), RUN, LAYOUT)
    second = Memories(tmp_path, outbox=["u1"])
    second.commit("u1")  # the resend was taken
    assert value(Memories(tmp_path)) == 1.0


def test_a_restart_between_commit_and_discard_commits_once(tmp_path: Path) -> None:
    first = Memories(tmp_path)
    first.put("u1", memory(1.0), RUN, LAYOUT)
    first.commit("u1")
    second = Memories(tmp_path, outbox=["u1"])  # it is sent again; the answer is a duplicate
    second.commit("u1")
    assert value(second) == 1.0


def test_what_never_got_into_the_outbox_is_dropped(tmp_path: Path) -> None:
    Memories(tmp_path).put("u1", memory(1.0), RUN, LAYOUT)
    (tmp_path / "pending-u2.tmp").write_bytes(b"half a file")
    Memories(tmp_path, outbox=["u9"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("run", "layout"), [("run-2", LAYOUT), (RUN, "bb" * 32)])
def test_another_run_or_model_starts_with_nothing(run: str, layout: str, tmp_path: Path) -> None:
    memories = Memories(tmp_path)
    memories.put("u1", memory(1.0), RUN, LAYOUT)
    memories.commit("u1")
    assert value(memories, run, layout) is None


@pytest.mark.parametrize("damage", ["torn", "flipped", "empty"])
def test_a_damaged_memory_counts_as_none(damage: str, tmp_path: Path, caplog: Any) -> None:
    memories = Memories(tmp_path)
    memories.put("u1", memory(1.0), RUN, LAYOUT)
    memories.commit("u1")
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[-1] ^= damage == "flipped"
    path.write_bytes(data[: {"torn": len(data) - 3, "flipped": len(data), "empty": 0}[damage]])
    assert value(Memories(tmp_path)) is None
    assert "damaged" in caplog.text


def test_a_diverged_device_forgets(tmp_path: Path) -> None:
    memories = Memories(tmp_path)
    memories.put("u1", memory(1.0), RUN, LAYOUT)
    memories.commit("u1")
    memories.forget()
    assert value(memories) is None


def test_the_held_model_comes_back_for_its_run_and_model_only(tmp_path: Path) -> None:
    model = BaseModel(7, np.arange(4, dtype=np.float32), {"n": np.array([5])})
    keep_model(tmp_path, model, RUN, SPEC)
    found = kept_model(tmp_path, RUN, SPEC)
    assert found is not None
    assert (found.version, found.vector.tolist(), found.frozen["n"].tolist()) == (7, [0, 1, 2, 3], [5])
    assert kept_model(tmp_path, "run-2", SPEC) is None
    assert kept_model(tmp_path, RUN, ParamSpec.of({"w": np.zeros(4, np.float32)})) is None
    path = tmp_path / "held.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    assert kept_model(tmp_path, RUN, SPEC) is None
