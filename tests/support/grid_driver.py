"""Our engine over Flower's Grid, spoken to in the words of `drivers.Driver`.

A node says nothing by itself: it is asked where it is there, and a message has one reply. So a node is there
for as long as its ask lasts, and what nobody waits for is not heard. Clients, tasks and updates have names of
the driver's own making there; the journal has those of the scenario.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from drivers import CAPABILITY, FIRST, NOT_HEARD, SPEC, decided, encoded
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from anabranch.core import events as ev
from anabranch.core.config.goal import Goal
from anabranch.core.config.tables import Config
from anabranch.core.journal import Record
from anabranch.core.model.chains import RAW
from anabranch.core.model.updates import Ask, Capability
from anabranch.flower.compression import RECORD, STYPE
from anabranch.flower.driver import GridRun
from anabranch.flower.local_grid import LocalGrid, in_a_task
from anabranch.flower.logbook import Logbook
from anabranch.flower.messages import EVALUATE, TRAIN, ServerAppMessage
from anabranch.reports.recorder import Recorder

ASK_S = 2.0  # a node that has failed once has a rest of one second


class Post(LocalGrid):
    """A Grid whose messages lie there until somebody answers. `here`: the nodes that are there."""

    def __init__(self) -> None:
        super().__init__({})
        self.here: list[int] = []
        self.orders: dict[int, list[Message]] = defaultdict(list)  # those to train, by node
        self.replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return self.here

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        for message in sent:
            if message.metadata.message_type == TRAIN:
                self.orders[message.metadata.dst_node_id].append(message)
        return super().push_messages(sent)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(i) for i in list(message_ids) if i in self.replies]


class OverGrid:
    """The driver over a Grid."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._now, self._grid = 1000.0, Post()
        self._book = Logbook(folder, config, FIRST)
        self._recorder = Recorder(config.strategy.name, "test", 0, Goal(), config.to_json(), "live")
        clock: Callable[[], float] = lambda: self._now  # noqa: E731
        said = dict.fromkeys((TRAIN, EVALUATE), ServerAppMessage())
        self._run = GridRun(self._grid, config, self._book, self._recorder, said, clock)
        self._nodes: dict[str, int] = {}
        self._tasks: dict[str, list[str]] = defaultdict(list)  # of a client, as they were asked for
        self._updates: list[str] = []

    def enrol(self, client_id: str, capability: Capability = CAPABILITY) -> None:
        self._nodes.setdefault(client_id, len(self._nodes) + 1)
        self._run.meet([self._nodes[client_id]])

    def ask(self, client_id: str, task_id: str) -> str:
        self._now += ASK_S
        node_id, named = self._nodes[client_id], self._tasks[client_id]
        self._step(node_id)
        if len(self._grid.orders[node_id]) == len(named):
            refused = self._run.engine.refusal(Ask(f"node-{node_id}", task_id), self._now)
            assert refused is not None, "the node was not asked"
            return f"refused {refused.reason}"
        named.append(task_id)
        order = self._grid.orders[node_id][len(named) - 1]
        return f"of version {int(order.metadata.group_id) - 1}"

    def fetch(self, client_id: str, task_id: str) -> str:
        raise NotImplementedError

    def push(
        self,
        client_id: str,
        task_id: str,
        update_id: str,
        value: float = 1.0,
        codec: str = "",
        more: bytes = b"",
    ) -> str:
        order = self._grid.orders[self._nodes[client_id]][self._tasks[client_id].index(task_id)]
        if not codec:
            uplink = order.content.config_records.get(RECORD)
            codec = RAW if uplink is None else str(uplink["uplink"])
        known = len(self._told("update"))
        self._grid.replies[order.metadata.message_id] = _reply(order, value, codec)
        self._step()
        found = self._told("update")
        if len(found) == known:
            return NOT_HEARD
        self._updates.append(update_id)
        receipt = self._run.engine.ledger.receipts[found[-1]["update_id"]]
        return NOT_HEARD if found[-1].get("flaw") else decided(receipt.decision)

    def beat(self, client_id: str, task_id: str, progress: float) -> str:
        return NOT_HEARD

    def drop(self, client_id: str, task_id: str) -> None:
        raise NotImplementedError

    def lapse(self, client_id: str, task_id: str) -> None:
        place = self._tasks[client_id].index(task_id)
        name = self._asked(client_id)[place]["task_id"]
        self._now = self._run.engine.ledger.tasks[name].expires_at
        self._step()

    def order(self, make: Callable[[float], ev.Event]) -> None:
        raise NotImplementedError

    def roll_back(self, to_version: int, without: str) -> str:
        raise NotImplementedError

    def journal(self) -> Sequence[Record]:
        names = {f"node-{node_id}": client_id for client_id, node_id in self._nodes.items()}
        for client_id, tasks in self._tasks.items():
            names |= zip((r["task_id"] for r in self._asked(client_id)), tasks, strict=True)
        names |= zip((r["update_id"] for r in self._told("update")), self._updates, strict=True)
        ids = ("client_id", "task_id", "update_id")
        return [r | {k: names[r[k]] for k in ids if k in r} for r in self._told()]

    def close(self) -> None:
        self._book.__exit__()
        self._recorder.close()

    def _step(self, *here: int) -> None:
        self._grid.here = list(here)
        self._run.step()

    def _told(self, kind: str = "") -> list[Record]:
        return [json.loads(json.dumps(r)) for _, r in self._book.records() if kind in ("", r["kind"])]

    def _asked(self, client_id: str) -> list[Record]:
        return [r for r in self._told("asked") if r["client_id"] == f"node-{self._nodes[client_id]}"]


def _reply(order: Message, value: float, codec: str) -> Message:
    """Trained arrays, where their difference to what was sent is exactly so; else the encoded update."""
    (sent,) = order.content.array_records.values()
    base = sent["w"].numpy()
    delta = np.full(SPEC.size, value, np.float32)
    if codec == RAW and np.array_equal((base + delta) - base, delta, equal_nan=True):
        record = ArrayRecord({"w": Array(base + delta)})
    else:
        payload = encoded(value, codec)
        record = ArrayRecord({"update": Array("uint8", (len(payload),), STYPE + codec, payload)})
    metrics = MetricRecord({"num-examples": 10, "loss": 1.5})
    return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=order)


@contextmanager
def over_grid(config: Config, folder: Path) -> Iterator[OverGrid]:
    """A new run over a Grid."""
    with in_a_task():
        run = OverGrid(config, folder)
        try:
            yield run
        finally:
            run.close()


def told_to_grids(records: Sequence[Record]) -> list[Record]:
    """A journal without what no node says: heartbeats, what a device can do, how many steps it took."""
    unsaid = ("capability", "local_steps")
    return [{k: v for k, v in r.items() if k not in unsaid} for r in records if r["kind"] != "renewed"]
