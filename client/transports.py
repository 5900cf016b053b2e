"""A device's way to its server, by name: gRPC, or the transport of others that `name://...` names."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any

from anabranch.client.messages import Enrolment, FetchedModel, HeartbeatAnswer, PushAnswer, UploadState
from anabranch.client.transport import GrpcTransport, Transport
from anabranch.core.effects import Refused
from anabranch.core.errors import AnabranchError, AppError, ConfigError, Unavailable
from anabranch.core.model.updates import Task
from anabranch.core.parts import PartKind, answer_text, members
from anabranch.identity.wallet import Wallet
from anabranch.support.own_code import told

log = logging.getLogger(__name__)

NO_TRANSPORTS = ("http", "https", "grpc", "grpcs", "tcp")  # what people write before an address
_NEEDS = (*members(Transport), "of", "close")
TRANSPORTS = PartKind(
    "transport", "transports", (), {"grpc": GrpcTransport}, _NEEDS, option="--part transport=PATH"
)

ANSWERS: dict[str, Any] = {
    "enrol": Enrolment,
    "ask": (Task, Refused),
    "fetch": FetchedModel,
    "push": PushAnswer,
    "push_and_ask": PushAnswer,
    "query_upload": UploadState,
    "heartbeat": HeartbeatAnswer,
    "drop": object,
}


class ForeignTransport:
    """The boundary round a transport of others: what it raises is an error of a device's, with its lines.

    A connection that fails is tried again, as with gRPC: libraries have errors of their own for that, which
    are `OSError`s that name no file. What is no answer is told before anybody takes it for one.
    """

    def __init__(self, name: str, server: str, client_id: str, wallet: Wallet | None) -> None:
        self._name = name
        self._transport = self._called("of", TRANSPORTS.find(name).of, server, client_id, wallet)

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
        answer, wanted = self._called(method, call, *args, **more), ANSWERS[method]
        if isinstance(answer, wanted):
            return answer
        kinds = wanted if isinstance(wanted, tuple) else (wanted,)
        names = " or ".join(kind.__name__ for kind in kinds)
        raise AppError(f"transport {self._name!r}: {method} must give {names}, not {answer_text(answer)}")

    def _called(self, method: str, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        try:
            return call(*args, **more)
        except AnabranchError:
            raise
        except Exception as error:
            what = told(f"transport {self._name}.{method}", error)
            if isinstance(error, OSError) and error.filename is None:
                raise Unavailable(what) from error
            raise AppError(what) from error


def is_foreign(server: str) -> bool:
    """Whether an address is one for a transport of others: `name://...`."""
    return "://" in server


def open_transport(server: str, client_id: str, wallet: Wallet | None) -> AbstractContextManager[Transport]:
    """The transport to a server, closed at the end. Raises `ConfigError` for a name that none has."""
    if is_foreign(server):
        name, _, rest = server.partition("://")
        if name in NO_TRANSPORTS:
            raise ConfigError(f"server {server!r}: write HOST:PORT without {name}://, {rest.rstrip('/')}")
        found: Any = ForeignTransport(name, server, client_id, wallet)
        return closing(found)
    return GrpcTransport(server, client_id, wallet=wallet)
