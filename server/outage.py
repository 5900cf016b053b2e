"""What a store cannot do, as devices hear it: come again. For nothing of it is a flaw of what they send.

By the store's own errors a device would discard its result, or end. Of what lasts the log says so at once,
and then after pauses that double, each kind by itself: a fleet comes again every few seconds, and each of its
devices is told of a file of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from anabranch.core.clock import Seconds
from anabranch.core.errors import LeadershipLost, StoreError, StoreFull, Unavailable
from anabranch.host.standstill import Lasting
from anabranch.reports.text import duration_text
from anabranch.server.store.base import DiskFailed

log = logging.getLogger(__name__)

SAY_AGAIN_S = 60.0  # and for so long nothing is heard of what is over
RETRY_S = (1.0, 5.0)  # somebody has to mend it, as to make room
NO_ROOM = "the server has no room for it, its log says why: once somebody makes room it goes on by itself"


class Outage:
    """Of one run's store, or of the authority's register. For the event loop's thread.

    `give_up`: ends the server where nobody can know what is on its disk; for the register nothing does.
    """

    def __init__(
        self, give_up: Callable[[BaseException], None] | None = None, monotonic: Seconds = time.monotonic
    ) -> None:
        self._give_up, self._monotonic = give_up, monotonic
        self._lasting: dict[type[StoreError], Lasting] = {}

    def told(self, error: Exception) -> Exception:
        """What a device is told of this error of its call: hosts, users and files are the log's alone."""
        if not isinstance(error, StoreError) or isinstance(error, LeadershipLost):
            return error
        if isinstance(error, StoreFull):  # which `server/room.py` logs
            return StoreFull(NO_ROOM)
        if isinstance(error, DiskFailed) and self._give_up is not None:
            self._give_up(error)
        else:
            self._say(error)
        again = Unavailable("the server's store cannot do it now; its log says why")
        again.retry_after_s = RETRY_S
        return again

    def _say(self, error: StoreError) -> None:
        lasting = self._lasting.setdefault(type(error), Lasting(SAY_AGAIN_S))
        lasted_s = lasting.heard(self._monotonic())
        if lasted_s == 0.0:
            log.error("devices are told to come again, and keep their updates: %s", error)
        elif lasted_s is not None:
            log.error("devices are told to come again, for %s by now: %s", duration_text(lasted_s), error)
