"""Numbers with their units as short texts, and outside text made safe for HTML and SVG."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from html import escape

NOTHING = "\N{EN DASH}"
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Unit:
    """A unit of `size` base units, used for quantities of at least `least` base units."""

    size: float
    name: str
    least: float = 0.0


COUNT = (Unit(1.0, ""),)
PERCENT = (Unit(0.01, "%"),)
SECONDS = (
    Unit(1.0, "s"),
    Unit(60.0, "min", 120.0),
    Unit(3600.0, "h", 7200.0),
    Unit(86400.0, "d", 172_800.0),
)
BYTES = tuple(Unit(1e3**i, name, 1e3**i) for i, name in enumerate(("B", "kB", "MB", "GB", "TB", "PB")))

JOULES = tuple(Unit(1e3**i, name, 1e3**i) for i, name in enumerate(("J", "kJ", "MJ", "GJ")))


def unit_for(largest: float, units: tuple[Unit, ...]) -> Unit:
    """The unit in which a quantity of `largest` base units reads best."""
    fitting = [u for u in units if largest >= u.least]
    return fitting[-1] if fitting else units[0]


def bytes_text(count: float | None) -> str:
    """`1.23 MB`: decimal prefixes, three digits."""
    return _with_unit(count, BYTES)


def duration_text(seconds: float | None) -> str:
    """`83.1 s`, `12.4 min`, `3.2 h`, `2.5 d`."""
    return _with_unit(seconds, SECONDS)


def energy_text(joules: float | None) -> str:
    """`12.3 J`, `4.56 kJ`."""
    return _with_unit(joules, JOULES)


def percent_text(fraction: float | None) -> str:
    """`84.13 %` of 0.8413."""
    return NOTHING if fraction is None else f"{100 * fraction:.2f} %"


def count_text(count: int) -> str:
    """`12,345`."""
    return f"{count:,}"


def counted(count: int, noun: str) -> str:
    """`1 version`, `12,345 versions`."""
    return f"{count_text(count)} {noun}{'s'[: count != 1]}"


def number_text(value: float | None, digits: int = 3) -> str:
    """So many significant digits, or all of the whole part: `0.0312`, `4.20`, `1,234`."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4 or magnitude >= 12:
        return f"{value:.2e}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def safe(value: object) -> str:
    """The text of a value that came from outside, escaped for HTML and SVG, content or attribute.

    Characters that XML forbids, and surrogates that UTF-8 cannot carry, become U+FFFD.
    """
    return escape(_NOT_XML.sub("\ufffd", str(value)), quote=True)


def clipped(text: str, chars_max: int) -> str:
    """The text, or its two ends about an ellipsis: names of devices often differ in their end."""
    if len(text) <= chars_max:
        return text
    tail = (chars_max - 1) // 2
    return f"{text[: chars_max - 1 - tail]}…{text[-tail:]}"


def _with_unit(quantity: float | None, units: tuple[Unit, ...]) -> str:
    if quantity is None:
        return NOTHING
    unit = unit_for(quantity, units)
    # A single byte has no parts.
    shown = f"{quantity:,.0f}" if unit.name == "B" else number_text(quantity / unit.size)
    return f"{shown} {unit.name}"
