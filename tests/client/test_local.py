"""The server in the same process, as people use it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.client.agent import Agent
from anabranch.client.local import LocalServer, LocalTransport
from anabranch.core import events as ev
from anabranch.core.errors import ConfigError, TooLarge, UnknownVersion
from anabranch.core.model.params import digest
from anabranch.core.model.updates import Ask, Capability, Task
from anabranch.simulation.run import open_simulation
from anabranch.testing.federation import config, first_weights, result_of
from anabranch.workloads.app import Shard
from anabranch.workloads.synthetic import Synthetic


def device(server: LocalServer, client_id: str = "a") -> LocalTransport:
    """A device that is enrolled."""
    transport = LocalTransport(server, client_id)
    transport.enrol(Capability(examples=10))
    return transport


def asked(transport: LocalTransport, task_id: str) -> Task:
    answer = transport.ask(Ask(transport.client_id, task_id), transport.server.spec)
    assert isinstance(answer, Task)
    return answer


@pytest.fixture
def server() -> LocalServer:
    return LocalServer(first_weights(), config())


def test_the_first_weights_of_an_app_are_those_of_a_simulation() -> None:
    settings = config(run={"seed": 3, "versions_max": 1})
    server = LocalServer.of(Synthetic(), settings)
    with open_simulation(settings, app=Synthetic()) as simulation:
        assert digest(server.engine.vector) == digest(simulation.engine.vector)


def test_a_model_is_a_copy_by_name(server: LocalServer) -> None:
    for array in server.model().values():
        array[...] = 9.0
    assert {name: a.tolist() for name, a in server.model().items()} == {
        name: a.tolist() for name, a in first_weights().items()
    }


def test_versions_are_held_as_long_as_an_open_task_starts_from_them(server: LocalServer) -> None:
    a, b, spec = device(server), device(server, "b"), server.spec
    early = asked(b, "t-b")
    for n in range(3):
        a.push(result_of(asked(a, f"t-{n}"), spec, f"u-{n}"))
    assert a.fetch(spec.layout_hash, 0).version == 0
    b.push(result_of(early, spec, "u-b"))
    for version in (0, 1, 2, 3):
        with pytest.raises(UnknownVersion, match=f"version {version} is not held"):
            a.fetch(spec.layout_hash, version)
    assert a.fetch(spec.layout_hash).version == 4


@pytest.mark.parametrize("kept", [True, False])
def test_payloads_are_kept_as_the_configuration_says(kept: bool) -> None:
    server = LocalServer(first_weights(), config(run={"keep_payloads": kept}))
    a = device(server)
    entry = result_of(asked(a, "t"), server.spec, "u")
    a.push(entry)
    assert server.payloads == ({entry.digest: entry.payload} if kept else {})


def test_an_operator_gives_orders(server: LocalServer) -> None:
    a = device(server)
    server.take(ev.Paused(server.clock()))
    refused = a.ask(Ask("a", "t"), server.spec)
    assert "paused" in str(refused)
    assert [record["kind"] for record in server.journal] == ["enrolled", "paused"]


def test_what_is_longer_than_its_codec_needs_is_not_taken(server: LocalServer) -> None:
    a = device(server)
    payload = bytes(4 * server.spec.size + 1)
    with pytest.raises(TooLarge, match="raw needs at most"):
        a.push(result_of(asked(a, "t"), server.spec, "u", payload=payload))
    assert server.receipt("u") is None


def test_devices_learn_what_becomes_of_their_own_buffers() -> None:
    server = LocalServer.of(Synthetic(), config(model={"buffers": "local"}))
    enrolled = LocalTransport(server, "a").enrol(Capability(examples=10))
    assert enrolled.config["model"]["buffers"] == "local"


def test_settings_that_fit_no_run_are_refused() -> None:
    with pytest.raises(ConfigError, match="strategy"):
        LocalServer(first_weights(), config(strategy={"name": "fedwhat"}))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"secagg": {"mode": "keeper", "keepers": ["ab" * 32], "clip": 1.0}}, "nothing of this run masks"),
        ({"privacy": {"clip": 1.0, "noise": 1.0, "participations": 4}}, "no key for the noise here"),
    ],
)
def test_what_is_kept_from_a_server_is_not_promised_by_one_in_the_same_process(
    table: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        LocalServer(first_weights(), config(strategy={"name": "fedbuff", "buffer_size": 2}, **table))


def test_devices_in_threads_learn_together(tmp_path: Path) -> None:
    settings = config(run={"updates_max": 24}, client={"steps": 8, "batch_size": 16})
    server = LocalServer.of(Synthetic(), settings)
    done: list[Any] = []

    def work(n: int) -> None:
        folder = tmp_path / f"d{n}"
        transport = LocalTransport(server, f"d{n}")
        done.append(Agent(Synthetic(), transport, f"d{n}", Shard("train", n, 3), folder).run())

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [summary.run_ended for summary in done] == [True] * 3
    assert sum(summary.applied for summary in done) == server.engine.counters.applied == 24
    assert not np.array_equal(server.engine.vector, server.spec.flatten(first_weights()))
