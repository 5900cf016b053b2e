"""What a page asks for: the parameters of its address, checked, with errors that name them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from anabranch.core.errors import ConfigError


class Asked:
    """The parameters of a request. Raises `ConfigError`, naming the parameter and the fix."""

    def __init__(self, parameters: Mapping[str, str]) -> None:
        self._given = parameters

    def text(self, name: str) -> str:
        """A text, empty where it is not given."""
        return self._given.get(name, "")

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        """One of some words."""
        found = self._given.get(name) or default
        if found not in choices:
            raise ConfigError(f"{name}={found!r}: write one of {', '.join(filter(None, choices))}")
        return found

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        """A whole number."""
        text = self._given.get(name) or str(default)
        if not (text.isascii() and text.isdecimal() and len(text) < 16 and least <= int(text) <= most):
            raise ConfigError(f"{name}={text!r}: write a whole number from {least} to {most}")
        return int(text)

    def number(self, name: str, default: float) -> float:
        """A number."""
        text = self._given.get(name, "")
        if not text:
            return default
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise ConfigError(f"{name}={text!r}: write a number")
        return found

    def names(self, name: str, most: int) -> list[str]:
        """Several names, with commas between them."""
        found = [part for part in self._given.get(name, "").split(",") if part]
        if len(found) > most:
            raise ConfigError(f"{name}: at most {most} of them at a time")
        return found


def known_device(row: int | None, client: str) -> int:
    """A device's row. Raises `ConfigError` where nobody has heard of it."""
    if row is None:
        raise ConfigError(f"no device {client!r} in this run")
    return row
