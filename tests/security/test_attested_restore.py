"""A server's data come from a backup, its operator says so, and the devices go on by themselves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import anabranch, answer, serving
from guarded import TENSORS, Federation, federation
from server_process import free_port
from wire import Served, server_config

from anabranch.client.history import HistoryRestored, SeenHistory
from anabranch.client.transport import GrpcTransport
from anabranch.core.errors import ConfigError, HistoryMismatch
from anabranch.core.updates import Ask, Capability, Task
from anabranch.identity.authority import Authority
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.restored import FILE, attest

RUN = """
[run]
workload = "synthetic"
updates_max = 12
[fleet]
examples_per_client = 40
[strategy]
name = "fedbuff"
buffer_size = 1
"""


@contextmanager
def started_again(guarded: Federation) -> Iterator[Served]:
    """The server on the data as they are now."""
    guarded.served = Served(guarded.served.config, guarded.served.manifest)
    with guarded.served as served:
        yield served


def take_back(guarded: Federation, backup: Path) -> None:
    """Stop the server and put its data back as they were."""
    guarded.served.close()
    shutil.rmtree(guarded.data_dir)
    shutil.copytree(backup, guarded.data_dir)


def back_up(guarded: Federation, backup: Path) -> None:
    """Stop the server and copy its data."""
    guarded.served.close()
    shutil.copytree(guarded.data_dir, backup)


def fetch(transport: GrpcTransport, guarded: Federation) -> int:
    """The newest version."""
    transport.enrol(Capability())
    return transport.fetch(guarded.served.manifest.spec.layout_hash).version


def test_a_restore_that_the_authority_attests_is_believed_once(tmp_path: Path) -> None:
    with federation(tmp_path) as guarded:
        wallet, other = guarded.joined("device-1"), guarded.joined("device-2")
        works(guarded, other, 1)
        back_up(guarded, tmp_path / "backup")
        with started_again(guarded):
            works(guarded, other, 2)
            seen = fetch(guarded.transport(wallet), guarded)
            assert seen == 3
        take_back(guarded, tmp_path / "backup")
        with started_again(guarded):
            works(guarded, other, 1, 5.0)  # another version 2
            with pytest.raises(HistoryMismatch, match="attest-restore"):
                fetch(guarded.transport(wallet), guarded)
        take_back(guarded, tmp_path / "backup")
        attest(guarded.data_dir, "", guarded.authority)
        with started_again(guarded):
            works(guarded, other, 3, 5.0)
            with pytest.raises(HistoryRestored, match="restored to version 1"):
                fetch(guarded.transport(wallet), guarded)
            assert fetch(guarded.transport(wallet), guarded) == 4  # from now on it follows
            fresh = guarded.joined("device-3")
            assert fetch(guarded.transport(fresh), guarded) == 4
        take_back(guarded, tmp_path / "backup")
        assert not (guarded.data_dir / FILE).exists()
        with started_again(guarded), pytest.raises(HistoryMismatch):
            fetch(guarded.transport(wallet), guarded)  # nobody has attested this one


def works(guarded: Federation, wallet: Any, times: int, value: float = 1.0) -> None:
    """A device pushes so many updates."""
    device = guarded.device(wallet)
    device.enrol()
    for _ in range(times):
        device.work(value)


def test_an_attestation_that_was_told_before_takes_nobody_back(tmp_path: Path) -> None:
    with federation(tmp_path) as guarded:
        wallet, other = guarded.joined("device-1"), guarded.joined("device-2")
        works(guarded, other, 1)
        guarded.served.close()
        attest(guarded.data_dir, "", guarded.authority)
        shutil.copytree(guarded.data_dir, tmp_path / "backup")
        with started_again(guarded):
            works(guarded, other, 2)
            assert fetch(guarded.transport(wallet), guarded) == 3  # it hears of the restore, and needs it not
        take_back(guarded, tmp_path / "backup")  # with the attestation of then
        with started_again(guarded), pytest.raises(HistoryMismatch) as refused:
            fetch(guarded.transport(wallet), guarded)
        assert not isinstance(refused.value, HistoryRestored)


@pytest.mark.parametrize("change", [{"version": 0}, {"head": "ab" * 32}, {"signature": "00"}, {"number": 1}])
def test_a_server_does_not_start_on_what_the_authority_did_not_sign(
    change: dict[str, Any], tmp_path: Path
) -> None:
    with federation(tmp_path) as guarded:
        works(guarded, guarded.joined("device-2"), 2)
        guarded.served.close()
        attest(guarded.data_dir, "", guarded.authority)
        path = guarded.data_dir / FILE
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        with pytest.raises(ConfigError, match="attest-restore"), started_again(guarded):
            pass


def test_another_authority_is_not_believed(tmp_path: Path) -> None:
    with federation(tmp_path) as guarded, Authority.create(tmp_path / "other") as other:
        wallet = guarded.joined("device-1")
        works(guarded, guarded.joined("device-2"), 2)
        memory = SeenHistory(guarded.authority.certificate, None)
        device = guarded.device(wallet)
        device.enrol()
        header, _ = device.fetch()
        memory.check(header, lambda after, to: b"")
        guarded.served.close()
        forged = attest(guarded.data_dir, "", other)
        (guarded.data_dir / FILE).unlink()
        header.restored.CopyFrom(forged.to_proto())
        header.restored.number += 1 << 40
        older = type(header)()
        older.CopyFrom(header)
        memory.check(older, lambda after, to: b"")  # it says nothing, and nothing is remembered of it
        assert memory._seen[header.run_id].restored == 0


# --- the base of a training -----------------------------------------------------------------------------


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path / "model", "test", TENSORS)


def test_nobody_trains_from_a_lost_version_of_the_same_number(tmp_path: Path, manifest: Manifest) -> None:
    """Without an authority, so that nothing is signed and nothing remembered: numbers alone are no proof."""
    config = server_config(tmp_path / "data")
    spec = manifest.spec
    with Served(config, manifest) as served:
        pushes(served, 1)
    shutil.copytree(tmp_path / "data", tmp_path / "backup")
    port = free_port()
    config = server_config(tmp_path / "data", server={"address": f"127.0.0.1:{port}"})
    with GrpcTransport(f"127.0.0.1:{port}", "device-1", reconnect_max_s=0.2) as transport:
        with Served(config, manifest) as served:
            pushes(served, 1)
            transport.enrol(Capability())
            lost = transport.fetch(spec.layout_hash, 2)
        shutil.rmtree(tmp_path / "data")
        shutil.copytree(tmp_path / "backup", tmp_path / "data")
        attest(tmp_path / "data", "", None)
        with Served(config, manifest) as served:
            pushes(served, 1, 5.0)
            transport.enrol(Capability())
            with pytest.raises(HistoryRestored, match="version 2 may be another"):
                granted(transport, Ask("device-1", "task-1", 2), manifest)
            task = granted(transport, Ask("device-1", "task-2", None), manifest)
            found = transport.fetch(spec.layout_hash, task.base_version)
            assert (found.version, lost.version) == (2, 2)
            assert found.data != lost.data
            assert np.frombuffer(found.data, np.float32).tolist() == [6.0] * 8
            again = granted(transport, Ask("device-1", "task-3", 2), manifest)  # it has this one
            assert again.base_version == 2


def granted(transport: GrpcTransport, ask: Ask, manifest: Manifest) -> Task:
    """The task that is granted."""
    answer = transport.ask(ask, manifest.spec)
    assert isinstance(answer, Task), answer
    return answer


def pushes(served: Served, times: int, value: float = 1.0) -> None:
    """A device pushes so many updates."""
    device = served.device("device-9")
    device.enrol()
    for _ in range(times):
        device.work(value)


# --- as its users see it --------------------------------------------------------------------------------


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "plain"])
def test_devices_go_on_by_themselves_after_a_restore(guarded: bool, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    answer(anabranch(tmp_path, "init", "synthetic", "--out", "model", "--json"))
    sha256 = answer(anabranch(tmp_path, "admin", "ca", "init", "--json"))["ca_sha256"]
    ports = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    settings = [f"identity.join_address={ports[2]}", f"identity.tls={'always' if guarded else 'auto'}"]
    start: list[object] = ["run.toml", "--model", "model", "--address", ports[0], "--admin-address", ports[1]]
    start += ["--data-dir", "data", *(word for text in settings for word in ("--set", text))]
    device: list[object] = ["client", "synthetic", "--server", ports[0], "--state-dir", "device", "--json"]
    joining: list[object] = ["--id", "device-1"]
    if guarded:
        token = answer(anabranch(tmp_path, "admin", "enrol", "device-1", "--json"))["token"]
        joining = ["--join", ports[2], "--ca-sha256", sha256, "--token", token]
    with serving(tmp_path, *start):
        assert answer(anabranch(tmp_path, *device, *joining, "--tasks-max", 3))["answered"] == 3
    shutil.copytree(tmp_path / "data", tmp_path / "backup")
    command = [sys.executable, "-m", "anabranch.cli.main", *map(str, device)]
    with (tmp_path / "device.log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, text=True)
    with process:
        assert process.stdout is not None
        with serving(tmp_path, *start):
            for line in process.stdout:
                said = json.loads(line)
                if said["kind"] == "pushed" and said["version"] >= 6:
                    break
        shutil.rmtree(tmp_path / "data")
        shutil.copytree(tmp_path / "backup", tmp_path / "data")
        unsigned = [] if guarded else ["--insecure"]
        attest_it = ("admin", "attest-restore", "--data-dir", "data", *unsigned, "--json")
        assert answer(anabranch(tmp_path, *attest_it))["version"] == 3
        with serving(tmp_path, *start) as served:
            assert served["version"] == 3
            rest = process.stdout.read()
            assert process.wait(60) == 0, (tmp_path / "device.log").read_text() + rest
    # Where nothing is signed nothing was remembered: it fetches what its task starts from, and goes on.
    assert ("discarded, and the device goes on" in (tmp_path / "device.log").read_text()) == guarded
    found = answer(anabranch(tmp_path, "verify", "data", "--json"))
    assert (found["problems"], found["version"]) == ([], 12)
