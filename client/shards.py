"""Which part of the data a device has in a run: as it was told, by its name, or all of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anabranch.core.config.tables import FleetTable, build
from anabranch.workloads.app import App, Shard
from anabranch.workloads.profiles import speed_profile


def numbered_shard(client_id: str, config: Mapping[str, Any]) -> tuple[int, int]:
    """The shard (index, count) of a device by its name, in a run of this configuration.

    Where the name ends with a number, such as `device-3`, that is the index, from 0 and modulo
    `fleet.clients`, the count. Any other has all of the training data, (0, 1).
    """
    number = re.search(r"(?:^|[._-])([0-9]+)\Z", client_id)
    if number is None:
        return 0, 1
    count = build(FleetTable, config.get("fleet", {}), "fleet").clients
    return int(number[1]) % count, count


def placed(app: App, client_id: str, given: tuple[int, int] | None, config: Mapping[str, Any]) -> Shard:
    """The part of the data that a live device trains on in a run: `given`, all of its own, or by its name."""
    own = app.own_data and given is None
    index, count = (0, 1) if own else given or numbered_shard(client_id, config)
    return replace(shard_of(config, index, count), own=own)


def is_shard(given: object) -> bool:
    """Whether it is (index, count), the index from 0 and below the count."""
    match given:
        case (int(index), int(count)):
            return 0 <= index < count
    return False


def shard_of(
    config: Mapping[str, Any], index: int = 0, count: int | None = None, role: str = "train"
) -> Shard:
    """The part of the data that device `index` of `count` has in a run, by the run's own configuration.

    `count` is `fleet.clients` if not given. Raises `DataError` and `ConfigError`.
    """
    fleet = build(FleetTable, config.get("fleet", {}), "fleet")
    fleet = replace(fleet, clients=count or fleet.clients)
    seed = int(config.get("run", {}).get("seed", 0))
    grouped = fleet.split == "speed-shards"
    groups = tuple(speed_profile(fleet, seed).group.tolist()) if grouped else ()
    return Shard(role, index, fleet.clients, fleet, seed, groups)
