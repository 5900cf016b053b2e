"""The colours of the pages: contrast by WCAG 2, and a scale of staleness that all eyes can read."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

TEXT, GRAPHIC = 4.5, 3.0  # WCAG 2 AA
GROUNDS = ("page", "card")
OF_TEXT = ("ink", "soft", "accent", "good", "warn", "bad")
OF_GRAPHICS = ("edge", "target", "open", *(f"c{i}" for i in range(8)), *(f"stale-{i}" for i in range(7)))
STEPS = 7
STYLE = Path(__file__).parents[2] / "cockpit" / "front" / "src" / "style.css"
REPORTS_STYLE = Path(__file__).parents[2] / "reports" / "style.css"


@pytest.fixture(params=["light", "dark"])
def palette(request: pytest.FixtureRequest) -> dict[str, str]:
    style = STYLE.read_text()
    light, dark = re.findall(r"^:root[^{]*\{(.*?)^\}", style, re.MULTILINE | re.DOTALL)
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light if request.param == "light" else dark))
    assert set(OF_TEXT) | set(OF_GRAPHICS) <= set(found)
    return found


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


def test_the_measure_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_text_is_legible(palette: dict[str, str]) -> None:
    pairs = [(name, ground) for name in OF_TEXT for ground in GROUNDS]
    pairs += [("ink", "grid"), ("soft", "grid"), ("water-ink", "water"), ("card", "ink"), ("card", "bad")]
    pairs += [("card", "accent")]
    found = {pair: contrast(palette[pair[0]], palette[pair[1]]) for pair in pairs}
    assert {pair: ratio for pair, ratio in found.items() if ratio < TEXT} == {}


def test_lines_and_marks_stand_out(palette: dict[str, str]) -> None:
    found = {(n, g): contrast(palette[n], palette[g]) for n in OF_GRAPHICS for g in GROUNDS}
    assert {pair: ratio for pair, ratio in found.items() if ratio < GRAPHIC} == {}


def test_staleness_is_told_by_lightness_alone(palette: dict[str, str]) -> None:
    """Whoever sees no hue sees a scale: each step is darker than the last in light, brighter in dark."""
    steps = [luminance(palette[f"stale-{i}"]) for i in range(STEPS)]
    away = steps if luminance(palette["card"]) < 0.5 else [-step for step in steps]
    assert all(later > sooner for sooner, later in pairwise(away))
    assert contrast(palette["stale-0"], palette[f"stale-{STEPS - 1}"]) > 2


def test_the_reports_have_the_same_colours() -> None:
    named = re.compile(r"--([\w-]+): (#[0-9a-f]{6});")
    assert named.findall(REPORTS_STYLE.read_text()) == named.findall(STYLE.read_text())
