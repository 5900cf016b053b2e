"""A simulated device: the live agent's `Session`, under a virtual clock, on a link, of a speed.

What can happen to it, every draw from a stream named by the device:

- dropout: with probability `fleet.dropout` it vanishes at a random moment of a task's training, and
  is away for a uniform time of up to `fleet.availability_period_s`;
- availability: it is on for the fraction `fleet.availability` of every `fleet.availability_period_s`,
  from a phase of its own. Off means out of reach, and training stops;
- departure: the fraction `fleet.leavers` of the devices goes for good, at a random moment of the run.

What it had trained is lost, except for a finished update: that waits in the outbox and is pushed
when the device is back. A message under way when its device vanishes does not arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from anabranch.compress.feedback import Memory
from anabranch.compress.registry import STAGES
from anabranch.core import effects as ef
from anabranch.core import events as ev
from anabranch.core.config import FleetTable
from anabranch.core.effects import Refused
from anabranch.core.errors import InvalidUpdate
from anabranch.core.ledger import TRAIN_S
from anabranch.core.rng import rank
from anabranch.core.session import Phase, Session
from anabranch.core.updates import Ask, Capability, Decision, Task, Verdict
from anabranch.simulation.clock import Action, VirtualClock
from anabranch.simulation.executors.base import Executor, Job, LocalResult, Pending
from anabranch.simulation.network import Link
from anabranch.simulation.versions import Offer
from anabranch.workloads.batches import planned_steps
from anabranch.workloads.profiles import DeviceProfiles


@dataclass(frozen=True, eq=False)
class Outbox:
    """A finished update, kept until the server has answered for good."""

    task: Task
    update_id: str
    examples: int
    result: LocalResult


class Server(Protocol):
    """What a device can say to the server, at the moment at which the message arrives."""

    def enrol(self, client_id: str, capability: Capability) -> None: ...  # noqa: D102
    def ask(self, ask: Ask) -> Refused | tuple[Task, Offer]: ...  # noqa: D102
    def push(self, client_id: str, outbox: Outbox) -> Decision: ...  # noqa: D102
    def takes(self, client_id: str, outbox: Outbox) -> bool: ...  # noqa: D102
    def renew(self, client_id: str, task_id: str, progress: float) -> bool: ...  # noqa: D102
    def downloaded(self, client_id: str, payload_bytes: int) -> None: ...  # noqa: D102
    def note(self, kind: str, client_id: str) -> None: ...  # noqa: D102


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What all devices share."""

    clock: VirtualClock
    server: Server
    executor: Executor
    fleet: FleetTable
    profiles: DeviceProfiles
    seed: int
    step_cost: Callable[[Task], float]  # relative to the whole model's
    horizon_s: float  # devices leave for good before this


class Device:
    """See the module. `index` is its place in the fleet's profiles and in the split of the data."""

    def __init__(self, index: int, examples: int, session: Session, around: Surroundings) -> None:
        self.index = index
        self.examples = examples
        self.session = session
        self.client_id = session.client_id
        self.link = Link.of(around.profiles, index)
        self._around = around
        self._clock, self._server = around.clock, around.server
        self._on = self._away = self._gone = self._enrolled = False
        self._call = 0  # counts calls: the answer to an earlier one is not for us any more
        self._heartbeat = 0
        self._tasks = 0
        self._offer: Offer | None = None
        self._holds: int | None = None  # the newest version that it has whole: it is on the device's disk
        self._memory: Memory | None = None  # of its uplink, on its disk too
        self._training: Pending[LocalResult] | None = None
        self._outbox: Outbox | None = None

    # --- coming and going --------------------------------------------------------------------

    def begin(self) -> None:
        """Live, from time 0: in the middle of an on or off period if the fleet has them."""
        fleet = self._around.fleet
        if self._draw("leaver", 0) < fleet.leavers:
            self._clock.at(self._around.horizon_s * self._draw("leaver-moment", 0), self._leave)
        if fleet.availability >= 1.0:
            self._switch_on()
            return
        phase_s = fleet.availability_period_s * self._draw("availability", 0)
        on_s = fleet.availability_period_s * fleet.availability
        self._cycle(-phase_s)
        if phase_s < on_s:
            self._switch_on()

    def _cycle(self, start_s: float) -> None:
        """One period from `start_s`, which may lie before 0; then the next."""
        fleet, clock = self._around.fleet, self._clock
        off_s = start_s + fleet.availability_period_s * fleet.availability
        next_s = start_s + fleet.availability_period_s
        if start_s >= 0.0:
            self._switch_on()
        if off_s > clock.now:
            clock.at(off_s, self._switch_off)
        clock.at(next_s, partial(self._cycle, next_s))

    def _switch_on(self) -> None:
        self._on = True
        if not (self._away or self._gone):
            self._come()

    def _switch_off(self) -> None:
        self._on = False
        if not (self._away or self._gone):
            self._vanish()

    def _leave(self) -> None:
        """For good."""
        present = self._on and not self._away
        self._gone = True
        if present:
            self._vanish()

    def _drop_out(self, task_index: int) -> None:
        self._away = True
        self._vanish()
        away_s = self._around.fleet.availability_period_s * self._draw("dropout-away", task_index)
        self._clock.at(self._clock.now + away_s, self._return)

    def _return(self) -> None:
        self._away = False
        if self._on and not self._gone:
            self._come()

    def _vanish(self) -> None:
        self._server.note("vanished", self.client_id)
        self._call += 1
        self._heartbeat += 1
        self._abandon()

    def _come(self) -> None:
        now = self._clock.now
        if not self._enrolled:
            self._after(self.link.latency_s, self._enrol)
        elif self.session.phase is Phase.PUSHING:
            self._handle(ev.Started(now, self.session.update_id))
        else:
            self._handle(ev.Started(now))

    def _enrol(self) -> None:
        fleet = self._around.fleet
        up_bps, down_bps = fleet.up_mbps * 1e6, fleet.down_mbps * 1e6
        capability = Capability(self.examples, up_bps=up_bps, down_bps=down_bps, codecs=STAGES)
        self._server.enrol(self.client_id, capability)
        self._after(self.link.latency_s, self._start)

    def _start(self) -> None:
        self._enrolled = True
        self._handle(ev.Started(self._clock.now))

    # --- the session's orders ----------------------------------------------------------------

    def _handle(self, event: ev.SessionEvent) -> None:
        for effect in self.session.handle(event):
            self._obey(effect, event.now)

    def _obey(self, effect: ef.SessionEffect, now: float) -> None:
        match effect:
            case ef.AskTask(task_id):
                self._call += 1
                self._clock.at(now + self.link.latency_s, partial(self._ask, self._call, task_id))
            case ef.FetchModel():
                self._fetch()
            case ef.Train():
                self._train(effect)
            case ef.Push():
                self._push()
            case ef.Discard():
                self._outbox = None
            case ef.Renew(task):
                # Seconds of work stand for progress: a device here may vanish, but never hangs.
                report = (self.client_id, task.task_id, now - task.granted_at)
                self._clock.at(now + self.link.latency_s, partial(self._renew, *report))
            case ef.StopTraining():
                self._call += 1
                self._abandon()
            case ef.SetTimer("heartbeat", at):
                self._heartbeat += 1
                self._clock.at(at, partial(self._beat, self._heartbeat))
            case ef.SetTimer("retry", at):
                # Nothing can reach a session that waits to ask again, so its time is skipped.
                self._handle(ev.TimerFired(at, "retry"))

    def _ask(self, call: int, task_id: str) -> None:
        """The ask is at the server."""
        if call != self._call:
            return
        answer = self._server.ask(Ask(self.client_id, task_id, self._holds))
        if isinstance(answer, Refused):
            at = self._clock.now + self.link.latency_s
            self._handle(ev.TaskRefused(at, answer.retry_after_s, answer.detail, answer.final))
        else:
            self._after(self.link.latency_s, partial(self._granted, *answer))

    def _granted(self, task: Task, offer: Offer) -> None:
        self._offer = offer
        self._handle(ev.TaskGranted(self._clock.now, task))

    def _fetch(self) -> None:
        assert self._offer is not None, "a granted task comes with its model"
        self._call += 1
        if not self._offer.payload_bytes:  # the device has it
            self._handle(ev.ModelFetched(self._clock.now))
            return
        self._after(self.link.latency_s + self.link.download_s(self._offer.payload_bytes), self._fetched)

    def _fetched(self) -> None:
        assert self._offer is not None
        if not self._offer.part_only:
            self._holds = self._offer.model.version
        self._server.downloaded(self.client_id, self._offer.payload_bytes)
        self._handle(ev.ModelFetched(self._clock.now))

    def _train(self, order: ef.Train) -> None:
        """Begin a task: how long it takes, and whether the device vanishes in it, is known at once."""
        assert self._offer is not None
        model, self._offer = self._offer.model, None
        self._call += 1
        self._tasks += 1
        around, task = self._around, order.task
        steps = planned_steps(task.local, self.examples)
        train_s = around.profiles.task_time_s(self.index, self._tasks, steps) * around.step_cost(task)
        if self._draw("dropout", self._tasks) < around.fleet.dropout:
            moment_s = train_s * self._draw("dropout-moment", self._tasks)
            self._after(moment_s, partial(self._drop_out, self._tasks))
            return
        due_s = self._clock.now + train_s
        self._training = around.executor.train(Job(self.index, model.vector, task, self._memory, due_s))
        self._after(train_s, partial(self._trained, order, train_s))

    def _trained(self, order: ef.Train, train_s: float) -> None:
        assert self._training is not None
        try:
            result = self._training.result()
        except InvalidUpdate as error:  # it has diverged: what it remembers is of no use either
            self._training = self._memory = None
            self._handle(ev.CallFailed(self._clock.now, str(error), retryable=False))
            return
        self._training = None
        result = replace(result, metrics={**result.metrics, TRAIN_S: train_s})
        self._outbox = Outbox(order.task, order.update_id, self.examples, result)
        self._handle(ev.Trained(self._clock.now, order.update_id))

    def _renew(self, client_id: str, task_id: str, progress: float) -> None:
        """A heartbeat is at the server; the answer may say that the task is not wanted any more."""
        if not self._server.renew(client_id, task_id, progress):
            self._clock.at(self._clock.now + self.link.latency_s, partial(self._cancelled, task_id))

    def _cancelled(self, task_id: str) -> None:
        if self._on and not (self._away or self._gone):
            self._handle(ev.TaskCancelled(self._clock.now, task_id))

    def _push(self) -> None:
        """Send the header; the server looks up the task before it takes the payload."""
        assert self._outbox is not None, "an update is in the outbox before it is pushed"
        self._call += 1
        received_at = self._clock.now + self.link.upload_s(len(self._outbox.result.payload))
        self._after(self.link.latency_s, partial(self._announced, received_at))

    def _announced(self, received_at: float) -> None:
        """The update's header is at the server; its last byte will be there at `received_at`."""
        assert self._outbox is not None
        if self._server.takes(self.client_id, self._outbox):
            self._at(received_at, self._pushed)
        else:
            self._after(self.link.latency_s, self._refused)

    def _refused(self) -> None:
        assert self._outbox is not None
        detail = f"task {self._outbox.task.task_id!r} is not open any more"
        self._handle(ev.CallFailed(self._clock.now, detail, retryable=False))

    def _pushed(self) -> None:
        """The update is at the server."""
        assert self._outbox is not None
        outbox = self._outbox
        decision = self._server.push(self.client_id, outbox)
        self._after(self.link.latency_s, partial(self._acknowledged, outbox.update_id, decision))

    def _acknowledged(self, update_id: str, decision: Decision) -> None:
        outbox = self._outbox
        if outbox is not None and decision.verdict is not Verdict.REJECTED:
            self._memory = outbox.result.memory or self._memory
        self._handle(ev.PushAcknowledged(self._clock.now, update_id, decision))

    def _beat(self, heartbeat: int) -> None:
        if heartbeat == self._heartbeat:
            self._handle(ev.TimerFired(self._clock.now, "heartbeat"))

    # --- small things ------------------------------------------------------------------------

    def _after(self, delay_s: float, step: Action) -> None:
        """Go on with the call in hand after so many seconds, unless it is over by then."""
        self._at(self._clock.now + delay_s, step)

    def _at(self, time_s: float, step: Action) -> None:
        call = self._call

        def go_on() -> None:
            if call == self._call:
                step()

        self._clock.at(time_s, go_on)

    def _abandon(self) -> None:
        if self._training is not None:
            self._training.cancel()
        self._training = self._offer = None

    def _draw(self, purpose: str, number: int) -> float:
        """A uniform number in [0, 1) that no other device and no other purpose shares."""
        return rank(self._around.seed, purpose, self.client_id, number)
