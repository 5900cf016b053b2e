"""The `[secagg]` table: masked sums, which the server cannot take apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.core.config.privacy import PrivacyTable
from anabranch.core.errors import ConfigError

OFF, KEEPER = "off", "keeper"  # secagg.mode
MODES = (OFF, KEEPER)


@dataclass(frozen=True)
class SecaggSummary:
    """What a run with masked sums has come to: no fewer than `updates_min` updates were ever seen as one.

    `cohorts_lost`: sums whose updates are in no version, dropped or out of bounds.
    """

    keepers: tuple[str, ...]
    updates_min: int
    clip: float
    bits: int
    cohorts_lost: int

    @property
    def who(self) -> str:
        """Whose word it takes."""
        return f"{len(self.keepers)} keeper{'' if len(self.keepers) == 1 else 's'}"

    def text(self) -> str:
        """In a line."""
        lost = f"; {self.cohorts_lost} sums were lost" if self.cohorts_lost else ""
        return f"masked: {self.who} took the masks off sums of {self.updates_min} updates or more{lost}"


@dataclass(frozen=True)
class SecaggTable:
    """`[secagg]`: masked sums, which only independent keepers unmask.

    With `mode` `keeper` devices mask what they send, and `keepers`, by their names, take the masks off sums
    of `cohort_min` updates at least. Values travel as whole numbers of `bits`, of which a value has
    `value_bits`; a fresh update counts `levels` steps, an old one fewer, down to a quarter. Updates are cut
    to the length `clip` (that of `[privacy]`, where there is one). While `cohorts_waiting_max` sums wait for
    a keeper no task is given out.
    """

    mode: str = OFF
    keepers: list[str] = field(default_factory=list)
    bits: int = 32
    value_bits: int = 20
    levels: int = 16
    clip: float = 0.0
    cohort_min: int = 8
    cohorts_waiting_max: int = 8

    @property
    def on(self) -> bool:
        """Whether updates are masked."""
        return self.mode != OFF

    def clip_of(self, privacy: PrivacyTable) -> float:
        """The length that updates are cut to."""
        return privacy.clip if privacy.on else self.clip

    @classmethod
    def of_json(cls, config: Mapping[str, Any]) -> SecaggTable:
        """That of a configuration as plain values, of whatever release."""
        return cls(**config.get("secagg", {}))

    def told(self, privacy: PrivacyTable, cohorts_lost: int) -> SecaggSummary | None:
        """What is said of a run; None where nothing is masked."""
        if not self.on:
            return None
        keepers, clip = tuple(sorted(self.keepers)), self.clip_of(privacy)
        return SecaggSummary(keepers, self.cohort_min, clip, self.bits, cohorts_lost)

    def check(self, privacy: PrivacyTable) -> None:
        """Raises `ConfigError`, naming the key; the ring's own numbers are checked with its model."""
        if not self.on:
            self._check_off()
            return
        if not self.keepers:
            raise ConfigError(
                "secagg.mode is 'keeper' and secagg.keepers names none: give the names that their people "
                "read in `anabranch keeper show`"
            )
        if "" in self.keepers:
            raise ConfigError("secagg.keepers has an empty name: `anabranch keeper show` says a keeper's")
        if len(set(self.keepers)) < len(self.keepers):
            raise ConfigError("secagg.keepers names a keeper twice: name each once")
        if privacy.on and self.clip not in (0, privacy.clip):
            raise ConfigError(
                f"secagg.clip is {self.clip!r} and privacy.clip {privacy.clip!r}: in a private run that of "
                "[privacy] holds, leave secagg.clip out"
            )
        if not self.clip_of(privacy):
            raise ConfigError("secagg.clip is not set: set the length that updates are cut to")
        for key in ("levels", "cohorts_waiting_max"):
            if getattr(self, key) < 1:
                raise ConfigError(f"secagg.{key} must be at least 1, not {getattr(self, key)!r}")

    def _check_off(self) -> None:
        said = [key for key in ("keepers", "clip") if getattr(self, key)]
        if said:
            raise ConfigError(
                f"secagg.{said[0]} is set and secagg.mode is 'off': set secagg.mode = 'keeper', or leave "
                "it out"
            )
