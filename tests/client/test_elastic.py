"""The agent whose device trains on: on an engine without a network, and real time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agents import SOON, WAIT_S, Gated, InRealTime, Unplugged
from waits import until

from anabranch.client.agent import Agent
from anabranch.client.base_model import BaseModel
from anabranch.client.elastic import ElasticTrainer
from anabranch.client.faulty import Fault, FaultKind, FaultyTransport
from anabranch.client.lease import Cancelled
from anabranch.client.local import LocalTransport
from anabranch.client.messages import PushAnswer
from anabranch.client.outbox import UpdateEntry
from anabranch.client.stopping import Bell
from anabranch.client.trainer import LocalTrainer
from anabranch.core.config.tables import ClientTable
from anabranch.core.engine.ledger import TRAIN_S
from anabranch.core.errors import AppError
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import Ask, LocalPlan, Task
from anabranch.workloads.app import Examples, Shard
from anabranch.workloads.batches import batches
from anabranch.workloads.synthetic import Synthetic

MIXING = {"name": "fedasync", "alpha": 0.5, "staleness": {"name": "constant"}}


class Elastic(InRealTime):
    """A federation whose devices train on, in real time: a push every three steps."""

    def __init__(self, folder: Path, **tables: Any) -> None:
        client = {"push": "elastic", "push_when": "interval", "push_steps": 3}
        tables["client"] = client | tables.get("client", {})
        super().__init__(folder, **({"strategy": MIXING} | tables))


class Counted(Synthetic):
    """Counts its local steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.starts = 0

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        self.starts += 1
        for rows in batches(len(examples), plan, seed):
            self.steps += 1
            model["hidden.bias"] += np.float32(0.01) * len(rows)
        return {}


@pytest.fixture
def federation(tmp_path: Path) -> Elastic:
    return Elastic(tmp_path)


def test_it_pushes_now_and_then_and_each_exchange_is_one_task(federation: Elastic) -> None:
    summary = federation.agent(tasks_max=5).run()
    assert (summary.why, summary.applied, summary.failures) == ("5 tasks done", 5, 0)
    engine = federation.server.engine
    assert (engine.version, engine.counters.granted, engine.counters.leases_lost) == (5, 5, 0)
    trained = [data for kind, data in federation.events if kind == "trained"]
    assert all(data["steps"] >= 3 for data in trained)
    assert all(data["metrics"][TRAIN_S] > 0 for data in trained)
    assert federation.outbox.pending() == []


def test_training_goes_on_while_a_push_hangs(federation: Elastic) -> None:
    transport, app = Gated(federation.server), Counted()
    agent = federation.agent(transport, app, tasks_max=2)
    thread = threading.Thread(target=agent.run)
    thread.start()
    assert transport.pushing.wait(WAIT_S)
    before = app.steps
    until(lambda: app.steps > before + 50)  # training does not wait for the network
    transport.gate.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert app.starts == 1, "the optimizer is made once"
    steps = [data["steps"] for kind, data in federation.events if kind == "trained"]
    assert steps[1] > 50, "what was learned meanwhile is in the next update"


def test_the_answer_that_is_merged_is_the_version_that_the_update_made(federation: Elastic) -> None:
    """Another device's updates come in between: they are seen one exchange later."""

    bases: list[tuple[int, int]] = []  # the version that an update made, and that the next task starts from

    class Crowded(LocalTransport):
        def push_and_ask(self, entry: UpdateEntry, ask: Ask, spec: ParamSpec) -> PushAnswer:
            answer = super().push_and_ask(entry, ask, spec)
            assert answer.next is not None
            bases.append((answer.version, getattr(answer.next, "base_version", -1)))
            other = LocalTransport(self.server, "b")
            task = other.ask(Ask("b", f"b-{answer.version}"), spec)
            assert isinstance(task, Task)
            delta = np.ones(spec.size, np.float32).tobytes()
            other.push(
                UpdateEntry(
                    f"u-{answer.version}", task.task_id, spec.layout_hash, task.base_version, 1, 1,
                    "raw", delta, spec.size,
                )
            )  # fmt: skip
            return answer

    transport = Crowded(federation.server, "a")
    LocalTransport(federation.server, "b").enrol(federation.agent()._local.capability())
    summary = federation.agent(transport, tasks_max=4).run()
    assert summary.applied == 4
    assert bases == [(1, 1), (3, 3), (5, 5)], "the last push asks for none"
    assert federation.server.engine.counters.rejected == 0


@pytest.mark.parametrize("call", ["enrol", "ask", "fetch", "push"])
@pytest.mark.parametrize("kind", list(FaultKind))
@pytest.mark.parametrize("nth", [1, 2])
def test_no_single_fault_loses_or_doubles_an_exchange(
    call: str, kind: FaultKind, nth: int, tmp_path: Path
) -> None:
    federation = Elastic(tmp_path)
    transport = FaultyTransport(LocalTransport(federation.server, "a"), [Fault(call, nth, kind)])
    summary = federation.agent(transport).run()
    assert (summary.answered, summary.rejected, federation.server.engine.version) == (3, 0, 3)


@pytest.mark.parametrize("moment", ["granted", "fetched", "trained", "pushed"])
def test_a_crash_at_any_moment_is_harmless(moment: str, tmp_path: Path) -> None:
    federation = Elastic(tmp_path)
    held = federation.crash(moment)
    federation.events.clear()
    summary = federation.agent(seed=8).run()
    pushed = [data["update"] for kind, data in federation.events if kind == "pushed"]
    assert pushed[: len(held)] == held
    engine = federation.server.engine
    assert (summary.rejected, engine.counters.rejected) == (0, 0)
    assert engine.counters.applied == len(engine.ledger.receipts)


def test_an_error_of_the_app_ends_the_agent_and_gives_the_task_back(federation: Elastic) -> None:
    class Raising(Counted):
        def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
            raise ZeroDivisionError("a bug of the App")

    with pytest.raises(AppError, match=r"Raising\.train .* on a: ZeroDivisionError: a bug of the App"):
        federation.agent(app=Raising()).run()
    assert federation.server.engine.ledger.live == 0


def test_the_server_may_ask_for_what_there_is(tmp_path: Path) -> None:
    """The device would wait for ten million steps; a heartbeat tells it that the model has moved on."""
    federation = Elastic(
        tmp_path,
        client={"push_when": "advised", "push_steps": 1, "push_steps_max": 10**7},
        server={"lease_s": 3.0, "lease_min_s": 3.0, "upload_now_versions": 1},
    )
    federation.server.clock = lambda: 0.0  # no lease ends, however late a heartbeat comes

    def hear(kind: str, **data: Any) -> None:
        federation.hear(kind, **data)
        if kind == "fetched":
            other = LocalTransport(federation.server, "b")
            other.enrol(agent._local.capability())
            spec = federation.server.spec
            task = other.ask(Ask("b", "t-b"), spec)
            assert isinstance(task, Task)
            delta = np.zeros(spec.size, np.float32).tobytes()
            fields = (task.task_id, spec.layout_hash, task.base_version, 1, 1)
            other.push(UpdateEntry("u-b", *fields, "raw", delta, spec.size))

    agent = federation.agent(on_event=hear, tasks_max=1)
    assert agent.run().applied == 1


def test_devices_that_train_on_learn_together(tmp_path: Path) -> None:
    from anabranch.workloads.trainer import trainer_for

    federation = Elastic(
        tmp_path,
        client={"push_steps": 20, "batch_size": 16, "learning_rate": 0.2},
        run={"versions_max": 60},
    )
    agents = [
        Agent(
            Synthetic(), LocalTransport(federation.server, f"d{n}"), f"d{n}", Shard("train", n, 3),
            tmp_path / f"d{n}", SOON, seed=n,
        )
        for n in range(3)
    ]  # fmt: skip
    threads = [threading.Thread(target=agent.run) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    found = trainer_for(Synthetic()).evaluate(
        federation.server.engine.vector, {}, Synthetic().data(Shard("test"))
    )
    assert found["accuracy"] > 0.6  # chance is 0.1


# --- tasks that come to nothing, and servers that are away ---------------------------------------


class Ones(Synthetic):
    """A step adds one everywhere, and takes a millisecond."""

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        for _ in batches(len(examples), plan, seed):
            time.sleep(0.001)
            for array in model.values():
                np.add(array, 1, out=array)
        return {}


@pytest.mark.parametrize(("weight", "pulled"), [(1.0, True), (0.5, False)], ids=["added", "mixed"])
def test_after_a_task_that_was_cancelled_the_update_is_what_was_learned(weight: float, pulled: bool) -> None:
    """Where a server adds updates up, the others' progress since the first task must not be in it."""
    local = LocalTrainer(Ones(), SOON)
    local.load(Shard("train", 0, 4))
    table = ClientTable(push="elastic", push_when="interval", push_steps=700, merge_weight=weight)
    trainer = ElasticTrainer(local, table, Bell())
    size = local.spec.size

    def cancelled() -> None:
        raise Cancelled

    def task(n: int) -> Task:
        return Task(f"t{n}", "a", n, 0.0, 1e9, 1e9, n, LocalPlan(batch_size=8))

    try:
        with pytest.raises(Cancelled):
            trainer.train(task(1), "u-1", BaseModel(1, np.zeros(size, np.float32), {}), None, cancelled)
        later = BaseModel(2, np.full(size, 100, np.float32), {})
        entry, _ = trainer.train(task(2), "u-2", later, None, lambda: None)
    finally:
        trainer.stop()
    delta = np.frombuffer(entry.payload, np.float32)
    others = 0 if pulled else 100  # a server that mixes is sent the snapshot
    assert delta == pytest.approx(np.full(size, entry.local_steps - others), abs=1e-3)


def test_without_the_server_it_trains_on_and_what_it_learns_counts_later(federation: Elastic) -> None:
    transport, app = Unplugged(federation.server, "a"), Counted()

    def hear(kind: str, **data: Any) -> None:
        federation.hear(kind, **data)
        failures = federation.kinds().count("failed")
        if kind == "trained" and not failures:
            transport.is_plugged_in = False
        if failures == 20:
            transport.is_plugged_in = True

    summary = federation.agent(transport, app, on_event=hear, tasks_max=3).run()
    assert (summary.applied, summary.rejected) == (3, 0)
    steps = [data["steps"] for kind, data in federation.events if kind == "trained"]
    assert steps[1] > 3, "it went on while there was no server"
    assert app.starts == 1


def test_an_app_without_batches_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would train without an end and never meet the server."""
    over = threading.Event()

    class Own(Synthetic):
        def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
            over.wait(WAIT_S)
            return {}

    def looked() -> None:
        if "batches" in caplog.text:
            over.set()
            raise Cancelled

    monkeypatch.setattr("anabranch.client.elastic.SILENT_S", 0.0)
    bell = Bell()
    monkeypatch.setattr(bell, "check", looked)
    local = LocalTrainer(Own(), SOON)
    local.load(Shard("train", 0, 4))
    trainer = ElasticTrainer(local, ClientTable(push="elastic"), bell)
    base = BaseModel(1, np.zeros(local.spec.size, np.float32), {})
    task = Task("t", "a", 1, 0.0, 1e9, 1e9, 1, LocalPlan(batch_size=8))
    with pytest.raises(Cancelled):
        trainer.train(task, "u", base, None, lambda: None)
    trainer.stop()
    assert "set client.push" in caplog.text
