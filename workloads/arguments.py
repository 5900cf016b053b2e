"""Arguments of what makes a model out of another one, checked before anything is made."""

from __future__ import annotations

import math
from typing import Any

from anabranch.core.errors import AppError
from anabranch.core.plain import of_python


def whole(where: str, name: str, value: Any, least: int | None = None) -> int:
    """A whole number, of numpy's and of torch's too. Raises `AppError`."""
    number = _plain(value)
    if type(number) is not int or (least is not None and number < least):
        what = "a whole number" if least is None else f"a whole number, at least {least}"
        raise AppError(f"{where}: {name} must be {what}, not {value!r}")
    return number


def positive(where: str, name: str, value: Any) -> float:
    """A finite number above 0, of numpy's and of torch's too. Raises `AppError`."""
    number = _plain(value)
    if type(number) not in (int, float) or not 0 < number < math.inf:
        raise AppError(f"{where}: {name} must be a number above 0, not {value!r}")
    return float(number)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else of_python(value)
