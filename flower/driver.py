"""Our engine over Flower's Grid: every node is a device, every message a task, and nobody waits for a round.

The engine is the one of the server and the simulator, and so is what stands round it (`host`); these are its
hands. What a Grid has not is left out. There are no heartbeats: leases are long, and a node that dies is
known by Flower's error. Models travel whole. Nobody stands in line, as a node is asked and does not ask.
Nothing but one reply comes of a task: so one that a server would refuse, for its device to send another,
gives its task back here.

What is sent is sent after the event that it comes of is durable. A reply that was pulled but not yet written
when the ServerApp died is gone: Flower hands it out once. Its task's lease ends, as that of a device that
died, and it does not begin anew with the next process, to which nobody could answer.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from anabranch.compress.model import full_bytes
from anabranch.compress.registry import simulated_stages
from anabranch.core import events as ev
from anabranch.core.backoff import backed_off_s
from anabranch.core.config.tables import Config
from anabranch.core.content import chosen, content_digest
from anabranch.core.effects import Decided, Effect, Granted, LeaseEnd, LeaseEnded, Published
from anabranch.core.engine.buffers import DeviceBuffers
from anabranch.core.errors import AppError
from anabranch.core.journal import to_record
from anabranch.core.model.chains import RAW
from anabranch.core.model.metrics import finite
from anabranch.core.model.params import Tensors, Vector, digest
from anabranch.core.model.updates import FLAWS, Ask, Capability, Task, Verdict
from anabranch.core.rng import unique_id
from anabranch.flower.compression import RECORD, Counting, Encoded
from anabranch.flower.evaluation import GridEvaluation
from anabranch.flower.logbook import Logbook
from anabranch.flower.messages import EVALUATE, TRAIN, NodeAway, Reply, ServerAppMessage
from anabranch.flower.played import Judge
from anabranch.host.build import Blueprint
from anabranch.host.journal import Replay
from anabranch.host.records import RunReporter
from anabranch.host.run import NoLine, Run
from anabranch.host.submission import announced, arrived, examined
from anabranch.reports.recorder import Recorder
from anabranch.support.shelf import ScratchShelf

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

log = logging.getLogger(__name__)

Clock = Callable[[], float]
BACK_OFF_S, BACK_OFF_MAX_S = 1.0, 60.0  # a node that failed: twice as long after each failure in a row


@dataclass(eq=False)
class _Node:
    """A node of the Grid: since when it may be asked again, and how often in a row it has failed.

    `turn`: the number of its newest task among all; who has waited longest has the smallest.
    """

    node_id: int
    failures: int = 0
    not_before: float = -math.inf
    turn: int = 0
    counting: Counting = field(default_factory=Counting)
    sends_whole: bool = False  # arrays, though asked for less

    @property
    def client_id(self) -> str:
        return f"node-{self.node_id}"

    def rested(self) -> None:
        """It may be asked again."""
        self.failures, self.not_before = 0, -math.inf

    def failed(self, now: float) -> None:
        self.not_before = now + backed_off_s(BACK_OFF_S, BACK_OFF_MAX_S, self.failures)
        self.failures += 1


class GridRun:
    """A run of our engine whose devices are the nodes of a Grid.

    `step` does what there is to do now; `done` says when the run has ended.

    `said` is what messages say beside the model, by their type. `clock` gives seconds since 1970. `judge`
    measures versions in the nodes' place.
    """

    def __init__(
        self,
        grid: Grid,
        config: Config,
        logbook: Logbook,
        recorder: Recorder,
        said: Mapping[str, ServerAppMessage],
        clock: Clock,
        judge: Judge | None = None,
    ) -> None:
        self._grid, self._config, self._logbook, self._recorder = grid, config, logbook, recorder
        self._said, self._clock, self._judge = said, clock, judge
        self.spec = logbook.spec
        self._frozen: Tensors = self.spec.frozen(logbook.initial)
        # Whether a node has our mod is known from its replies: without it they are whole, which is as good.
        self._capability = (
            Capability()
            if config.uplink.codec == RAW
            else Capability(codecs=simulated_stages(config.uplink.codec))
        )
        blueprint = Blueprint.of(config, self.spec, shelf=ScratchShelf())
        replay = Replay(logbook, partial(blueprint.engine, logbook.initial))
        self.engine = replay.engine
        self.host = Run(self.engine, NoLine(), config.limits)
        self._teller = RunReporter(recorder)
        self._life = int.from_bytes(os.urandom(8), "little")  # ids of this process are no other's
        self._ids = 0
        self._start: float | None = None
        self._now = self._behind_s = 0.0
        self._nodes: dict[int, _Node] = {}  # all that ever were there
        self._here: list[_Node] = []
        self._tasks: dict[str, tuple[Task, _Node]] = {}  # by the id of the message that is under way
        self._bases: dict[int, Vector] = {}
        self._failures = 0  # in a row, of all nodes
        self._evaluation = GridEvaluation(config, logbook, recorder, self._since)
        self._resume(replay)

    @property
    def done(self) -> bool:
        """Whether the run has ended and its last version was measured."""
        return bool(self.engine.finished) and self._evaluation.judged == self.engine.version

    def step(self) -> None:
        """Take what has come, hand out what is wanted."""
        self.meet(self._grid.get_node_ids())
        self._pull()
        self._tick()
        self._hand_out()
        self._evaluate()
        self._logbook.sync()

    def wait_no_longer(self) -> bool:
        """The version that nodes judge, if any, is judged by what has come; whether there was one."""
        waited = bool(self._evaluation.waiting)
        self._evaluation.conclude()
        return waited

    # --- nodes -------------------------------------------------------------------------------

    def meet(self, node_ids: Iterable[int]) -> None:
        """Enrol who is new; whoever is gone is asked no more until it is back, and then at once."""
        before, self._here = set(self._here), []
        for node_id in sorted(node_ids):
            node = self._nodes.setdefault(node_id, _Node(node_id))
            self._here.append(node)
            if node not in before:
                node.rested()
            if node.client_id not in self.engine.ledger.clients:
                self._handle(ev.Enrolled(self._tell_time(), node.client_id, self._capability))

    def _hand_out(self) -> None:
        """A task for each node that may have one, the messages sent once the grants are durable."""
        granted: list[tuple[Task, _Node]] = []
        for node in sorted(self._here, key=lambda node: node.turn):  # where places are few
            under_way = sum(other is node for _, other in self._tasks.values())
            while under_way < self.engine.settings.tasks_per_client and (task := self._ask(node)):
                granted.append((task, node))
                node.turn = self.engine.counters.granted
                under_way += 1
        if not granted:
            return
        self._logbook.sync()
        messages = [self._order(task, node) for task, node in granted]
        for message_id, (task, node) in zip(self._grid.push_messages(messages), granted, strict=True):
            self._tasks[message_id] = task, node
            self._recorder.downloaded(self._since(), node.client_id, full_bytes(self.spec))

    def _ask(self, node: _Node) -> Task | None:
        now = self._tell_time()
        ask = Ask(node.client_id, self._fresh_id("task"))
        if now < node.not_before:
            return None
        found = [e.task for e in self._handle(ev.TaskAsked(now, ask)) if isinstance(e, Granted)]
        for task in found:
            if task.base_version not in self._bases:
                self._bases[task.base_version] = self.engine.vector.copy()
        return found[0] if found else None

    def _order(self, task: Task, node: _Node) -> Message:
        model = self._model(self._bases[task.base_version])
        message = self._message(TRAIN, node, model, task.base_version + 1)
        if task.uplink != RAW:
            message.content[RECORD] = node.counting.order(task, self.spec.buffers)
        return message

    def _message(self, what: str, node: _Node, model: Tensors, round_number: int) -> Message:
        from flwr.app import Message

        content, ttl_s = self._said[what].content(model, round_number), self._config.server.lease_max_s
        return Message(content, node.node_id, what, group_id=str(round_number), ttl=ttl_s)

    def _evaluate(self) -> None:
        """Have the newest version judged, if it is time."""
        version, nodes = self.engine.version, self._here
        if not self._evaluation.wants(version, is_last=bool(self.engine.finished)):
            return
        model = self._model(self.engine.vector.copy())
        if self._judge is not None:
            self._evaluation.judge(version, model, self._judge)
            return
        if not nodes:
            return
        asked = nodes[: self._config.flower.evaluate_partitions or len(nodes)]
        messages = [self._message(EVALUATE, node, model, version) for node in asked]
        self._evaluation.begin(version, model, self._grid.push_messages(messages))

    # --- replies -----------------------------------------------------------------------------

    def _pull(self) -> None:
        asked = [*self._tasks, *self._evaluation.waiting]
        for message in self._grid.pull_messages(asked) if asked else ():
            message_id = message.metadata.reply_to_message_id
            if message_id in self._tasks:
                self._trained(*self._tasks.pop(message_id), message)
            elif message_id in self._evaluation.waiting:
                self._evaluation.take(message_id, message)
        needed = {task.base_version for task, _ in self._tasks.values()}
        self._bases = {v: base for v, base in self._bases.items() if v in needed}

    def _trained(self, task: Task, node: _Node, message: Message) -> None:
        try:
            reply = Reply.of(message, TRAIN)
            sent = self._sent(task, reply)
        except NodeAway as error:
            self._failed(task, node, str(error))
            return
        except AppError as error:
            self._failed(task, node, str(error))
            self._count_failure(node, str(error))
            return
        if task.uplink != RAW and reply.encoded is None and not node.sends_whole:
            node.sends_whole = True
            log.warning("%s sends whole arrays: its ClientApp lacks compressed_uplink", node.client_id)
        submission = announced(
            self.spec,
            update_id=self._fresh_id("update"),
            task_id=task.task_id,
            client_id=node.client_id,
            base_version=task.base_version,
            examples=reply.examples,
            local_steps=1,
            metrics=finite(reply.metrics),
            sha256=content_digest(sent.data, chosen(self._config.run.payload_digest, len(sent.data))),
            size_bytes=len(sent.data),
            codec=sent.codec,
        )
        found = examined(submission, sent.data, self.spec, self._config.limits)
        effects = self._handle(arrived(submission, found, self._tell_time()), sent.data)
        (receipt,) = [e.receipt for e in effects if isinstance(e, Decided)]
        node.counting.answered(task.task_id, receipt.decision.verdict is not Verdict.REJECTED)
        if receipt.decision.reason in FLAWS:
            detail = receipt.decision.detail or receipt.decision.reason
            log.warning("%s: its update does not count: %s", node.client_id, detail)
            node.failed(self._tell_time())
        else:
            node.rested()
        self._failures = 0

    def _failed(self, task: Task, node: _Node, why: str) -> None:
        """There is no update of a task, and the node has a rest."""
        log.warning("%s: %s", node.client_id, why)
        now = self._tell_time()
        node.failed(now)
        node.counting.answered(task.task_id, taken=False)
        self._recorder.note(self._since(), "failed", client=node.client_id, why=why)
        self._handle(ev.TaskDropped(now, node.client_id, task.task_id, why[:200]))

    def _count_failure(self, node: _Node, why: str) -> None:
        """Raises `AppError` after `run.rejections_max` in a row: the app fails everywhere.

        A node that is away is none: a link that is gone for a minute takes them all.
        """
        self._failures += 1
        if self._failures == self._config.run.rejections_max:
            raise AppError(
                f"the last {self._failures} tasks all failed, the newest on {node.client_id}: {why}. Mend "
                "the app and start again: the run goes on where it is (anabranch.run.rejections_max)"
            )

    def _sent(self, task: Task, reply: Reply) -> Encoded:
        """What the node has changed, buffers as reached, as it goes on record.

        Raises `AppError` for bytes that the task did not ask for, and for arrays of another model.
        """
        if reply.encoded is not None:
            return reply.encoded.checked(task, self.spec)
        known = {t.name: t.shape for t in self.spec.tensors}
        came = {name: array.shape for name, array in reply.arrays.items()}
        if came != known:
            wrong = next(n for n in {**known, **came} if came.get(n) != known.get(n))
            shapes = f"{came.get(wrong)}, the model's {known.get(wrong)}"
            raise AppError(f"the reply's array {wrong!r} has shape {shapes}")
        base, came_to = self._bases[task.base_version], self.spec.flatten(reply.arrays)
        return Encoded.whole(DeviceBuffers(self.spec).told(base, came_to - base, None, b"")[0], self.spec)

    def _give_up(self, task_id: str) -> None:
        """Whatever comes of a task, it does not count any more."""
        for message_id, (task, node) in list(self._tasks.items()):
            if task.task_id == task_id:
                node.counting.answered(task_id, taken=False)
                del self._tasks[message_id]

    # --- the engine --------------------------------------------------------------------------

    def _tick(self) -> None:
        if (ticked := self.host.tick(self._tell_time())) is not None:
            self._handle(ticked)

    def _handle(self, event: ev.Event, payload: bytes | None = None) -> list[Effect]:
        done = self.host.take(event, lambda event: self._logbook.append(to_record(event), payload))
        if done.event is not None:
            self._record(event.now, done.effects)
        return done.effects

    def _record(self, now: float, effects: Sequence[Effect]) -> None:
        self._start = now if self._start is None else self._start
        self._now, since = now, now - self._start
        self._teller.tell(since, self.engine, effects)
        for effect in effects:
            match effect:
                case Published(version):
                    self._evaluation.published(version)
                case LeaseEnded(task, end) if end is not LeaseEnd.EXPIRED:  # a late update may still count
                    self._give_up(task.task_id)

    def _resume(self, replay: Replay) -> None:
        """Go on where an earlier process stood. Raises `ReplayMismatch` and `StoreCorrupt`."""
        for _, record, effects in replay:
            self._record(record["now"], effects)
        self._evaluation.resume()
        if self._logbook.resumed:
            log.info("resumed at version %d, %d updates", self.engine.version, self.engine.counters.applied)

    def _tell_time(self) -> float:
        """The time of the next event: it goes on from the last one where the clock was set back since."""
        self._behind_s = max(self._behind_s, self._now - (shown := self._clock()))
        return shown + self._behind_s

    def _since(self) -> float:
        return self._tell_time() - self._start if self._start is not None else 0.0

    def _fresh_id(self, what: str) -> str:
        self._ids += 1
        return unique_id(self._life, what, self._ids)

    @property
    def model_sha256(self) -> str:
        """The digest of the newest version."""
        return digest(self.engine.vector)

    def model(self) -> dict[str, Any]:
        """The newest version, by name."""
        return self._model(self.engine.vector)

    def _model(self, vector: Vector) -> dict[str, Any]:
        return self.spec.unflatten(vector, self._frozen)
