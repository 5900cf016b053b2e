"""A transport that fails where it is told to: the same faults every time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from anabranch.client.messages import Enrolment, FetchedModel, HeartbeatAnswer, PushAnswer, UploadState
from anabranch.client.outbox import UpdateEntry
from anabranch.client.transport import Transport
from anabranch.core.effects import Refused
from anabranch.core.errors import AnabranchError, Unavailable
from anabranch.core.params import ParamSpec
from anabranch.core.submodels import Submodel
from anabranch.core.updates import Ask, Capability, Task

T = TypeVar("T")


class FaultKind(StrEnum):
    """What happens to a call."""

    LOST = "lost"  # it never arrives
    ANSWER_LOST = "answer_lost"  # it is carried out, the caller does not hear of it
    TWICE = "twice"  # it is carried out twice, the caller hears the second answer


@dataclass(frozen=True)
class Fault:
    """The `nth` call (from 1) of the method `call` meets this fault; `error` is what the caller gets."""

    call: str
    nth: int
    kind: FaultKind
    error: AnabranchError = field(default_factory=lambda: Unavailable("a fault of the test"))


class FaultyTransport:
    """Passes calls on to `inner`, less the faults. `calls` counts them by method."""

    def __init__(self, inner: Transport, faults: Sequence[Fault] = ()) -> None:
        self._inner = inner
        self._faults = {(f.call, f.nth): f for f in faults}
        self.calls: Counter[str] = Counter()

    def enrol(self, capability: Capability) -> Enrolment:
        """See `Transport`."""
        return self._pass("enrol", lambda: self._inner.enrol(capability))

    def ask(self, ask: Ask, spec: ParamSpec) -> Task | Refused:
        """See `Transport`."""
        return self._pass("ask", lambda: self._inner.ask(ask, spec))

    def fetch(
        self,
        manifest_sha256: str,
        version: int | None = None,
        newer_than: int | None = None,
        holds: int | None = None,
        exact: bool = False,
        submodel: Submodel | None = None,
    ) -> FetchedModel:
        """See `Transport`."""
        return self._pass(
            "fetch", lambda: self._inner.fetch(manifest_sha256, version, newer_than, holds, exact, submodel)
        )

    def push(self, entry: UpdateEntry) -> PushAnswer:
        """See `Transport`."""
        return self._pass("push", lambda: self._inner.push(entry))

    def push_and_ask(self, entry: UpdateEntry, ask: Ask, spec: ParamSpec) -> PushAnswer:
        """See `Transport`. It counts as a push."""
        return self._pass("push", lambda: self._inner.push_and_ask(entry, ask, spec))

    def query_upload(self, update_id: str) -> UploadState:
        """See `Transport`."""
        return self._pass("query_upload", lambda: self._inner.query_upload(update_id))

    def heartbeat(self, task_id: str, progress: float) -> HeartbeatAnswer:
        """See `Transport`."""
        return self._pass("heartbeat", lambda: self._inner.heartbeat(task_id, progress))

    def drop(self, task_id: str, why: str) -> None:
        """See `Transport`."""
        self._pass("drop", lambda: self._inner.drop(task_id, why))

    def _pass(self, name: str, call: Callable[[], T]) -> T:
        self.calls[name] += 1
        fault = self._faults.get((name, self.calls[name]))
        if fault is None:
            return call()
        if fault.kind is FaultKind.LOST:
            raise fault.error
        answer = call()
        if fault.kind is FaultKind.ANSWER_LOST:
            raise fault.error
        return call() if fault.kind is FaultKind.TWICE else answer
