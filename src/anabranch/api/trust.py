"""Whose code runs: what one's own settings name, and what a folder names only if its reader says so."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from anabranch.compress.registry import others
from anabranch.core.config.tables import Config
from anabranch.core.parts import PartKind, check_names
from anabranch.simulation.parts import PARTS, REPLAYED
from anabranch.support.code import check_trusted, let_in
from anabranch.workloads.splits import check_split


def admit(config: Config) -> None:
    """Let in what one's own settings name, and check every name of a part. Raises `ConfigError`."""
    _admit(config, PARTS)


def admit_found(config: Config, where: Path, load_code: bool) -> None:
    """The same for a run that lies in a folder: its code is let in only if the command line says so.

    Its trackers are not: they are told of no run again. Raises `ConfigError`, which says how.
    """
    if not load_code:
        check_trusted(config, REPLAYED, str(where))
    _admit(config, REPLAYED)


def _admit(config: Config, kinds: Collection[PartKind]) -> None:
    let_in(config, kinds)
    others()
    check_names(config, kinds)
    check_split(config.fleet)
