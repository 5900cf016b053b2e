"""Ids of clients, tasks and updates: short, and safe in logs, look-ups and file names."""

from __future__ import annotations

import re

from anabranch.core.errors import ConfigError, InvalidUpdate
from anabranch.core.limits import DEFAULT_LIMITS, Limits

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_ALLOWED = "ASCII letters, digits, '.', '_' or '-', the first a letter or a digit"


def is_id(text: str, limits: Limits = DEFAULT_LIMITS) -> bool:
    """Whether a text may be one."""
    return 0 < len(text) <= limits.id_chars_max and _ID.match(text) is not None


def checked_id(text: str, name: str, limits: Limits = DEFAULT_LIMITS) -> str:
    """An id that is safe in logs and look-ups. Raises `InvalidUpdate`, naming the field."""
    if not is_id(text, limits):
        raise InvalidUpdate(
            f"{name} must be 1 to {limits.id_chars_max} {_ALLOWED}, not {text[:80]!r}{stranger(text)}"
        )
    return text


def typed_id(text: str, name: str, limits: Limits = DEFAULT_LIMITS) -> str:
    """The same of an id that a person gives: raises `ConfigError`."""
    if not isinstance(text, str):
        raise ConfigError(f"{name} must be text, not {text!r}")
    try:
        return checked_id(text, name, limits)
    except InvalidUpdate as error:
        raise ConfigError(str(error)) from None


def stranger(text: str, marks: str = "._-") -> str:
    """Words on the first character that is no ASCII letter, digit or mark, as `isalpha` is true of 'ä'."""
    found = next((char for char in text if not (char.isascii() and (char.isalnum() or char in marks))), "")
    return found and f", which has {found!r}"
