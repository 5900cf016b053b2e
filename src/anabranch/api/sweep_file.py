"""`[sweep]` in a file of settings: which runs it stands for.

[sweep]
seeds = 5                        # so many, from 0, or a list of them
parallel = 2                     # runs at a time
on = "processes"                 # of this machine; or "ray"
grid = { "strategy.name" = ["fedasync", "fedbuff"], "client.epochs" = [1, 2] }

[[sweep.choices]]                # or one by one; each meets every combination of the grid
strategy = { name = "fedbuff", buffer_size = 8 }
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.api.configuration import SWEEP, TUNE, Choice, flat_settings, read_settings
from anabranch.core.errors import ConfigError

SEED = "run.seed"  # which no choice may have: seeds are paired
SEEDS_SAID = "a sweep has seeds= (in a file sweep.seeds), how many or a list of them"
KEYS = ("seeds", "parallel", "on", "grid", "choices")


@dataclass(frozen=True)
class SweepTable:
    """What `[sweep]` says; None and no choice at all where it does not. Choices are of `table.key`s."""

    choices: Sequence[Choice] = ({},)
    seeds: Sequence[int] | None = None
    parallel: int | None = None
    on: str | None = None


def read_sweep(path: Path) -> tuple[dict[str, Any], SweepTable | None]:
    """The tables of a run in a file of settings, and what its `[sweep]` says. Raises `ConfigError`."""
    tables = read_settings(path)
    tables.pop(TUNE, None)
    if SWEEP not in tables:
        return tables, None
    try:
        return tables, _table(tables.pop(SWEEP))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def combinations(grid: Mapping[str, Sequence[Any]]) -> list[Choice]:
    """Every combination of a grid's values, the last name's fastest."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _table(said: Any) -> SweepTable:
    if not isinstance(said, Mapping):
        raise ConfigError(f"[sweep] must be a table of keys, not {said!r}")
    if unknown := sorted({*said} - {*KEYS}):
        raise ConfigError(f"unknown key {unknown[0]!r} in [sweep]: it has {', '.join(KEYS)}")
    grid = _settings(said.get("grid", {}), "sweep.grid")
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"sweep.grid: {name} = {values!r}: give a list of values")
    listed = said.get("choices", [{}])
    if not isinstance(listed, list) or not listed:
        raise ConfigError("sweep.choices: write [[sweep.choices]], a table of settings each")
    choices = [_settings(choice, "sweep.choices") for choice in listed]
    if twice := sorted({*grid} & {name for choice in choices for name in choice}):
        raise ConfigError(f"sweep: {twice[0]} is in the grid and in a choice: say it once")
    found = [{**choice, **combination} for choice in choices for combination in combinations(grid)]
    return SweepTable(found, _seeds(said.get("seeds")), _parallel(said.get("parallel")), said.get("on"))


def _settings(tables: Any, where: str) -> dict[str, Any]:
    found = dict(flat_settings(tables, where))
    if SEED in found:
        raise ConfigError(f"{where}: {SEED}: {SEEDS_SAID}")
    return found


def _seeds(said: Any) -> list[int] | None:
    if said is None:
        return None
    found = list(range(said)) if _is_count(said) else said
    if not isinstance(found, list) or not found or not all(map(_is_count, found)):
        raise ConfigError(
            f"sweep.seeds = {said!r}: give how many, from 0, or a list of them, such as [1, 3, 7]"
        )
    return list(dict.fromkeys(found))


def _parallel(said: Any) -> int | None:
    if said is not None and (not _is_count(said) or said < 1):
        raise ConfigError(f"sweep.parallel = {said!r}: give how many runs at a time, at least 1")
    return None if said is None else int(said)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
