"""A range of local steps, as schedulers have it."""

from __future__ import annotations

from anabranch.core.errors import ConfigError


def check_steps(fewest: int, most: int) -> None:
    """Raises `ConfigError` where the range is empty."""
    if most < fewest:
        raise ConfigError(f"strategy.scheduler.steps_max must be at least steps_min = {fewest}, not {most}")
