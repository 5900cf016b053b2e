"""What many transfers on one line get: max-min fairness, beside its definition."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.simulation.clock import VirtualClock
from anabranch.simulation.shared_link import Flow, SharedLink


@dataclass
class Sent:
    """A transfer of the examples: when it begins, how large it is, its cap, and what happens to it."""

    at_s: float
    bits: float
    cap: float
    cancel_s: float = math.inf
    recaps: tuple[tuple[float, float], ...] = ()  # (when, to what)
    done_s: float = math.inf
    left: float = field(default=math.nan)


def run(bps: float, sent: list[Sent]) -> list[float]:
    """When each is through, by the line."""
    clock = VirtualClock()
    line = SharedLink(clock, bps)
    ends = [math.inf] * len(sent)

    def begin(i: int, one: Sent) -> None:
        def done() -> None:
            ends[i] = clock.now

        flow: Flow = line.begin(one.bits, one.cap, done)
        if one.cancel_s < math.inf:
            clock.at(max(one.cancel_s, clock.now), flow.cancel)
        for at_s, cap in one.recaps:
            clock.at(max(at_s, clock.now), partial(flow.recap, cap))

    for i, one in enumerate(sent):
        clock.at(one.at_s, partial(begin, i, one))
    clock.run()
    return ends


def fair(bps: float, caps: list[float]) -> list[float]:
    """Max-min fair rates by their definition: raise all alike, until the line or the own cap is full."""
    rates = [0.0] * len(caps)
    growing = list(range(len(caps)))
    while growing:
        room = bps - sum(rates)
        step = min(room / len(growing), *(caps[i] - rates[i] for i in growing))
        for i in growing:
            rates[i] += step
        growing = [i for i in growing if caps[i] - rates[i] > 1e-9 * caps[i]]
        if room - step * len(growing) <= 1e-9 * bps or step >= room / max(1, len(growing)) - 1e-12:
            break
    return rates


def cap_at(one: Sent, now_s: float) -> float:
    """What its own link takes then."""
    return [one.cap, *(c for at, c in sorted(one.recaps) if max(at, one.at_s) <= now_s)][-1]


def reference(bps: float, sent: list[Sent]) -> list[float]:
    """The same by going from one change to the next, every rate by the definition, nothing kept."""
    left = [one.bits for one in sent]
    ends = [math.inf] * len(sent)
    cuts = sorted(
        {t for one in sent for t in (one.at_s, one.cancel_s, *(at for at, _ in one.recaps)) if t < math.inf}
    )
    now = 0.0
    while True:
        open_ = [
            i
            for i, one in enumerate(sent)
            if one.at_s <= now < max(one.cancel_s, one.at_s) and ends[i] == math.inf
        ]
        rates = dict(zip(open_, fair(bps, [cap_at(sent[i], now) for i in open_]), strict=True))
        finish = min((now + left[i] / rates[i] for i in open_ if rates[i]), default=math.inf)
        change = min((t for t in cuts if t > now), default=math.inf)
        then = min(finish, change)
        if then == math.inf:
            return ends
        for i in open_:
            left[i] -= rates[i] * (then - now)
            if left[i] <= 1e-7 * sent[i].bits:
                ends[i] = then
        now = then


times = st.integers(0, 40).map(lambda n: n / 4)
caps = st.sampled_from([1.0, 2.0, 5.0, 30.0])


@st.composite
def transfers(draw: st.DrawFn) -> Sent:
    at_s = draw(times)
    recaps = draw(st.lists(st.tuples(times, caps), max_size=2, unique_by=lambda one: one[0]))
    later = tuple(sorted((at_s + t + 0.125, cap) for t, cap in recaps))
    cancel_s = draw(st.one_of(st.just(math.inf), times.map(lambda t: at_s + t + 0.0625)))
    return Sent(at_s, float(draw(st.integers(1, 60))), draw(caps), cancel_s, later)


@settings(max_examples=150)
@given(st.sampled_from([1.0, 7.0, 1000.0]), st.lists(transfers(), min_size=1, max_size=7))
def test_everybody_gets_what_is_fair(bps: float, sent: list[Sent]) -> None:
    found, expected = run(bps, sent), reference(bps, sent)
    for i, one in enumerate(sent):
        if one.cancel_s < math.inf and one.cancel_s in (found[i], pytest.approx(expected[i], abs=1e-5)):
            continue  # what is through in the moment in which it is cancelled may count as either
        assert found[i] == pytest.approx(expected[i], abs=1e-5), (i, one)


def test_a_line_by_hand() -> None:
    """10 bit/s; one of cap 2 with 4 bits, two without a cap worth naming with 40 and 20.

    At first 2, 4 and 4: the small one is through at 2 s. Then 5 and 5: the 20 have had 8, 12 are left, 4.4 s.
    Then the 40 have had 8 + 12, 20 are left at 10 bit/s: 6.4 s.
    """
    assert run(10.0, [Sent(0, 4, 2), Sent(0, 40, 50), Sent(0, 20, 60)]) == pytest.approx([2.0, 6.4, 4.4])


def test_what_is_not_there_any_more_leaves_its_share() -> None:
    one, two = Sent(0, 100, 50), Sent(0, 100, 50, cancel_s=4.0)
    assert run(10.0, [one, two]) == pytest.approx([12.0, math.inf])  # 20 in 4 s, 80 in 8


def test_a_link_that_changes_under_way() -> None:
    assert run(math.inf, [Sent(0, 100, 10, recaps=((4.0, 1.0), (14.0, 50.0)))]) == pytest.approx([15.0])


def test_no_limit_is_no_time() -> None:
    assert run(math.inf, [Sent(3.0, 1e12, math.inf), Sent(1.0, 8.0, 4.0)]) == [3.0, 3.0]
    assert run(5.0, [Sent(0.0, 0.0, math.inf), Sent(0.0, 10.0, math.inf)]) == pytest.approx([0.0, 2.0])


def test_equal_ones_end_in_the_order_in_which_they_began() -> None:
    clock, order = VirtualClock(), list[int]()
    line = SharedLink(clock, 8.0)
    for i in range(50):
        line.begin(16.0, 1e9, partial(order.append, i))
    clock.run()
    assert order == list(range(50))
    assert clock.now == pytest.approx(100.0)


def test_what_has_left_is_forgotten() -> None:
    """A line that is always busy, with transfers that begin and are given up, does not grow."""
    clock = VirtualClock()
    line = SharedLink(clock, 1.0)
    line.begin(1e9, 5.0, lambda: None)
    for _ in range(10_000):
        line.begin(10.0, 5.0, lambda: None).cancel()
    (of,) = line._classes
    assert (of.count, len(of.ends) < 50) == (1, True)
