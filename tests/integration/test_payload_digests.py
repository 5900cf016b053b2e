"""Updates named by SHA-256 and by BLAKE3 in one run, over real gRPC, through restarts, audits and copies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from contents import named, package
from guarded import federation
from ports import free_port
from wire import Device, Served, chunks, requests, server_config

from anabranch.client.agent import Agent
from anabranch.client.trainer import LocalTrainer
from anabranch.client.transfer import signed_record, update_header
from anabranch.client.transport import GrpcTransport
from anabranch.core import content
from anabranch.core import events as ev
from anabranch.core.config.tables import ClientTable
from anabranch.core.errors import ConfigError
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.model.updates import Ask, Capability, LocalPlan, Task
from anabranch.identity.signatures import update_message
from anabranch.reports.journal_files import PayloadReader
from anabranch.server.backup import back_up
from anabranch.server.export import export_run
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.store import blobs
from anabranch.server.store.factory import open_store
from anabranch.server.verify import verify
from anabranch.testing.federation import config as small
from anabranch.testing.federation import first_weights, result_of
from anabranch.workloads.app import Shard
from anabranch.workloads.synthetic import Synthetic

OFFERED = {"run": {"payload_digest": "blake3"}}
# In the log, in files of their own.
WHERE = {"log": DEFAULT_LIMITS.inline_bytes_max, "files": 1000}
SIZE = 30_000


@pytest.fixture(autouse=True)
def installed() -> None:
    package()


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path / "model", "test", {"w": np.zeros(SIZE, np.float32)})


@pytest.fixture(params=WHERE)
def serve(request: pytest.FixtureRequest, tmp_path: Path, manifest: Manifest) -> Callable[..., Served]:
    """Opens a server, again after it was closed, with tables of a run that offers BLAKE3 or that does not."""
    limits = replace(DEFAULT_LIMITS, inline_bytes_max=WHERE[request.param])

    def made(**tables: Any) -> Served:
        return Served(server_config(tmp_path / "data", **tables), manifest, limits)

    return made


def pair(server: Served) -> tuple[Device, Device]:
    """A device that names its updates by SHA-256, and one that does by BLAKE3."""
    old, new = server.device("old"), server.device("new")
    new.blake3 = True
    return old, new


def digests(data_dir: Path) -> list[str]:
    """What the log says of each update's payload; its bytes are there, under that name."""
    store = open_store("", data_dir)
    try:
        found = [ev.Payload(**record["payload"]) for _, record in store.records() if "payload" in record]
        for payload in found:
            algorithm = "blake3" if payload.sha256.startswith("blake3-") else "sha256"
            assert payload.sha256 == named(bytes(store.payload(payload)), algorithm)
        return [payload.sha256 for payload in found]
    finally:
        store.close()


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return str(error.value.details())


def test_a_mixed_fleet_makes_one_model(
    serve: Callable[..., Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        blobs, "digest_like", lambda *_: pytest.fail("what grew with the chunks is made again")
    )
    with serve(**OFFERED) as server:
        old, new = pair(server)
        assert json.loads(old.enrol().config_json)["run"]["payload_digest"] == "blake3"
        for value, device in enumerate((old, new, old, new), start=1):
            assert device.work(value).decision.verdict == "published"
        assert server.model().tolist() == [10.0] * SIZE
    assert [digest.partition("-")[0] == "blake3" for digest in digests(tmp_path / "data")] == [
        False,
        True,
    ] * 2
    found = verify(tmp_path / "data", whole=True)
    assert (found.problems, found.version, found.updates) == ((), 4, 4)


def test_a_resend_is_known_and_damage_is_not_taken(serve: Callable[..., Served]) -> None:
    with serve(**OFFERED) as server:
        _, device = pair(server)
        task, data = device.task(), np.ones(SIZE, np.float32).tobytes()
        damaged = device.header(task, data[1:] + b"!", "u")
        push = device.stub.PushUpdate
        assert "digest" in error_of(lambda: push(requests(damaged, chunks(data))))
        first = device.send(task, data, "u")
        again = device.send(task, data, "u")
        assert (again.status, again.version, again.decision) == (2, first.version, first.decision)
        device.blake3 = False
        assert "by its blake3 digest, which a resend repeats" in error_of(
            lambda: device.send(task, data, "u")
        )
        assert server.model().tolist() == [1.0] * SIZE


@pytest.mark.parametrize("goes_on_by", ["sha256", "blake3"])
@pytest.mark.parametrize("restarted", [False, True])
def test_an_upload_goes_on_where_it_was_cut(
    serve: Callable[..., Served], goes_on_by: str, restarted: bool, tmp_path: Path
) -> None:
    data = np.ones(SIZE, np.float32).tobytes()
    server = serve(**OFFERED).__enter__()
    _, device = pair(server)
    task = device.task()
    header = device.header(task, data, "u")
    assert "bytes declared" in error_of(
        lambda: device.stub.PushUpdate(requests(header, chunks(data[: SIZE + 1], size=10_000)))
    )
    if restarted:
        server.close()
        server = serve(**OFFERED).__enter__()
        _, device = pair(server)
    device.blake3 = goes_on_by == "blake3"
    offset = device.query("u").received_bytes
    assert restarted or offset == SIZE + 1
    assert device.send(task, data, "u", offset).decision.verdict == "published"
    server.close()
    assert digests(tmp_path / "data") == [named(data, goes_on_by)]


def test_a_run_of_before_goes_on_with_what_it_is_now_offered(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    with serve() as server:
        assert "payload_digest" not in json.loads(server.device().enrol().config_json)["run"]
        server.device().work()
    with serve(**OFFERED) as server:
        pair(server)[1].work()
        task, data = pair(server)[1].task(), np.ones(SIZE, np.float32).tobytes()
        first = pair(server)[1].send(task, data, "u")
    with serve() as server:  # not any more: what was taken by it is known by it
        _, device = pair(server)
        assert device.send(task, data, "u").version == first.version
        assert "does not offer (run.payload_digest): send its sha256" in error_of(device.work)
        device.blake3 = False
        device.work()
    kinds = [digest.startswith("blake3-") for digest in digests(tmp_path / "data")]
    assert kinds == [False, True, True, False]
    assert verify(tmp_path / "data", whole=True).problems == ()


def test_a_server_without_the_package_says_so_and_offers_nothing(
    serve: Callable[..., Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(**OFFERED) as server:
        pair(server)[1].work()
    monkeypatch.setattr(content, "blake3", None)
    needed = r'pip install "anabranch\[blake3\]"'
    with pytest.raises(ConfigError, match=needed):
        serve(**OFFERED).__enter__()
    with pytest.raises(ConfigError, match=needed):
        verify(tmp_path / "data", whole=True)


def test_copies_and_exports_have_all_payloads(serve: Callable[..., Served], tmp_path: Path) -> None:
    with serve(**OFFERED) as server:
        for device in pair(server):
            device.work()
        assert back_up(tmp_path / "data", tmp_path / "backup").proved
    assert verify(tmp_path / "backup", whole=True).problems == ()
    assert digests(tmp_path / "backup") == digests(tmp_path / "data")
    export_run(tmp_path / "data", "", tmp_path / "run")
    with PayloadReader(tmp_path / "run") as payloads:
        for digest in digests(tmp_path / "data"):
            assert payloads(ev.Payload(digest, 4 * SIZE)) == np.ones(SIZE, np.float32).tobytes()


@pytest.mark.parametrize("connection", ["calls", "stream"])
def test_agents_with_the_package_and_without_it(
    connection: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents themselves: what each has is what it names its updates by."""
    manifest = write_manifest(tmp_path / "model", "synthetic", first_weights())
    tables = small(client={"connection": connection}, **OFFERED).to_json()
    config = server_config(tmp_path / "data", **{k: tables[k] for k in ("run", "fleet", "client")})
    with Served(config, manifest) as server:
        assert server.info is not None
        for name, has in (("with", True), ("without", False)):
            monkeypatch.setattr(content, "BLAKE3_FROM_BYTES", 1)
            monkeypatch.setattr(content, "blake3", package().blake3 if has else None)
            transport = GrpcTransport(server.info.address, name)
            shard = Shard("train", 0, 4)
            Agent(Synthetic(), transport, name, shard, tmp_path / name, tasks_max=2, seed=7).run()
            transport.close()
            monkeypatch.undo()
    assert [digest.startswith("blake3-") for digest in digests(tmp_path / "data")] == [True] * 2 + [False] * 2
    assert verify(tmp_path / "data", whole=True).problems == ()


def test_a_device_goes_on_with_a_server_that_does_not_offer_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process enrolled with one that did; nothing of its work is lost, and nothing counts twice."""
    monkeypatch.setattr(content, "BLAKE3_FROM_BYTES", 1)
    manifest = write_manifest(tmp_path / "model", "synthetic", first_weights())
    tables = small(**OFFERED).to_json()
    address = f"127.0.0.1:{free_port()}"
    server = {"server": {"address": address}, "fleet": tables["fleet"], "client": tables["client"]}
    told: list[str] = []
    first = Served(server_config(tmp_path / "data", run=tables["run"], **server), manifest).__enter__()
    second = Served(server_config(tmp_path / "data", **server), manifest)

    def hear(kind: str, **_: Any) -> None:
        told.append(kind)
        if told.count("granted") == 2 and kind == "granted":
            first.close()
            second.__enter__()

    with GrpcTransport(address, "a", reconnect_max_s=0.2) as transport:
        shard = Shard("train", 0, 4)
        agent = Agent(Synthetic(), transport, "a", shard, tmp_path / "a", tasks_max=4, seed=7, on_event=hear)
        agent.run()
    second.close()
    kinds = [digest.startswith("blake3-") for digest in digests(tmp_path / "data")]
    assert kinds[0]
    assert kinds[1:] == [False] * 3
    assert told.count("pushed") == 4
    assert verify(tmp_path / "data", whole=True).version == 4


def test_masked_updates_keep_to_the_digest_of_all_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their boxes are bound to it, and keepers of all releases open them."""
    monkeypatch.setattr(content, "BLAKE3_FROM_BYTES", 1)
    local = LocalTrainer(Synthetic(), ClientTable())
    local.join(local.spec, OFFERED)
    local.load(Shard("train", 0, 4))
    delta = np.zeros(local.spec.size, np.float32)
    task = Task("t", "a", 0, 0.0, 60.0, 60.0, 1, LocalPlan())

    class Masking:
        def masked(self, delta: Any, *_: Any) -> tuple[bytes, dict[str, str]]:
            return bytes(100_000), {"north": "a box"}

    kinds = []
    for masker, payload_digest in ((None, "blake3"), (Masking(), "blake3"), (None, "sha256")):
        local.masker, local.payload_digest = masker, payload_digest  # type: ignore[assignment]
        entry, _ = local.pack(task, "u", delta, delta.copy(), 1, {}, None, "")
        kinds.append(entry.algorithm)
    assert kinds == ["blake3", "sha256", "sha256"]


def test_signatures_are_over_the_digest_as_it_is_written(tmp_path: Path) -> None:
    with federation(tmp_path, **OFFERED) as guarded:
        wallet = guarded.joined("device-1")
        transport = guarded.transport(wallet)
        spec = transport.enrol(Capability()).spec
        task = transport.ask(Ask("device-1", "t-1"), spec)
        assert isinstance(task, Task)
        entry = result_of(task, spec, "u-1", algorithm="blake3")
        transport.push(entry)
        record = signed_record(entry, "device-1", spec)
        assert record["payload"]["sha256"] == named(bytes(entry.payload), "blake3")
        said = json.loads(update_message("r", record).partition(b"\n")[2])
        assert said["payload"]["sha256"].startswith("blake3-")
        assert update_header(entry, "device-1").parts[0].sha256 == b""
        guarded.served.close()
    found = verify(guarded.data_dir, ca_sha256=guarded.authority.sha256)
    assert (found.problems, found.signed) == ((), 1)
