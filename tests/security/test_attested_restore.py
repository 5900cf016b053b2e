"""A server's data come from a backup, its operator says so, and the devices go on by themselves."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import anabranch, answer, serving
from guarded import TENSORS, Federation, federation
from nursery import COMMAND, PIPE, Process
from ports import free_port
from wire import Served, server_config

from anabranch.client.agent import Agent
from anabranch.client.base_model import BaseModel
from anabranch.client.held import VECTOR, HeldModels
from anabranch.client.history import HistoryRestored, SeenHistory
from anabranch.client.records import read_record, write_record
from anabranch.client.state import HELD
from anabranch.client.summary import AgentSummary
from anabranch.client.trainer import LocalTrainer
from anabranch.client.transport import GrpcTransport
from anabranch.core.config.tables import ClientTable
from anabranch.core.errors import ConfigError, FolderMissing, HistoryMismatch, StoreError
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.model.params import digest
from anabranch.core.model.updates import Ask, Capability, Task
from anabranch.identity.authority import Authority
from anabranch.identity.wallet import Wallet
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.restored import FILE, attest, read_restored
from anabranch.server.store.base import Mark
from anabranch.server.store.factory import open_store
from anabranch.server.verify import verify
from anabranch.testing.federation import BASE, first_weights
from anabranch.testing.store import INFO, asked
from anabranch.workloads.app import Shard
from anabranch.workloads.synthetic import Synthetic

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


@contextmanager
def believed(
    guarded: Federation, backup: Path, authority: Authority, worker: Wallet, wallet: Wallet, value: float
) -> Iterator[None]:
    """Put the backup of version 1 back, attested, serve three versions more: a device comes to follow."""
    take_back(guarded, backup)
    attest(guarded.data_dir, "", authority)
    with guarded.started_again():
        works(guarded, worker, 3, value)
        with pytest.raises(HistoryRestored, match="restored to version 1"):
            fetch(guarded.transport(wallet), guarded)
        assert fetch(guarded.transport(wallet), guarded) == 4  # from now on it follows
        yield


def test_a_restore_that_the_authority_attests_is_believed_once(tmp_path: Path) -> None:
    with federation(tmp_path) as guarded:
        wallet, other = guarded.joined("device-1"), guarded.joined("device-2")
        works(guarded, other, 1)
        back_up(guarded, tmp_path / "backup")
        with guarded.started_again():
            works(guarded, other, 2)
            seen = fetch(guarded.transport(wallet), guarded)
            assert seen == 3
        take_back(guarded, tmp_path / "backup")
        with guarded.started_again():
            works(guarded, other, 1, 5.0)  # another version 2
            with pytest.raises(HistoryMismatch, match="attest-restore"):
                fetch(guarded.transport(wallet), guarded)
        with believed(guarded, tmp_path / "backup", guarded.authority, other, wallet, 5.0):
            fresh = guarded.joined("device-3")
            assert fetch(guarded.transport(fresh), guarded) == 4
        take_back(guarded, tmp_path / "backup")
        assert not (guarded.data_dir / FILE).exists()
        with guarded.started_again(), pytest.raises(HistoryMismatch):
            fetch(guarded.transport(wallet), guarded)  # nobody has attested this one


def test_a_second_restore_is_believed_though_the_clock_was_set_back(tmp_path: Path) -> None:
    with federation(tmp_path) as guarded:
        wallet, other = guarded.joined("device-1"), guarded.joined("device-2")
        works(guarded, other, 1)
        back_up(guarded, tmp_path / "backup")
        with guarded.started_again():
            works(guarded, other, 2)
            assert fetch(guarded.transport(wallet), guarded) == 3
        an_hour_ago = guarded.authority.now() - 3600.0
        for value, authority in (
            (5.0, guarded.authority),
            (7.0, Authority.open(guarded.authority.folder, lambda: an_hour_ago)),
        ):
            with believed(guarded, tmp_path / "backup", authority, other, wallet, value):
                pass
        authority.close()


def test_a_database_that_is_put_back_on_another_machine_needs_no_folder_there(
    tmp_path: Path, postgresql_url: str
) -> None:
    """pg_restore brings the database alone: the folder of the data has nothing in it, or is not there."""
    manifest = write_manifest(tmp_path / "model", "test", {"w": np.zeros(8, np.float32)})
    server = {"database": postgresql_url}
    with Served(server_config(tmp_path / "lost", server=server), manifest) as served:
        served.device().work()
    elsewhere = tmp_path / "elsewhere" / "data"
    made = attest(elsewhere, postgresql_url, None)
    assert (made.version, (elsewhere / FILE).is_file()) == (1, True)
    with Served(server_config(elsewhere, server=server), manifest) as served:
        assert served.device("other").task().base_version == 1
    with pytest.raises(FolderMissing):
        attest(tmp_path / "mistyped", "", None)


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
        with guarded.started_again():
            works(guarded, other, 2)
            assert fetch(guarded.transport(wallet), guarded) == 3  # it hears of the restore, and needs it not
        take_back(guarded, tmp_path / "backup")  # with the attestation of then
        with guarded.started_again(), pytest.raises(HistoryMismatch) as refused:
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
        mend = f"attest-restore --data-dir {guarded.data_dir} --folder {guarded.authority.folder}"
        with pytest.raises(ConfigError, match=re.escape(mend)), guarded.started_again():
            pass


def test_an_attestation_that_cannot_be_read_now_is_not_damaged(tmp_path: Path) -> None:
    """Nobody is told to sign once more: the next start may read it."""
    store = open_store("", tmp_path)
    (tmp_path / FILE).mkdir()
    with pytest.raises(StoreError, match=rf"{FILE} cannot be used: Is a directory"):
        read_restored(tmp_path, "", store, INFO, None)


def test_a_word_to_be_given_again_is_for_the_database_that_is_served(tmp_path: Path) -> None:
    store = open_store("", tmp_path)
    (tmp_path / FILE).write_text("{")
    mend = f"attest-restore --data-dir {tmp_path} --database URL --insecure"
    with pytest.raises(ConfigError, match=re.escape(mend)):
        read_restored(tmp_path, "postgresql:///runs", store, INFO, None)


def test_another_authority_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with federation(tmp_path) as guarded, Authority.create(tmp_path / "other") as other:
        wallet = guarded.joined("device-1")
        works(guarded, guarded.joined("device-2"), 2)
        memory = SeenHistory(guarded.authority.certificate, None)
        device = guarded.device(wallet)
        device.enrol()
        header, _ = device.fetch()
        memory.check(header, lambda after, to: b"")
        guarded.served.close()
        for authority, is_believed in ((other, False), (guarded.authority, True)):
            made = attest(guarded.data_dir, "", authority)
            header.restored.CopyFrom(made.to_proto())
            memory.check(header, lambda after, to: b"")
            assert memory._seen[header.run_id].restored == (made.number if is_believed else 0)
            assert caplog.text.count("is attested by somebody else than the authority") == 1


# --- the base of a training -----------------------------------------------------------------------------


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path / "model", "test", TENSORS)


@pytest.mark.parametrize("attested", [True, False])
def test_nobody_trains_from_a_lost_version_of_the_same_number(
    attested: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the clear nothing is signed, and no history remembered: what is held is known by its head."""
    manifest, port = write_manifest(tmp_path / "model", "test", first_weights()), free_port()
    config = server_config(tmp_path / "data", server={"address": f"127.0.0.1:{port}"})
    with Served(config, manifest) as served:
        pushes(served, 1)
    shutil.copytree(tmp_path / "data", tmp_path / "backup")
    with Device(port, tmp_path / "device") as device:
        with Served(config, manifest) as served:
            pushes(served, 1)
            assert device.starts_from("task-0") == (2, 2.0)
        shutil.rmtree(tmp_path / "data")
        shutil.copytree(tmp_path / "backup", tmp_path / "data")
        if attested:
            attest(tmp_path / "data", "", None)
        with Served(config, manifest) as served:
            pushes(served, 1, 5.0)
            assert device.starts_from("task-1") == (2, 6.0)
            assert device.fetches == 2
            lost = "version 2 that is here is not the server's of that number, whose data were put back, say"
            assert f"{lost}: it is fetched anew" in caplog.messages
            assert device.starts_from("task-2") == (2, 6.0)
            assert device.fetches == 2  # it has this one
    with Device(port, tmp_path / "device") as device, Served(config, manifest):
        assert device.starts_from("task-3") == (2, 6.0)
        assert device.fetches == 0  # it was on its disk
    record = read_record(tmp_path / "device" / HELD)
    assert record is not None
    facts = {
        name: fact for name, fact in record.facts.items() if name != "head"
    }  # as older releases wrote it
    write_record(tmp_path / "device" / HELD, replace(record, facts=facts), durable=False)
    caplog.clear()
    with Device(port, tmp_path / "device") as device, Served(config, manifest):
        assert device.starts_from("task-4") == (2, 6.0)
        assert device.fetches == 1
        assert [text.split(":")[0] for text in caplog.messages if "fetched anew" in text] == [
            "version 2 was kept here by an older release, which kept its number and not its name"
        ]


def test_an_update_from_a_lost_version_is_refused_by_its_name(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data")
    with Served(config, manifest) as served:
        device = served.device()
        device.work()
        task = device.task()
        assert task.base_head == device.fetch()[0].head != b""
        lost = device.answer(task, 64.0, base_head=bytes(32)).decision
        assert (lost.verdict, lost.reason) == ("rejected", "other_base")
        assert "of another history, which is lost" in lost.detail
        task = device.task()
        assert device.answer(task, 2.0, base_head=task.base_head).decision.verdict == "published"
        assert device.answer(device.task(), 4.0).decision.verdict == "published"  # who knows of no names
        assert served.model().tolist() == [7.0] * 8
    assert verify(tmp_path / "data").problems == ()


def test_a_device_that_holds_a_lost_version_finds_out_at_the_grant(tmp_path: Path) -> None:
    """Over mutual TLS, with no word of the authority: it ends before it has trained."""
    with federation(tmp_path, first_weights(), DEFAULT_LIMITS, time.time, **BASE) as guarded:
        wallet, other = guarded.joined("device-1"), guarded.joined("device-2")

        def agent(name: str, wallet: Any) -> Agent:
            shard, folder = Shard("train", 0, 4), tmp_path / name
            return Agent(Synthetic(), guarded.transport(wallet), name, shard, folder, tasks_max=2)

        back_up(guarded, tmp_path / "backup")
        with guarded.started_again():
            assert agent("device-1", wallet).run().answered == 2  # it holds version 1, and has its head
        take_back(guarded, tmp_path / "backup")
        with guarded.started_again():
            works(guarded, other, 1, 64.0)
            with pytest.raises(HistoryMismatch, match="version 1 has another history"):
                agent("device-1", wallet).run()
            assert guarded.operators(guarded.operator()).status().updates_applied == 1


class Device:
    """A device's models, over the network."""

    def __init__(self, port: int, folder: Path) -> None:
        self._transport = GrpcTransport(f"127.0.0.1:{port}", "device-1", reconnect_max_s=0.2)
        self._local, self.fetches = LocalTrainer(Synthetic(), ClientTable()), 0
        parts = (folder, time.monotonic, AgentSummary("device-1"), self._hear)
        self._models = HeldModels(self._local, self._transport, *parts)
        folder.mkdir(exist_ok=True)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()

    def _hear(self, kind: str, **_: Any) -> None:
        self.fetches += kind == "fetched"

    def starts_from(self, task_id: str) -> tuple[int, float]:
        """The version that a task starts from, and by how much its model is above the first weights."""
        spec = self._local.spec
        self._models.join(self._transport.enrol(Capability()).run_id)
        holds = self._models.holds
        assert not isinstance(holds, tuple), "it is of no sub-models"
        task = self._transport.ask(Ask("device-1", task_id, holds), spec)
        assert isinstance(task, Task), task
        above = self._models.get(task).vector - spec.flatten(first_weights())
        assert np.ptp(above) < 1e-5
        return task.base_version, round(float(above.mean()), 3)


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
    with (tmp_path / "device.log").open("w") as log:
        process = Process(COMMAND, *device, cwd=tmp_path, stdout=PIPE, stderr=log)
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
        if not guarded:
            nobodys = ("--data-dir", "data", "--folder", "nowhere")
            refused = anabranch(tmp_path, "admin", "attest-restore", *nobodys)
            assert (refused.returncode, "--insecure" in refused.stderr) == (2, True), "none is to be made now"
        attest_it = ("admin", "attest-restore", "--data-dir", "data", *unsigned, "--json")
        assert answer(anabranch(tmp_path, *attest_it))["version"] == 3
        with serving(tmp_path, *start) as served:
            assert served["version"] == 3
            rest = process.stdout.read()
            assert process.wait(600) == 0, (tmp_path / "device.log").read_text() + rest
    # Where nothing is signed nothing was remembered: it fetches what its task starts from, and goes on.
    assert ("discarded, and the device goes on" in (tmp_path / "device.log").read_text()) == guarded
    found = answer(anabranch(tmp_path, "verify", "data", "--json"))
    assert (found["problems"], found["version"]) == ([], 12)


def test_older_data_are_put_back_and_nobody_says_so(tmp_path: Path) -> None:
    """The same numbers name other models then; a device that holds one of the lost ones fetches anew."""
    (tmp_path / "run.toml").write_text(RUN)
    answer(anabranch(tmp_path, "init", "synthetic", "--out", "model", "--json"))
    address = f"127.0.0.1:{free_port()}"
    start = ["run.toml", "--model", "model", "--address", address, "--admin-address", "127.0.0.1:0"]
    start += ["--data-dir", "data"]

    def work(name: str, tasks: int) -> list[dict[str, Any]]:
        command = ["client", "synthetic", "--server", address, "--id", name, "--state-dir", name]
        done = anabranch(tmp_path, *command, "--tasks-max", tasks, "--json")
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    with serving(tmp_path, *start):
        pass
    shutil.copytree(tmp_path / "data", tmp_path / "backup")
    with serving(tmp_path, *start):
        work("device-1", 2)
    lost = held_by(tmp_path, "device-1")
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "backup").rename(tmp_path / "data")
    with serving(tmp_path, *start):
        work("device-2", 1)
        said = work("device-1", 1)
    granted, pushed = (next(s for s in said if s["kind"] == kind) for kind in ("granted", "pushed"))
    assert (granted["base_version"], pushed["verdict"], pushed["version"]) == (1, "published", 2)
    store = open_store("", tmp_path / "data")
    (first,) = store.versions(limit=1)
    store.close()
    now = held_by(tmp_path, "device-1")
    assert (lost.version, now.version, first.version) == (1, 1, 1)
    assert digest(lost.vector) != first.sha256
    assert digest(now.vector) == first.sha256


def held_by(folder: Path, name: str) -> BaseModel:
    """The model that is on a device's disk, whatever its run."""
    record = read_record(folder / name / HELD)
    assert record is not None
    return BaseModel(int(record.facts["version"]), record.arrays[VECTOR], {})


def test_a_word_for_postgresql_leaves_the_folder_of_a_run_on_sqlite(
    tmp_path: Path, postgresql_url: str
) -> None:
    """A wrong `--data-dir`: that run keeps its mark, by which its losses are seen, and gets no word."""
    ours, its = open_store("", tmp_path / "data"), open_store(postgresql_url, tmp_path / "other")
    for store, run_id in ((ours, INFO.run_id), (its, "another")):
        store.start(replace(INFO, run_id=run_id))
        store.append([asked("t1")])
        store.acknowledge(Mark(run_id, 1, "ab" * 32))
        store.close()
    mark = (tmp_path / "data/acknowledged").read_bytes()
    with pytest.raises(ConfigError, match=r"has run run-1 on SQLite.*another server\.data_dir"):
        attest(tmp_path / "data", postgresql_url, None)
    assert (tmp_path / "data/acknowledged").read_bytes() == mark
    assert not (tmp_path / "data" / FILE).exists()
    assert attest(tmp_path / "other", postgresql_url, None).run_id == "another"
