"""The `[ray]` table: of the executor of that name."""

from __future__ import annotations

from dataclasses import dataclass, field

from anabranch.core.config.secrets import SECRET


@dataclass(frozen=True)
class RayTable:
    """`[ray]`: of the executor of that name. `address`: of a cluster; empty: Ray on this machine.

    An actor reserves `cpus` and `gpus`, which may be fractions; `gpus_by_group`, if not empty, has the GPUs
    for the devices of each speed group, the fastest first; the last is for all that are slower.
    """

    address: str = field(default="", repr=False, metadata=SECRET)
    cpus: float = 1.0
    gpus: float = 0.0
    gpus_by_group: list[float] = field(default_factory=list)
