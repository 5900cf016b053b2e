"""A run with masked sums under test."""

from __future__ import annotations

from typing import Any

from anabranch.core.config.tables import Config, merge

SECAGG: dict[str, Any] = {"mode": "keeper", "keepers": ["north"], "clip": 2.0, "cohort_min": 2}


def masked_config(
    strategy: dict[str, Any] | None = None, secagg: dict[str, Any] | None = None, **tables: Any
) -> Config:
    """FedBuff of two updates and one keeper, and what a test wants else."""
    base = {
        "strategy": {"name": "fedbuff", "buffer_size": 2} if strategy is None else strategy,
        "secagg": {**SECAGG, **(secagg or {})},
    }
    return merge([("masked", base), ("test", tables)])
