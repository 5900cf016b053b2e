"""Runs in which the server's machine fails as well as the network, and what is noted of them from outside.

Every note here is the test's own, by the virtual clock: nothing is taken from what the code believes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rough import MADE_MIN, Proved, prove, rough

from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.effects import Decided, Effect, Granted, LeaseEnd, LeaseEnded, Refused
from anabranch.core.engine.engine import Engine
from anabranch.core.journal import Record
from anabranch.core.model.params import Delta, digest
from anabranch.core.model.submodels import Submodel
from anabranch.core.model.updates import Ask, Decision, Reason, Task, TaskState, Verdict
from anabranch.core.rng import rank
from anabranch.core.snapshot import state_digest
from anabranch.host.journal import replay
from anabranch.host.run import Advice
from anabranch.simulation.disk import Backup
from anabranch.simulation.executors.base import Job, LocalResult, Pending
from anabranch.simulation.run import Simulation
from anabranch.simulation.server import Process, PushOutcome, Reply
from anabranch.simulation.storage import FinishedUpdate
from anabranch.simulation.versions import Offer

NEAR_S = 1e-3  # what floats and answers that are written at the same moment come to
OVERDUE_S = 2.0  # a lease may end so late: its tick looks whether the disk has room again
STEPS_S = (60.0, 3600.0, 3e6)
LEASE_MAX_S = 40.0

DISASTERS = {
    "clock_step_every_s": 8.0,
    "disk_full_every_s": 12.0,
    "disk_full_s": 3.0,
    "torn_tail": 0.5,
    "lost_tail": 0.2,
    "restore_every_s": 15.0,
    "device_copy_every_s": 30.0,
    "device_copy_s": 15.0,
}


def disastrous(seed: int, clients: int = 16, **faults: Any) -> Config:
    """A rough run (`rough.py`) with every fault of the server's machine as well."""
    step_s = STEPS_S[int(rank(seed, "disaster", "step") * len(STEPS_S))]
    settings = rough(seed, clients, **{**DISASTERS, "clock_step_s": step_s, **faults})
    # A device's mean task time has the time that a server believes to have been away: its lease may be long.
    return merge([("rough", settings.to_json()), ("leases", {"server": {"lease_max_s": LEASE_MAX_S}})])


def prove_disaster(seed: int) -> Proved:
    """The run of a seed with every promise and every note looked at. For a worker process."""
    try:
        proved = prove(disastrous(seed, 8), 20, NOTES)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
    assert proved.applied > MADE_MIN, f"seed {seed} took {proved.applied} updates"
    return proved


class Elapsed:
    """Leases last as long as they were granted for, by the true time, whatever the server's clock says."""

    def __init__(self, simulation: Simulation) -> None:
        assert isinstance(simulation.server, Process)
        self._simulation, self._server = simulation, simulation.server
        self._due_s: dict[str, float] = {}
        self._expires: dict[str, float] = {}
        self._last: tuple[int, float, float] | None = None
        self._room_at = 0.0
        simulation.world.observers.append(self.observe)
        fill = simulation.server.disk.fill

        def noted(is_full: bool) -> None:
            fill(is_full)
            self._room_at = simulation.clock.now

        simulation.server.disk.fill = noted  # type: ignore[method-assign]

    def observe(self, event: ev.Event, effects: Sequence[Effect]) -> None:
        """One event."""
        now, engine = self._simulation.clock.now, self._simulation.engine
        self._check_pace(event.now, now)
        leased = {t.task_id: t for t in engine.ledger.tasks.values() if t.state is TaskState.LEASED}
        for task_id, task in leased.items():
            anew = isinstance(event, ev.Returned) or self._expires.get(task_id) != task.expires_at
            if anew:
                self._due_s[task_id], self._expires[task_id] = now + task.lease_s, task.expires_at
            late_s = now - max(self._due_s[task_id], self._room_at)
            assert late_s <= OVERDUE_S, f"the lease of {task_id} should have ended {late_s:.1f} s ago"
        for effect in effects:
            match effect:
                case LeaseEnded(task, LeaseEnd.EXPIRED):
                    left_s = self._due_s[task.task_id] - now
                    assert left_s <= NEAR_S, f"a lease ended {left_s:.1f} s before its time"
                case Granted(task, again=True):
                    assert task.task_id in self._due_s

    def _check_pace(self, event_s: float, now: float) -> None:
        life = self._server.restarts
        if self._last is not None and self._last[0] == life:
            _, event_before_s, before_s = self._last
            apart_s = (event_s - event_before_s) - (now - before_s)
            assert abs(apart_s) <= NEAR_S, f"the time of events went {apart_s:.1f} s apart from the true one"
        self._last = life, event_s, now

    def end(self) -> None:
        """Nothing is left to be looked at."""


class Bases:
    """What a device trains from is what its task was granted with, and so is what comes into the model."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._granted: dict[tuple[str, float], str] = {}
        self._newest: dict[str, str] = {}
        self._trained: dict[int, tuple[Task, str]] = {}
        self._pushed: dict[str, str] = {}
        self.lost = 0  # results of a history that was lost, which were refused
        world, executor = simulation.world, simulation.executor
        train, push = executor.train, world.push

        def training(job: Job) -> Pending[LocalResult]:
            found = digest(job.vector)
            wanted = self._granted[job.task.task_id, job.task.granted_at]
            assert found == wanted, f"{job.task.task_id} is trained from another version than its own"
            self._trained[id(job.task)] = job.task, found
            return train(job)

        def pushing(client_id: str, done: FinishedUpdate) -> PushOutcome:
            self._pushed[done.update_id] = self._trained[id(done.task)][1]
            return push(client_id, done)

        executor.train = training  # type: ignore[method-assign]
        world.push = pushing  # type: ignore[method-assign]
        world.observers.append(self.observe)

    def observe(self, _: ev.Event, effects: Sequence[Effect]) -> None:
        """One event."""
        for effect in effects:
            match effect:
                case Granted(task, again=False):
                    model = digest(self._simulation.world.versions.offer(None).model.vector)
                    self._granted[task.task_id, task.granted_at] = self._newest[task.task_id] = model
                case Decided(_, receipt, _, duplicate=False):
                    self.lost += receipt.decision.reason is Reason.OTHER_BASE
                    if receipt.decision.verdict is not Verdict.REJECTED:
                        same = self._pushed[receipt.update_id] == self._newest[receipt.task_id]
                        assert same, f"update {receipt.update_id} was trained from a lost version"

    def end(self) -> None:
        """Nothing is left to be looked at."""


class Whole:
    """What was said is what is there: acknowledged updates, each once; the log gives the state, to the bit.

    Where the log goes back, by an operator's word or a backup, so do these notes, and nowhere else.
    """

    def __init__(self, simulation: Simulation) -> None:
        assert isinstance(simulation.server, Process)
        self._simulation, self._disk = simulation, simulation.server.disk
        self._log: list[tuple[Record, bytes]] = []
        self._said: dict[str, Decision] = {}
        self._at: dict[str, int] = {}  # the event of an update
        self._word = False  # an operator has said that the log may go back, or has put a backup back
        append, push = self._disk.append, simulation.server.push
        attest, put_back = self._disk.attest, self._disk.put_back

        def appending(record: Record, payload: bytes | memoryview | None = None) -> None:
            append(record, payload)
            self._log.append((record, bytes(payload or b"")))
            if record["kind"] == "update":
                self._at[record["update_id"]] = len(self._log)

        def attesting() -> None:
            self._word = True
            attest()

        def putting_back(backup: Backup) -> None:
            self._word = True
            put_back(backup)

        def pushing(client_id: str, done: FinishedUpdate, reply: Reply[PushOutcome]) -> None:
            def said(outcome: PushOutcome) -> None:
                if isinstance(outcome, Decision):
                    self._say(done.update_id, outcome)
                reply(outcome)

            push(client_id, done, said)

        self._disk.append = appending  # type: ignore[method-assign]
        simulation.server.push = pushing  # type: ignore[method-assign]
        self._disk.attest = attesting  # type: ignore[method-assign]
        self._disk.put_back = putting_back  # type: ignore[method-assign]
        simulation.world.taken_back.append(self._take_back)

    def _say(self, update_id: str, decision: Decision) -> None:
        before = self._said.setdefault(update_id, decision)
        assert before == decision, f"update {update_id} is decided in two ways"

    def _take_back(self, _: Engine, seq: int) -> None:
        lost = [update_id for update_id in self._said if self._at[update_id] > seq]
        assert self._word or not lost, f"{lost} were acknowledged, and are lost without a word"
        self._word = False
        del self._log[seq:]
        self._said = {u: decision for u, decision in self._said.items() if u not in lost}

    def end(self) -> None:
        """The whole log that is left, through a fresh engine."""
        now, engine = self._simulation.engine, self._disk._make(None)
        payloads = {record["payload"]["sha256"]: data for record, data in self._log if "payload" in record}

        def load(payload: ev.Payload, submodel: Submodel | None) -> Delta:
            codec = make_codec(payload.codec)
            return codec.decode(payloads[payload.sha256], Layout.of(engine.spec, submodel))

        decided: Counter[str] = Counter()
        log = enumerate((record for record, _ in self._log), 1)
        for _, _, effects in replay(engine, log, load):
            new = [e for e in effects if isinstance(e, Decided) and not e.duplicate]
            decided.update(e.receipt.update_id for e in new)
        assert state_digest(engine) == state_digest(now), "the log gives another state"
        assert state_digest(self._disk.rebuild(now)) == state_digest(now)
        assert set(decided.values()) <= {1}, "an update was decided twice"
        assert decided.total() == now.counters.applied + now.counters.rejected
        for update_id, decision in self._said.items():
            assert now.ledger.receipts[update_id].decision == decision, f"{update_id} was acknowledged"


class Working:
    """Of two copies of a device one works: none takes a task away from another that it knows to live.

    A newcomer does so once, as a process that was started again: the other has not been heard of since.
    """

    def __init__(self, simulation: Simulation) -> None:
        assert isinstance(simulation.server, Process)
        self._simulation, self._server = simulation, simulation.server
        self._holder: dict[str, str] = {}
        self._first: dict[tuple[str, str, int], float] = {}  # when a session has asked, since a start
        self._owners: dict[str, tuple[str, int]] = {}  # who had a device's last task, in which life
        self._beats: dict[tuple[str, str, int], float] = {}
        world = simulation.world
        renew, self._ask = world.renew, world.ask

        def renewing(client_id: str, task_id: str, progress: float, session: str = "") -> Advice:
            self._beats[client_id, session, self._server.restarts] = simulation.clock.now
            return renew(client_id, task_id, progress, session)

        world.renew = renewing  # type: ignore[method-assign]
        world.ask = self._asking  # type: ignore[method-assign]

    def _asking(self, ask: Ask) -> Refused | tuple[Task, Offer]:
        life, now = self._server.restarts, self._simulation.clock.now
        before = set(self._simulation.engine.ledger.tasks)
        live = self._simulation.engine.ledger.live_of(ask.client_id)
        first = self._first.setdefault((ask.client_id, ask.session, life), now)
        answer = self._ask(ask)
        left = self._simulation.engine.ledger.tasks
        for task in (t for t in live if t.task_id not in left):
            holder = self._holder[task.task_id]
            beat = self._beats.get((ask.client_id, holder, life), -math.inf)
            alive = holder != ask.session and beat > first and now - beat < task.lease_s / 2.0 - NEAR_S
            known = self._owners.get(ask.client_id) == (holder, life)  # a restart forgets it
            assert not (alive and known), f"{ask.session} took a task away from {holder}, which lives"
        if not isinstance(answer, Refused):
            task_id = answer[0].task_id
            if task_id not in before:
                self._owners[ask.client_id] = ask.session, life
            self._holder[task_id] = ask.session
        return answer

    def end(self) -> None:
        """Nothing is left to be looked at."""


NOTES = (Elapsed, Bases, Whole, Working)
