"""Streaming DiLoCo with real processes: of four devices one is killed and one is cut off, and each part of
the model is the sum of what came of it."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fragment_device
import numpy as np
import telling_device
from device_lives import PUSHES, DeviceProcess
from flaky_proxy import FlakyProxy
from server_process import ConfiguredServer
from wire import SUM

from anabranch.client.outbox import Outbox
from anabranch.core.events import Payload
from anabranch.core.model.params import digest
from anabranch.server.manifest import write_manifest
from anabranch.server.store.factory import open_store
from anabranch.server.verify import verify

TABLES: dict[str, dict[str, Any]] = {
    "strategy": SUM,
    "fleet": {"clients": 4},
    "submodel": {"name": "fragments", "parts": 3},
    "client": PUSHES["elastic"],
    "server": {"lease_min_s": 60.0, "snapshot_every_versions": 10},
}
NAMES = tuple(fragment_device.SHAPES)
SIZES = [int(np.prod(shape)) for shape in fragment_device.SHAPES.values()]
PARTS = len(NAMES)


def sums_of(data_dir: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The updates in the log, and what those of each tensor come to: read of the bytes by hand."""
    store, logged = open_store("", data_dir), []
    sums = {name: np.zeros(size) for name, size in zip(NAMES, SIZES, strict=True)}
    try:
        for _, record in store.records():
            if record["kind"] != "update":
                continue
            (bits,) = record["submodel"]["tensors"]
            (name,) = (name for i, name in enumerate(NAMES) if int(bits, 16) >> i & 1)
            payload = Payload(**record["payload"])
            assert payload.codec == "raw"
            sums[name] += np.frombuffer(bytes(store.payload(payload)), "<f4")
            logged.append({**record, "tensor": name})
    finally:
        store.close()
    return logged, sums


def test_each_part_is_what_came_of_it_though_one_device_is_killed_and_one_cut_off(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    first = {
        name: rng.integers(-9, 10, shape).astype(np.float32) for name, shape in fragment_device.SHAPES.items()
    }
    write_manifest(tmp_path / "model", "crash", first)
    server, script = ConfiguredServer(tmp_path, TABLES), Path(fragment_device.__file__)
    with ExitStack() as stack:
        server.start()
        stack.callback(server.kill)
        proxy = stack.enter_context(FlakyProxy(server.address, ()))
        addresses = [server.address] * 3 + [proxy.address]
        fleet = [DeviceProcess(tmp_path, f"device-{i}", a, script) for i, a in enumerate(addresses)]
        killed, cut = fleet[1], fleet[3]
        app = f"{script}:App"
        life = telling_device.device(
            server.address, killed.state_dir, "trained", client_id=killed.client_id, app=app
        )
        telling_device.told(life)
        held = Outbox(killed.state_dir / "outbox").pending()
        assert len(held) == 1
        for device in fleet:
            device.start()
            stack.callback(device.kill)
        cut.await_event("pushed")
        proxy.part()
        # The others go on meanwhile, through all parts.
        for device in fleet[:3]:
            device.await_event("pushed", device.told("pushed") + PARTS)
        proxy.heal()
        cut.await_event("pushed", cut.told("pushed") + PARTS)
        for device in fleet:
            held += device.kill()
            device.start(tasks_max=2 * PARTS)
        assert [device.ended() for device in fleet] == [0] * 4
        assert server.drain() == 0, server.log_tail()
    logged, sums = sums_of(server.data_dir)
    ids = Counter(record["update_id"] for record in logged)
    told = {e["update"]: e["verdict"] for device in fleet for e in device.events() if e["kind"] == "pushed"}
    assert max(ids.values()) == 1
    assert "rejected" not in told.values()
    assert {*told, *held} <= ids.keys()
    assert {(r["client_id"], r["tensor"]) for r in logged} == {(d.client_id, n) for d in fleet for n in NAMES}
    found = verify(server.data_dir)
    assert (list(found.problems), found.version) == ([], len(logged))
    flat = np.concatenate([first[name].ravel() + sums[name] for name in NAMES])
    assert found.model_sha256 == digest(flat.astype(np.float32))  # whole numbers: equal, not nearly so
