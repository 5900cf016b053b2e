"""A transport that fails where it is told to, or as often: the same faults every time.

For tests of what is built on a `Transport`, your own App and retries among them. The vocabulary is that of
the simulator's `[faults]`, so that what was found there can be tried against a live server:

    transport = FaultyTransport(GrpcTransport(...), at_random=MessageFaults(FaultsTable(loss=0.1), seed=1))
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from anabranch.client.messages import Enrolment, FetchedModel, HeartbeatAnswer, PushAnswer, UploadState
from anabranch.client.outbox import UpdateEntry
from anabranch.client.transport import Transport
from anabranch.core.config.faults import FaultKind, FaultsTable, MessageFaults
from anabranch.core.effects import Refused
from anabranch.core.errors import AnabranchError, Unavailable
from anabranch.core.model.holdings import Holdings
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import Submodel
from anabranch.core.model.updates import Ask, Capability, Task

T = TypeVar("T")


@dataclass(frozen=True)
class Fault:
    """The `nth` call (from 1) of the method `call` meets this fault; `error` is what the caller gets.

    `delay_s` is for `DELAYED` alone.
    """

    call: str
    nth: int
    kind: FaultKind
    error: AnabranchError = field(default_factory=lambda: Unavailable("a fault of the test"))
    delay_s: float = 0.0


class FaultyTransport:
    """Passes calls on to `inner`, less the faults. `calls` counts them by method, `met` the faults by kind.

    `faults` happen where they say. `at_random` draws the fate of every other call and of its answer. A call
    that is `REORDERED` fails for its caller, and is carried out after the next one. `sleep` is for delays.
    """

    def __init__(
        self,
        inner: Transport,
        faults: Sequence[Fault] = (),
        at_random: MessageFaults | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._inner, self._at_random, self._sleep = inner, at_random, sleep
        self._faults = {(f.call, f.nth): f for f in faults}
        self._late: list[Callable[[], object]] = []
        self.calls: Counter[str] = Counter()
        self.met: Counter[FaultKind] = Counter()

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
        holds: Holdings = None,
        exact: bool = False,
        submodel: Submodel | None = None,
        part_id: int = 0,
    ) -> FetchedModel:
        """See `Transport`."""
        return self._pass(
            "fetch",
            lambda: self._inner.fetch(manifest_sha256, version, newer_than, holds, exact, submodel, part_id),
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

    def drop(self, task_id: str, why: str, diverged: bool = False) -> None:
        """See `Transport`."""
        self._pass("drop", lambda: self._inner.drop(task_id, why, diverged))

    def _pass(self, name: str, call: Callable[[], T]) -> T:
        self.calls[name] += 1
        late, self._late = self._late, []
        try:
            for fault in self._meets(name):
                self.met[fault.kind] += 1
                if fault.kind is FaultKind.DELAYED:
                    self._sleep(fault.delay_s)
                elif fault.kind is FaultKind.DUPLICATED:
                    call()
                else:
                    self._fail(fault, call)
            return call()
        finally:
            for overtaken in late:
                with contextlib.suppress(AnabranchError):  # nobody waits for its answer
                    overtaken()

    def _fail(self, fault: Fault, call: Callable[[], object]) -> NoReturn:
        if fault.kind is FaultKind.ANSWER_LOST:
            call()
        elif fault.kind is FaultKind.REORDERED:
            self._late.append(call)
        raise fault.error

    def _meets(self, name: str) -> list[Fault]:
        """The faults of this call, in the order in which they happen: one that fails comes last."""
        nth = self.calls[name]
        if (fault := self._faults.get((name, nth))) is not None:
            return [fault]
        if self._at_random is None:
            return []
        there, back = (self._at_random.fate(f"{name} {way}", nth) for way in ("up", "down"))
        delay_s = max(there.delays_s, default=0.0) + max(back.delays_s, default=0.0)
        happens = {
            FaultKind.DELAYED: delay_s > 0.0,
            FaultKind.LOST: not there.delays_s,
            FaultKind.REORDERED: there.held,
            FaultKind.DUPLICATED: len(there.delays_s) > 1,
            FaultKind.ANSWER_LOST: not back.delays_s,
        }
        return [Fault(name, nth, kind, delay_s=delay_s) for kind, does in happens.items() if does]


__all__ = ["Fault", "FaultKind", "FaultsTable", "FaultyTransport", "MessageFaults"]
