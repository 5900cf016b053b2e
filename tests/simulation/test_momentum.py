"""Momentum on devices in whole runs, simulated and of real agents: every update of the log, made by hand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import Ones, config

from anabranch.api.configuration import load_config
from anabranch.client.agent import Agent
from anabranch.client.local import LocalServer, LocalTransport
from anabranch.core import events as ev
from anabranch.core.effects import Granted
from anabranch.core.errors import ConfigError
from anabranch.core.events import Payload
from anabranch.core.journal import Record
from anabranch.core.model.updates import Ask, Capability, LocalPlan
from anabranch.reports.journal_files import PayloadReader
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import simulate
from anabranch.workloads.app import Examples, Shard

SHARE = 0.75
UPLINK = {"codec": f"momentum({SHARE})"}


class Later(Ones):
    """Every task adds as much as the version that it starts from has for a number, and one."""

    def train(
        self, model: dict[str, Any], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        model["w"] += 1.0 + self.version
        return {"loss": 0.0}


def check(records: Iterable[Record], read: Callable[[Payload], bytes]) -> Counter[str]:
    """Every update is what its device sent before, three parts, and one of what its task made; how many."""
    before: dict[str, float] = {}
    sent: Counter[str] = Counter()
    for record in records:
        if record["kind"] != "update":
            continue
        client, delta = record["client_id"], 1.0 + record["base_version"]
        before[client] = SHARE * before[client] + (1 - SHARE) * delta if client in before else delta
        values = np.frombuffer(read(Payload(**record["payload"])), "<f4")
        assert values.tolist() == pytest.approx([before[client]] * 4, rel=1e-6), (client, sent[client])
        sent[client] += 1
    return sent


def test_simulated_devices_send_it_and_the_log_replays(tmp_path: Path) -> None:
    simulate(config(uplink=UPLINK, run={"updates_max": 30}), tmp_path, Later())
    lines = (tmp_path / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    with PayloadReader(tmp_path) as read:
        assert min(check(map(json.loads, lines), read).values()) >= 3
    assert replay_run(tmp_path).matches


def test_a_device_that_is_started_again_goes_on_with_what_it_sent(tmp_path: Path) -> None:
    server = LocalServer.of(Later(), config("fedasync", uplink=UPLINK, run={"updates_max": 20}))
    for _ in range(3):
        transport = LocalTransport(server, "a")
        Agent(Later(), transport, "a", Shard("train", 0, 1), tmp_path / "a", tasks_max=3).run()
    assert check(server.journal, lambda payload: server.payloads[payload.sha256]) == {"a": 9}


def test_a_device_that_does_not_know_it_sends_whole_updates() -> None:
    server = LocalServer.of(Later(), config(uplink=UPLINK))
    server.take(ev.Enrolled(0.0, "a", Capability(codecs=("raw:1", "ef:1"))))
    (granted,) = server.take(ev.TaskAsked(0.0, Ask("a", "t")))
    assert isinstance(granted, Granted)
    assert granted.task.uplink == "raw"


def test_devices_that_train_on_have_no_mean_of_tasks() -> None:
    with pytest.raises(ConfigError, match="leave momentum out"):
        load_config(None, ["uplink.codec=momentum(0.5)|int8", "client.push=elastic"])
    assert load_config(None, ["uplink.codec=momentum(0.5)"]).uplink.codec == "momentum(0.5)"
