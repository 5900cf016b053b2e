"""Another run of the same model is served at the address of the one that a device enrolled in."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from guarded import federation
from ports import free_port
from wire import Served, server_config

from anabranch.client.agent import Agent
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.testing.federation import BASE, first_weights
from anabranch.workloads.app import Shard
from anabranch.workloads.synthetic import Synthetic


@pytest.mark.parametrize("known", [True, False], ids=["it knows the device", "it does not"])
def test_a_device_goes_over_to_the_run_that_is_served(known: bool, tmp_path: Path) -> None:
    tables = BASE | {"server": {"address": f"127.0.0.1:{free_port()}"}}
    heard: list[tuple[str, dict[str, Any]]] = []
    with federation(tmp_path, first_weights(), DEFAULT_LIMITS, time.time, **tables) as guarded:
        wallet, manifest = guarded.joined("device-1"), guarded.served.manifest
        first = guarded.served.config
        identity = {"folder": str(tmp_path / "ca"), "tls": "always", "join_address": "127.0.0.1:0"}
        other = server_config(tmp_path / "other", identity=identity, **tables)

        def serve(config: Any) -> None:
            guarded.served.close()
            guarded.served = Served(config, manifest)
            guarded.served.__enter__()

        def hear(kind: str, **data: Any) -> None:
            heard.append((kind, data))
            if kind == "trained" and guarded.served.config is first:
                serve(other)

        try:
            serve(other)
            device = guarded.device(wallet)
            if known:
                device.enrol()
                device.work()
            serve(first)
            place = Shard("train", 0, 4), tmp_path / "device"
            transport = guarded.transport(wallet)
            agent = Agent(Synthetic(), transport, "device-1", *place, tasks_max=3, on_event=hear)
            assert agent.run().answered == 2  # of three: the one that it had in hand is lost
            status = guarded.operators(guarded.operator()).status()
        finally:
            guarded.served.close()
    failures = [data for kind, data in heard if kind == "failed" and data["error"] != "Unavailable"]
    assert "signed for another run" in failures[0]["detail"]
    assert [data["error"] for data in failures[1:]] == ["ManifestMismatch"] * known
    assert status.updates_applied == 2 + known
