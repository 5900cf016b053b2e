"""The calls of a simulated device, by lane: one at a time, and what belongs to an earlier one is over.

A device that overlaps has two lanes: its work, and its pushes.
"""

from __future__ import annotations

from anabranch.simulation.clock import Action, VirtualClock
from anabranch.simulation.network import DOWN, Network
from anabranch.simulation.transfers import Transfer


class Lane:
    """Counts the calls. Where messages may be lost, a call without an answer fails in time."""

    __slots__ = ("_call", "_client_id", "_clock", "_network", "_transfer")  # a large fleet has two a device

    def __init__(self, clock: VirtualClock, network: Network, client_id: str) -> None:
        self._clock, self._network, self._client_id = clock, network, client_id
        self._call = 0
        self._transfer: Transfer | None = None

    def end(self) -> None:
        """Nothing is waited for any more."""
        self._call += 1
        transfer, self._transfer = self._transfer, None
        if transfer is not None:  # bytes of a call that is over are not wanted any more
            transfer.cancel()

    def begin(self, unanswered: Action, transfer: Transfer | None = None) -> int:
        """A new call, with these bytes, if it has any; returns its number."""
        self.end()
        timeout_s, self._transfer = self._network.timeout_s, transfer
        if timeout_s is None:
            return self._call
        if transfer is None:
            self.after(timeout_s, unanswered)
        elif transfer.takes_s is not None:
            self.after(transfer.takes_s + timeout_s, unanswered)
        else:
            call = self._call
            transfer.arrives(lambda at: self._time_out(call, at + timeout_s, unanswered))
        return self._call

    def _time_out(self, call: int, at_s: float, unanswered: Action) -> None:
        if call == self._call:
            self.at(at_s, unanswered)

    def hear(self, call: int, step: Action, due_s: float) -> None:
        """The server's answer to a call, due at a moment, unless the call is over by then."""
        self._network.send(self._client_id, DOWN, due_s, _Answer(self, call, step))

    def after(self, delay_s: float, step: Action) -> None:
        """Go on with the call in hand after so many seconds, unless it is over by then."""
        self.at(self._clock.now + delay_s, step)

    def at(self, time_s: float, step: Action) -> None:
        """The same, at a moment."""
        self._clock.at(time_s, _Step(self, self._call, step))


class _Step:
    """What a call goes on with, unless it is over. A closure would take four times as much memory."""

    __slots__ = ("_call", "_lane", "_step")

    def __init__(self, lane: Lane, call: int, step: Action) -> None:
        self._lane, self._call, self._step = lane, call, step

    def __call__(self) -> None:
        if self._call == self._lane._call:
            self._step()


class _Answer(_Step):
    """The same, of a call that is then answered: neither a second answer nor its timeout matters."""

    __slots__ = ()

    def __call__(self) -> None:
        if self._call == self._lane._call:
            self._lane.end()
            self._step()
