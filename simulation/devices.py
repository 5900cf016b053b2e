"""A simulated device: the live agent's shell and session, under a virtual clock, on a link, of a speed.

What can happen to it, every draw from a stream named by the device:

- data that arrive (`fleet.arrival`): it first asks when it has its first example, and trains on what is there
  when a task's training begins;
- dropout: with probability `fleet.dropout` it vanishes at a random moment of a task's training, and
  is away for a uniform time of up to `fleet.availability_period_s`;
- availability: it is on for the fraction `fleet.availability` of every `fleet.availability_period_s`,
  from a phase of its own, or when its trace says so. Off means out of reach, and training stops;
- departure: the fraction `fleet.leavers` of the devices goes for good, at a random moment of the run;
- where `[faults]` are on (`faults.py`), crashes, a clock that is wrong, and messages that do not arrive: a
  call without an answer fails after a while and is repeated, like the live agent's.

What it had trained is lost, except for finished updates: those wait in the outbox and are pushed
when the device is back. A message under way when its device vanishes does not arrive.

With `client.push = "overlap"` its session has two lanes (`core/device/overlap.py`): a task is trained while
the result of the last one is on its way. Both use the same link, each as if it had that for itself; what
devices share is the server's line, where that has a limit (`transfers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Self

from anabranch.core import effects as ef
from anabranch.core import events as ev
from anabranch.core.device.overlap import PUSH_TIMER, OverlapSession
from anabranch.core.device.session import Session
from anabranch.core.effects import Refused
from anabranch.core.engine.ledger import TRAIN_S
from anabranch.core.errors import AnabranchError, ConfigError, InvalidUpdate, StoreFull, Unavailable
from anabranch.core.model.updates import Ask, Capability, Decision, Task
from anabranch.core.rng import rank, seed_of
from anabranch.host.device import OVER, DeviceCall, DeviceShell
from anabranch.host.run import Advice, AdviceKind
from anabranch.reports.energy import EnergyMeter
from anabranch.simulation.clock import Action
from anabranch.simulation.executors.base import Job, LocalResult, Pending
from anabranch.simulation.faults import RIGHT, DeviceClock
from anabranch.simulation.lanes import Lane
from anabranch.simulation.network import DOWN, UP, NetworkLink
from anabranch.simulation.server import Exchange, Granting, PushOutcome
from anabranch.simulation.storage import FinishedUpdate
from anabranch.simulation.surroundings import Surroundings, View
from anabranch.simulation.talker import Talker
from anabranch.simulation.versions import Model, Offer
from anabranch.workloads.batches import planned_steps
from anabranch.workloads.traces import DeviceMoment, DeviceTrace

FIRST_LIFE = "life-0"  # the process of a device that has not crashed and is no copy


class Device(Talker, DeviceShell):
    """One device of a simulated fleet.

    `index` is its place in the fleet's profiles and in the split of the data.

    Idle it is a row of numbers: the models that it trains from are the run's, one copy of a version.
    """

    __slots__ = (
        "_asleep",
        "_copied_of",
        "_copy",
        "_crashes",
        "_disk",
        "_enrolled",
        "_heartbeat",
        "_offer",
        "_push_lane",
        "_server",
        "_skips_waits",
        "_tasks",
        "_training",
        "_work",
        "examples",
        "index",
        "session",
    )
    heeds: tuple[AdviceKind, ...] = OVER  # what notices mean anything to it

    def __init__(
        self, index: int, examples: int, session: Session, around: Surroundings, time: DeviceClock = RIGHT
    ) -> None:
        super().__init__(session.client_id, around, NetworkLink.of(around.profiles, index), time)
        self.index = index
        self.examples = examples
        self.session = session
        self._server = around.server
        self._enrolled = self._asleep = False
        self._crashes = 0
        self._copy = self._copied_of = ""  # which copy it is, and of which process: empty for none
        self._work = Lane(around.clock, around.network, session.client_id)
        self._push_lane: Lane | None = None
        # Nothing can reach a session that waits to ask again, so its time is skipped: not with two lanes.
        self._skips_waits = around.network.timeout_s is None and not isinstance(session, OverlapSession)
        self._heartbeat = 0
        self._tasks = 0
        self._offer: Offer | None = None
        self._disk = around.storage
        self._training: Pending[LocalResult] | None = None

    @property
    def _pushes(self) -> Lane:
        """Made with its first push: most devices of a large fleet never have one."""
        if self._push_lane is None:
            self._push_lane = Lane(self._around.clock, self._around.network, self.client_id)
        return self._push_lane

    # --- coming and going --------------------------------------------------------------------

    def crash(self, down_s: float) -> None:
        """Forget everything that is not on the disk, and begin anew after so many seconds."""
        if self.is_down:
            return
        self._be_down(down_s)
        self._crashes += 1
        seed = seed_of(self._around.seed, "life", f"{self.client_id}{self._copy}", self._crashes)
        anew = type(self.session)
        self.session, self._enrolled = anew(self.client_id, seed, self.session.settings), False

    def copied(self, number: int) -> Self:
        """Another one with what is on the disk of this one; it is not there yet."""
        seed = seed_of(self._around.seed, "copy", self.client_id, number)
        session = type(self.session)(self.client_id, seed, self.session.settings)
        copy = type(self)(self.index, self.examples, session, self._around, self._time)
        copy._copy, copy._copied_of = f" copy-{number} ", self._process
        copy._disk = self._disk
        return copy

    @property
    def _process(self) -> str:
        """The name that it has chosen for its session."""
        return f"{self._copy}life-{self._crashes}" if self._copy or self._crashes else FIRST_LIFE

    def _drop_out(self, task_index: int) -> None:
        self._be_away(self._fleet.availability_period_s * self._draw("dropout-away", task_index))

    def _vanish(self) -> None:
        self._server.gone(self.client_id)
        self._asleep = False
        self._life += 1
        self._work.end()
        if self._push_lane is not None:
            self._push_lane.end()
        self._heartbeat += 1
        self._abandon()

    def _come(self) -> None:
        if (first_s := self._first_data_s) > self._clock.now:
            self._work.at(first_s, self._come)
        elif self._enrolled:
            self._begin()
        else:
            self._enrol(self._enrolled_now)

    def _enrol(self, then: Action) -> None:
        capability = self._around.capability(self.index, self.examples)
        retries = self._network.timeout_s is not None
        call = self._work.begin(partial(self._enrol, then) if retries else _never)
        self._say(self._soon, _Enrolment(self, call, capability, then))

    def _heard_of(self, call: int, then: Action, failed: ConfigError | StoreFull | None) -> None:
        """The server knows who it is, or could not write that down, or has nothing for it: then it ends."""
        if isinstance(failed, ConfigError):
            then = self._ended
        elif failed is not None:
            then = partial(self._work.after, failed.retry_after_s[0], partial(self._enrol, then))
        self._work.hear(call, then, self._soon)

    def _ended(self) -> None:
        """For good, and nobody misses it who was never let in."""
        self.has_left = True

    def _enrolled_now(self) -> None:
        self._enrolled = True
        self._begin()

    @property
    def view(self) -> View:
        """What it believes at the moment."""
        tasks = [self.session.task, *(waiting.task for waiting in self._disk.waiting)]
        return View(self._disk.held.version, tuple(task for task in tasks if task is not None))

    # --- the session's orders ----------------------------------------------------------------

    _order = DeviceShell._obey  # at once; but `now` is ahead of the clock where a wait was skipped

    def _end(self, why: str) -> None:
        pass

    def _stop_work(self, task_id: str) -> None:  # noqa: ARG002 - it has one
        self._work.end()
        self._abandon()

    def _give_back(self, order: ef.GiveBack, now: float) -> None:
        drop = partial(self._server.drop, self.client_id, order.task_id, order.why, order.diverged)
        self._say(self._time.true(now) + self.link.latency_s, drop)

    def _set_timer(self, timer: ef.SetTimer) -> None:
        if timer.name == "heartbeat":
            self._heartbeat += 1
            self._clock.at(self._moment(timer.at), partial(self._beat, self._heartbeat))
        elif self._asleep:  # it will be called
            return
        elif self._skips_waits:
            self._hear(ev.TimerFired(timer.at, timer.name))
        else:
            lane = self._pushes if timer.name == PUSH_TIMER else self._work
            lane.at(self._moment(timer.at), lambda: self._hear(ev.TimerFired(self._now, timer.name)))

    def asked(self, answer: Granting | StoreFull) -> None:
        """The server answers to its first ask, which it made as a newcomer (`newcomers.py`)."""
        self._told(self._first_ask(), answer)

    def woken(self) -> None:
        """The server has called for it, who was a newcomer until now and asleep since its first ask."""
        self._first_ask()
        self.session.handle(ev.TaskRefused(self._now, (0.0, 0.0)))
        self.called()

    def _first_ask(self) -> int:
        self._on = self._enrolled = True
        self.session.handle(ev.Started(self._now))
        return self._work.begin(self._unanswered)

    def called(self) -> None:
        """The server has called for it, who was asleep: it asks as soon as it hears that."""
        self._asleep = False
        self._work.after(self.link.latency_s, self._retry)

    def _retry(self) -> None:
        self._hear(ev.TimerFired(self._now, "retry"))

    def _ask(self, task_id: str, now: float) -> None:
        ask, call = self._ask_of(task_id), self._work.begin(self._unanswered)
        self._say(self._time.true(now) + self.link.latency_s, _Asking(self, call, ask))

    def _told(self, call: int, granting: Granting | StoreFull) -> None:
        """What the server answers to an ask."""
        if isinstance(granting, StoreFull):
            self._work.hear(call, partial(self._failed, DeviceCall.ASK, granting), self._soon)
        elif not isinstance(granting, Refused):
            self._work.hear(call, partial(self._granted, *granting), self._soon)
        elif self._skips_waits:
            self._asleep = self._server.waits(granting, self)
            self._answered(granting, self._time.local(self._soon))
        else:
            self._work.hear(call, lambda: self._answered(granting, self._now), self._soon)

    def _ask_of(self, task_id: str) -> Ask:
        before = f"{self._copy}life-{self._crashes - 1}" if self._crashes else self._copied_of
        held = self._disk.held
        whole = None if held.parts else held.version
        return Ask(self.client_id, task_id, whole, self._process, before, held.parts)

    def _granted(self, task: Task, offer: Offer) -> None:
        self._offer = offer
        self._answered(task, self._now)

    def _fetch(self, task: Task) -> None:  # noqa: ARG002 - the model has come with it
        """The model's bytes; the server has them as a file, so that its crash does not matter."""
        assert self._offer is not None, "a granted task comes with its model"
        held = self._disk.held.leading_from(self._offer.from_heads)
        if held is not self._disk.held:  # it has another model of that number
            self._disk = replace(self._disk, held=held)
            self._offer = replace(self._offer, payload_bytes=self._offer.whole_bytes, from_heads="")
        if not self._offer.payload_bytes:  # the device has it
            self._work.end()
            self._fetched()
            return
        coming = self._offer.payload_bytes + self._frozen_bytes
        transfer = self._around.lines.download(self.client_id, self.link, coming)
        call = self._work.begin(self._unanswered, transfer)
        transfer.arrives(lambda at: self._work.hear(call, self._downloaded, at))

    @property
    def _frozen_bytes(self) -> int:
        """What comes before its first version."""
        return 0 if self._disk.has_frozen else self._around.frozen_bytes

    def _downloaded(self) -> None:
        assert self._offer is not None
        offer, model = self._offer, self._offer.model
        kept = model if offer.head else None  # another may have its number one day
        held = self._disk.held
        if offer.adds is not None:
            held = held.with_part(offer.adds, kept)
        else:
            held = held.after(model.version, offer.head, kept, offer.part_only)
        self._server.downloaded(self.client_id, offer.payload_bytes, self._frozen_bytes)
        if (meter := self._around.energy) is not None:
            meter.received(self.client_id, offer.payload_bytes + self._frozen_bytes)
        self._disk = self._disk.fetched(held)
        self._fetched()

    def _train(self, order: ef.Train) -> None:
        """Begin a task: how long it takes, and whether the device vanishes in it, is known at once."""
        model, head = self._begin_task()
        around, task = self._around, order.task
        steps = planned_steps(task.local, self._present)
        train_s = around.profiles.task_time_s(self.index, self._tasks, steps) * around.step_cost(task)
        self._works()
        if self._drops_out(train_s):
            return
        self._training = around.executor.train(self._job(model, task, self._clock.now + train_s))
        self._work.after(train_s, partial(self._done, order, train_s, head))

    @property
    def _present(self) -> int:
        """How many examples it has by now."""
        arrivals, count = self._around.arrivals, self.examples
        return count if arrivals is None else arrivals.present(self.index, count, self._clock.now)

    @property
    def _trace(self) -> DeviceTrace | None:
        trace = self._around.trace
        return None if trace is None else trace.of(self.index)

    def _meet(self, moment: DeviceMoment) -> None:
        link = NetworkLink.of(self._around.profiles, self.index).at(moment)
        if link != self.link:
            self.link = link
            self._around.lines.relink(self.client_id, link)

    @property
    def _first_data_s(self) -> float:
        """Until when it has nothing to train on."""
        arrivals = self._around.arrivals
        return 0.0 if arrivals is None else arrivals.first_s(self.index, self.examples)

    def _begin_task(self) -> tuple[Model, str]:
        """What it starts from, and its head."""
        assert self._offer is not None
        offer, held, self._offer = self._offer, self._disk.held, None
        self._work.end()
        self._tasks += 1
        if offer.payload_bytes or held.model is None:
            return offer.model, offer.head
        return held.model, held.head

    def _drops_out(self, train_s: float) -> bool:
        """Whether it vanishes in the next so many seconds."""
        likely = self._fleet.dropout
        if not likely or self._draw("dropout", self._tasks) >= likely:
            return False
        moment_s = train_s * self._draw("dropout-moment", self._tasks)
        self._work.after(moment_s, partial(self._drop_out, self._tasks))
        return True

    def _job(self, model: Model, task: Task, due_s: float) -> Job:
        disk = self._disk
        begun_s = self._clock.now
        return Job(self.index, model.vector, task, disk.remembered, due_s, disk.kept, disk.own, begun_s)

    def _done(self, order: ef.Train, train_s: float, head: str) -> None:
        assert self._training is not None
        training, self._training = self._training, None
        self._rests()
        try:
            result = training.result()
        except InvalidUpdate as error:  # it has diverged
            self._failed(DeviceCall.TRAIN, error)
        else:
            self._keep(order, replace(result, metrics={**result.metrics, TRAIN_S: train_s}), head)

    def _keep(self, order: ef.Train, result: LocalResult, head: str) -> None:
        examples = result.examples or self.examples
        sha256 = self._around.hasher.begin(result.payload)
        done = FinishedUpdate(order.task, order.update_id, examples, result, sha256, head)
        self._disk = self._disk.put(done)
        self._trained(order.update_id)

    def _renew(self, task: Task, now: float) -> None:
        """A heartbeat; the answer may say that the task is not wanted any more."""
        # Seconds of work stand for progress: a device here may vanish, but never hangs.
        true_s, client_id, task_id = self._time.true(now), self.client_id, task.task_id
        progress = true_s - self._around.time.true(task.granted_at)

        def answer(said: Advice | StoreFull) -> None:
            if isinstance(said, Advice) and said.notice in self.heeds:
                self._network.send(client_id, DOWN, self._soon, partial(told, said.notice))

        def told(notice: AdviceKind) -> None:
            if self.is_there:
                self._noticed(task_id, notice)

        beat = partial(self._server.renew, client_id, task_id, progress, self._process, answer)
        self._network.send(client_id, UP, true_s + self.link.latency_s, beat)

    def _unwanted(self, task_id: str) -> None:
        self._cancelled(task_id)

    def _advised(self) -> None:
        pass

    def _push(self, order: ef.Push) -> None:
        """Send the header; the server looks up the task before it takes the payload."""
        update_id, done = order.update_id, self._disk.finished(order.update_id)
        transfer = self._around.lines.upload(self.client_id, self.link, len(done.result.payload))
        call = self._pushes.begin(partial(self._unanswered, update_id), transfer)

        def answer(objection: AnabranchError | None) -> None:
            if objection is None:  # the verdict is of all of it
                transfer.arrives(lambda at: self._say(max(at, self._clock.now), send))
            else:
                self._pushes.hear(
                    call, partial(self._failed, DeviceCall.PUSH, objection, update_id), self._soon
                )

        def decided(outcome: PushOutcome, granting: Granting | None = None) -> None:
            if isinstance(outcome, Decision):
                self._pushes.hear(call, partial(self._judged, update_id, outcome, granting), self._soon)
            else:
                self._pushes.hear(
                    call, partial(self._failed, DeviceCall.PUSH, outcome, update_id), self._soon
                )

        def exchanged(answer: Exchange | StoreFull) -> None:
            decided(answer) if isinstance(answer, StoreFull) else decided(*answer)

        send = partial(self._server.push, self.client_id, done, decided)
        if order.next_task_id:
            ask = self._ask_of(order.next_task_id)
            send = partial(self._server.exchange, self.client_id, done, ask, exchanged)
        if (meter := self._around.energy) is not None:
            send = partial(_sent, meter, self.client_id, len(done.result.payload), send)
        self._say(self._soon, partial(self._server.objection, self.client_id, done, answer))

    def _judged(self, update_id: str, decision: Decision, granting: Granting | None) -> None:
        """The verdict of a result, and perhaps the task that was asked for with it."""
        task = None
        if granting is not None and not isinstance(granting, Refused):
            task, self._offer = granting
        self._acknowledged(update_id, decision, task)

    # --- its disk ----------------------------------------------------------------------------

    def _waiting(self) -> Sequence[str]:
        return [one.update_id for one in self._disk.waiting]

    def _commit(self, update_id: str) -> None:
        self._disk = self._disk.commit(update_id)

    def _discard(self, update_id: str) -> None:
        self._disk = self._disk.discard(update_id)

    def _forget(self) -> None:
        self._disk = replace(self._disk, memory=None)

    # --- small things ------------------------------------------------------------------------

    def _beat(self, heartbeat: int) -> None:
        if heartbeat == self._heartbeat:
            self._hear(ev.TimerFired(self._now, "heartbeat"))

    def _unanswered(self, update_id: str | None = None) -> None:
        """A call has failed: a push, or the work lane's."""
        (self._work if update_id is None else self._pushes).end()
        call = DeviceCall.ASK if update_id is None else DeviceCall.PUSH
        self._failed(call, Unavailable("no answer in time"), update_id)

    def _abandon(self) -> None:
        if self._training is not None:
            self._training.cancel()
        self._training = self._offer = None
        self._rests()

    def _works(self) -> None:
        """It trains from now on."""
        if (meter := self._around.energy) is not None:
            meter.begin(self._clock.now, self, self.client_id)

    def _rests(self) -> None:
        """It does not any more."""
        if (meter := self._around.energy) is not None:
            meter.end(self._clock.now, self)

    def _draw(self, purpose: str, number: int) -> float:
        """A uniform number in [0, 1) that no other device and no other purpose shares."""
        return rank(self._around.seed, purpose, f"{self.client_id}{self._copy}", number)


class _Enrolment:
    """A device makes itself known.

    All do at once, and then ask: the peak of a large fleet's memory. Closures would take eight times as much.
    """

    __slots__ = ("_call", "_capability", "_of", "_then")

    def __init__(self, of: Device, call: int, capability: Capability, then: Action) -> None:
        self._of, self._call, self._capability, self._then = of, call, capability, then

    def __call__(self) -> None:
        device = self._of
        answer = partial(device._heard_of, self._call, self._then)
        device._server.enrol(device.client_id, self._capability, answer)


class _Asking:
    """The same, of a device that asks for a task."""

    __slots__ = ("_ask", "_call", "_of")

    def __init__(self, of: Device, call: int, ask: Ask) -> None:
        self._of, self._call, self._ask = of, call, ask

    def __call__(self) -> None:
        device = self._of
        device._server.ask(self._ask, partial(device._told, self._call))


def _sent(meter: EnergyMeter, client_id: str, count: int, then: Action) -> None:
    """So many bytes have come to the server, which does that now."""
    meter.sent(client_id, count)
    then()


def _never() -> None:
    """What would be done if a message were lost, where none is."""
