"""What an App's `train` and `evaluate` return: any names, each with one number. Checked here, once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from anabranch.core.errors import AppError
from anabranch.core.model.metrics import names_flaw


def metrics_of(found: Any, where: str, names_max: int) -> dict[str, float]:
    """The metrics that a method of an App has returned; `where` is that method, for the error.

    What is not finite stays: it is a measurement too. Raises `AppError`, which names the metric and the fix.
    """
    if not isinstance(found, Mapping):
        raise AppError(f"{where} returned {_a(found)}: return a dict of metrics, each one number")
    named = {str(name): number(value, f"{where}: metric {name!r}") for name, value in found.items()}
    if flaw := names_flaw(named, names_max):
        raise AppError(f"{where}: {flaw}")
    return named


def number(value: Any, what: str) -> float:
    """One number, of whatever library. Raises `AppError` for what is none."""
    plain = value
    try:
        if hasattr(plain, "item"):  # an array or a tensor, wherever it lies
            plain = plain.item()
        if not isinstance(plain, str | bytes):
            return float(plain)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise AppError(f"{what} is {_a(value)}{shape}: return one number")


def taken_count(metrics: dict[str, float], name: str, else_: int, where: str) -> int:
    """A metric that is a number of things, taken out of the others. Raises `AppError`."""
    value = metrics.pop(name, else_)
    if not math.isfinite(value) or value < 0:
        raise AppError(f"{where}: metric {name!r} is {value!r}: return how many there were")
    return int(value)


def _a(value: Any) -> str:
    name = type(value).__name__
    return "nothing" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
