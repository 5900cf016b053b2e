"""A device that backs off hears that its server is back, whenever that is said."""

from __future__ import annotations

import threading

from anabranch.client.shadow import Order, SyncThread
from anabranch.client.stopping import Bell
from anabranch.client.timers import RETRY, Reachability, Timers
from anabranch.core import effects as ef
from anabranch.core.device.overlap import PUSH_TIMER

FAR = 1e6
SOON_S = 600.0


def timers(reach: Reachability) -> Timers:
    bell = Bell(lambda: 0.0, sleep=lambda _: None)
    found = Timers(bell, lambda _: None, reach)
    found.set(ef.SetTimer(RETRY, FAR))
    return found


def test_the_news_counts_before_the_timer_is_set_and_after() -> None:
    reach = Reachability()
    reach.begin()
    reach.returned()
    reach.nobody()
    assert timers(reach).due() == RETRY
    reach.begin()
    reach.nobody()
    waits = timers(reach)
    assert waits.due() is None
    reach.returned()
    assert waits.due() == RETRY


def test_what_was_put_off_for_another_reason_waits() -> None:
    reach = Reachability()
    reach.begin()
    reach.returned()
    assert timers(reach).due() is None


def test_news_of_an_earlier_call_are_old() -> None:
    reach = Reachability()
    reach.nobody()
    reach.returned()
    reach.begin()
    reach.nobody()
    assert timers(reach).due() is None


def test_the_sync_thread_hears_it_as_well() -> None:
    fired, reach = threading.Event(), Reachability()

    def do(order: Order) -> None:
        assert isinstance(order, ef.SetTimer)
        reach.begin()
        fired.set()

    sync = SyncThread(do, lambda: 0.0, lambda: None, reach)
    sync.start()
    reach.nobody()
    reach.returned()  # before the timer is there
    sync.take(ef.SetTimer(PUSH_TIMER, FAR))
    assert fired.wait(SOON_S)
    fired.clear()
    reach.nobody()
    sync.take(ef.SetTimer(PUSH_TIMER, FAR))
    reach.returned()  # after it is
    sync.look()
    assert fired.wait(SOON_S)
    sync.stop()
    sync.check()
