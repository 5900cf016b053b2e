"""`server.disk_bytes_max`: who holds so much takes nothing more, loses nothing, and goes on with more."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from wire import Device, Served, server_config

from anabranch.core.errors import StoreFull
from anabranch.core.limits import MIB
from anabranch.server.manifest import write_manifest
from anabranch.server.store.quota import EVERY_S, Quota, held_bytes
from anabranch.server.verify import verify


def test_a_server_that_holds_so_much_takes_nothing_more(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "model", "test", {"w": np.zeros(100_000, np.float32)})
    bound = 8 * MIB
    with Served(server_config(tmp_path / "data", server={"disk_bytes_max": bound}), manifest) as served:
        device = served.device()
        taken, refused = filled(device)
        assert f"over server.disk_bytes_max = {bound}" in refused.details()
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert device.fetch()[0].version == taken, "what is there is served"
    assert held_bytes(tmp_path / "data") > bound
    assert taken > 0
    with Served(server_config(tmp_path / "data", server={"disk_bytes_max": 64 * bound}), manifest) as served:
        served.device().work()
    found = verify(tmp_path / "data")
    assert (found.problems, found.version) == ((), taken + 1)


def filled(device: Device) -> tuple[int, Any]:
    """How many updates were taken until one was not, and why it was not."""
    for taken in count():
        try:
            device.work()
        except grpc.RpcError as error:
            return taken, error
    raise AssertionError


def test_it_looks_now_and_then(tmp_path: Path) -> None:
    now = 0.0
    quota = Quota(tmp_path, 100_000, lambda: now)
    quota.check()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_bytes(bytes(200_000))
    quota.check()
    now = EVERY_S
    with pytest.raises(StoreFull, match="holds"):
        quota.check()
    (tmp_path / "folder/file").unlink()
    now = 2 * EVERY_S
    quota.check()
    Quota(tmp_path / "nowhere", 0).check()
