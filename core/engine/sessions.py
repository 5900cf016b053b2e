"""Two of one: whether two processes run under one device's id, and whose the device's tasks are.

A process of a device has a session, a random name that it says with every ask and heartbeat. An ask also
says which session it succeeds: the last one that the device's folder knows of. Without this two copies of a
folder would end each other's tasks for ever. An ask by another session than the one that has the tasks

| it succeeds that one, which has not been heard of since | a restart: it gets the tasks at once |
|---|---|
| that one has been silent for half a lease (it beats every third) | it has died: at once |
| that one has no live task | nobody loses anything: at once |
| else | it is refused until then (`another_session`) |

Whoever is heard of after a newer session has spoken shows that both live: `twins` names the device.

Beside the engine, as the line is (`waiting.py`): no part of its state or its journal, forgotten by a restart.
A device that names no session is taken as it comes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from anabranch.core.effects import Refused
from anabranch.core.engine.engine import Engine
from anabranch.core.model.updates import Ask, Reason

SILENT_LEASES = 0.5
TWINS_S = 600.0  # so long after it was last seen to be so, two are said to run
SESSIONS_MAX = 3  # of a device: two that live, and one that is gone and had the tasks
KEPT_MAX = 100_000  # devices; the least recently added leave
RETRY_S_MIN, RETRY_S_MAX = 0.5, 60.0


@dataclass(slots=True)
class SessionSpan:
    """When a session spoke first and last."""

    first: float
    last: float


@dataclass(slots=True)
class DeviceSessions:
    """Sessions of a device: the `owner` of its tasks, as soon as it has had any, and the last other ones.

    `coming`: the tasks that the engine is still to grant, and the sessions that they are for.
    """

    owner: str = ""
    coming: dict[str, str] = field(default_factory=dict)
    sessions: dict[str, SessionSpan] = field(default_factory=dict)


class Sessions:
    """Which process each device's tasks belong to, and where two run under one id.

    `news`: devices of which it has just come out; whoever tells of them empties it.
    """

    def __init__(self, kept_max: int = KEPT_MAX) -> None:
        self._kept_max = kept_max
        self._devices: dict[str, DeviceSessions] = {}
        self._coming: list[DeviceSessions] = []  # those with asks of the batch at hand that have passed
        self._twins_at: dict[str, float] = {}  # when both were last seen to live
        self.news: list[str] = []

    def heard(self, client_id: str, session: str, now: float) -> None:
        """A session of a device speaks."""
        if not session:
            return
        device = self._devices.get(client_id)
        if device is None:
            device = self._devices[client_id] = DeviceSessions()
            if len(self._devices) > self._kept_max:
                del self._devices[next(iter(self._devices))]
        known = device.sessions.get(session)
        if known is None:
            device.sessions[session] = SessionSpan(now, now)
            if len(device.sessions) > SESSIONS_MAX:
                # Whoever has the tasks is known, however many others come and go.
                holders = {device.owner, *device.coming.values()}
                others = [name for name in device.sessions if name not in holders]
                del device.sessions[min(others, key=lambda name: device.sessions[name].last)]
            return
        known.last = now
        if len(device.sessions) > 1 and any(o.first > known.first for o in device.sessions.values()):
            if client_id not in self.twins(now):
                self.news.append(client_id)
            self._twins_at[client_id] = now

    def refusal(self, engine: Engine, ask: Ask, now: float) -> Refused | None:
        """Why a session may not have the device's tasks now, or None: see the table."""
        device = self._devices.get(ask.client_id)
        if device is None or not ask.session or (ask.session == device.owner and not device.coming):
            return None
        tasks = engine.ledger.live_of(ask.client_id)
        holders = {*device.coming.values(), *([device.owner] if tasks else [])}
        if not holders:
            return None
        lease_s = max((task.lease_s for task in tasks), default=engine.settings.lease_s)
        left_s = max((_left_s(device, holder, ask, now, lease_s) for holder in holders), default=0.0)
        if left_s <= 0:
            return None
        detail = (
            f"another process runs as {ask.client_id!r} and has its task: stop one of them, or give this one "
            "an --id and a --state-dir of its own"
        )
        earliest_s = min(max(left_s, RETRY_S_MIN), RETRY_S_MAX)
        return Refused(ask, Reason.ANOTHER_SESSION, detail, (earliest_s, 1.25 * earliest_s))

    def begin(self) -> None:
        """A batch begins: what has passed before and was not decided could not be written."""
        for device in self._coming:
            device.coming.clear()
        self._coming.clear()

    def passed(self, ask: Ask) -> None:
        """This ask is for the log: the device's tasks become its session's if they are granted."""
        device = self._devices.get(ask.client_id)
        if device is not None:
            device.coming[ask.task_id] = ask.session
            self._coming.append(device)

    def decided(self, client_id: str, task_id: str, granted: bool) -> None:
        """What came of an ask is known, and in the log."""
        device = self._devices.get(client_id)
        session = None if device is None else device.coming.pop(task_id, None)
        if device is not None and session is not None and granted:
            device.owner = session

    def twins(self, now: float) -> list[str]:
        """Devices that are run by two processes, as far as was seen lately, in order."""
        self._twins_at = {c: at for c, at in self._twins_at.items() if now - at <= TWINS_S}
        return sorted(self._twins_at)


def _left_s(device: DeviceSessions, holder: str, ask: Ask, now: float, lease_s: float) -> float:
    """How long an ask has to wait for the session that has the device's tasks: see the table."""
    held, since = device.sessions.get(holder), device.sessions.get(ask.session)
    if held is None or holder == ask.session:
        return 0.0
    if ask.succeeds == holder and (since is None or held.last < since.first):
        return 0.0
    return held.last + SILENT_LEASES * lease_s - now
