"""A device's way to its server, by name: gRPC, or the transport of others that `name://...` names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import fields, is_dataclass
from functools import cache, partial
from numbers import Real
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from anabranch.client.messages import Enrolment, FetchedModel, HeartbeatAnswer, PushAnswer, UploadState
from anabranch.client.transport import GrpcTransport, Transport
from anabranch.core.effects import Refused
from anabranch.core.errors import AnabranchError, AppError, ConfigError, Unavailable
from anabranch.core.model.updates import Ask, Task
from anabranch.core.parts import PartKind, answer_text, members
from anabranch.identity.wallet import Wallet
from anabranch.support.own_code import is_signal, told

log = logging.getLogger(__name__)

NO_TRANSPORTS = ("http", "https", "grpc", "grpcs", "tcp")  # what people write before an address
_NEEDS = (*members(Transport), "of", "close")
TRANSPORTS = PartKind(
    "transport", "transports", (), {"grpc": GrpcTransport}, _NEEDS, option="--part transport=PATH"
)

ANSWERS: dict[str, tuple[type[Any], ...]] = {
    "enrol": (Enrolment,),
    "ask": (Task, Refused),
    "fetch": (FetchedModel,),
    "push": (PushAnswer,),
    "push_and_ask": (PushAnswer,),
    "query_upload": (UploadState,),
    "heartbeat": (HeartbeatAnswer,),
    "drop": (object,),
}

_ALIKE: dict[type[Any], type[Any]] = {float: Real, tuple: Sequence}  # what serves as well


class ForeignTransport:
    """The boundary round a transport of others: what it raises is an error of a device's, with its lines.

    A connection that fails is tried again, as with gRPC: see `is_lost`. What is no answer is told before
    anybody takes it for one.
    """

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self._name = name
        self._transport = self._called("of", make)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        return partial(self._answered, name, found) if name in ANSWERS else found

    def close(self) -> None:
        """Close it; what it raises then costs nothing any more."""
        try:
            self._called("close", self._transport.close)
        except AnabranchError as error:
            log.warning("%s", error)

    def _answered(self, method: str, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        answer = self._called(method, call, *args, **more)
        if flaw := _flaw(answer, ANSWERS[method]):
            raise AppError(f"transport {self._name!r}: {method} must give {flaw}")
        asked = next((one for one in args if isinstance(one, Ask)), None)
        task = getattr(answer, "next", answer)
        if asked is not None and isinstance(task, Task) and task.task_id != asked.task_id:
            raise AppError(
                f"transport {self._name!r}: {method} must give the task that was asked for, "
                f"{asked.task_id!r}, not {task.task_id!r}"
            )
        return answer

    def _called(self, method: str, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        try:
            return call(*args, **more)
        except AnabranchError:
            raise
        except (Exception, SystemExit) as error:
            if is_signal(error):
                raise
            what = told(f"transport {self._name}.{method}", error)
            if is_lost(error):
                raise Unavailable(what) from error
            if type(error).__module__ != "builtins":  # of a library, perhaps its word for a line that is cut
                what += "\n  where a connection has failed raise ConnectionError: that is tried again"
            raise AppError(what) from error


def is_lost(error: BaseException) -> bool:
    """Whether a connection has failed: the end of what is read, or an `OSError`, but one about a file.

    Libraries have errors of their own for that, which are of this kind. Some name an address as `filename`;
    what the system says of a file has a number as well.
    """
    if isinstance(error, OSError):
        return error.filename is None or error.errno is None
    return isinstance(error, EOFError)


def _flaw(answer: Any, wanted: tuple[type[Any], ...]) -> str:
    """What an answer should be, and what it is; empty where nothing is wrong with it."""
    of: Any = next((kind for kind in wanted if isinstance(answer, kind)), None)
    if of is None:
        return f"{_either(wanted)}, not {answer_text(answer)}"
    for name, kinds in _fields(of):
        if not isinstance(value := getattr(answer, name), kinds):
            return f"{of.__name__} whose {name} is {_either(kinds)}, not {answer_text(value)}"
    return ""


def _either(kinds: tuple[type[Any], ...]) -> str:
    return " or ".join(kind.__name__ for kind in kinds)


@cache
def _fields(kind: Any) -> list[tuple[str, tuple[type[Any], ...]]]:
    """The fields of an answer, each with the classes that it may be of; those of other hints are left out."""
    if not is_dataclass(kind):
        return []
    hints, found = get_type_hints(kind), []
    for field in fields(kind):
        hint = hints[field.name]
        parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        origins = [get_origin(part) or part for part in parts]
        if all(isinstance(one, type) for one in origins):
            found.append((field.name, tuple(_ALIKE.get(one, one) for one in origins)))
    return found


def is_foreign(server: str) -> bool:
    """Whether an address is one for a transport of others: `name://...`."""
    return "://" in server


def open_transport(server: str, client_id: str, wallet: Wallet | None) -> AbstractContextManager[Transport]:
    """The transport to a server, closed at the end. Raises `ConfigError` for a name that none has."""
    if is_foreign(server):
        name, _, rest = server.partition("://")
        if name in NO_TRANSPORTS:
            raise ConfigError(f"server {server!r}: write HOST:PORT without {name}://, {rest.rstrip('/')}")
        made = TRANSPORTS.find(name)
        found: Any = ForeignTransport(name, lambda: made.of(server, client_id, wallet))
        return closing(found)
    return GrpcTransport(server, client_id, wallet=wallet)
