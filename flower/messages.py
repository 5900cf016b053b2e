"""Flower's messages: what a ClientApp is told, and what its reply says.

A message is like the one that the app's own ServerApp would send: an ArrayRecord with the model and config
records. `ServerAppMessage` has all of it but the arrays, so one message tells what each other is like, be the
app written with Flower's message API or as a NumPyClient, whose messages only have other names in them.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy.typing as npt

from anabranch.core.errors import AppError
from anabranch.flower.compression import Encoded, encoded_in
from anabranch.flower.installed import flwr_version
from anabranch.flower.records import Arrays, Plain, array_record, arrays_of, plain
from anabranch.support.own_code import told
from anabranch.workloads.batches import every_generator
from anabranch.workloads.torch_loop import seed_generators

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
    from flwr.clientapp import ClientApp

TRAIN, EVALUATE = "train", "evaluate"
TTL_S = 3600.0 * 24  # nobody waits for it here; mods may look at it
SERVER_NODE, RUN_ID = 1, 1
# A node's id in Flower is drawn; ours follow from the partition, so that they are the same at each start.
FIRST_NODE = 1000
# How Flower's strategies, and the compatibility layer under NumPyClient, name what is in a message.
ROUND_KEYS = ("server-round", "server_round", "current_round")
EXAMPLES_KEYS = ("num-examples", "num_examples")
LEGACY_ARRAYS, LEGACY_STATUS = "fitins.parameters", ".status"
SECURE = "secaggplus"  # so the records of its workflow are called
LEGACY_EVALUATE = ("evaluateins.parameters", "evaluateins.config")

_globals = threading.RLock()  # generators and stdout are the process's: one ClientApp at a time has them


class NodeAway(AppError):
    """Flower has lost a node, or a message: what an app makes of it is not known."""


@dataclass(frozen=True)
class ServerAppMessage:
    """What a ServerApp says beside the model: its ArrayRecord's name, its config records by name."""

    arrays: str = "arrays"
    records: Plain = field(default_factory=lambda: {"config": {}})

    @classmethod
    def of(cls, content: RecordDict) -> ServerAppMessage:
        """What is said in a message. Raises `AppError` unless it has one ArrayRecord, which is the model."""
        names = list(content.array_records)
        if any(name.startswith(SECURE) for name in content):
            raise AppError(
                "the ServerApp's first messages are Flower's secure aggregation, which is a protocol of "
                "rounds: give it a strategy alone, without SecAggPlusWorkflow; what masks updates here is "
                "[secagg]"
            )
        if len(names) != 1:
            raise AppError(
                f"the ServerApp sends {len(names)} ArrayRecords in a message ({', '.join(names) or 'none'}): "
                "there must be one, which is the model"
            )
        return cls(names[0], plain(content))

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> ServerAppMessage:
        """The inverse of `to_json`. Raises `AppError`, naming the key."""
        arrays, records = data.get("arrays", "arrays"), data.get("records", {"config": {}})
        if not isinstance(arrays, str) or not isinstance(records, Mapping):
            raise AppError(f'{where} must be {{ arrays = "NAME", records = {{ NAME = {{ ... }} }} }}')
        for name, record in records.items():
            if not isinstance(record, Mapping):
                raise AppError(f"{where}.records.{name} must be a table of settings, not {record!r}")
        return cls(arrays, {name: dict(record) for name, record in records.items()})

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"arrays": self.arrays, "records": self.records}

    def of_evaluation(self) -> ServerAppMessage:
        """What an evaluation is told where nothing else is known: the same names, no settings."""
        if self.arrays == LEGACY_ARRAYS:
            arrays, config = LEGACY_EVALUATE
            return ServerAppMessage(arrays, {config: {}})
        kept = {n: {k: v for k, v in r.items() if k in ROUND_KEYS} for n, r in self.records.items()}
        return ServerAppMessage(self.arrays, kept)

    def content(self, arrays: Arrays, round_number: int) -> RecordDict:
        """The content of a message with this model. A round's number, where one is told, is this one.

        Raises `AppError` for settings that Flower's messages cannot carry.
        """
        from flwr.app import ConfigRecord, RecordDict

        found = RecordDict({self.arrays: array_record(arrays)})
        for name, record in self.records.items():
            settings = {k: round_number if k in ROUND_KEYS else v for k, v in record.items()}
            try:
                found[name] = ConfigRecord(settings)
            except TypeError as error:
                raise AppError(
                    f"flower: a message cannot have {settings!r} as record {name!r}: {error}"
                ) from error
        return found


@dataclass(frozen=True, eq=False)
class Reply:
    """What a ClientApp answered: arrays by name (none after an evaluation), examples, numbers.

    `encoded`: what has come in the arrays' place, if it was asked for.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    examples: int
    metrics: Mapping[str, float]
    encoded: Encoded | None = None

    @classmethod
    def of(cls, message: Message, what: str) -> Reply:
        """A reply to a message of this type. Raises `AppError`, naming what is missing, or `NodeAway`."""
        metrics = told_by(message, what)
        content = message.content
        examples = next((metrics.pop(k) for k in EXAMPLES_KEYS if k in metrics), None)
        if examples is None or not 1 <= examples < math.inf:
            flaw = "has no metric 'num-examples'" if examples is None else f"says num-examples = {examples:g}"
            raise AppError(
                f"the ClientApp's reply to {what!r} {flaw}: return how many examples there were, 1 or more"
            )
        record = _trained(content) if what == TRAIN else None
        encoded = None if record is None else encoded_in(record)
        arrays = {} if record is None or encoded is not None else arrays_of(record)
        return cls(arrays, int(examples), metrics, encoded)


def told_by(message: Message, what: str) -> dict[str, float]:
    """The numbers of a reply. Raises `AppError` for one that says what went wrong, or `NodeAway`."""
    if message.has_error():
        _raise(message.error, what)
    config = list(message.content.config_records.items())  # Flower gathers them at each look
    for name, record in config:
        if name.endswith(LEGACY_STATUS) and record.get("code", 0) != 0:
            raise AppError(f"the ClientApp's {what} failed: {record.get('message', record)}")
    return _numbers([*message.content.metric_records.items(), *config])


def _raise(error: Error, what: str) -> NoReturn:
    from flwr.common.constant import ErrorCode

    away = ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE
    if error.code in away:
        raise NodeAway(f"no answer to {what!r}, says Flower (error {error.code}): {error.reason}")
    raise AppError(f"the ClientApp answered {what!r} with error {error.code}: {error.reason}")


def instruct(
    app: ClientApp,
    what: str,
    said: ServerAppMessage,
    arrays: Arrays,
    round_number: int,
    context: Context,
    seed: int,
) -> Reply:
    """Have a ClientApp train or evaluate this model; what it draws from the global generators has this seed.

    Raises `AppError` with what it raises.
    """
    message = new_message(said.content(arrays, round_number), what, context.node_id, str(round_number))
    return Reply.of(handled(app, message, context, seed), what)


def handled(app: ClientApp, message: Message, context: Context, seed: int) -> Message:
    """The ClientApp's reply. Its prints go to stderr: stdout is for answers. Raises `AppError`."""
    with own_part(f"the ClientApp's {message.metadata.message_type}", seed):
        return app(message, context)


@contextlib.contextmanager
def own_part(what: str, seed: int) -> Iterator[None]:
    """Inside, a part of the app runs: it prints to stderr, its draws have this seed. Raises `AppError`."""
    try:
        with _globals, seeded(seed), contextlib.redirect_stdout(sys.stderr):
            yield
    except AppError:
        raise
    except (Exception, SystemExit) as error:
        raise AppError(told(what, error)) from error


def evaluates(app: ClientApp) -> bool:
    """Whether a ClientApp has a function for evaluations, as far as can be seen: a legacy one may."""
    from flwr.clientapp import ClientApp

    if type(app).__call__ is not ClientApp.__call__ or app._call is not None:
        return True
    return any(name.startswith(f"{EVALUATE}.") for name in app._registered_funcs)


def new_message(content: RecordDict, message_type: str, node_id: int, group_id: str) -> Message:
    """A message to a node, outside of Flower's own runtime. The one place that relies on `metadata=`."""
    from flwr.app import Message, Metadata

    metadata = Metadata(
        run_id=RUN_ID,
        message_id=f"{message_type}-{node_id}-{group_id}",
        src_node_id=SERVER_NODE,
        dst_node_id=node_id,
        reply_to_message_id="",
        group_id=group_id,
        created_at=time.time(),
        ttl=TTL_S,
        message_type=message_type,
    )
    return Message(content, metadata=metadata)


def new_context(
    partition: int,
    partitions: int,
    run_config: Mapping[str, Any],
    node_config: Mapping[str, Any] | None = None,
) -> Context:
    """The context of the node that has this partition, with an empty state."""
    flwr_version()
    from flwr.app import Context, RecordDict

    return Context(
        run_id=RUN_ID,
        node_id=FIRST_NODE + partition,
        node_config={**(node_config or {}), "partition-id": partition, "num-partitions": partitions},
        state=RecordDict(),
        run_config=dict(run_config),
    )


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the global generators of Python, numpy and (if in use) torch start from this seed."""
    torch = sys.modules.get("torch")
    torch_state = None if torch is None else torch.get_rng_state()
    if torch is not None:
        seed_generators(torch, seed % 2**63)
    try:
        with every_generator(seed):
            yield
    finally:
        if torch is not None and torch_state is not None:
            torch.set_rng_state(torch_state)


def _numbers(records: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, float]:
    """The numbers of a reply's records, by name; a NumPyClient's metrics come as config records."""
    found: dict[str, float] = {}
    for name, record in records:
        if not name.endswith(LEGACY_STATUS):
            found |= numbers_of(record)
    return found


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """What is a number in a record; of a list of them there is no one value."""
    return {name: float(value) for name, value in record.items() if isinstance(value, int | float)}


def _trained(content: RecordDict) -> ArrayRecord:
    records = list(content.array_records.values())
    if len(records) != 1:
        raise AppError(
            f"the ClientApp's reply to 'train' has {len(records)} ArrayRecords: return one, the trained model"
        )
    return records[0]
