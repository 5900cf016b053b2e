"""Schedulers by name; see `core/parts.py` for those of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.core.config.tables import build
from anabranch.core.errors import ConfigError
from anabranch.core.parts import PartKind, is_data, members
from anabranch.strategies.schedulers.capped import PLACE, Capped
from anabranch.strategies.schedulers.equal_time import EqualTime
from anabranch.strategies.schedulers.fedluck import FedLuck
from anabranch.strategies.schedulers.scheduler import Scheduler

BUILT_IN: dict[str, type[Any]] = {c.name: c for c in (Capped, EqualTime, FedLuck)}


def _check(found: Any) -> None:
    if not is_data(found):
        raise ConfigError(
            "a scheduler is a class, a dataclass of its parameters: write @dataclass(frozen=True)"
        )


NAMED_IN = ("strategy.scheduler.name", "strategy.phases.scheduler.name")
SCHEDULERS = PartKind("scheduler", "schedulers", NAMED_IN, BUILT_IN, members(Scheduler), _check)


def make_scheduler(table: Any) -> Scheduler:
    """The scheduler of a table such as `{name = "capped", fraction = 0.2}`. Raises `ConfigError`."""
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ConfigError(
            f'{PLACE} must be a table with a name, such as {{ name = "capped" }}, not {table!r}'
        )
    values = dict(table)
    made: Scheduler = build(SCHEDULERS.find(values.pop("name")), values, PLACE)
    return made
