"""The agent on an engine without a network, in virtual time: every fault at its place, every run alike."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agents import SHARD, Federation

from anabranch.client.agent import Agent
from anabranch.client.base_model import BaseModel
from anabranch.client.faulty import Fault, FaultKind, FaultsTable, FaultyTransport, MessageFaults
from anabranch.client.lease import LeaseKeeper
from anabranch.client.local import LocalServer, LocalTransport
from anabranch.client.messages import HeartbeatAnswer, PushAnswer
from anabranch.client.outbox import Outbox, UpdateEntry
from anabranch.client.stopping import Bell
from anabranch.client.trainer import LocalTrainer
from anabranch.core.config.tables import ClientTable
from anabranch.core.effects import Refused
from anabranch.core.engine.ledger import TRAIN_S
from anabranch.core.errors import (
    AnabranchError,
    AppError,
    ClocksDisagree,
    DataError,
    InvalidUpdate,
    ManifestMismatch,
    Overloaded,
    StoreError,
    StoreLocked,
    Unavailable,
    UnknownTask,
)
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import Ask, LocalPlan, Task
from anabranch.testing.federation import first_weights
from anabranch.workloads.app import Examples
from anabranch.workloads.synthetic import Synthetic


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation(tmp_path)


def undisturbed(folder: Path) -> str:
    """The model after three tasks without a fault."""
    federation = Federation(folder)
    federation.agent().run()
    return federation.model()


def test_it_works_until_its_tasks_are_done(federation: Federation) -> None:
    summary = federation.agent().run()
    assert (summary.why, summary.answered, summary.applied) == ("3 tasks done", 3, 3)
    assert summary.uplink_bytes == summary.downlink_bytes == 3 * 4 * federation.server.spec.size
    assert federation.server.engine.version == 3
    once = ["granted", "fetched", "trained", "pushed"]
    assert federation.kinds() == ["enrolled", *once, *once, *once, "stopped"]
    assert federation.outbox.pending() == []


def test_it_works_until_the_run_ends(tmp_path: Path) -> None:
    federation = Federation(tmp_path, run={"versions_max": 2})
    summary = federation.agent(tasks_max=0).run()
    assert "version 2, its budget" in summary.why
    assert summary.applied == 2


def test_the_update_is_what_the_trainer_makes_of_the_task(federation: Federation) -> None:
    seen: list[Task | UpdateEntry] = []

    class Listening(LocalTransport):
        def ask(self, ask: Ask, spec: ParamSpec) -> Task | Refused:
            answer = super().ask(ask, spec)
            assert isinstance(answer, Task)
            seen.append(answer)
            return answer

        def push(self, entry: UpdateEntry) -> PushAnswer:
            seen.append(entry)
            return super().push(entry)

    federation.agent(Listening(federation.server, "a"), tasks_max=1).run()
    task, sent = seen
    assert isinstance(task, Task)
    assert isinstance(sent, UpdateEntry)
    local = LocalTrainer(Synthetic(), ClientTable())
    examples = local.load(SHARD)
    weights = local.spec.flatten(first_weights())
    again, memory = local.train(task, sent.update_id, BaseModel(0, weights, {}), None, lambda: None)
    assert memory is None
    timed = replace(again, metrics={**again.metrics, TRAIN_S: sent.metrics[TRAIN_S]})
    assert whole(timed) == whole(sent)
    assert sent.metrics[TRAIN_S] >= 0
    assert (again.examples, again.local_steps, set(again.metrics)) == (len(examples), 3, {"loss"})
    assert federation.server.engine.vector == pytest.approx(weights + 0.6 * _values(again), abs=1e-6)


def test_a_metric_that_is_not_finite_is_left_out_and_said_once(
    federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    class Flawed(Synthetic):
        def train(self, model: Any, examples: Any, plan: Any, seed: int) -> dict[str, float]:
            found = super().train(model, examples, plan, seed)
            return {**found, "entropy": float("nan"), "norm": float("inf")}

    sent: list[UpdateEntry] = []

    class Listening(LocalTransport):
        def push(self, entry: UpdateEntry) -> PushAnswer:
            sent.append(entry)
            return super().push(entry)

    summary = federation.agent(Listening(federation.server, "a"), Flawed()).run()
    assert summary.applied == 3
    assert [{*entry.metrics} for entry in sent] == [{"loss", TRAIN_S}] * 3
    said = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert len(said) == 1
    assert said[0].endswith("metrics 'entropy', 'norm'")


def whole(entry: UpdateEntry) -> bytes:
    """The bytes of an entry's file."""
    return b"".join(bytes(part) for part in entry.to_bytes())


def _values(entry: UpdateEntry) -> Any:
    return np.frombuffer(entry.payload, np.float32)


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["enrol", "ask", "fetch", "push"])
@pytest.mark.parametrize("kind", list(FaultKind))
@pytest.mark.parametrize("nth", [1, 2])
def test_no_single_fault_changes_the_model(call: str, kind: FaultKind, nth: int, tmp_path: Path) -> None:
    federation = Federation(tmp_path / "faulty")
    transport = FaultyTransport(LocalTransport(federation.server, "a"), [Fault(call, nth, kind)])
    summary = federation.agent(transport).run()
    assert (summary.answered, federation.server.engine.version) == (3, 3)
    assert federation.model() == undisturbed(tmp_path / "smooth")


@pytest.mark.parametrize("seed", range(10))
def test_no_mixture_of_faults_costs_or_doubles_an_update(seed: int, tmp_path: Path) -> None:
    federation = Federation(tmp_path / "faulty")
    rests: list[float] = []
    table = FaultsTable(loss=0.2, duplication=0.2, reordering=0.2, delay=0.2, delay_s=1.0)
    transport = FaultyTransport(
        LocalTransport(federation.server, "a"), at_random=MessageFaults(table, seed), sleep=rests.append
    )
    summary = federation.agent(transport).run()
    assert (summary.answered, federation.server.engine.version) == (3, 3)
    # A late ask may take the place of the task in hand: then another one is done, from another seed.
    same = federation.model() == undisturbed(tmp_path / "smooth")
    assert same == (federation.server.engine.counters.granted == 3)
    assert transport.met
    assert len(rests) == transport.met[FaultKind.DELAYED]


def test_a_push_that_fails_for_long_is_repeated_with_the_same_bytes(federation: Federation) -> None:
    sent: list[bytes] = []

    class Listening(FaultyTransport):
        def push(self, entry: UpdateEntry) -> PushAnswer:
            sent.append(whole(entry))
            return super().push(entry)

    faults = [Fault("push", n, FaultKind.LOST) for n in range(1, 8)]
    summary = federation.agent(Listening(LocalTransport(federation.server, "a"), faults), tasks_max=1).run()
    assert (summary.failures, summary.answered) == (7, 1)
    assert sent == [sent[0]] * 8
    rests = federation.time.rests
    assert len(rests) == 7
    assert all(0 <= s <= 0.5 * 2**n for n, s in enumerate(rests, 1))
    assert max(rests) > 0.5 * 2**4, "they get longer"


@pytest.mark.parametrize(
    ("error", "trained", "rejected"),
    [(InvalidUpdate("not finite"), 2, 1), (UnknownTask("it ended"), 3, 0)],
    ids=["a flaw is an answer", "a task that is over is none"],
)
def test_a_push_that_is_refused_for_good_is_discarded_and_work_goes_on(
    error: AnabranchError, trained: int, rejected: int, federation: Federation
) -> None:
    faults = [Fault("push", 1, FaultKind.LOST, error)]
    transport = FaultyTransport(LocalTransport(federation.server, "a"), faults)
    summary = federation.agent(transport, tasks_max=2).run()
    assert (summary.answered, summary.rejected, summary.failures) == (2, rejected, 1)
    assert federation.kinds().count("trained") == trained
    assert federation.outbox.pending() == []


def test_an_update_whose_id_is_taken_is_given_up(
    federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a device's folder came from a backup: once, with a line, and work goes on."""
    transport = LocalTransport(federation.server, "a")
    local = LocalTrainer(Synthetic(), ClientTable())
    local.load(SHARD)
    transport.enrol(local.capability())
    base = local.decode(transport.fetch(local.spec.layout_hash, 0))
    task = transport.ask(Ask("a", "t-1"), local.spec)
    assert isinstance(task, Task)
    entry = local.train(task, "u-1", base, None, lambda: None)[0]
    transport.push(entry)
    federation.outbox.put(replace(entry, payload=bytes(len(entry.payload))))
    summary = federation.agent(tasks_max=2).run()
    assert (summary.answered, summary.failures) == (2, 1)
    assert federation.kinds().count("trained") == 2
    assert "'u-1' was decided before, with other bytes: an id is used once: it is given up" in caplog.text
    assert federation.outbox.pending() == []


def test_an_ask_that_is_refused_for_good_ends_it(federation: Federation) -> None:
    faults = [Fault("ask", 2, FaultKind.LOST, InvalidUpdate("client_id must be ..."))]
    transport = FaultyTransport(LocalTransport(federation.server, "a"), faults)
    with pytest.raises(InvalidUpdate, match="client_id"):
        federation.agent(transport).run()
    assert federation.server.engine.counters.applied == 1


def test_the_servers_retry_window_is_honoured(federation: Federation) -> None:
    faults = [Fault("push", 1, FaultKind.LOST, Overloaded("too many uploads", (40.0, 42.0)))]
    transport = FaultyTransport(LocalTransport(federation.server, "a"), faults)
    federation.agent(transport, tasks_max=1).run()
    (rest,) = federation.time.rests
    assert 40.0 <= rest <= 42.0


def test_a_refused_ask_is_repeated_within_the_window(tmp_path: Path) -> None:
    server = {"concurrency": 1, "lease_s": 30.0, "retry_after_min_s": 7.0, "retry_after_max_s": 9.0}
    federation = Federation(tmp_path, server=server)
    other = LocalTransport(federation.server, "other")
    spec = other.enrol(LocalTrainer(Synthetic(), ClientTable()).capability()).spec
    assert isinstance(other.ask(Ask("other", "t-other"), spec), Task)
    federation.agent(tasks_max=1).run()  # the other's lease of 30 s has to end first
    rests = federation.time.rests
    assert 4 <= len(rests) <= 5
    assert all(7.0 <= rest <= 9.0 for rest in rests)


# --- crashes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["granted", "fetched", "trained", "pushed"])
def test_after_a_crash_it_goes_on_from_the_outbox(moment: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    held = federation.crash(moment)
    assert len(held) == (moment in ("trained", "pushed"))
    federation.events.clear()
    federation.agent(seed=8, tasks_max=3).run()
    pushed = [data["update"] for kind, data in federation.events if kind == "pushed"]
    assert pushed[: len(held)] == held
    # Three answers in this life; one of them repeats an old one if the crash came after its push.
    assert federation.server.engine.counters.applied == 4
    assert len(federation.server.engine.ledger.receipts) == 4


def test_everything_that_an_earlier_life_left_goes_first(tmp_path: Path) -> None:
    federation = Federation(tmp_path, server={"tasks_per_client": 2})
    transport = LocalTransport(federation.server, "a")
    local = LocalTrainer(Synthetic(), ClientTable())
    local.load(SHARD)
    transport.enrol(local.capability())
    base = local.decode(transport.fetch(local.spec.layout_hash, 0))
    box = Outbox(tmp_path / "a" / "outbox")
    for n in (1, 2):
        task = transport.ask(Ask("a", f"t-{n}"), local.spec)
        assert isinstance(task, Task)
        box.put(local.train(task, f"u-{n}", base, None, lambda: None)[0])
    federation.agent(tasks_max=2).run()
    assert federation.kinds() == ["enrolled", "pushed", "pushed", "stopped"]
    assert federation.server.engine.counters.applied == 2


def test_one_folder_has_one_agent(federation: Federation) -> None:
    inner: list[StoreLocked] = []

    def second(kind: str, **data: Any) -> None:
        if kind == "granted" and not inner:
            with pytest.raises(StoreLocked) as caught:
                federation.agent(on_event=None).run()
            inner.append(caught.value)

    federation.agent(on_event=second).run()
    assert len(inner) == 1


@pytest.mark.parametrize("moment", ["granted", "trained", "pushed"])
def test_a_folder_that_is_taken_away_ends_it_and_can_be_put_back(moment: str, federation: Federation) -> None:
    own, aside = federation.folder / "a", federation.folder / "aside"

    def take_away(kind: str, **data: Any) -> None:
        federation.hear(kind, **data)
        if kind == moment and not aside.exists():
            own.rename(aside)
        if kind == "failed" and federation.kinds().count(kind) > 3:
            agent.stop()

    agent = federation.agent(on_event=take_away)
    with pytest.raises(StoreError, match="not the folder that this device began with"):
        agent.run()
    assert not own.exists()
    aside.rename(own)
    federation.agent().run()
    assert federation.outbox.pending() == []


# --- another run, another model ------------------------------------------------------------------


def test_a_new_run_at_the_same_address_is_joined(federation: Federation) -> None:
    transport = LocalTransport(federation.server, "a")
    fresh = LocalServer(first_weights(), federation.server.config, federation.time.now, run_id="run-2")

    def replace(kind: str, **data: Any) -> None:
        federation.hear(kind, **data)
        if kind == "pushed":
            transport.server = fresh

    federation.agent(transport, on_event=replace).run()
    assert (federation.server.engine.version, fresh.engine.version) == (1, 2)
    assert federation.kinds().count("enrolled") == 2
    # Version 1 of the old run is not version 1 of the new one, so each base was fetched.
    assert federation.kinds().count("fetched") == 3


def test_an_app_of_another_model_is_told_where_it_differs(federation: Federation) -> None:
    class Wider(Synthetic):
        def model(self, seed: int = 0) -> dict[str, Any]:
            return super().model(seed) | {"extra": super().model(seed)["hidden.bias"]}

    with pytest.raises(ManifestMismatch, match="the App has 5 tensors, the server 4"):
        federation.agent(app=Wider()).run()


def test_an_app_whose_model_has_become_wider_is_told_what_to_do(federation: Federation) -> None:
    """The names are the same: no wrapper of torch's is the cause."""

    class Wider(Synthetic):
        def model(self, seed: int = 0) -> dict[str, Any]:
            return {name: np.concatenate([a, a]) for name, a in super().model(seed).items()}

        def units(self, model: Any) -> Any:
            return None

    with pytest.raises(ManifestMismatch, match="keeps its model: build that one, or begin another") as raised:
        federation.agent(app=Wider()).run()
    assert "torch.compile" not in str(raised.value)


def test_an_app_that_fails_gives_its_task_back(federation: Federation) -> None:
    with pytest.raises(AppError, match=r"_Raising\.train .* on a: ValueError: division"):
        federation.agent(app=_Raising(ValueError("division"))).run()
    assert federation.server.engine.ledger.live == 0


def test_data_that_cannot_be_trained_on_give_the_task_back_and_end_the_device(federation: Federation) -> None:
    """A DataLoader without a batch, or data that are gone: each further task would end like the first."""
    with pytest.raises(DataError, match="the share is gone"):
        federation.agent(app=_Raising(DataError("the share is gone"))).run()
    assert federation.kinds().count("granted") == 1
    assert federation.server.engine.ledger.live == 0


def test_what_an_app_raises_when_the_device_is_to_stop_is_no_error(federation: Federation) -> None:
    """Its own processes, such as a DataLoader's workers, were struck by the same signal."""

    class Struck(Synthetic):
        def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
            agent.stop()
            raise RuntimeError("DataLoader worker is killed by signal: Terminated")

    agent = federation.agent(app=Struck())
    assert agent.run().why == "stopped"
    assert federation.server.engine.ledger.live == 0, "the task was given back"


class _Raising(Synthetic):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        raise self._error


# --- heartbeats and cancelling -------------------------------------------------------------------


class Nervous(LocalTransport):
    """Its server takes the task away at the third heartbeat; what was reported is kept."""

    def __init__(self, server: LocalServer) -> None:
        super().__init__(server, "a")
        self.progress: list[float] = []

    def heartbeat(self, task_id: str, progress: float) -> HeartbeatAnswer:
        self.progress.append(progress)
        if len(self.progress) == 3:
            self.drop(task_id, "the test wants it so")
        return super().heartbeat(task_id, progress)


@pytest.mark.parametrize("endless", ["training", "resting"])
def test_a_cancelled_task_ends_in_the_midst_of_its_work(endless: str, tmp_path: Path) -> None:
    long = endless == "training"
    client = {"steps": 10**9 if long else 3}
    federation = Federation(tmp_path, server={"lease_s": 0.15, "lease_min_s": 0.15}, client=client)
    federation.server.clock = Bell().now
    transport = Nervous(federation.server)
    agents: list[Agent] = []

    def hear(kind: str, **data: Any) -> None:
        federation.hear(kind, **data)
        if kind == "cancelled":
            agents[0].stop()

    step_time_s = 0.0 if long else 1e9
    agents.append(federation.agent(transport, on_event=hear, bell=Bell(), step_time_s=step_time_s))
    summary = agents[0].run()
    assert summary.why == "stopped"
    assert federation.kinds() == ["enrolled", "granted", "fetched", "cancelled", "stopped"]
    assert federation.server.engine.counters.applied == 0
    assert transport.progress == sorted(set(transport.progress))  # it grew from beat to beat


class Deaf(LocalTransport):
    """Its heartbeats fail: twice for one reason, three times for another, and after one that counts again."""

    fails: tuple[type[AnabranchError] | None, ...] = (
        *(ClocksDisagree, ClocksDisagree, Unavailable, Unavailable, Unavailable, None, Unavailable),
    )

    def __init__(self, server: LocalServer) -> None:
        super().__init__(server, "a")
        self.beats = 0

    def heartbeat(self, task_id: str, progress: float) -> HeartbeatAnswer:
        self.beats += 1
        if why := self.fails[self.beats - 1]:
            raise why(f"in the test's beat {self.beats}")
        return super().heartbeat(task_id, progress)


def test_heartbeats_that_fail_are_told_once_for_each_change(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    transport = Deaf(federation.server)
    told: list[tuple[str, dict[str, Any]]] = []
    keeper = LeaseKeeper(transport, lambda: None, Bell(), lambda kind, **data: told.append((kind, data)))
    task = Task("t", "a", 0, 0.0, 60.0, 60.0, 1, LocalPlan())
    for _ in transport.fails:
        keeper.renew(task)
    assert [(kind, data["error"], data["detail"][-1]) for kind, data in told] == [
        *(("failed", "ClocksDisagree", "1"), ("failed", "Unavailable", "3"), ("failed", "Unavailable", "7")),
    ]


def test_stop_ends_a_wait(tmp_path: Path) -> None:
    window = {"retry_after_min_s": 3600.0, "retry_after_max_s": 3600.0}
    federation = Federation(tmp_path, server=window)
    federation.server.engine.paused = True
    waiting = threading.Event()

    def hear(kind: str, **data: Any) -> None:
        if kind == "waiting":
            waiting.set()

    agent = federation.agent(bell=Bell(), on_event=hear)
    thread = threading.Thread(target=agent.run)
    thread.start()
    assert waiting.wait(600)
    agent.stop()
    thread.join(600)
    assert not thread.is_alive()
    assert agent.summary.why == "stopped"


class Silent(LocalTransport):
    """Its server grants a task, and is never heard of again until its device has ended."""

    def __init__(self, server: LocalServer) -> None:
        super().__init__(server, "a")
        self.ended = threading.Event()
        self.heard: list[bool] = []

    def drop(self, task_id: str, why: str, diverged: bool = False) -> None:
        self.heard.append(self.ended.wait(60))


def test_a_server_that_is_silent_keeps_no_device_that_ends(federation: Federation) -> None:
    transport = Silent(federation.server)
    agents: list[Agent] = []

    def hear(kind: str, **data: Any) -> None:
        if kind == "granted":
            agents[0].stop()

    agents.append(federation.agent(transport, on_event=hear, bell=Bell()))
    assert agents[0].run().why == "stopped"
    assert transport.heard == [], "the device has ended before it was answered"
    transport.ended.set()


# --- what cannot be used -------------------------------------------------------------------------


class NoNumbers(Synthetic):
    """Its training has diverged for good."""

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        for weights in model.values():
            weights[...] = np.nan
        return {"loss": float("nan")}


@pytest.mark.parametrize("codec", ["raw", "int8"], ids=["rejected by the server", "no codec carries it"])
def test_a_device_whose_updates_cannot_be_used_backs_off_until_the_run_is_given_up(
    codec: str, tmp_path: Path
) -> None:
    federation = Federation(tmp_path, run={"rejections_max": 12}, uplink={"codec": codec})
    summary = federation.agent(app=NoNumbers(), tasks_max=0).run()
    assert "the last 12 updates were all rejected" in summary.why
    assert summary.applied == 0
    rests = [data["seconds"] for kind, data in federation.events if kind == "waiting"]
    assert len(rests) >= 12
    assert all(rest <= 0.5 * 2.0 ** (number + 1) for number, rest in enumerate(rests))
    assert max(rests) <= 4.0, "the run's end is not put off"
    assert max(rests[3:]) > 1.0, "the later ones are longer"
    assert federation.server.engine.ledger.live == 0, "no lease is left behind"


def test_a_device_whose_updates_cannot_be_used_ends_when_its_tasks_are_done(tmp_path: Path) -> None:
    """They were answered, by an error each: it does not go on for ever."""
    federation = Federation(tmp_path)
    summary = federation.agent(app=NoNumbers(), tasks_max=3).run()
    assert (summary.why, summary.answered, summary.rejected) == ("3 tasks done", 3, 3)
    assert federation.server.engine.counters.rejected == 3
