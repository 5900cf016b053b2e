"""The agent whose results leave in the background: on an engine without a network, and real time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agents import WAIT_S, Gated, InRealTime, Unplugged

from anabranch.client.faulty import Fault, FaultKind, FaultyTransport
from anabranch.client.local import LocalTransport
from anabranch.client.memory import Memories
from anabranch.client.messages import PushAnswer
from anabranch.client.outbox import OutboxBounds, UpdateEntry
from anabranch.compress.feedback import Memory
from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core.errors import AnabranchError, InvalidUpdate, Unavailable, UnknownTask
from anabranch.core.model.params import SparseVector
from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.app import Examples
from anabranch.workloads.synthetic import Synthetic


class Overlapping(InRealTime):
    """A federation whose devices push in the background, in real time."""

    def __init__(self, folder: Path, **tables: Any) -> None:
        tables["client"] = {"push": "overlap", **tables.get("client", {})}
        tables["server"] = {"tasks_per_client": 2, **tables.get("server", {})}
        super().__init__(folder, **tables)


@pytest.fixture
def federation(tmp_path: Path) -> Overlapping:
    return Overlapping(tmp_path)


def test_the_next_task_is_trained_while_the_result_is_on_its_way(federation: Overlapping) -> None:
    transport = Gated(federation.server)

    def hear(kind: str, **data: Any) -> None:
        federation.hear(kind, **data)
        if federation.kinds().count("trained") == 2:
            transport.gate.set()  # not before: without the overlap nobody would ever get here

    summary = federation.agent(transport, on_event=hear, tasks_max=4).run()
    assert (summary.why, summary.applied, summary.failures) == ("4 tasks done", 4, 0)
    kinds = federation.kinds()
    assert kinds.index("pushed") > [i for i, kind in enumerate(kinds) if kind == "trained"][1]
    third_ask = [i for i, kind in enumerate(kinds) if kind == "granted"][2]
    assert third_ask > kinds.index("pushed"), "the server would have given the first task up"
    assert federation.server.engine.counters.leases_lost == 0
    assert federation.outbox.pending() == []


def test_it_works_until_the_run_ends(tmp_path: Path) -> None:
    federation = Overlapping(tmp_path, run={"versions_max": 5})
    summary = federation.agent(tasks_max=0).run()
    assert "version 5, its budget" in summary.why
    assert summary.applied == 5


@pytest.mark.parametrize("call", ["enrol", "ask", "fetch", "push"])
@pytest.mark.parametrize("kind", list(FaultKind))
@pytest.mark.parametrize("nth", [1, 2])
def test_no_single_fault_loses_or_doubles_a_result(
    call: str, kind: FaultKind, nth: int, tmp_path: Path
) -> None:
    federation = Overlapping(tmp_path)
    transport = FaultyTransport(LocalTransport(federation.server, "a"), [Fault(call, nth, kind)])
    summary = federation.agent(transport).run()
    assert (summary.answered, summary.rejected, federation.server.engine.version) == (3, 0, 3)
    assert federation.server.engine.counters.applied == 3


@pytest.mark.parametrize(
    ("error", "trained"),
    [(InvalidUpdate("not finite"), 2), (UnknownTask("it ended"), 3)],
    ids=["a flaw is an answer", "a task that is over is none"],
)
def test_a_result_that_is_refused_for_good_makes_room_and_work_goes_on(
    error: AnabranchError, trained: int, federation: Overlapping
) -> None:
    faults = [Fault("push", 1, FaultKind.LOST, error)]
    transport = FaultyTransport(LocalTransport(federation.server, "a"), faults)
    assert federation.agent(transport, tasks_max=2).run().answered == 2
    assert federation.kinds().count("trained") == trained


def test_a_task_that_cannot_be_done_does_not_cost_the_result_on_its_way(federation: Overlapping) -> None:
    """Its slot is given back; else the next ask would give up the older task, whose result is sent."""
    transport = Gated(federation.server)

    class Diverging(Synthetic):
        def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
            if federation.kinds().count("granted") == 2:
                raise InvalidUpdate("the training has diverged")
            return super().train(model, examples, plan, seed)

    def hear(kind: str, **data: Any) -> None:
        federation.hear(kind, **data)
        if federation.kinds().count("granted") == 3:
            transport.gate.set()

    summary = federation.agent(transport, Diverging(), on_event=hear).run()
    assert (summary.applied, summary.rejected, summary.failures) == (3, 0, 1)


def test_an_error_in_the_sync_thread_ends_the_agent(federation: Overlapping) -> None:
    class Broken(LocalTransport):
        def push(self, entry: UpdateEntry) -> PushAnswer:
            raise ZeroDivisionError("a bug")

    endless = Overlapping(federation.folder / "endless", client={"steps": 3})
    with pytest.raises(ZeroDivisionError, match="a bug"):
        endless.agent(Broken(endless.server, "a"), tasks_max=0).run()


def test_a_stop_does_not_wait_for_a_push_and_loses_nothing(federation: Overlapping) -> None:
    transport = Gated(federation.server)
    agent = federation.agent(transport, tasks_max=0)
    thread = threading.Thread(target=agent.run)
    thread.start()
    assert transport.pushing.wait(WAIT_S)
    agent.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    held = federation.outbox.pending()
    assert 1 <= len(held) <= 2
    transport.gate.set()
    federation.events.clear()
    assert federation.agent(seed=8).run().rejected == 0
    pushed = [data["update"] for kind, data in federation.events if kind == "pushed"]
    assert pushed[: len(held)] == held


def test_without_the_server_it_trains_what_it_has_then_waits_and_says_so(federation: Overlapping) -> None:
    """Once the server is back, everything goes in the order in which it was made."""
    transport = Unplugged(federation.server, "a")
    made: list[str] = []

    def hear(kind: str, **data: Any) -> None:
        federation.hear(kind, **data)
        kinds = federation.kinds()
        if kind == "trained" and kinds.count("trained") == 1:
            transport.is_plugged_in = False
        if kind == "failed" and kinds.count("failed") == 20:
            assert kinds.count("trained") == 1
            files = (federation.folder / "a" / "outbox").glob("*.update")
            made.extend(path.stem for path in sorted(files, key=lambda path: path.stat().st_mtime_ns))
            transport.is_plugged_in = True

    summary = federation.agent(transport, on_event=hear).run()
    assert "waiting" in federation.kinds()
    assert (summary.applied, summary.rejected) == (3, 0)
    pushed = [data["update"] for kind, data in federation.events if kind == "pushed"]
    assert pushed[: len(made)] == made
    assert made


def test_results_that_no_push_takes_wait_and_it_is_said_how_many(tmp_path: Path) -> None:
    """Asks are answered, pushes are not: all the tasks that the server allows are trained, no more."""
    federation = Overlapping(tmp_path, server={"tasks_per_client": 4})
    transport = Gated(federation.server)

    def hear(kind: str, **data: Any) -> None:
        federation.hear(kind, **data)
        if kind == "waiting" and data.get("results") == 4:
            transport.gate.set()

    assert federation.agent(transport, on_event=hear, tasks_max=6).run().applied == 6
    trained = [i for i, kind in enumerate(federation.kinds()) if kind == "trained"]
    assert federation.kinds().index("pushed") > trained[3]


@pytest.mark.parametrize("bound", ["entries", "bytes"])
def test_a_full_outbox_makes_training_wait_and_drops_nothing(bound: str, tmp_path: Path) -> None:
    federation = Overlapping(tmp_path, server={"tasks_per_client": 4})
    transport = Gated(federation.server)
    size_bytes = 4 * federation.server.spec.size
    bounds = OutboxBounds(2) if bound == "entries" else OutboxBounds(bytes_max=5 * size_bytes // 2)
    most: list[int] = []

    def hear(kind: str, **data: Any) -> None:
        federation.hear(kind, **data)
        most.append(len(list((tmp_path / "a" / "outbox").glob("*.update"))))
        if kind == "outbox_full" and not transport.gate.is_set():  # afterwards it empties as it likes
            assert data["results"] == 2
            transport.gate.set()

    summary = federation.agent(transport, on_event=hear, tasks_max=6, outbox=bounds).run()
    assert (summary.applied, summary.rejected, max(most)) == (6, 0, 2)
    assert "outbox_full" in federation.kinds()


def test_who_leaves_while_the_outbox_is_full_takes_its_result_along(tmp_path: Path) -> None:
    federation = Overlapping(tmp_path)

    class OneWay(LocalTransport):
        def push(self, entry: UpdateEntry) -> PushAnswer:
            raise Unavailable("no way up")

    def hear(kind: str, **data: Any) -> None:
        federation.hear(kind, **data)
        if kind == "outbox_full":
            agent.stop()

    room = OutboxBounds(1)
    agent = federation.agent(OneWay(federation.server, "a"), on_event=hear, tasks_max=0, outbox=room)
    assert agent.run().why == "stopped"
    held = federation.outbox.pending()
    assert len(held) == federation.kinds().count("trained") == 2
    again = federation.agent(seed=8, tasks_max=3, outbox=room).run()
    assert (again.applied, again.rejected, federation.server.engine.version) == (3, 0, 3)
    assert [data["update"] for kind, data in federation.events if kind == "pushed"][:2] == held


# --- crashes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["granted", "fetched", "trained", "pushed"])
@pytest.mark.parametrize("nth", [2, 3])
@pytest.mark.parametrize("slow", [False, True], ids=["quick", "slow"])
def test_a_crash_at_any_moment_is_harmless(moment: str, nth: int, slow: bool, tmp_path: Path) -> None:
    federation = Overlapping(tmp_path)
    transport = Gated(federation.server)

    def heard() -> None:
        if not slow or federation.kinds().count("trained") == 2:
            transport.gate.set()

    made = federation.crash(moment, nth, transport, heard)
    transport.gate.set()
    federation.events.clear()
    summary = federation.agent(seed=8, tasks_max=4).run()
    pushed = [data["update"] for kind, data in federation.events if kind == "pushed"]
    assert pushed[: len(made)] == made, "what was left goes first, in its order"
    engine = federation.server.engine
    assert (summary.rejected, engine.counters.rejected) == (0, 0)
    assert engine.counters.applied == len(engine.ledger.receipts)
    assert set(pushed) <= set(engine.ledger.receipts)


# --- what the uplink remembers -------------------------------------------------------------------


def memory(value: float) -> Memory:
    return Memory(np.full(3, value, np.float32), 0)


def test_a_result_goes_on_from_what_the_one_before_left_out(tmp_path: Path) -> None:
    box = Memories(tmp_path)
    for update_id, value in (("u-1", 1.0), ("u-2", 2.0)):
        box.put(update_id, memory(value), "run", "layout")
    waiting = ["u-1", "u-2"]

    def residual(ids: list[str]) -> float:
        found = box.load("run", "layout", ids)
        assert found is not None
        return float(found.residual[0])

    assert residual(waiting) == 2.0
    box.drop("u-2")
    assert residual(waiting) == 1.0
    box.commit("u-1")
    assert residual(waiting) == residual([]) == 1.0


def test_error_feedback_loses_nothing_when_results_overlap(tmp_path: Path) -> None:
    """What the server got and what is still remembered add up to what was trained."""
    sent: list[np.ndarray[Any, Any]] = []

    class Listening(LocalTransport):
        def push(self, entry: UpdateEntry) -> PushAnswer:
            delta = make_codec(entry.codec).decode(entry.payload, Layout.of(self.server.spec))
            dense = np.zeros(self.server.spec.size, np.float32)
            if isinstance(delta, SparseVector):
                dense[delta.indices] = delta.values
            else:
                dense += delta
            sent.append(dense)
            return super().push(entry)

    trained: list[np.ndarray[Any, Any]] = []
    federation = Overlapping(
        tmp_path, strategy={"name": "fedbuff", "buffer_size": 100}, uplink={"codec": "ef(1.0)|topk(0.05)"}
    )
    agent = federation.agent(Listening(federation.server, "a"), tasks_max=6)
    inner = agent._local._trainer.train

    def train(*values: Any, **named: Any) -> Any:
        result = inner(*values, **named)
        trained.append(result.delta.copy())
        return result

    agent._local._trainer.train = train  # type: ignore[method-assign]
    assert agent.run().applied == 6
    kept = Memories(tmp_path / "a" / "memory").load(
        federation.server.run_id, federation.server.spec.layout_hash
    )
    assert kept is not None
    assert np.sum(sent, axis=0) + kept.residual == pytest.approx(np.sum(trained, axis=0), abs=1e-5)
