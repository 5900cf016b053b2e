"""With large libraries of others: collected only where they are asked for (`make libraries`)."""

from __future__ import annotations

import re

import pytest


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Not even imported, unless `-m libraries` or the like asks for them."""
    wanted = re.search(r"(?<!not )\blibraries\b", config.option.markexpr)
    return None if wanted else True
