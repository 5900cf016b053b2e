"""How often each client may make each call: nobody is kept waiting by one who calls without end."""

from __future__ import annotations

import time
from collections import defaultdict

from anabranch.core.errors import Overloaded
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.rates import Rates
from anabranch.server.gate import Caller
from anabranch.server.joining import source_of

CALLERS_KEPT = 20_000  # of each call
WAIT_S_MIN = 0.5


class Calls:
    """For the event loop's thread. It is of this process alone, and by a clock that nobody sets."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        each = limits.calls_per_minute
        self._rates: dict[str, Rates] = defaultdict(lambda: Rates(each, each, CALLERS_KEPT))

    def take(self, call: str, client_id: str, caller: Caller) -> None:
        """One more call of a client, or of who looks on without a name. Raises `Overloaded`."""
        who = client_id or (source_of(caller.address) if caller.peer is None else str(caller.peer.name))
        wait_s = self._rates[call].take(who, time.monotonic())
        if wait_s:
            wait_s = max(wait_s, WAIT_S_MIN)
            raise Overloaded(f"{who!r} calls {call} too often: wait", (wait_s, 2 * wait_s))
