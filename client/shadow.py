"""The sync thread: results leave in a thread of their own, so that training never waits for the network.

One thread and one exchange in flight, as in ShadowSync's background synchronisation (Zheng et al.,
arXiv 2003.03477): the thread that trains owns the weights, this one has results that nobody changes any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from anabranch.client.timers import Reachability
from anabranch.core import effects as ef

JOIN_S = 2.0

Order = ef.Push | ef.SetTimer


class SyncThread:
    """Carries out orders, one at a time: a push at once, a timer when its moment has come.

    `do` is called in the thread. What it raises ends the thread, and comes out of `check` elsewhere;
    `failed` is called then. A timer is due as well once `reach` says that a server is back.
    """

    def __init__(
        self,
        do: Callable[[Order], None],
        clock: Callable[[], float],
        failed: Callable[[], None],
        reach: Reachability,
    ) -> None:
        self._do, self._clock, self._failed, self._reach = do, clock, failed, reach
        self._changed = threading.Condition()
        self._push: ef.Push | None = None
        self._timer: ef.SetTimer | None = None
        self._over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="anabranch-sync", daemon=True)

    def start(self) -> None:
        """Be ready for orders."""
        self._thread.start()

    def take(self, order: Order) -> None:
        """From any thread: an order. A timer replaces the one before."""
        with self._changed:
            if isinstance(order, ef.Push):
                assert self._push is None, "one exchange at a time"
                self._push = order
            else:
                self._timer = order
            self._changed.notify()

    def look(self) -> None:
        """From any thread: see whether a server is back."""
        with self._changed:
            self._changed.notify()

    def check(self) -> None:
        """Raises what has ended the thread."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """No more orders; a call that is under way is not waited for long."""
        with self._changed:
            self._over = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            while (order := self._next()) is not None:
                self._do(order)
        except BaseException as error:  # noqa: BLE001 - the agent's thread raises it
            self._error = error
            self._failed()

    def _next(self) -> Order | None:
        """The next order that is due; None at the end."""
        with self._changed:
            while not self._over:
                if (push := self._push) is not None:
                    self._push = None
                    return push
                timer = self._timer
                left_s = None if timer is None else timer.at - self._clock()
                if timer is not None and self._reach.is_back:
                    left_s = 0.0
                if timer is not None and left_s is not None and left_s <= 0:
                    self._timer = None
                    return timer
                self._changed.wait(left_s)
            return None
