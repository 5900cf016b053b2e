"""Devices with tasks of sub-models: what they fetch, keep, train and send, crash after crash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from agents import SHARD, Crash, Federation
from wire import Served, server_config

from anabranch.api.live_result import report_of_data
from anabranch.client.agent import Agent
from anabranch.client.base_model import BaseModel
from anabranch.client.faulty import Fault, FaultKind, FaultyTransport
from anabranch.client.held import PARTS, VECTOR, keep_model, kept, kept_model
from anabranch.client.local import LocalServer, LocalTransport
from anabranch.client.memory import Memories
from anabranch.client.messages import FetchedModel, PushAnswer
from anabranch.client.outbox import UpdateEntry
from anabranch.client.records import read_record, write_record
from anabranch.client.state import HELD
from anabranch.client.trainer import LocalTrainer
from anabranch.client.transport import GrpcTransport
from anabranch.compress.feedback import Memory
from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core.config.tables import ClientTable
from anabranch.core.effects import Refused
from anabranch.core.engine.ledger import TRAIN_S
from anabranch.core.engine.planner import Applicant
from anabranch.core.errors import InvalidUpdate
from anabranch.core.model.holdings import HeldPart, Holdings
from anabranch.core.model.params import ParamSpec, Vector, dense
from anabranch.core.model.submodels import Submodel, UnitMap, unit_map
from anabranch.core.model.updates import Ask, Task
from anabranch.host.held import NOTHING
from anabranch.protos import convert
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.server.manifest import write_manifest
from anabranch.server.verify import verify
from anabranch.testing.federation import first_weights
from anabranch.workloads.synthetic import Synthetic
from anabranch.workloads.trainer import trainer_for

GROUPS = trainer_for(Synthetic()).spec.groups
SPEC = ParamSpec.of(first_weights(), GROUPS)
DROP: dict[str, dict[str, Any]] = {"strategy": {"name": "asyncdrop"}}
LOSSY = "ef(0.9)|topk(0.1)|int8(64)|gaps|zstd"
EVEN, ODD = unit_map(SPEC, [range(0, 32, 2)]), unit_map(SPEC, [range(1, 32, 2)])


class Listening(LocalTransport):
    """Keeps what was granted, fetched and pushed."""

    def __init__(self, server: LocalServer) -> None:
        super().__init__(server, "a")
        self.tasks: list[Task] = []
        self.fetches: list[tuple[Holdings, Submodel | None, FetchedModel]] = []
        self.entries: list[UpdateEntry] = []

    def ask(self, ask: Ask, spec: ParamSpec) -> Task | Refused:
        answer = super().ask(ask, spec)
        if isinstance(answer, Task):
            self.tasks.append(answer)
        return answer

    def fetch(self, *args: Any, **options: Any) -> FetchedModel:
        found = super().fetch(*args, **options)
        self.fetches.append((options.get("holds"), options.get("submodel"), found))
        return found

    def push(self, entry: UpdateEntry) -> PushAnswer:
        self.entries.append(entry)
        return super().push(entry)

    @property
    def parts(self) -> list[UnitMap]:
        """What the tasks were of; all of parts."""
        found = [task.submodel for task in self.tasks]
        return [part for part in found if isinstance(part, UnitMap)]


class Scripted:
    """A planner that hands these out, the last for ever; None is the whole model."""

    name: ClassVar[str] = "scripted"
    state_type: ClassVar[type[Any]] = int

    def __init__(self, *parts: UnitMap | None) -> None:
        self._parts = parts

    def init(self, vector: Vector) -> int:
        return 0

    def plan(self, state: int, vector: Vector, applicant: Applicant) -> tuple[int, UnitMap | None]:
        return state + 1, self._parts[min(state, len(self._parts) - 1)]

    def applied(self, state: int, submodel: Submodel | None, version: int) -> int:
        return state

    def released(self, state: int, submodel: Submodel | None) -> int:
        return state


def federation(folder: Path, *script: UnitMap | None, **tables: Any) -> Federation:
    """One of sub-models by AsyncDrop, or by a script."""
    found = Federation(folder, GROUPS, **DROP, **tables)
    if script:
        found.server.engine.planner, found.server.engine.planner_state = Scripted(*script), 0
    return found


def held(f: Federation) -> BaseModel | None:
    return kept_model(f.folder / "a", f.server.run_id, f.server.spec)


def lose_a_result(f: Federation, transport: Any) -> None:
    """A device trains, dies, and its result is gone: the version stays what it was."""

    def crash(kind: str, **data: Any) -> None:
        if kind == "trained":
            raise Crash

    with pytest.raises(Crash):
        f.agent(transport, on_event=crash).run()
    box = f.outbox
    for update_id in box.pending():
        box.remove(update_id)


def map_of(entry: UpdateEntry) -> Submodel | None:
    return None if entry.submodel is None else convert.submodel_from_proto(entry.submodel, SPEC)


def decoded(entry: UpdateEntry) -> Vector:
    return dense(make_codec(entry.codec).decode(entry.payload, Layout.of(SPEC, map_of(entry))))


def trained(task: Task, base: BaseModel) -> Vector:
    """What a trainer of its own makes of a task."""
    local = LocalTrainer(Synthetic(), ClientTable())
    local.load(SHARD)
    return decoded(local.train(task, "u", base, None, lambda: None)[0])


# --- parts ---------------------------------------------------------------------------------------


def test_only_parts_travel_and_none_is_kept(tmp_path: Path) -> None:
    f = federation(tmp_path)
    transport = Listening(f.server)
    summary = f.agent(transport, tasks_max=5).run()
    sizes = [part.size for part in transport.parts]
    assert sizes == [20 * 24 + 24 + 24 * 10 + 10] * 5  # a quarter of the 32 units is left out
    assert summary.uplink_bytes == summary.downlink_bytes == 4 * sum(sizes)
    assert summary.uplink_bytes_raw == 4 * sum(sizes)
    assert summary.downlink_bytes_full_equivalent == 5 * 4 * SPEC.size
    assert [(h, s, m.part_only) for h, s, m in transport.fetches] == [
        (None, p, True) for p in transport.parts
    ]
    assert [map_of(entry) for entry in transport.entries] == transport.parts
    assert [entry.values for entry in transport.entries] == sizes
    assert all(entry.metrics[TRAIN_S] >= 0 for entry in transport.entries)
    assert held(f) is None
    assert (summary.applied, f.server.engine.version) == (5, 5)


def test_a_part_is_trained_from_its_own_coordinates(tmp_path: Path) -> None:
    f = federation(tmp_path, EVEN)
    transport = Listening(f.server)
    f.agent(transport, tasks_max=1).run()
    weights = SPEC.flatten(first_weights())
    (entry,), (task,) = transport.entries, transport.tasks
    for base in (BaseModel(0, weights, {}), BaseModel(0, weights[EVEN.indices], {}, EVEN)):
        assert np.array_equal(decoded(entry), trained(task, base))
    after = weights.copy()
    after[EVEN.indices] += np.float32(0.5) * decoded(entry)
    np.testing.assert_allclose(f.server.engine.vector, after, rtol=1e-6, atol=1e-7)


def test_whole_and_part_tasks_in_turn(tmp_path: Path) -> None:
    f = federation(tmp_path, None, EVEN, ODD, None, EVEN)
    transport = Listening(f.server)
    versions_held = []

    def hear(kind: str, **data: Any) -> None:
        f.hear(kind, **data)
        if kind == "pushed":
            versions_held.append(getattr(held(f), "version", None))

    f.agent(transport, on_event=hear, tasks_max=5).run()
    assert [task.submodel for task in transport.tasks] == [None, EVEN, ODD, None, EVEN]
    assert [model.part_only for _, _, model in transport.fetches] == [False, True, True, False, True]
    assert versions_held == [0, 0, 0, 3, 3]
    kept = held(f)
    assert kept is not None
    _, _, whole = transport.fetches[3]
    assert kept.vector.tobytes() == bytes(whole.data)
    assert kept.submodel is None
    assert f.server.engine.counters.applied == 5


def test_a_device_that_has_the_version_whole_fetches_no_part_of_it(tmp_path: Path) -> None:
    f = federation(tmp_path, None, EVEN)
    transport = Listening(f.server)
    lose_a_result(f, transport)
    kept = held(f)
    assert kept is not None
    assert kept.version == 0
    summary = f.agent(transport, seed=8, tasks_max=1).run()
    assert [task.submodel for task in transport.tasks] == [None, EVEN]
    assert (len(transport.fetches), summary.downlink_bytes) == (1, 0)
    (entry,) = transport.entries
    assert map_of(entry) == EVEN
    assert np.array_equal(decoded(entry), trained(transport.tasks[1], kept))


@pytest.mark.parametrize("codec", ["log(1)", "int8(256)"])
def test_encoded_versions_come_whole_and_are_cut_on_the_device(codec: str, tmp_path: Path) -> None:
    f = federation(tmp_path, EVEN, ODD, downlink={"codec": codec})
    transport = Listening(f.server)
    f.agent(transport, tasks_max=4).run()
    assert [model.part_only for _, _, model in transport.fetches] == [False] * 4
    assert [h for h, _, _ in transport.fetches] == [None, 0, 1, 2]
    kept = held(f)
    assert kept is not None
    assert (kept.version, kept.vector.size, kept.submodel) == (3, SPEC.size, None)
    assert np.array_equal(decoded(transport.entries[3]), trained(transport.tasks[3], kept))
    assert [entry.values for entry in transport.entries] == [EVEN.size, ODD.size, ODD.size, ODD.size]


OWN = {"codec": "log(1)", "parts": "own"}


def test_of_the_log_comes_the_part_and_stays(tmp_path: Path) -> None:
    """Each time what is new to the part, whatever it is of; what a task starts from is the replica's."""
    f = federation(tmp_path, EVEN, ODD, EVEN, None, ODD, downlink=OWN)
    transport = Listening(f.server)
    replicas: list[Vector] = []

    def look(kind: str, **data: Any) -> None:
        f.hear(kind, **data)
        if kind == "fetched":
            replicas.append(replica_of(f))

    summary = f.agent(transport, on_event=look, tasks_max=5).run()
    assert [model.part_only for _, _, model in transport.fetches] == [True, True, True, False, True]
    assert [model.from_version for _, _, model in transport.fetches] == [None, 0, 0, 1, 3]
    assert [holds for holds, _, _ in transport.fetches] == [
        None,
        (HeldPart(0, EVEN),),
        (HeldPart(0, EVEN), HeldPart(1, ODD)),
        (HeldPart(1, ODD), HeldPart(2, EVEN)),
        3,
    ]
    for task, entry, replica in zip(transport.tasks, transport.entries, replicas, strict=True):
        assert np.array_equal(decoded(entry), trained(task, BaseModel(0, replica, {})))
    assert summary.downlink_bytes == sum(len(model.data) for _, _, model in transport.fetches)


def replica_of(f: Federation) -> Vector:
    engine = f.server.engine
    assert engine.broadcast is not None
    found = engine.broadcast.replica(engine.broadcast_state, engine.offered)
    assert found is not None
    return found


@pytest.mark.parametrize("lost", ["nothing", "the disk", "a bit"])
def test_parts_outlive_the_process_on_the_disk(lost: str, tmp_path: Path) -> None:
    f = federation(tmp_path, EVEN, ODD, EVEN, ODD, downlink=OWN)
    first = Listening(f.server)
    f.agent(first, tasks_max=2).run()
    assert held(f) is None, "no version is held whole"
    file = f.folder / "a" / HELD
    if lost == "the disk":
        file.unlink()
    elif lost == "a bit":
        record = read_record(file)
        assert record is not None
        record.arrays[VECTOR][EVEN.indices[5]] += 1.0
        write_record(file, record, durable=False)
    again = Listening(f.server)
    f.agent(again, seed=8, tasks_max=2).run()
    leads = {"nothing": [0, 1], "the disk": [None, 2], "a bit": [0, None, 2]}[lost]
    assert [model.from_version for _, _, model in again.fetches] == leads
    assert "failed" in f.kinds() if lost == "a bit" else "failed" not in f.kinds()
    base = BaseModel(0, replica_of_task(f, again.tasks[0]), {})
    assert np.array_equal(decoded(again.entries[0]), trained(again.tasks[0], base))
    assert f.server.engine.counters.applied == 4


def replica_of_task(f: Federation, task: Task) -> Vector:
    engine = f.server.engine
    assert engine.broadcast is not None
    found = engine.broadcast.replica(engine.broadcast_state, task.base_version)
    assert found is not None
    return found


def test_a_release_that_knows_no_parts_fetches_anew(tmp_path: Path) -> None:
    """To it a file of held parts is one of a version without a head, as still older ones wrote them."""
    mosaic = BaseModel(1, SPEC.flatten(first_weights()), {}, head="cd")
    parts = HeldPart(0, EVEN, "ab"), HeldPart(1, ODD, "cd")
    keep_model(tmp_path, mosaic, "run", SPEC, parts)
    now = kept(tmp_path, "run", SPEC)
    assert (now.version, now.head, now.parts, now.heads) == (1, "cd", parts, "ab+cd")
    assert now.model is not None
    assert now.model.head == "cd"
    record = read_record(tmp_path / HELD)
    assert record is not None
    facts = {name: fact for name, fact in record.facts.items() if name != PARTS}
    write_record(tmp_path / HELD, replace(record, facts=facts), durable=False)
    then = kept(tmp_path, "run", SPEC)
    assert (then.version, then.parts) == (1, ())
    assert then.known_as("cd") is NOTHING


def test_a_part_of_a_version_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    f = federation(tmp_path, EVEN, downlink=OWN)
    transport = Listening(f.server)
    lose_a_result(f, transport)
    summary = f.agent(transport, seed=8, tasks_max=1).run()
    assert (len(transport.fetches), summary.downlink_bytes) == (1, 0)
    base = BaseModel(0, replica_of_task(f, transport.tasks[1]), {})
    assert np.array_equal(decoded(transport.entries[0]), trained(transport.tasks[1], base))


# --- what may go wrong ---------------------------------------------------------------------------


def undisturbed(folder: Path) -> str:
    f = federation(folder)
    f.agent().run()
    return f.model()


@pytest.mark.parametrize("call", ["enrol", "ask", "fetch", "push"])
@pytest.mark.parametrize("kind", list(FaultKind))
@pytest.mark.parametrize("nth", [1, 2])
def test_no_single_fault_changes_the_model(call: str, kind: FaultKind, nth: int, tmp_path: Path) -> None:
    f = federation(tmp_path / "faulty")
    transport = FaultyTransport(LocalTransport(f.server, "a"), [Fault(call, nth, kind)])
    summary = f.agent(transport).run()
    assert (summary.answered, f.server.engine.version) == (3, 3)
    assert f.model() == undisturbed(tmp_path / "smooth")


@pytest.mark.parametrize("uplink", ["raw", LOSSY])
@pytest.mark.parametrize("moment", ["granted", "fetched", "trained", "pushed"])
def test_after_a_crash_it_goes_on_with_the_same_part(moment: str, uplink: str, tmp_path: Path) -> None:
    f = federation(tmp_path, EVEN, ODD, EVEN, uplink={"codec": uplink})
    transport = Listening(f.server)
    found = f.crash(moment, transport=transport)
    waiting = {update_id: map_of(f.outbox.load(update_id)) for update_id in found}
    assert list(waiting.values()) == [ODD] * (moment in ("trained", "pushed"))
    before = len(transport.entries)
    f.agent(transport, seed=8, tasks_max=3).run()
    again = transport.entries[before : before + len(waiting)]
    assert {entry.update_id: map_of(entry) for entry in again} == waiting
    assert f.server.engine.counters.applied == 4
    assert len(f.server.engine.ledger.receipts) == 4


def test_a_part_that_was_not_asked_for_is_refused() -> None:
    local = LocalTrainer(Synthetic(), ClientTable())
    local.adopt(SPEC)
    part = FetchedModel(3, "raw", EVEN.indices.astype(np.float32).tobytes(), part_only=True)
    assert local.decode(part, None, EVEN).part(EVEN).tolist() == EVEN.indices.tolist()
    with pytest.raises(InvalidUpdate, match="a part of version 3 came"):
        local.decode(part)
    for other in (unit_map(SPEC, [range(3)]), unit_map(SPEC, [range(32)])):
        with pytest.raises(InvalidUpdate, match="values"):
            local.decode(part, None, other)


# --- error feedback ------------------------------------------------------------------------------


def test_the_residual_outside_a_part_stays_as_it_was(tmp_path: Path) -> None:
    f = federation(tmp_path, EVEN, ODD, None, EVEN, ODD, uplink={"codec": LOSSY})
    transport = Listening(f.server)
    memories: list[Memory | None] = []

    def hear(kind: str, **data: Any) -> None:
        f.hear(kind, **data)
        if kind == "pushed":
            memories.append(Memories(tmp_path / "a" / "memory").load(f.server.run_id, SPEC.layout_hash))

    f.agent(transport, on_event=hear, tasks_max=5).run()
    local = LocalTrainer(Synthetic(), ClientTable())
    before: Vector = np.zeros(SPEC.size, np.float32)
    rows = zip(transport.tasks, transport.fetches, transport.entries, memories, strict=True)
    for task, (_, _, fetched), entry, memory in rows:
        assert memory is not None
        assert memory.residual.shape == (SPEC.size,)
        covered = np.arange(SPEC.size) if task.submodel is None else task.submodel.indices
        outside = np.setdiff1d(np.arange(SPEC.size), covered)
        assert np.array_equal(memory.residual[outside], before[outside])
        assert np.any(memory.residual[covered] != before[covered])
        # What was sent and what was kept back are what was trained and what was carried.
        model = local.decode(fetched, None, task.submodel)
        exact = trained(replace(task, uplink="raw"), model)
        total = decoded(entry).astype(np.float64) + memory.residual[covered]
        np.testing.assert_allclose(total, exact + 0.9 * before[covered], atol=1e-5)
        before = memory.residual


# --- over the network ----------------------------------------------------------------------------


def test_devices_of_a_live_server(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "model", "synthetic", first_weights(), GROUPS)
    tables = {**DROP, "client": {"steps": 3, "batch_size": 8}, "uplink": {"codec": LOSSY}}
    summaries = []
    with Served(server_config(tmp_path / "data", **tables), manifest) as served:
        assert served.info is not None
        for name in ("a", "b"):
            with GrpcTransport(served.info.address, name) as transport:
                agent = Agent(Synthetic(), transport, name, SHARD, tmp_path / name, tasks_max=3)
                summaries.append(agent.run())
        status = served.operator().GetStatus(operators.GetStatusRequest())
    part = 20 * 24 + 24 + 24 * 10 + 10
    for summary in summaries:
        assert (summary.applied, summary.failures) == (3, 0)
        assert summary.downlink_bytes == summary.uplink_bytes_raw == 3 * 4 * part
        assert 0 < summary.uplink_bytes < summary.uplink_bytes_raw / 4
    for total in ("uplink_bytes", "uplink_bytes_raw", "downlink_bytes", "downlink_bytes_full_equivalent"):
        assert getattr(status, total) == sum(getattr(summary, total) for summary in summaries), total
    assert verify(tmp_path / "data").problems == ()


@pytest.mark.parametrize("connection", ["calls", "stream"])
def test_devices_of_a_live_server_follow_the_log_by_parts(connection: str, tmp_path: Path) -> None:
    """Over restarts of both, and the bytes are those that the report of the run's own log counts."""
    manifest = write_manifest(tmp_path / "model", "synthetic", first_weights(), GROUPS)
    client = {"steps": 3, "batch_size": 8, "connection": connection}
    tables = {**DROP, "client": client, "uplink": {"codec": LOSSY}, "downlink": OWN}
    summaries = []
    fetched: list[tuple[str, int | None, int]] = []

    def hear(kind: str, **data: Any) -> None:
        if kind in ("fetched", "failed"):
            fetched.append((kind, data.get("from_version"), data.get("size_bytes", 0)))

    for life in range(2):
        with Served(server_config(tmp_path / "data", **tables), manifest) as served:
            assert served.info is not None
            for name in ("a", "b"):
                with GrpcTransport(served.info.address, name) as transport:
                    folder = tmp_path / name
                    agent = Agent(
                        Synthetic(), transport, name, SHARD, folder, tasks_max=2, on_event=hear, seed=life
                    )
                    summaries.append(agent.run())
            status = served.operator().GetStatus(operators.GetStatusRequest())
            for _, file in sorted((p.name, p) for p in (tmp_path / "data").rglob("*-part-*")):
                assert file.stat().st_size > 0
    assert [summary.applied for summary in summaries] == [2] * 4
    assert [(kind, version) for kind, version, _ in fetched] == [
        *[("fetched", v) for v in (None, 0)],
        *[("fetched", v) for v in (None, 2)],
        *[("fetched", v) for v in (0, 0)],
        *[("fetched", v) for v in (2, 2)],
    ]
    kept_by = [kept_model(tmp_path / name, status.run_id, manifest.spec) for name in ("a", "b")]
    assert kept_by == [None, None]
    result = report_of_data(tmp_path / "data", "", tmp_path / "run")
    bytes_down = sum(summary.downlink_bytes for summary in summaries)
    assert result.downlink_bytes == bytes_down == sum(size for _, _, size in fetched)
    assert result.downlink_bytes < 0.6 * result.downlink_bytes_full_equivalent
    assert verify(tmp_path / "data").problems == ()
