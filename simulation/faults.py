"""What goes wrong in a simulation, as `[faults]` says: on the links, on the devices and at the server.

Links. Every message is lost, comes twice, late or is overtaken (`core/config/faults.py`). A *partition*
cuts a part of the devices off for a while: what they send or are sent is lost. A *swizzle* clogs a part
of the links one after the other, in random order, and unclogs them in another random order: what is
under way then comes later, all at once. (After `swizzle` of FoundationDB's test workload RandomClogging,
which unclogs in the reversed order; the random one is ours.)

Devices. A device crashes, forgets what it did, and comes back with what is on its disk: its outbox, what its
uplink remembers, the version that it holds. Its clock is set wrong, and goes too fast or too slow. It is
copied, and both work under one name for a while (`copies.py`).

Server. It crashes with everything that is not committed, and comes back from its log and its newest
snapshot (`server.py`). Its clock is set, forward or back, while it runs and while it does not
(`server_time.py`). Its disk is full for a while, loses the end of the log, or is put back to what it was
(`disk.py`).

Every draw is from a named stream, so a seed has one history. After `until_s` nothing goes wrong any more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from anabranch.core.config.faults import UNHARMED, FaultKind, FaultsTable, MessageFaults, length_s
from anabranch.core.rng import rank
from anabranch.simulation.clock import Action, VirtualClock

T = TypeVar("T")

NEVER = (math.inf, math.inf)


@dataclass(frozen=True)
class DeviceClock:
    """What a device takes for the time: `offset_s` + `rate` times the true one."""

    offset_s: float = 0.0
    rate: float = 1.0

    def local(self, time_s: float) -> float:
        """What the device's clock shows at this time."""
        return self.offset_s + self.rate * time_s

    def true(self, local_s: float) -> float:
        """When the device's clock shows this."""
        return (local_s - self.offset_s) / self.rate


RIGHT = DeviceClock()


CrashDevice = Callable[[str, float], None]
CrashServer = Callable[[float], None]
StepClock = Callable[[float], None]
Fill = Callable[[bool], None]
CopyDevice = Callable[[str, int, float], None]
Happen = Callable[[int, float], None]


class Faults:
    """The faults of one run. `counts`: how often each has happened."""

    def __init__(self, table: FaultsTable, seed: int, clock: VirtualClock, clients: Sequence[str]) -> None:
        self.table, self._seed, self._clock = table, seed, clock
        self.timeout_s: float | None = table.timeout_s
        self.counts: Counter[str] = Counter()
        self._clients = tuple(clients)
        self._messages = MessageFaults(table, seed)
        self._sent: Counter[str] = Counter()
        self._cut_until: dict[str, float] = {}
        self._clogged: dict[str, tuple[float, float]] = {}
        self._held: dict[str, list[Action]] = {}

    def begin(self, crash_device: CrashDevice, crash_server: CrashServer) -> None:
        """From time 0 on. Both are told for how many seconds."""
        table = self.table
        self._episodes("partition", table.partition_every_s, table.partition_s, self._partition)
        self._episodes("swizzle", table.swizzle_every_s, table.swizzle_s, self._swizzle)
        self._episodes(
            "server-crash", table.server_crash_every_s, table.server_down_s, lambda _, s: crash_server(s)
        )
        for client_id in self._clients:
            crash = partial(_crash, crash_device, client_id)
            self._episodes(
                f"device-crash {client_id}", table.device_crash_every_s, table.device_down_s, crash
            )

    def crash_keepers(self, names: Sequence[str], crash: CrashDevice) -> None:
        """Let every keeper be down now and then: `crash` is told which, and for how long."""
        for name in names:
            every_s, down_s = self.table.keeper_crash_every_s, self.table.keeper_down_s
            self._episodes(f"keeper-crash {name}", every_s, down_s, partial(_crash, crash, name))

    def set_clock(self, step: StepClock) -> None:
        """Set the server's clock every now and then, whether it is up or down: forward or back."""

        def happen(number: int, _: float) -> None:
            u = self._draw("clock-step", number)
            by_s = length_s("exponential", self.table.clock_step_s, abs(2.0 * u - 1.0))
            step(math.copysign(by_s, u - 0.5))

        self._episodes("clock-step", self.table.clock_step_every_s, 0.0, happen)

    def copy_devices(self, copy: CopyDevice) -> None:
        """Let every device be copied now and then: `copy` is told which, its number, and for how long."""
        every_s, lasts_s = self.table.device_copy_every_s, self.table.device_copy_s
        for client_id in self._clients:
            self._episodes(f"device-copy {client_id}", every_s, lasts_s, partial(copy, client_id))

    def toss(self, client_id: str, number: int) -> float:
        """Which of two devices goes."""
        return self._draw("device-copy goes", client_id, number)

    def fail_disk(
        self, fill: Fill, back_up: Callable[[], T | None], put_back: Callable[[T, float], None]
    ) -> None:
        """Let the server's disk be full for a while, and a backup be put back some time after it was made."""
        table = self.table

        def filled(_: int, lasts_s: float) -> None:
            fill(True)
            self._clock.at(self._clock.now + lasts_s, partial(fill, False))

        def backed_up(number: int, age_s: float) -> None:
            if (backup := back_up()) is not None:
                down_s = length_s("exponential", table.server_down_s, self._draw("restore down", number))
                self._clock.at(self._clock.now + age_s, partial(put_back, backup, down_s))

        self._episodes("disk-full", table.disk_full_every_s, table.disk_full_s, filled)
        self._episodes("restore", table.restore_every_s, table.restore_age_s, backed_up)

    @property
    def are_over(self) -> bool:
        """Whether nothing goes wrong any more."""
        return 0.0 < self.table.until_s <= self._clock.now

    def clock_of(self, client_id: str) -> DeviceClock:
        """The clock of a device, off by at most `skew_s` and `drift`."""
        table = self.table
        offset_s = table.skew_s * (2.0 * self._draw("skew", client_id) - 1.0)
        return DeviceClock(offset_s, 1.0 + table.drift * (2.0 * self._draw("drift", client_id) - 1.0))

    # --- messages ----------------------------------------------------------------------------

    def send(self, client_id: str, way: str, due_s: float, action: Action) -> None:
        """See `Network`."""
        link, now = f"{client_id} {way}", self._clock.now
        if now < self._cut_until.get(client_id, -math.inf):
            self.counts["partitioned"] += 1
            return
        self._sent[link] += 1
        fate = UNHARMED if self.are_over else self._messages.fate(link, self._sent[link])
        self.counts.update(kind.value for kind in fate.kinds)
        due_s += self._clogged_s(client_id)
        for extra_s in fate.delays_s:
            if fate.held:
                self._hold(link, due_s + extra_s, action)
            else:
                self._clock.at(due_s + extra_s, partial(self._arrive, link, action))

    def _clogged_s(self, client_id: str) -> float:
        """How long a message waits before it gets on its way."""
        now = self._clock.now
        since_s, until_s = self._clogged.get(client_id, NEVER)
        if not since_s <= now < until_s:
            return 0.0
        self.counts["clogged"] += 1
        return until_s - now

    def _hold(self, link: str, due_s: float, action: Action) -> None:
        """Until the next message of the link has arrived, or it has waited for a mean delay."""
        held = self._held.setdefault(link, [])
        held.append(action)

        def in_any_case() -> None:
            if action in held:
                held.remove(action)
                action()

        self._clock.at(due_s + self.table.delay_s, in_any_case)

    def _arrive(self, link: str, action: Action) -> None:
        action()
        held = self._held.get(link, [])
        overtaken, held[:] = list(held), []
        for late in overtaken:
            late()

    # --- episodes ----------------------------------------------------------------------------

    def _episodes(self, name: str, every_s: float, mean_s: float, happen: Happen) -> None:
        """One after the other, never two at a time: gaps and lengths are exponential."""
        if not every_s:
            return

        def come(number: int) -> None:
            if self.are_over:
                return
            lasts_s = length_s("exponential", mean_s, self._draw(f"{name} length", number))
            if self.table.until_s:
                lasts_s = min(lasts_s, self.table.until_s - self._clock.now)
            self.counts[name.split()[0]] += 1
            happen(number, lasts_s)
            plan(number + 1, self._clock.now + lasts_s)

        def plan(number: int, earliest_s: float) -> None:
            gap_s = length_s("exponential", every_s, self._draw(f"{name} gap", number))
            self._clock.at(earliest_s + gap_s, partial(come, number))

        plan(0, 0.0)

    def _some(self, what: str, number: int, fraction: float) -> list[str]:
        """So many of the devices, at least one, in random order."""
        order = sorted(self._clients, key=lambda c: self._draw(what, c, number))
        return order[: max(1, round(fraction * len(order)))]

    def _partition(self, number: int, lasts_s: float) -> None:
        for client_id in self._some("partition", number, self.table.partition_fraction):
            self._cut_until[client_id] = self._clock.now + lasts_s

    def _swizzle(self, number: int, lasts_s: float) -> None:
        """Clogged in the first half of the time, unclogged in the second."""
        now = self._clock.now
        for client_id in self._some("swizzle", number, self.table.swizzle_fraction):
            clog_s = now + lasts_s * self._draw("clog", client_id, number) / 2.0
            heal_s = now + lasts_s * (1.0 + self._draw("unclog", client_id, number)) / 2.0
            self._clogged[client_id] = clog_s, heal_s

    def _draw(self, purpose: str, *names: str | int) -> float:
        return rank(self._seed, "fault", purpose, *names)


def _crash(crash_device: CrashDevice, client_id: str, _: int, down_s: float) -> None:
    crash_device(client_id, down_s)


__all__ = ["DeviceClock", "FaultKind", "Faults", "FaultsTable"]
