"""A model that grows with real processes, of which a device and the server are killed: every update is of
what its version's stage trains, and the model is the sum of what came."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import growing_app
import growing_device
import numpy as np
from device_lives import DeviceProcess
from growing_app import App, names_of
from server_process import ConfiguredServer
from telling_device import device, told
from wire import SUM

from anabranch.client.outbox import Outbox
from anabranch.core.events import Payload
from anabranch.core.model.params import digest
from anabranch.server.manifest import Manifest, read_manifest, write_manifest
from anabranch.server.store.factory import open_store
from anabranch.server.verify import verify
from anabranch.workloads.trainer import trainer_for

VERSIONS, AT_ONCE = 32, 9
TABLES: dict[str, dict[str, Any]] = {
    "run": {"versions_max": VERSIONS},
    "strategy": SUM,
    "fleet": {"clients": 2},
    "client": {"steps": 2, "learning_rate": 0.01},
    "submodel": {"name": "progressive", "grow_at": [0.25, 0.5], "warm_up_versions": 3},
    "server": {"lease_min_s": 60.0, "snapshot_every_versions": 5},
}


def trained_at(version: int) -> set[str]:
    """By the table above: 8 and 16 begin a stage, and three versions of each train what is new."""
    if version < 8:
        return names_of((1,), 1)
    if version < 16:
        return names_of((2,) if version < 11 else (1, 2), 2)
    return names_of((3,) if version < 19 else (1, 2, 3), 3)


def folded(data_dir: Path, manifest: Manifest) -> tuple[list[dict[str, Any]], Any]:
    """The updates in the log, and what they come to: read of the bytes by hand."""
    store, logged, total = open_store("", data_dir), [], manifest.vector
    try:
        for _, record in store.records():
            if record["kind"] != "update":
                continue
            (bits,) = record["submodel"]["tensors"]
            flags = np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8), bitorder="little")
            names = [t.name for t, flag in zip(manifest.spec.tensors, flags, strict=False) if flag]
            values = np.frombuffer(bytes(store.payload(Payload(**record["payload"]))), "<f4")
            for name in names:
                where = manifest.spec.slices[name]
                size = where.stop - where.start
                total[where] += values[:size]
                values = values[size:]
            assert not values.size
            logged.append({**record, "names": set(names)})
    finally:
        store.close()
    return logged, total


def test_every_update_is_of_its_stage_though_a_device_and_the_server_are_killed(tmp_path: Path) -> None:
    trainer = trainer_for(App())
    write_manifest(tmp_path / "model", "grower", trainer.initial(0), stages=trainer.spec.stages)
    server, script = ConfiguredServer(tmp_path, TABLES), Path(growing_device.__file__)
    with ExitStack() as stack:
        server.start()
        stack.callback(server.kill)
        first, second = (DeviceProcess(tmp_path, f"device-{i}", server.address, script) for i in (0, 1))
        app = f"{growing_app.__file__}:App"
        told(device(server.address, second.state_dir, "trained", client_id=second.client_id, app=app))
        (held,) = Outbox(second.state_dir / "outbox").pending()
        server.kill()
        server.start()
        first.start(tasks_max=AT_ONCE)  # the model has grown when the other one comes back
        stack.callback(first.kill)
        assert first.ended() == 0
        second.start()
        stack.callback(second.kill)
        assert second.ended() == 0
        assert server.drain() == 0, server.log_tail()
    manifest = read_manifest(tmp_path / "model")
    logged, total = folded(server.data_dir, manifest)
    assert len({record["update_id"] for record in logged}) == len(logged) == VERSIONS
    late = logged[AT_ONCE]  # of the first stage, when the second one had begun
    assert (late["update_id"], late["base_version"]) == (held, 0)
    assert [record["names"] for record in logged] == [trained_at(r["base_version"]) for r in logged]
    sets = {frozenset(record["names"]) for record in logged}
    assert sets == {frozenset(trained_at(version)) for version in (0, 8, 11, 16, 19)}
    found = verify(server.data_dir, whole=True)
    assert (list(found.problems), found.version, found.model_sha256) == ([], VERSIONS, digest(total))
