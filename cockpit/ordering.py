"""Orders of operators over the cockpit: each is said in words first, and given when it is confirmed."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from anabranch.cockpit.runs import ShownRun
from anabranch.cockpit.source import Orders
from anabranch.cockpit.visitors import Visitor
from anabranch.core.config.toml import setting_text
from anabranch.core.errors import ConfigError, NotPermitted

log = logging.getLogger(__name__)

CONFIRM_S = 60.0
WAITING_MAX = 256
CHARS_MAX = 200
WHOLE_MAX = 2**53  # of a number of JSON

Doing = Callable[[Orders], str]


@dataclass(frozen=True)
class Order:
    """One that waits to be confirmed: `says` what it does, `do` does it and says what was done."""

    says: str
    do: Doing
    run: str
    session: int
    until: float


class Ordering:
    """The orders that wait to be confirmed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._waiting: dict[str, Order] = {}

    def ask(self, run: ShownRun, session: Visitor, name: str, arguments: Mapping[str, Any]) -> dict[str, str]:
        """What an order would do, and the token that confirms it. Raises `ConfigError`."""
        _orders_of(run)
        if name not in READERS:
            raise ConfigError(f"order={name!r}: write one of {', '.join(READERS)}")
        given = Arguments(arguments)
        says, do = READERS[name](run, given)
        given.end()
        token, now = secrets.token_urlsafe(24), self._clock()
        with self._lock:
            self._waiting = {t: order for t, order in self._waiting.items() if order.until > now}
            while len(self._waiting) >= WAITING_MAX:
                del self._waiting[next(iter(self._waiting))]
            self._waiting[token] = Order(says, do, run.id, session.number, now + CONFIRM_S)
        return {"confirm": token, "says": says}

    def confirm(self, run: ShownRun, session: Visitor, token: str) -> dict[str, str]:
        """Give an order, once. Raises `NotPermitted`, and what the order does."""
        with self._lock:
            order = self._waiting.get(token)
            known = order is not None and (order.run, order.session) == (run.id, session.number)
            if known:
                del self._waiting[token]
        if order is None or not known or order.until <= self._clock():
            raise NotPermitted(f"no such order waits here: ask again, and confirm within {CONFIRM_S:g} s")
        who = f"session {session.number} of the cockpit"
        if run.source.operator:
            who += f", operator {run.source.operator!r}"
        log.info("order by %s: %s", who, order.says)
        try:
            done = order.do(_orders_of(run))
        finally:
            run.source.changed()
        log.info("done for %s: %s", who, done)
        return {"done": done}


class Arguments:
    """Those of an order. Raises `ConfigError`, naming the argument; `end` where one is not known."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = dict(given)

    def text(self, name: str, needed: bool = True) -> str:
        """A short text."""
        found = self._given.pop(name, "")
        if not isinstance(found, str) or len(found) > CHARS_MAX or (needed and not found):
            raise ConfigError(f"arguments.{name}: write a text of at most {CHARS_MAX} characters")
        return found

    def whole(self, name: str) -> int:
        """A whole number, from 0."""
        found = self._given.pop(name, None)
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= WHOLE_MAX:
            raise ConfigError(f"arguments.{name}: write a whole number, from 0 to {WHOLE_MAX}")
        return found

    def truth(self, name: str) -> bool:
        """Yes or no."""
        found = self._given.pop(name, False)
        if not isinstance(found, bool):
            raise ConfigError(f"arguments.{name}: write true or false")
        return found

    def texts(self, name: str) -> list[str]:
        """A list of short texts."""
        found = self._given.pop(name, [])
        if not isinstance(found, list) or not all(
            isinstance(f, str) and 0 < len(f) <= CHARS_MAX for f in found
        ):
            raise ConfigError(f"arguments.{name}: write a list of names")
        return found

    def settings(self, name: str) -> dict[str, Any]:
        """Settings by their `table.key`."""
        found = self._given.pop(name, None)
        if not isinstance(found, dict) or not found:
            raise ConfigError(f"arguments.{name}: write an object, 'table.key' -> value")
        for path, value in found.items():
            if "." not in path:
                raise ConfigError(f"{path[:80]!r} is no setting: write table.key, such as run.updates_max")
            if not _is_value(value):
                raise ConfigError(
                    f"{path[:80]}: write a number, true, false or a text, not {str(value)[:80]}"
                )
        return found

    def end(self) -> None:
        """There are no others."""
        if self._given:
            raise ConfigError(f"arguments.{next(iter(self._given))}: this order has no such argument")


def _is_value(value: object) -> bool:
    return isinstance(value, str | int | float | bool) and (
        not isinstance(value, float) or math.isfinite(value)
    )


def _orders_of(run: ShownRun) -> Orders:
    if run.source.orders is None:
        raise ConfigError(
            "orders are for a run that is live: open its server with `anabranch ui --admin HOST:PORT`"
        )
    return run.source.orders


def _is_stranger(run: ShownRun, client: str) -> bool:
    picture = run.open()
    with picture.lock:
        return picture.devices.find(client) is None


def _pause(run: ShownRun, _: Arguments) -> tuple[str, Doing]:
    def do(orders: Orders) -> str:
        orders.pause()
        return "paused"

    then = "no device gets a task until it is resumed; updates are still taken"
    return f"Pause the run `{run.title}`: {then}.", do


def _resume(run: ShownRun, _: Arguments) -> tuple[str, Doing]:
    def do(orders: Orders) -> str:
        orders.resume()
        return "resumed"

    return f"Resume the run `{run.title}`: devices get tasks again.", do


def _quarantine(run: ShownRun, given: Arguments) -> tuple[str, Doing]:
    client, why = given.text("client"), given.text("why", needed=False)
    stranger = " No device of this name has called so far." if _is_stranger(run, client) else ""

    def do(orders: Orders) -> str:
        orders.quarantine(client, why)
        return f"{client} is in quarantine"

    told = f" It is told: {why!r}." if why else ""
    then = f"no task for it, and no update of it.{told}{stranger}"
    return f"Put {client!r} of the run `{run.title}` into quarantine: {then}", do


def _release(run: ShownRun, given: Arguments) -> tuple[str, Doing]:
    client = given.text("client")

    def do(orders: Orders) -> str:
        released = orders.release(client)
        return f"{client} is out of quarantine" if released else f"{client} was not in quarantine"

    return f"Let {client!r} of the run `{run.title}` out of quarantine.", do


def _rollback(run: ShownRun, given: Arguments) -> tuple[str, Doing]:
    to_version, everyone = given.whole("to_version"), given.truth("everyone")
    without = given.texts("without")
    if not (without or everyone):
        raise ConfigError("arguments.without: name the devices that are left out, or say everyone = true")

    def do(orders: Orders) -> str:
        version, left_out = orders.rollback(to_version, without, everyone)
        return f"version {version}, without {left_out} updates"

    whose = "every update" if everyone else f"the updates of {', '.join(without)}"
    barred = f" {', '.join(without)}: into quarantine." if without else ""
    then = f"publish a version without {whose} after version {to_version}.{barred}"
    return f"Roll the run `{run.title}` back: {then}", do


def _set(run: ShownRun, given: Arguments) -> tuple[str, Doing]:
    values = given.settings("settings")

    def do(orders: Orders) -> str:
        return "; ".join(orders.set_settings(values)) or "nothing was changed"

    told = ", ".join(f"{path} = {setting_text(value)}" for path, value in values.items())
    return f"Change settings of the run `{run.title}`: {told}.", do


READERS: dict[str, Callable[[ShownRun, Arguments], tuple[str, Doing]]] = {
    "pause": _pause,
    "resume": _resume,
    "quarantine": _quarantine,
    "release": _release,
    "rollback": _rollback,
    "set": _set,
}
