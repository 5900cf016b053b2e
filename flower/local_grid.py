"""Flower's Grid with its nodes in this process: a ServerApp can run on it, without a SuperLink.

Replies are made when they are pulled, one after the other, so equal calls give equal results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from anabranch.core.errors import AppError
from anabranch.flower.installed import flwr_version
from anabranch.flower.messages import RUN_ID, SERVER_NODE

flwr_version()

from flwr.app import Error, Message, RecordDict  # noqa: E402 - the environment is set by then
from flwr.serverapp import Grid  # noqa: E402
from flwr.supercore.run import Run  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

CLIENTAPP_RAISED = 2  # Flower's code for an exception in a ClientApp

Node = Callable[[Message], Message]


@contextmanager
def in_a_task() -> Iterator[None]:
    """Inside, messages can be made, which Flower allows in a process that has been given a task.

    The legacy API makes up a task of its own: what was before is there again afterwards.
    """
    names = ("_task_id", "_run_id", "_node_id")
    before = {name: getattr(TaskIdentity, name) for name in names}
    for name, value in zip(names, (1, RUN_ID, SERVER_NODE), strict=True):
        if before[name] is None:
            setattr(TaskIdentity, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)


class LocalGrid(Grid):
    """`nodes` by id: what answers a message. What a node raises as `AppError` becomes an error reply."""

    def __init__(self, nodes: dict[int, Node]) -> None:
        self.nodes = nodes
        self._run = Run.create_empty(RUN_ID)
        self._waiting: dict[str, Message] = {}
        self._numbers = itertools.count(1)  # the legacy API sends from many threads

    def set_run(self, run: Run) -> None:
        """See `Grid`."""
        self._run = run

    @property
    def run(self) -> Run:
        """See `Grid`."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """See `Grid`; deprecated there."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """See `Grid`."""
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See `Grid`."""
        found = []
        for message in messages:
            message_id = f"message-{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = message_id
            self._waiting[message_id] = message
            found.append(message_id)
        return found

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See `Grid`: all that are asked for are answered."""
        asked = [self._waiting.pop(i) for i in list(message_ids) if i in self._waiting]
        return [self._answered(message) for message in asked]

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,  # noqa: ARG002 - Flower's
    ) -> Iterable[Message]:
        """See `Grid`."""
        return self.pull_messages(self.push_messages(messages))

    def _answered(self, message: Message) -> Message:
        node: Any = self.nodes.get(message.metadata.dst_node_id)
        if node is None:
            return Message(Error(5, "there is no such node"), reply_to=message)
        try:
            found: Message = node(message)
        except AppError as error:
            return Message(Error(CLIENTAPP_RAISED, str(error)), reply_to=message)
        return found
