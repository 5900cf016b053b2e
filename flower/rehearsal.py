"""What a ServerApp says first: the model that a run starts from, and what ClientApps are told.

The ServerApp is run as it is, on a Grid of ours, until it has sent its first messages for training: their
arrays are version 0, their config is what devices are told in every task. Whatever it asks nodes before
that (a legacy app fetches the first weights from one) is answered by the ClientApp itself. Then one reply
comes back, with the model unchanged, so that the messages for evaluation are seen as well; and there it ends.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.errors import AppError
from anabranch.core.rng import seed_of
from anabranch.flower.installed import flwr_version
from anabranch.flower.messages import (
    EVALUATE,
    EXAMPLES_KEYS,
    LEGACY_ARRAYS,
    TRAIN,
    ServerAppMessage,
    handled,
    new_context,
    seeded,
)
from anabranch.flower.played import Played, played_in
from anabranch.flower.project import Project
from anabranch.flower.records import arrays_of
from anabranch.support.own_code import told

flwr_version()

from flwr.app import (  # noqa: E402 - the environment is set by then
    ArrayRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import ServerApp  # noqa: E402
from flwr.supercore.run import RunNotRunningException  # noqa: E402

from anabranch.flower.local_grid import LocalGrid, Node, in_a_task  # noqa: E402

log = logging.getLogger(__name__)

# Strategies of Flower's that take a mean, as ours do. FedProx's term is the ClientApp's.
MEANS = ("FedAvg", "FedProx")
PRIVATE = ("DifferentialPrivacy", "DPFedAvg")  # how the names of those begin that add noise
NODES = 32  # a ServerApp waits for as many as it wants; at each look there are twice as many


@dataclass(frozen=True, eq=False)
class Rehearsed:
    """The first weights by name, what is said in tasks and in evaluations, and the strategy that says it."""

    arrays: Mapping[str, npt.NDArray[Any]]
    train: ServerAppMessage
    evaluate: ServerAppMessage
    played: Played

    @property
    def settings(self) -> dict[str, Any]:
        """As `[flower]` has it."""
        central = {"central": True} if self.played.is_central else {}
        return {"train": self.train.to_json(), "evaluate": self.evaluate.to_json(), **central}


class _Over(BaseException):
    """Ends a ServerApp from within: it has said all that is wanted. Nothing that it catches."""


class _Stage(LocalGrid):
    """A Grid that takes down what is sent, and ends the ServerApp when it has heard enough."""

    def __init__(self, answer: Node) -> None:
        super().__init__({})
        self._answer, self._thread = answer, threading.get_ident()
        self.arrays: Mapping[str, npt.NDArray[Any]] | None = None
        self.said: dict[str, ServerAppMessage] = {}
        self.played = Played()
        self.flaw: AppError | None = None
        self.differs = False  # what nodes are told beside the model
        self.is_over = False

    def get_node_ids(self) -> Iterable[int]:
        """More at each look: whoever waits for enough of them goes on.

        Once a legacy app was heard it ends here. However it has ended, so does the thread in which that looks
        after nodes every five seconds, or else there were more than fit into the memory after a few minutes.
        """
        if self.is_over or (TRAIN in self.said and self.said[TRAIN].arrays == LEGACY_ARRAYS):
            raise _Over if threading.get_ident() == self._thread else RunNotRunningException
        for node_id in range(len(self.nodes) + 1, max(NODES, 2 * len(self.nodes)) + 1):
            self.nodes[node_id] = self._answer
        return list(self.nodes)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Take down what training is told; the next thing that is sent ends it."""
        sent = list(messages)
        kinds = {message.metadata.message_type for message in sent}
        if self.arrays is None and TRAIN not in kinds:
            return super().send_and_receive(sent, timeout=timeout)
        if self.arrays is not None:
            if EVALUATE in kinds:
                self._take(EVALUATE, sent[0])
            raise _Over
        content = self._take(TRAIN, sent[0])
        self._compare([m.content for m in sent if m.metadata.message_type == TRAIN])
        if self.said[TRAIN].arrays == LEGACY_ARRAYS:  # evaluations are told nothing more as a rule
            raise _Over
        (name,) = content.array_records
        unchanged = RecordDict({name: content[name], "metrics": MetricRecord({"num-examples": 1})})
        return [Message(unchanged, reply_to=sent[0])]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """A ServerApp with a loop of its own is heard up to its first messages for training."""
        sent = list(messages)
        if any(message.metadata.message_type == TRAIN for message in sent):
            self._take(TRAIN, sent[0])
            self._compare([m.content for m in sent if m.metadata.message_type == TRAIN])
            raise _Over
        return super().push_messages(sent)

    def _compare(self, contents: Sequence[RecordDict]) -> None:
        """Nodes are told one thing in a round, as tasks are: the model above all."""
        first, name = contents[0], self.said[TRAIN].arrays
        for other in contents[1:]:
            if other is first:
                continue
            if name not in other.array_records or other[name] != first[name]:
                self.flaw = AppError(
                    "the ServerApp sends its nodes different models in its first round: there must be one, "
                    "which all of them train"
                )
                raise _Over from self.flaw
            if other.config_records != first.config_records:
                self.differs = True

    def _take(self, what: str, message: Message) -> RecordDict:
        content: RecordDict = message.content
        try:
            self.said[what] = said = ServerAppMessage.of(content)
            if self.arrays is None:
                self.played = played_in(self._thread)
                self.arrays = _floats_of(content.array_records[said.arrays])
        except AppError as flaw:
            self.flaw = flaw
            raise _Over from flaw
        return content


def hear(serverapp: ServerApp, context: Context, answer: Node, name: str) -> Rehearsed:
    """Hear what a ServerApp says first; `answer` is asked for what it asks before. Raises `AppError`."""
    stage, ended_by = _Stage(answer), None
    with contextlib.redirect_stdout(sys.stderr), _quiet(), in_a_task():
        try:
            serverapp(stage, context)
        except _Over:
            pass
        except Exception as error:  # noqa: BLE001 - the app's own, whatever it is
            ended_by = error
        finally:
            stage.is_over = True
    if stage.flaw is not None:
        raise stage.flaw
    if stage.arrays is None:
        head = f"the ServerApp of {name} ended before it sent a message for training"
        raise AppError(told(head, ended_by) if ended_by else head)
    if ended_by is not None:
        log.info(
            "the ServerApp of %s ended at an unchanged reply, so evaluations are told nothing: %s",
            name,
            ended_by,
        )
    if stage.differs:
        _tell_differences(name)
    _tell_strategy(stage.played.name, stage.played.weighted_by, name)
    train = stage.said[TRAIN]
    return Rehearsed(stage.arrays, train, stage.said.get(EVALUATE, train.of_evaluation()), stage.played)


def _floats_of(record: ArrayRecord) -> Mapping[str, npt.NDArray[Any]]:
    """Arrays by name. Raises `AppError` where no strategy of ours could make a mean of any."""
    found = arrays_of(record)
    if not any(np.issubdtype(array.dtype, np.floating) for array in found.values()):
        kinds = ", ".join(sorted({str(array.dtype) for array in found.values()})) or "no arrays"
        raise AppError(
            f"the ServerApp's first model has no numbers with a fraction ({kinds}): trees and other "
            "models that travel as bytes, such as XGBoost's, have no mean, and cannot be learned here"
        )
    return found


@lru_cache
def _tell_differences(name: str) -> None:
    log.warning(
        "the ServerApp of %s tells its nodes different settings in a round: here each device is told what "
        "the first one was; what is a node's own goes by its partition-id, or by `anabranch client --option`",
        name,
    )


@lru_cache
def _tell_strategy(strategy: str, weighted_by: str, name: str) -> None:
    """Once in a process, whatever the app is rehearsed with."""
    if weighted_by not in EXAMPLES_KEYS:
        log.warning(
            "the strategy of %s's ServerApp weighs by %r: here an update weighs as its num-examples",
            name,
            weighted_by,
        )
    if strategy in ("", *MEANS):
        return
    noise = "; nor is its noise added (see [privacy])" if strategy.startswith(PRIVATE) else ""
    log.warning(
        "the strategy of %s's ServerApp, %s, is not played: strategy.name and robust.rule of this run say "
        "what becomes of updates%s",
        name,
        strategy,
        noise,
    )


def rehearse(folder: Path, overrides: Mapping[str, Any], partitions: int, seed: int) -> Rehearsed:
    """Hear what the ServerApp of a folder says first. Raises `AppError`.

    Once for each app, run config and seed in a process: what it loads on the way may be large.
    """
    return _rehearsed(folder.expanduser().resolve(), tuple(sorted(overrides.items())), partitions, seed)


@lru_cache(maxsize=2)
def _rehearsed(folder: Path, overrides: tuple[tuple[str, Any], ...], partitions: int, seed: int) -> Rehearsed:
    project = Project.read(folder)
    run_config, serverapp = project.fused(dict(overrides)), project.server_app()
    first_seed = seed_of(seed, "flower", "first")

    def answer(message: Message) -> Message:
        """By the ClientApp of a node's partition."""
        partition = (message.metadata.dst_node_id - 1) % partitions
        context = new_context(partition, partitions, run_config)
        return handled(project.client_app(), message, context, first_seed)

    with seeded(first_seed):
        return hear(serverapp, new_context(0, partitions, run_config), answer, project.name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Flower tells of rounds that are not played."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
