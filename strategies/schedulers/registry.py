"""Schedulers by name; see `core/parts.py` for those of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.core.config.tables import build
from anabranch.core.errors import ConfigError
from anabranch.core.parts import PartKind, check_is_data, members
from anabranch.strategies.schedulers.capped import PLACE
from anabranch.strategies.schedulers.scheduler import Scheduler

_HERE = "anabranch.strategies.schedulers"
BUILT_IN = {
    "capped": f"{_HERE}.capped:Capped",
    "equal_time": f"{_HERE}.equal_time:EqualTime",
    "fedluck": f"{_HERE}.fedluck:FedLuck",
}


def _check(found: Any) -> None:
    check_is_data(found, "a scheduler is a class, a dataclass of its parameters")


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
