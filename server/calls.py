"""How often each client may call, and how many calls at a time: nobody waits for one who calls without end.

Each has a bound a minute. And of one kind a client has one call at a time: its others wait for their turn, as
no device makes two, so that whoever keeps many under way gets no more of a busy server than who has one. And
a call may come early: inside the wait that its client was told, right behind one that was of no use (refused,
cut, full of errors, an ask that gave a task up), or as a heartbeat that renews nothing yet. Each client has a
few such calls for nothing, for a device that was restarted asks early as well; whoever goes on has its
answers late, one a second.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from anabranch.core.engine.rates import Rates
from anabranch.core.errors import AnabranchError, Overloaded
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.server.gate import Caller
from anabranch.server.joining import source_of

CALLERS_KEPT = 20_000  # of each call
WHO_CHARS_MAX = 256  # of what may be no id
WAIT_S_MIN = 0.5
HELD_S_MAX = 1.0
EARLY_PER_MINUTE = 6.0  # so fast are they forgiven
USELESS_S = 1.0  # from a call that was of no use to the next, where the answer names no window


@dataclass
class Turn:
    """Of one client and one kind of call: how many are here, the one that has its turn among them."""

    here: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Calls:
    """For the event loop's thread. It is of this process alone, and by a clock that nobody sets."""

    def __init__(
        self,
        limits: Limits = DEFAULT_LIMITS,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._now, self._sleep = now, sleep
        self._not_before: dict[str, OrderedDict[str, float]] = defaultdict(OrderedDict)
        self._early = Rates(EARLY_PER_MINUTE, limits.early_calls_at_once, CALLERS_KEPT)
        each = limits.calls_per_minute
        self._rates: dict[str, Rates] = defaultdict(lambda: Rates(each, each, CALLERS_KEPT))
        self._turns: dict[tuple[str, str], Turn] = {}
        self._waiting, self._waiting_max = 0, limits.rpcs_max // 2  # the rest is for those whose turn it is

    def take(self, call: str, client_id: str, caller: Caller) -> None:
        """One more call of a client, or of who looks on without a name. Raises `Overloaded`."""
        who = client_id or _name(caller)
        wait_s = self._rates[call].take(who, self._now())
        if wait_s:
            wait_s = max(wait_s, WAIT_S_MIN)
            raise Overloaded(f"{who!r} calls {call} too often: wait", (wait_s, 2 * wait_s))

    def told(self, call: str, who: str, earliest_s: float) -> None:
        """A call of this kind that this one makes before that is early."""
        not_before = self._not_before[call]
        not_before[who] = self._now() + earliest_s
        not_before.move_to_end(who)
        if len(not_before) > CALLERS_KEPT:
            not_before.popitem(last=False)

    async def hold(self, call: str, who: str) -> None:
        """Let who calls early once too often wait, a second at most."""
        now = self._now()
        early_s = self._not_before[call].pop(who, 0.0) - now
        if early_s > 0 and self._early.take(who, now):
            await self._sleep(min(early_s, HELD_S_MAX))

    @contextmanager
    def heeding(self, call: str, who: str) -> Iterator[None]:
        """Inside is a call of this client: if it is of no use or cut, the next one is early for a while."""
        try:
            yield
        except (AnabranchError, asyncio.CancelledError) as error:
            window = error.retry_after_s if isinstance(error, AnabranchError) else None
            self.told(call, who, window[0] if window else USELESS_S)
            raise

    @asynccontextmanager
    async def turn(self, call: str, who: str) -> AsyncIterator[None]:
        """Inside, no other call of this kind is this client's. Raises `Overloaded` where too many wait."""
        turn = self._turns.setdefault((call, who), Turn())
        waits = turn.here > 0
        if waits and self._waiting >= self._waiting_max:
            why = f"{who!r} has {turn.here} calls of {call} under way: wait for their answers"
            raise Overloaded(why, (WAIT_S_MIN, 2 * WAIT_S_MIN))
        turn.here += 1
        self._waiting += waits
        try:
            async with turn.lock:
                self._waiting -= waits
                waits = False
                yield
        finally:
            self._waiting -= waits
            turn.here -= 1
            if not turn.here:
                del self._turns[call, who]


class Counted(Protocol):
    """A servicer whose calls are counted."""

    @property
    def calls(self) -> Calls:
        """Of its run."""
        ...


Servicer = TypeVar("Servicer", bound=Counted)
Request = TypeVar("Request")
Response = TypeVar("Response")
Method = Callable[[Servicer, Request, Caller], Awaitable[Response]]


def in_turn(method: Method[Servicer, Request, Response]) -> Method[Servicer, Request, Response]:
    """A call of a device, which waits for the device's other calls of the kind, and longer if it is early."""

    @functools.wraps(method)
    async def waiting(self: Servicer, request: Request, caller: Caller) -> Response:
        said: Any = request
        who = str(said.client_id)[:WHO_CHARS_MAX] if caller.peer is None else _name(caller)
        call, calls = method.__name__, self.calls
        async with calls.turn(call, who):
            await calls.hold(call, who)
            with calls.heeding(call, who):
                return await method(self, request, caller)

    return waiting


def _name(caller: Caller) -> str:
    """By its certificate, else by where it calls from."""
    return source_of(caller.address) if caller.peer is None else str(caller.peer.name)
