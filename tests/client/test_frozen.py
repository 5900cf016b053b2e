"""What is frozen reaches a device once, by its digest and any door; updates and versions are without it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest
from frozen_apps import BASE_BYTES, HEAD, HEAD_SIZE, Head, base
from live_server import live_server
from safetensors.numpy import load_file
from wire import Device

from anabranch.client.agent import Agent
from anabranch.client.follower import Follower
from anabranch.client.frozen import fetched_frozen
from anabranch.client.local import LocalServer, LocalTransport
from anabranch.client.messages import FetchedModel
from anabranch.client.operator import OperatorClient
from anabranch.client.run import ClientOptions, run_client
from anabranch.client.transport import GrpcTransport
from anabranch.compress.model import frozen_sha256
from anabranch.core.errors import InvalidUpdate, ManifestMismatch, TooLarge, UnknownVersion
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import Ask, Capability, Task
from anabranch.testing.federation import config, result_of
from anabranch.workloads.app import Shard
from anabranch.workloads.synthetic import Synthetic
from anabranch.workloads.trainer import trainer_for

FIRST = Head().model(1)
SPEC = ParamSpec.of(FIRST, trained=HEAD)
VERSION_BYTES = 4 * HEAD_SIZE
SHARD = Shard("train", 0, 4)


def served(**tables: Any) -> LocalServer:
    return LocalServer(FIRST, config(**tables), trained=HEAD)


def work(server: LocalServer, folder: Path, app: Head, tasks: int = 2) -> tuple[list[str], int]:
    """What a device in the same process told, and the bytes that it fetched."""
    told: list[str] = []
    agent = Agent(
        app,
        LocalTransport(server, "a"),
        "a",
        SHARD,
        folder,
        tasks_max=tasks,
        seed=7,
        on_event=lambda kind, **_: told.append(kind),
    )
    return told, agent.run().downlink_bytes


def test_a_device_fetches_what_is_frozen_once(tmp_path: Path) -> None:
    server = served()
    told, size = work(server, tmp_path / "a", Head(seed=9))
    assert (told.count("fetched_frozen"), size) == (1, BASE_BYTES + 2 * VERSION_BYTES)
    (file,) = (tmp_path / "a" / "frozen").iterdir()
    assert file.stem == frozen_sha256(SPEC, FIRST)
    told, size = work(server, tmp_path / "a", Head(seed=9))
    assert (told.count("fetched_frozen"), size) == (0, 2 * VERSION_BYTES)
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    told, _ = work(server, tmp_path / "a", Head(seed=9))
    assert told.count("fetched_frozen") == 1, "the file was damaged"


def test_a_device_that_has_it_fetches_nothing(tmp_path: Path) -> None:
    """Its App builds these very tensors. It then trains as one that fetched them, to the bit."""
    models = []
    for name, app in (("own", Head()), ("fetched", Head(seed=9))):
        server = served()
        told, _ = work(server, tmp_path / name, app, tasks=3)
        assert ("fetched_frozen" in told) == (name == "fetched")
        models.append({n: a.tobytes() for n, a in server.model().items()})
    assert models[0] == models[1]
    assert {n: models[0][n] for n in base()} == {n: a.tobytes() for n, a in base().items()}
    assert models[0]["output.weight"] != FIRST["output.weight"].tobytes()


class Damaged(LocalTransport):
    """Other bytes than the manifest names."""

    def fetch(self, *args: Any, **options: Any) -> FetchedModel:
        found = super().fetch(*args, **options)
        data = bytes(found.data)
        return FetchedModel(found.version, found.codec, bytes([data[0] ^ 1]) + data[1:])


def test_other_tensors_than_the_manifests_are_refused() -> None:
    server = served()
    with pytest.raises(InvalidUpdate, match="not those of the manifest: its SHA-256 differs"):
        fetched_frozen(Damaged(server, "a"), SPEC, server.frozen_sha256)


def test_who_trains_other_tensors_is_refused(tmp_path: Path) -> None:
    class Whole(Head):
        def trained(self, model: Any) -> None:
            return None

    with pytest.raises(ManifestMismatch, match=r"float32, the server hidden.weight .* frozen"):
        work(served(), tmp_path, Whole())


def test_where_it_is_local_who_has_other_tensors_is_refused_at_once(tmp_path: Path) -> None:
    server = served(run={"frozen": "local"})
    with pytest.raises(ManifestMismatch, match=r"run\.frozen = 'local'.* builds here are others: SHA-256"):
        work(server, tmp_path / "other", Head(seed=9))
    assert not server.engine.ledger.tasks
    assert not (tmp_path / "other" / "frozen").exists()
    told, size = work(server, tmp_path / "own", Head())
    assert (told.count("fetched_frozen"), size) == (0, 2 * VERSION_BYTES)
    assert server.engine.version > 0


@pytest.mark.parametrize("connection", ["calls", "stream"])
def test_over_the_wire(connection: str, tmp_path: Path) -> None:
    """Two lives of a device, an evaluator and an export, by calls and by a stream."""
    settings = config(client={"steps": 3, "connection": connection})
    told: list[str] = []
    with live_server(tmp_path, FIRST, settings, trained=HEAD) as info:
        options = ClientOptions("head", info.address, "a", state_dir=tmp_path / "a", tasks_max=2)
        summaries = [run_client(options, lambda kind, **_: told.append(kind), Head(seed=9)) for _ in range(2)]
        with OperatorClient(info.admin_address) as operator:
            status = operator.status()
            operator.export(tmp_path / "final.safetensors")
        with GrpcTransport(info.address, "follower") as transport:
            (seen,) = Follower(Head(seed=9), transport, Shard("test"), once=True)
    weights = load_file(tmp_path / "final.safetensors")
    assert told.count("fetched_frozen") == 1
    assert [s.downlink_bytes for s in summaries] == [BASE_BYTES + 2 * VERSION_BYTES, 2 * VERSION_BYTES]
    assert (status.version, status.uplink_bytes) == (4, 4 * VERSION_BYTES)
    assert status.downlink_bytes == BASE_BYTES + 4 * VERSION_BYTES
    assert {n: weights[n].tobytes() for n in base()} == {n: a.tobytes() for n, a in base().items()}
    trainer = trainer_for(Head())
    test = Synthetic().data(Shard("test"))
    assert seen.metrics == trainer.evaluate(SPEC.flatten(weights), SPEC.frozen(weights), test)


def test_the_part_is_served_from_any_offset(tmp_path: Path) -> None:
    whole = b"".join(FIRST[t.name].tobytes() for t in SPEC.tensors if t.name not in HEAD)
    with (
        live_server(tmp_path, FIRST, config(), trained=HEAD) as info,
        grpc.insecure_channel(info.address) as channel,
        GrpcTransport(info.address, "b") as transport,
    ):
        device = Device(channel, SPEC)
        for offset in (0, 1000, len(whole)):
            header, data = device.fetch(part_id=1, offset=offset)
            assert (data, header.part.part_id, header.part.size_bytes) == (whole[offset:], 1, len(whole))
            assert header.part.sha256.hex() == frozen_sha256(SPEC, FIRST)
        with pytest.raises(UnknownVersion, match=r"part 2 is not there: the parts .* are two"):
            transport.fetch(SPEC.layout_hash, part_id=2)
        with pytest.raises(grpc.RpcError, match="a part is frozen, which is in no update"):
            device.enrol()


def test_where_it_is_local_it_is_never_on_the_wire(tmp_path: Path) -> None:
    settings = config(client={"steps": 3}, run={"frozen": "local"})
    with live_server(tmp_path, FIRST, settings, trained=HEAD) as info:
        told = []
        for name, app in (("a", Head()), ("b", Head(seed=9))):
            options = ClientOptions("head", info.address, name, state_dir=tmp_path / name, tasks_max=2)
            with pytest.raises(ManifestMismatch) if name == "b" else nullcontext():
                told.append(run_client(options, app=app).downlink_bytes)
        assert told == [2 * VERSION_BYTES]
        assert not list(tmp_path.glob("**/frozen-*.bin"))
        with GrpcTransport(info.address, "c") as transport:
            with pytest.raises(UnknownVersion, match=r"not sent in this run \(run\.frozen = 'local'\)"):
                transport.fetch(SPEC.layout_hash, part_id=1)
            with OperatorClient(info.admin_address) as operator:
                status = operator.status()
                operator.export(tmp_path / "final.safetensors")
            known: Any = {"once": True, "config": status.config, "frozen_sha256": status.frozen_sha256}
            with pytest.raises(ManifestMismatch, match="builds here are others"):
                list(Follower(Head(seed=9), transport, Shard("test"), **known))
            (seen,) = Follower(Head(), transport, Shard("test"), **known)
    weights = load_file(tmp_path / "final.safetensors")
    assert {n: weights[n].tobytes() for n in base()} == {n: a.tobytes() for n, a in base().items()}
    test = Synthetic().data(Shard("test"))
    assert seen.metrics == trainer_for(Head()).evaluate(SPEC.flatten(weights), SPEC.frozen(weights), test)


def test_an_update_that_counts_a_frozen_tensor_is_refused() -> None:
    server, whole = served(), ParamSpec.of(FIRST)
    transport = LocalTransport(server, "a")
    transport.enrol(Capability())
    task = transport.ask(Ask("a", "t-1"), SPEC)
    assert isinstance(task, Task)
    with pytest.raises(ManifestMismatch, match="another model"):
        transport.fetch(whole.layout_hash)
    with pytest.raises((InvalidUpdate, TooLarge), match="bytes"):
        transport.push(result_of(task, whole, "u-1", manifest_sha256=SPEC.layout_hash, values=SPEC.size))
    assert transport.push(result_of(task, SPEC, "u-1")).version == 1
