"""A simulated device: the live agent's `Session`, under a virtual clock, on a link, of a speed.

What can happen to it, every draw from a stream named by the device:

- dropout: with probability `fleet.dropout` it vanishes at a random moment of a task's training, and
  is away for a uniform time of up to `fleet.availability_period_s`;
- availability: it is on for the fraction `fleet.availability` of every `fleet.availability_period_s`,
  from a phase of its own. Off means out of reach, and training stops;
- departure: the fraction `fleet.leavers` of the devices goes for good, at a random moment of the run;
- where `[faults]` are on (`faults.py`), crashes, a clock that is wrong, and messages that do not arrive: a
  call without an answer fails after a while and is repeated, like the live agent's.

What it had trained is lost, except for a finished update: that waits in the outbox and is pushed
when the device is back. A message under way when its device vanishes does not arrive.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from anabranch.compress.feedback import Memory
from anabranch.core import effects as ef
from anabranch.core import events as ev
from anabranch.core.effects import Refused
from anabranch.core.errors import InvalidUpdate
from anabranch.core.ledger import TRAIN_S
from anabranch.core.rng import rank, seed_of
from anabranch.core.session import Session
from anabranch.core.updates import Ask, Decision, Task, Verdict
from anabranch.simulation.clock import Action
from anabranch.simulation.executors.base import Job, LocalResult, Pending
from anabranch.simulation.faults import RIGHT, DeviceClock
from anabranch.simulation.network import Link, down, up
from anabranch.simulation.outbox import Outbox
from anabranch.simulation.presence import Presence
from anabranch.simulation.server import Granting
from anabranch.simulation.surroundings import Surroundings, View, capability_of
from anabranch.simulation.versions import Offer
from anabranch.workloads.batches import planned_steps


class Device(Presence):
    """See the module. `index` is its place in the fleet's profiles and in the split of the data.

    Idle it is a row of numbers: the models that it trains from are the run's, one copy of a version.
    """

    __slots__ = (
        "_around",
        "_asleep",
        "_call",
        "_crashes",
        "_enrolled",
        "_heartbeat",
        "_holds",
        "_life",
        "_memory",
        "_network",
        "_offer",
        "_outbox",
        "_server",
        "_tasks",
        "_time",
        "_training",
        "examples",
        "index",
        "link",
        "session",
    )

    def __init__(
        self, index: int, examples: int, session: Session, around: Surroundings, time: DeviceClock = RIGHT
    ) -> None:
        super().__init__(around.clock, around.fleet, around.horizon_s)
        self.index = index
        self.examples = examples
        self.session = session
        self.link = Link.of(around.profiles, index)
        self._around = around
        self._server, self._network = around.server, around.network
        self._time = time
        self._enrolled = self._asleep = False
        self._crashes = 0
        self._life = 0  # counts how often it has vanished: what it had sent by then is gone
        self._call = 0  # counts calls: the answer to an earlier one is not for us any more
        self._heartbeat = 0
        self._tasks = 0
        self._offer: Offer | None = None
        self._holds: int | None = None  # the newest version that it has whole: it is on the device's disk
        self._memory: Memory | None = None  # of its uplink, on its disk too
        self._training: Pending[LocalResult] | None = None
        self._outbox: Outbox | None = None

    @property
    def client_id(self) -> str:
        """Its name."""
        return self.session.client_id

    # --- coming and going --------------------------------------------------------------------

    def crash(self, down_s: float) -> None:
        """Forget everything that is not on the disk, and begin anew after so many seconds."""
        if self.is_down:
            return
        self._be_down(down_s)
        self._crashes += 1
        seed = seed_of(self._around.seed, "life", self.client_id, self._crashes)
        self.session, self._enrolled = Session(self.client_id, seed, self.session.settings), False

    def _drop_out(self, task_index: int) -> None:
        self._be_away(self._fleet.availability_period_s * self._draw("dropout-away", task_index))

    def _vanish(self) -> None:
        self._server.gone(self.client_id)
        self._asleep = False
        self._life += 1
        self._call += 1
        self._heartbeat += 1
        self._abandon()

    def _come(self) -> None:
        if self._enrolled:
            self._start()
        else:
            self._enrol()

    def _enrol(self) -> None:
        fleet = self._fleet
        capability = capability_of(self.examples, fleet.up_mbps * 1e6, fleet.down_mbps * 1e6)
        call = self._begin_call(0.0, self._enrol)

        def answer(_: None) -> None:
            self._hear(call, self._enrolled_now)

        self._say(self._soon, partial(self._server.enrol, self.client_id, capability, answer))

    def _enrolled_now(self) -> None:
        self._enrolled = True
        self._start()

    def _start(self) -> None:
        pending = None if self._outbox is None else self._outbox.update_id
        self._handle(ev.Started(self._now, pending))

    @property
    def view(self) -> View:
        """What it believes at the moment."""
        tasks = [self.session.task, None if self._outbox is None else self._outbox.task]
        return View(self._holds, tuple(task for task in tasks if task is not None))

    # --- the session's orders ----------------------------------------------------------------

    @property
    def _now(self) -> float:
        """By its own clock."""
        return self._time.local(self._clock.now)

    def _handle(self, event: ev.SessionEvent) -> None:
        for effect in self.session.handle(event):
            self._obey(effect, self._time.true(event.now))

    def _obey(self, effect: ef.SessionEffect, now: float) -> None:
        """Do what the session says; `now` is the true time, which a refused device skips ahead of."""
        match effect:
            case ef.AskTask(task_id):
                self._ask(task_id, now)
            case ef.FetchModel():
                self._fetch()
            case ef.Train():
                self._train(effect)
            case ef.Push():
                self._push()
            case ef.Discard():
                self._outbox = None
            case ef.Renew(task):
                self._renew(task, now)
            case ef.StopTraining():
                self._call += 1
                self._abandon()
            case ef.SetTimer("heartbeat", at):
                self._heartbeat += 1
                self._clock.at(self._moment(at), partial(self._beat, self._heartbeat))
            case ef.SetTimer("retry", at):
                self._retry(at)

    def called(self) -> None:
        """The server has called for it, who was asleep: it asks as soon as it hears that."""
        self._asleep = False
        self._after(self.link.latency_s, lambda: self._handle(ev.TimerFired(self._now, "retry")))

    def _retry(self, at: float) -> None:
        if self._asleep:
            return
        if self._network.timeout_s is None:
            # Nothing can reach a session that waits to ask again, so its time is skipped.
            self._handle(ev.TimerFired(at, "retry"))
        else:
            self._at(self._moment(at), lambda: self._handle(ev.TimerFired(self._now, "retry")))

    def _ask(self, task_id: str, now: float) -> None:
        call, ask = self._begin_call(0.0), Ask(self.client_id, task_id, self._holds)

        def answer(granting: Granting) -> None:
            if not isinstance(granting, Refused):
                self._hear(call, partial(self._granted, *granting))
            elif self._network.timeout_s is None:
                self._asleep = self._server.waits(granting, self)
                self._refused(granting, self._clock.now + self.link.latency_s)
            else:
                self._hear(call, lambda: self._refused(granting, self._clock.now))

        self._say(now + self.link.latency_s, partial(self._server.ask, ask, answer))

    def _refused(self, refused: Refused, now: float) -> None:
        local_s = self._time.local(now)
        self._handle(ev.TaskRefused(local_s, refused.retry_after_s, refused.detail, refused.final))

    def _granted(self, task: Task, offer: Offer) -> None:
        self._offer = offer
        self._handle(ev.TaskGranted(self._now, task))

    def _fetch(self) -> None:
        """The model's bytes; the server has them as a file, so that its crash does not matter."""
        assert self._offer is not None, "a granted task comes with its model"
        if not self._offer.payload_bytes:  # the device has it
            self._call += 1
            self._handle(ev.ModelFetched(self._now))
            return
        takes_s = self.link.download_s(self._offer.payload_bytes)
        call = self._begin_call(takes_s)
        self._hear(call, self._fetched, self._clock.now + (self.link.latency_s + takes_s))

    def _fetched(self) -> None:
        assert self._offer is not None
        if not self._offer.part_only:
            self._holds = self._offer.model.version
        self._server.downloaded(self.client_id, self._offer.payload_bytes)
        self._handle(ev.ModelFetched(self._now))

    def _train(self, order: ef.Train) -> None:
        """Begin a task: how long it takes, and whether the device vanishes in it, is known at once."""
        assert self._offer is not None
        model, self._offer = self._offer.model, None
        self._call += 1
        self._tasks += 1
        around, task = self._around, order.task
        steps = planned_steps(task.local, self.examples)
        train_s = around.profiles.task_time_s(self.index, self._tasks, steps) * around.step_cost(task)
        if self._draw("dropout", self._tasks) < self._fleet.dropout:
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
            self._handle(ev.CallFailed(self._now, str(error), retryable=False))
            return
        self._training = None
        result = replace(result, metrics={**result.metrics, TRAIN_S: train_s})
        self._outbox = Outbox(order.task, order.update_id, self.examples, result)
        self._handle(ev.Trained(self._now, order.update_id))

    def _renew(self, task: Task, now: float) -> None:
        """A heartbeat; the answer may say that the task is not wanted any more."""
        # Seconds of work stand for progress: a device here may vanish, but never hangs.
        client_id, task_id, progress = self.client_id, task.task_id, now - task.granted_at

        def answer(wanted: bool) -> None:
            if not wanted:
                self._network.send(down(client_id), self._soon, partial(self._cancelled, task_id))

        beat = partial(self._server.renew, client_id, task_id, progress, answer)
        self._network.send(up(client_id), now + self.link.latency_s, beat)

    def _cancelled(self, task_id: str) -> None:
        if self.is_there:
            self._handle(ev.TaskCancelled(self._now, task_id))

    def _push(self) -> None:
        """Send the header; the server looks up the task before it takes the payload."""
        outbox = self._outbox
        assert outbox is not None, "an update is in the outbox before it is pushed"
        upload_s = self.link.upload_s(len(outbox.result.payload))
        received_at, call = self._clock.now + upload_s, self._begin_call(upload_s)

        def answer(takes: bool) -> None:
            if takes:  # the last byte will be there at `received_at`
                due_s = max(received_at, self._clock.now)
                self._say(due_s, partial(self._server.push, self.client_id, outbox, decided))
            else:
                self._hear(call, partial(self._not_taken, outbox))

        def decided(decision: Decision) -> None:
            self._hear(call, partial(self._acknowledged, outbox, decision))

        self._say(self._soon, partial(self._server.takes, self.client_id, outbox, answer))

    def _not_taken(self, outbox: Outbox) -> None:
        detail = f"task {outbox.task.task_id!r} is not open any more"
        self._handle(ev.CallFailed(self._now, detail, retryable=False))

    def _acknowledged(self, outbox: Outbox, decision: Decision) -> None:
        if decision.verdict is not Verdict.REJECTED:
            self._memory = outbox.result.memory or self._memory
        self._handle(ev.PushAcknowledged(self._now, outbox.update_id, decision))

    def _beat(self, heartbeat: int) -> None:
        if heartbeat == self._heartbeat:
            self._handle(ev.TimerFired(self._now, "heartbeat"))

    # --- messages ----------------------------------------------------------------------------

    def _begin_call(self, takes_s: float, again: Action | None = None) -> int:
        """A new call; where messages may be lost, it fails in time. Its bytes take `takes_s`."""
        self._call += 1
        if self._network.timeout_s is not None:
            self._after(takes_s + self._network.timeout_s, again or self._unanswered)
        return self._call

    def _unanswered(self) -> None:
        self._call += 1
        self._handle(ev.CallFailed(self._now, "no answer in time", retryable=True))

    @property
    def _soon(self) -> float:
        """When a small message that leaves now is due."""
        return self._clock.now + self.link.latency_s

    def _say(self, due_s: float, action: Action) -> None:
        """A message to the server, unless the device vanishes before it is there."""
        life = self._life

        def arrive() -> None:
            if life == self._life:
                action()

        self._network.send(up(self.client_id), due_s, arrive)

    def _hear(self, call: int, step: Action, due_s: float | None = None) -> None:
        """The server's answer to a call, unless that is over by then."""

        def arrive() -> None:
            if call == self._call:
                self._call += 1  # it is answered: neither a second answer nor its timeout matters
                step()

        self._network.send(down(self.client_id), self._soon if due_s is None else due_s, arrive)

    # --- small things ------------------------------------------------------------------------

    def _moment(self, local_s: float) -> float:
        """When its clock shows this; at once if it does already."""
        return max(self._clock.now, self._time.true(local_s))

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
