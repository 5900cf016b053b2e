"""Settings of the run as operators send and see them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from anabranch.core.config.tables import Config
from anabranch.core.effects import SettingChange
from anabranch.core.engine.settable import typed
from anabranch.core.errors import ConfigError
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.strategies.registry import shortage, strategy_of

log = logging.getLogger(__name__)


def read_settings(values_json: str, config: Config) -> dict[str, Any]:
    """The values that somebody wants, of a run that has `config`. Raises `ConfigError`."""
    try:
        values = json.loads(values_json)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or not values:
        raise ConfigError("values_json must be a JSON object of table.key and value, with one at least")
    return typed(config, values)


def doubts_of_change(news: Mapping[str, Any], config: Config) -> list[str]:
    """What whoever has set `news`, so that a run has `config`, should know, as at a start; said here too."""
    told = ""
    if "robust.buffer_max" in news:
        told = shortage(strategy_of(config), config.fleet.clients, config.robust.buffer_max)
    if told:
        log.warning(told)
    return [told] if told else []


def change_to_proto(change: SettingChange) -> operators.SettingChange:
    """A change on the wire."""
    return operators.SettingChange(
        path=change.path,
        value_json=json.dumps(change.value),
        was_json=json.dumps(change.was),
        by=change.by,
        at_s=change.at,
    )
