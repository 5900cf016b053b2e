"""How bytes travel between a device and the server: as if each device had the server for itself, or not.

`OwnLines`: the moment at which a transfer is over is known when it begins. `SharedLines`: transfers share the
server's line (`shared_link.py`), and a device's link may change meanwhile, so it is known when it comes.

Either way the bytes need a device's latency more, and a download that of its request before; of a model that
comes with its task (`fleet.fetch`) the answer to the ask has taken both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from anabranch.core.config.tables import FleetTable
from anabranch.simulation.clock import VirtualClock
from anabranch.simulation.network import NetworkLink, bps_of
from anabranch.simulation.shared_link import Flow, SharedLink

Arrival = Callable[[float], None]


class Transfer(Protocol):
    """Bytes under way. `takes_s`: how long they are, if that is known."""

    takes_s: float | None

    def arrives(self, then: Arrival) -> None:
        """`then` is told the moment at which the last byte is there: at once if it is known."""
        ...

    def cancel(self) -> None:
        """Nobody wants the rest."""
        ...


class Lines(Protocol):
    """What carries the bytes of a fleet."""

    def upload(self, owner: str, link: NetworkLink, payload_bytes: int) -> Transfer:
        """To the server, from now on."""
        ...

    def download(self, owner: str, link: NetworkLink, payload_bytes: int) -> Transfer:
        """From the server, asked for now."""
        ...

    def relink(self, owner: str, link: NetworkLink) -> None:
        """A device's link is this from now on, for what is under way too."""
        ...


class KnownTransfer:
    """One that takes so long, whatever else is under way."""

    __slots__ = ("_at_s", "takes_s")

    def __init__(self, at_s: float, takes_s: float) -> None:
        self._at_s = at_s
        self.takes_s: float | None = takes_s

    def arrives(self, then: Arrival) -> None:
        """See `Transfer`."""
        then(self._at_s)

    def cancel(self) -> None:
        """It has cost nobody anything."""


class OwnLines:
    """Every device's link is its own, from end to end, and stays as it is."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def upload(self, owner: str, link: NetworkLink, payload_bytes: int) -> Transfer:  # noqa: ARG002
        """See `Lines`."""
        takes_s = link.upload_s(payload_bytes)
        return KnownTransfer(self._clock.now + takes_s, takes_s)

    def download(self, owner: str, link: NetworkLink, payload_bytes: int) -> Transfer:  # noqa: ARG002
        """See `Lines`."""
        takes_s = link.download_s(payload_bytes)
        return KnownTransfer(self._clock.now + (link.model_s + takes_s), takes_s)

    def relink(self, owner: str, link: NetworkLink) -> None:
        """Nothing under way heeds it."""


class SharedTransfer:
    """One whose end depends on the others."""

    __slots__ = ("_arrived_s", "_flow", "_is_up", "_lines", "_owner", "_waiting", "link", "takes_s")

    def __init__(self, lines: SharedLines, owner: str, link: NetworkLink, is_up: bool) -> None:
        self.takes_s: float | None = None
        self.link = link
        self._lines, self._owner, self._is_up = lines, owner, is_up
        self._flow: Flow | None = None
        self._arrived_s: float | None = None
        self._waiting: list[Arrival] | None = []  # None: nobody wants it

    def begin(self, line: SharedLink, payload_bytes: int) -> None:
        """The first bit leaves now."""
        if self._waiting is not None:
            self._flow = line.begin(8.0 * payload_bytes, self._cap_bps, self._through)

    def arrives(self, then: Arrival) -> None:
        """See `Transfer`."""
        if self._arrived_s is not None:
            then(self._arrived_s)
        elif self._waiting is not None:
            self._waiting.append(then)

    def cancel(self) -> None:
        """See `Transfer`."""
        self._waiting = None
        self._lines.over(self._owner, self)
        if self._flow is not None:
            self._flow.cancel()

    def relink(self, link: NetworkLink) -> None:
        """Go on over another link."""
        self.link = link
        if self._flow is not None:
            self._flow.recap(self._cap_bps)

    @property
    def _cap_bps(self) -> float:
        return self.link.up_bps if self._is_up else self.link.down_bps

    def _through(self) -> None:
        self._lines.over(self._owner, self)
        if self._waiting is None:
            return
        self._arrived_s = self._lines.clock.now + (self.link.latency_s if self._is_up else self.link.model_s)
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then(self._arrived_s)


class SharedLines:
    """Devices share the server's line, each way, and their links may change."""

    def __init__(self, clock: VirtualClock, fleet: FleetTable) -> None:
        self.clock = clock
        self._up = SharedLink(clock, bps_of(fleet.server_in_mbps))
        self._down = SharedLink(clock, bps_of(fleet.server_out_mbps))
        self._under_way: dict[str, list[SharedTransfer]] = {}

    def upload(self, owner: str, link: NetworkLink, payload_bytes: int) -> Transfer:
        """See `Lines`."""
        transfer = self._enter(owner, link, is_up=True)
        transfer.begin(self._up, payload_bytes)
        return transfer

    def download(self, owner: str, link: NetworkLink, payload_bytes: int) -> Transfer:
        """See `Lines`."""
        transfer = self._enter(owner, link, is_up=False)
        self.clock.at(self.clock.now + link.model_s, partial(transfer.begin, self._down, payload_bytes))
        return transfer

    def relink(self, owner: str, link: NetworkLink) -> None:
        """See `Lines`."""
        for transfer in self._under_way.get(owner, ()):
            transfer.relink(link)

    def over(self, owner: str, transfer: SharedTransfer) -> None:
        """It is not under way any more."""
        mine = self._under_way.get(owner, [])
        if transfer in mine:
            mine.remove(transfer)
        if not mine:
            self._under_way.pop(owner, None)

    def _enter(self, owner: str, link: NetworkLink, is_up: bool) -> SharedTransfer:
        transfer = SharedTransfer(self, owner, link, is_up)
        self._under_way.setdefault(owner, []).append(transfer)
        return transfer


def lines_of(clock: VirtualClock, fleet: FleetTable, changing: bool) -> Lines:
    """What carries the bytes of a fleet, whose links are `changing` or stay."""
    if changing or fleet.server_in_mbps or fleet.server_out_mbps:
        return SharedLines(clock, fleet)
    return OwnLines(clock)
