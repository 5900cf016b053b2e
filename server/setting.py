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


def doubts_of_change(news: Mapping[str, Any], config: Config, enrolled: int) -> list[str]:
    """What whoever has set `news`, so that a run has `config`, should know; said in the log as well."""
    devices, share = max(config.fleet.clients, enrolled), config.robust.buffer_max
    if "robust.buffer_max" not in news or not shortage(strategy_of(config), devices, share):
        return []
    told = (
        f"robust.buffer_max is {share}, and there are {devices} devices: with as many updates of each in a "
        "version they never fill a buffer, and the run waits without an end; set it higher, or to 0"
    )
    log.warning(told)
    return [told]


def change_to_proto(change: SettingChange) -> operators.SettingChange:
    """A change on the wire."""
    return operators.SettingChange(
        path=change.path,
        value_json=json.dumps(change.value),
        was_json=json.dumps(change.was),
        by=change.by,
        at_s=change.at,
    )
