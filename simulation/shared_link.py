"""A line that many transfers share: each gets what is fair, and no more than its own link takes.

| symbol  | name     | meaning                                                                          |
|---------|----------|----------------------------------------------------------------------------------|
| C       | bps      | bits a second of the line                                                        |
| c_k     | cap      | bits a second that a transfer of class k takes at most: its device's own link    |
| n_k     | count    | transfers of class k under way                                                   |
| theta   |          | the fair share: as much as it can be with sum over k of n_k min(c_k, theta) <= C |
| r_k     | rate     | min(c_k, theta), what each transfer of class k gets                              |
| S_k     | served   | bits that one has got which was there as long as class k is                      |

That is max-min fairness on one line, found by filling it (Bertsekas and Gallager, Data Networks, 2nd edition,
section 6.5.2). Transfers with the same cap get the same, so only S_k is counted: one that began at S_k with B
bits to go ends when S_k is that and B. What a change costs grows with the classes, not with the transfers.

All of it follows from the virtual clock: one seed, one history.
"""

from __future__ import annotations

import math
from bisect import insort
from functools import partial
from heapq import heapify, heappop, heappush

from anabranch.simulation.clock import Action, VirtualClock


class Flow:
    """A transfer under way, or over: `done` is called when its last bit is through."""

    __slots__ = ("done", "end_bits", "line", "of")

    def __init__(self, line: SharedLink, done: Action) -> None:
        self.line, self.done = line, done
        self.of: _Class | None = None  # None: it is over
        self.end_bits = 0.0

    def cancel(self) -> None:
        """Nothing more of it passes. What is over stays so."""
        if self.of is not None:
            self.line.leave(self)

    def recap(self, cap_bps: float) -> None:
        """From now on its device's link takes so much."""
        if self.of is not None and self.of.cap != cap_bps:
            self.line.move(self, cap_bps)


class _Class:
    """The transfers with one cap."""

    __slots__ = ("cap", "count", "ends", "rate", "served")

    def __init__(self, cap: float) -> None:
        self.cap, self.rate = cap, 0.0
        self.count, self.served = 0, 0.0
        self.ends: list[tuple[float, int, Flow]] = []  # those that left are dropped when they are first

    def __lt__(self, other: _Class) -> bool:
        return self.cap < other.cap


class SharedLink:
    """One direction of a server's line, of `bps` bits a second; infinite: only the devices' links count."""

    def __init__(self, clock: VirtualClock, bps: float) -> None:
        self._clock, self._bps = clock, bps
        self._classes: list[_Class] = []  # by cap
        self._by_cap: dict[float, _Class] = {}
        self._entered, self._seen_s = 0, 0.0
        self._first: Flow | None = None  # which ends next, at `_due_s`
        self._due_s = self._wakes_s = math.inf

    def begin(self, bits: float, cap_bps: float, done: Action) -> Flow:
        """So many bits start to pass; `done` is called once they have."""
        flow = Flow(self, done)
        if math.isinf(min(cap_bps, self._bps)):
            self._clock.at(self._clock.now, done)
            return flow
        self._advance()
        self._join(flow, bits, cap_bps)
        self._plan()
        return flow

    def leave(self, flow: Flow) -> None:
        """See `Flow.cancel`."""
        self._advance()
        self._part(flow)
        self._plan()

    def move(self, flow: Flow, cap_bps: float) -> None:
        """See `Flow.recap`."""
        self._advance()
        left_bits = max(0.0, flow.end_bits - self._part(flow).served)
        if math.isinf(min(cap_bps, self._bps)):
            self._clock.at(self._clock.now, flow.done)
        else:
            self._join(flow, left_bits, cap_bps)
        self._plan()

    # --- the classes -------------------------------------------------------------------------

    def _join(self, flow: Flow, bits: float, cap_bps: float) -> None:
        of = self._by_cap.get(cap_bps)
        if of is None:
            of = self._by_cap[cap_bps] = _Class(cap_bps)
            insort(self._classes, of)
        of.count += 1
        self._entered += 1
        flow.of, flow.end_bits = of, of.served + bits
        heappush(of.ends, (flow.end_bits, self._entered, flow))

    def _part(self, flow: Flow) -> _Class:
        """Take it out of its class, which goes with its last one."""
        of, flow.of = flow.of, None
        assert of is not None, "only what is under way is asked to leave"
        of.count -= 1
        if not of.count:
            del self._by_cap[of.cap]
            self._classes.remove(of)
        elif len(of.ends) > 2 * of.count + 16:
            of.ends = [one for one in of.ends if one[2].of is of and one[2].end_bits == one[0]]
            heapify(of.ends)
        return of

    def _advance(self) -> None:
        """What has passed since this was last called."""
        took_s = self._clock.now - self._seen_s
        self._seen_s = self._clock.now
        if took_s > 0.0:
            for of in self._classes:
                of.served += of.rate * took_s

    def _share(self) -> None:
        """Fill the line: who takes less than the fair share of what is left gets that."""
        left_bps, left = self._bps, sum(of.count for of in self._classes)
        for of in self._classes:
            of.rate = min(of.cap, left_bps / left)
            left_bps -= of.rate * of.count
            left -= of.count

    def _plan(self) -> None:
        """Look again when the next one ends, or before."""
        self._share()
        self._due_s, self._first = math.inf, None
        for of in self._classes:
            while not _is_under_way(of):
                heappop(of.ends)
            left_s = (of.ends[0][0] - of.served) / of.rate if of.rate else math.inf
            due_s = self._clock.now + max(0.0, left_s)
            if due_s < self._due_s:
                self._due_s, self._first = due_s, of.ends[0][2]
        if self._due_s < self._wakes_s:
            self._wakes_s = self._due_s
            self._clock.at(self._due_s, partial(self._wake, self._due_s))

    def _wake(self, planned_s: float) -> None:
        if planned_s != self._wakes_s:
            return  # it was planned earlier since
        self._wakes_s = math.inf
        self._advance()
        flow = self._first
        if flow is None or self._due_s > self._clock.now:  # what ended then takes longer now, or has left
            self._plan()
            return
        assert flow.of is not None, "each that leaves is followed by a plan without it"
        flow.of.served = flow.end_bits  # to the bit, whatever the clock is rounded to
        self._part(flow)
        self._plan()
        flow.done()


def _is_under_way(of: _Class) -> bool:
    end_bits, _, flow = of.ends[0]
    return flow.of is of and flow.end_bits == end_bits
