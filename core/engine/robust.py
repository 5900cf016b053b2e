"""The `[robust]` table: what is done against hostile updates."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO

NO_RULE = "none"


@dataclass(frozen=True)
class RobustTable:
    """`[robust]`: what is done against hostile updates.

    `rule` replaces the mean of a buffered strategy; `none` leaves that to the strategy. `attackers` is the
    assumed fraction of hostile updates in a buffer, for `trimmed_mean`, `krum`, `multi_krum` and
    `neighbour_mixing`; `selected` is for `multi_krum`, `radius` for `centred_clipping`, `iterations` for
    that, `geometric_median` and `neighbour_mixing`. An update longer than `clip` median lengths is cut to
    that (0: never; `auto`: the strategy's own choice). One client may have `buffer_max` updates in a version,
    `window_max` in `window_versions` of them, and get `tasks_per_minute`; its `flaws_max`-th update in a row
    that cannot be used puts it into quarantine (0: no bound).
    """

    rule: str = NO_RULE
    attackers: float = 0.3
    selected: int = 0
    radius: float = 0.0
    iterations: int = 8
    clip: float | str = AUTO
    buffer_max: int = 0
    window_max: int = 0
    window_versions: int = 20
    tasks_per_minute: float = 0.0
    flaws_max: int = 10

    def check(self) -> None:
        """Raises `ConfigError`, naming the key; that numbers are not negative is checked for all tables."""
        if not self.attackers < 0.5:
            raise ConfigError(
                f"robust.attackers must be less than 0.5, not {self.attackers!r}: "
                "no rule holds against a majority"
            )
        if isinstance(self.clip, str) and self.clip != AUTO:
            raise ConfigError(f"robust.clip must be {AUTO!r} or a number, not {self.clip!r}")
