"""Whether flwr is here, and is one that this adapter was tested with."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from anabranch.core.config.extras import how_to_install
from anabranch.core.errors import AppError

# What pyproject.toml says as well; a test compares them.
OLDEST, BELOW = (1, 41), (1, 43)
RANGE = f">={OLDEST[0]}.{OLDEST[1]},<{BELOW[0]}.{BELOW[1]}"


@lru_cache(maxsize=1)
def flwr_version() -> str:
    """The version of flwr. Raises `AppError` where it is absent or out of range.

    Unless the environment says otherwise, flwr then sends no telemetry and asks for no updates.
    """
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    try:
        found = version("flwr")
    except PackageNotFoundError as error:
        raise AppError(f"a Flower app needs flwr{RANGE}: {how_to_install('flwr')}") from error
    parts = tuple(int(part) for part in found.split(".")[:2])
    if not OLDEST <= parts < BELOW:
        raise AppError(f"flwr {found} is installed, needed is flwr{RANGE}: {how_to_install('flwr')}")
    return found
