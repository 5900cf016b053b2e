"""A server's start holds a model once: a large one beside a small one, of real processes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from commands import serving

from anabranch.core import events as ev
from anabranch.core.config.tables import Config
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import Capability
from anabranch.core.snapshot import state_digest, take_snapshot
from anabranch.host.build import Blueprint
from anabranch.server.manifest import write_manifest
from anabranch.server.store.snapshots import SnapshotFiles

VALUES = 12_000_000
ADDRESSES = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0")
COPIES_MAX = 1.6  # the engine's own, and 20 MB of what is chance; two copies would be 2


def peak_bytes(pid: int) -> int:
    """Of the resident memory of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def start(folder: Path, values: int) -> int:
    """The peak of a server's memory over its start."""
    model = folder / f"model-{values}"
    if not model.exists():
        write_manifest(model, "test", {"w": np.full(values, 0.5, np.float32), "b": np.ones(2, np.float32)})
    with serving(folder, "--model", model, "--data-dir", folder / f"data-{values}", *ADDRESSES) as served:
        return peak_bytes(served["pid"])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not tell of memory here")
def test_a_start_and_the_next_hold_the_model_once(tmp_path: Path) -> None:
    small = start(tmp_path, 4)
    for _ in range(2):  # the second finds what the first has kept
        assert start(tmp_path, VALUES) - small < COPIES_MAX * 4 * VALUES


def test_a_state_is_read_once_from_its_snapshot(tmp_path: Path) -> None:
    tensors = {"w": np.arange(2_000_000, dtype=np.float32)}
    config = Config.from_json({"strategy": {"name": "fedbuff", "buffer_size": 3}})
    blueprint = Blueprint.of(config, ParamSpec.of(tensors))
    engine = blueprint.engine(tensors)
    engine.handle(ev.Enrolled(0.0, "a", Capability()))
    engine.state.buffer[:] = 2.0
    files = SnapshotFiles(tmp_path, DEFAULT_LIMITS)
    files.prepare()
    sha256 = files.write(take_snapshot(engine))
    state_bytes = engine.vector.nbytes + engine.state.buffer.nbytes
    tracemalloc.start()
    try:
        again = blueprint.engine(tensors, files.read(sha256))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert state_digest(again) == state_digest(engine)
    assert peak < 1.8 * state_bytes  # an empty buffer is made first, which costs no memory, but counts


def test_an_engine_writes_on_its_own_values_only() -> None:
    tensors = {"w": np.ones(3, np.float32)}
    blueprint = Blueprint.of(Config.from_json({}), ParamSpec.of(tensors))
    one, other = blueprint.engine(tensors), blueprint.engine(tensors)
    one.vector += 1
    assert (other.vector == 1).all()
    assert (tensors["w"] == 1).all()
    from_other = blueprint.engine(tensors, snapshot := take_snapshot(other))
    from_other.vector += 1
    assert (snapshot.arrays["vector"] == 1).all()
    assert state_digest(other) == state_digest(blueprint.engine(tensors))
