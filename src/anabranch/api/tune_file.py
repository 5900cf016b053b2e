"""`[tune]` in a file of settings: how its run is tuned; the run itself is what the other tables say.

[tune]
trials = 16                      # choices to begin with, the file's own among them
seeds = 2                        # each choice is run from so many, paired
fresh_seeds = 5                  # the recommendation is measured from so many others
extensions = 4                   # trials beyond the ends of ranges, where the best is at one
aim = "time"                     # to the target: time, bytes, updates; or value, at the end of the budget
bytes_max = 20_000_000           # a budget beside those of [run], up and down
parallel = 2                     # runs at a time
on = "processes"                 # of this machine; or "ray"
defaults = true                  # tune what is worth it, beside what [tune.ranges] names
ranges = { "client.learning_rate" = [0.01, 0.1, 1.0], "strategy.buffer_size" = { from = 2, to = 32 } }
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from anabranch.api.configuration import TUNE, flat_settings, one_run, read_settings
from anabranch.api.pool import PROCESSES
from anabranch.api.tune_ranges import TuneRange, read_range
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO

AIMS = (AUTO, "value", "time", "updates", "bytes")
LEAST = {"trials": 2, "seeds": 1, "fresh_seeds": 2, "extensions": 0, "parallel": 1, "bytes_max": 0}
RUNS_MAX = 100_000  # trials, seeds and the like: each is at least a run


@dataclass(frozen=True)
class TuneTable:
    """What `[tune]` says. `bytes_max` 0: no such budget. Raises `ConfigError`, naming the key."""

    trials: int = 16
    seeds: int = 2
    fresh_seeds: int = 5
    extensions: int = 4
    aim: str = AUTO
    bytes_max: int = 0
    parallel: int = 1
    on: str = PROCESSES
    defaults: bool = True
    ranges: Sequence[TuneRange] = field(default=())

    def __post_init__(self) -> None:
        for key, least in LEAST.items():
            value = getattr(self, key)
            most = math.inf if key == "bytes_max" else RUNS_MAX
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                up_to = "" if key == "bytes_max" else f" and at most {most}"
                raise ConfigError(f"tune.{key} = {value!r}: give a whole number, at least {least}{up_to}")
        if self.aim not in AIMS:
            raise ConfigError(f"tune.aim = {self.aim!r}: give one of {', '.join(AIMS)}")
        if not isinstance(self.defaults, bool):
            raise ConfigError(f"tune.defaults = {self.defaults!r}: give true or false")

    def over(self, given: Mapping[str, Any], ranges: Sequence[TuneRange] = ()) -> TuneTable:
        """The same with what was given beside it, where that is not None. Raises `ConfigError`."""
        said = {key: value for key, value in given.items() if value is not None}
        named = {r.path: r for r in (*self.ranges, *ranges)}
        return replace(self, **said, ranges=tuple(named.values()))


def read_tune(path: Path) -> tuple[dict[str, Any], TuneTable]:
    """The tables of a run in a file of settings, and what its `[tune]` says. Raises `ConfigError`."""
    tables = read_settings(path)
    said = tables.get(TUNE, {})
    try:
        return one_run(tables, path), tune_table(said)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def tune_table(said: Any) -> TuneTable:
    """A table of plain values as what it says. Raises `ConfigError`."""
    if not isinstance(said, Mapping):
        raise ConfigError(f"[tune] must be a table of keys, not {said!r}")
    known = [f.name for f in fields(TuneTable)]
    if unknown := sorted({*said} - {*known}):
        raise ConfigError(f"unknown key {unknown[0]!r} in [tune]: it has {', '.join(known)}")
    if isinstance(said.get("bytes_max"), float) and math.isfinite(said["bytes_max"]):  # 2e7 is one in TOML
        said = {**said, "bytes_max": int(said["bytes_max"])}
    return TuneTable(**{**said, "ranges": read_ranges(said.get("ranges", {}))})


def read_ranges(said: Any) -> tuple[TuneRange, ...]:
    """Ranges by the name of their setting, or by its table and key. Raises `ConfigError`."""
    return tuple(read_range(name, value) for name, value in flat_settings(said, "tune.ranges"))
