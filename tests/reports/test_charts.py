"""The charts: well-formed SVG with the marks that the data ask for, inside the drawing."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.reports.charts import Bar, bar_chart, binned, histogram, ranked_area
from anabranch.reports.scales import Axis
from anabranch.reports.svg import CHAR_WIDTH, LEFT, RIGHT, WIDTH
from anabranch.reports.text import (
    BYTES,
    PERCENT,
    SECONDS,
    bytes_text,
    clipped,
    duration_text,
    number_text,
    safe,
)

SVG = "{http://www.w3.org/2000/svg}"
TIME, ACCURACY = Axis("time", SECONDS), Axis("accuracy", PERCENT, from_zero=False)
HOSTILE = "<script>alert('x')</script>&\x00\ud800\""


def parse(svg: str) -> ET.Element:
    root = ET.fromstring(svg.encode())
    assert root.tag == f"{SVG}svg"
    return root


def texts(root: ET.Element) -> list[str]:
    return [t.text or "" for t in root.iter(f"{SVG}text")]


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20), st.booleans(), st.booleans(), st.booleans())
def test_scales_cover_their_values_with_few_round_ticks(
    values: list[float], from_zero: bool, whole: bool, snug: bool
) -> None:
    scale = Axis("x", from_zero=from_zero, whole=whole).scale(values, 0.0, 100.0, snug)
    assert 1 <= len(scale.ticks) <= 8
    assert all(-1e-6 <= scale(v) <= 100 + 1e-6 for v in values)
    assert not whole or all(float(t).is_integer() for t in scale.ticks)
    labels = [scale.tick_text(t) for t in scale.ticks]
    assert len(set(labels)) == len(labels) or scale.step < 1e-5 or max(map(abs, scale.ticks)) >= 1e6


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_scales_have_a_place_for_every_finite_number(values: list[float]) -> None:
    scale = Axis("x", from_zero=False).scale(values, 0.0, 100.0)
    assert all(math.isfinite(t) for t in scale.ticks)
    assert all(-1e-6 <= scale(v) <= 100 + 1e-6 for v in values)


@given(st.dictionaries(st.integers(0, 100_000), st.integers(1, 9), min_size=1, max_size=40))
def test_bins_lose_nothing(counts: dict[int, int]) -> None:
    bins, width = binned(counts)
    assert sum(bins.values()) == sum(counts.values())
    assert len(bins) <= 30
    assert all(b - a == width for a, b in itertools.pairwise(bins))
    parse(histogram(counts, Axis("staleness"), Axis("updates", whole=True)))


def test_the_histogram_says_what_each_bar_is() -> None:
    root = parse(histogram({0: 5, 2: 1}, Axis("staleness"), Axis("updates", whole=True)))
    assert [r.get("data-tip") for r in root.iter(f"{SVG}rect")] == [
        "staleness 0: 5",
        "staleness 1: 0",
        "staleness 2: 1",
    ]
    wide = parse(histogram({0: 5, 99: 1}, Axis("staleness"), Axis("updates")))
    assert next(wide.iter(f"{SVG}rect")).get("data-tip") == "staleness 0 to 4: 5"


def test_bars_are_as_long_as_their_numbers() -> None:
    root = parse(
        bar_chart([Bar("a", (6, 2)), Bar("b", (3, 0))], (("applied", 0), ("rejected", 1)), "updates")
    )
    widths = [float(r.get("width") or "") for r in root.iter(f"{SVG}rect")]
    assert widths[0] == pytest.approx(3 * widths[1], abs=0.2)
    assert widths[0] == pytest.approx(2 * widths[2], abs=0.2)
    assert {"6 + 2", "3 + 0", "applied", "rejected"} <= set(texts(root))


def test_no_bars_or_empty_ones() -> None:
    parse(bar_chart([], (("applied", 0),), "updates"))
    assert not list(parse(bar_chart([Bar("a", (0,))], (("applied", 0),), "updates")).iter(f"{SVG}rect"))


def test_a_ranked_area_of_a_thousand_devices() -> None:
    bars = [Bar(f"d{i}", (1000 - i, i % 3)) for i in range(1000)]
    root = parse(ranked_area(bars, (("applied", 0), ("rejected", 1)), Axis("devices"), Axis("updates")))
    areas = [p.get("d") or "" for p in root.iter(f"{SVG}path") if "area" in (p.get("class") or "")]
    assert len(areas) == 2
    numbers = [float(n) for d in areas for n in re.findall(r"[\d.]+", d)]
    assert all(math.isfinite(n) and n >= 0 for n in numbers)


@pytest.mark.parametrize("devices", [5000, 200_000])
def test_the_last_number_under_an_axis_is_within_the_drawing(devices: int) -> None:
    bars = [Bar(f"d{i}", (devices - i,)) for i in range(devices)]
    root = parse(ranked_area(bars, (("applied", 0),), Axis("devices", whole=True), Axis("updates")))
    ticks = [t for t in root.iter(f"{SVG}text") if "x" in (t.get("class") or "").split()]
    assert f"{devices:,}" in {t.text for t in ticks}
    assert all(float(t.get("x") or 0) + len(t.text or "") * CHAR_WIDTH / 2 <= WIDTH for t in ticks)


def test_a_ranked_area_of_many_has_as_many_steps_as_a_screen_shows() -> None:
    bars = [Bar(f"d{i}", (100_000 - i,)) for i in range(100_000)]
    drawn = ranked_area(bars, (("applied", 0),), Axis("devices"), Axis("updates"))
    assert len(drawn) < 100_000
    [area] = [p.get("d") or "" for p in parse(drawn).iter(f"{SVG}path") if "area" in (p.get("class") or "")]
    ends = [tuple(map(float, each)) for each in re.findall(r"([\d.]+)[ ,]([\d.]+)", area)]
    assert min(x for x, _ in ends) == pytest.approx(LEFT, abs=0.1)
    assert max(x for x, _ in ends) == pytest.approx(WIDTH - RIGHT, abs=0.1)


def test_hostile_names_stay_text() -> None:
    for svg in (
        bar_chart([Bar(HOSTILE, (1, 2))], ((HOSTILE, 0), ("b", 1)), HOSTILE),
        ranked_area([Bar(HOSTILE, (1,))], ((HOSTILE, 0),), Axis(HOSTILE), Axis(HOSTILE)),
        histogram({1: 1}, Axis(HOSTILE), Axis(HOSTILE)),
    ):
        assert {e.tag for e in parse(svg).iter()} <= {
            SVG + t for t in ("svg", "path", "text", "rect", "circle")
        }


def test_numbers_read_well() -> None:
    assert [bytes_text(n) for n in (None, 0, 999, 1000, 1_234_567, 5.6e9)] == [
        "\N{EN DASH}", "0 B", "999 B", "1.00 kB", "1.23 MB", "5.60 GB",
    ]  # fmt: skip
    assert [duration_text(s) for s in (0.25, 83.1, 600, 10_800, 400_000)] == [
        "0.250 s", "83.1 s", "10.0 min", "3.00 h", "4.63 d",
    ]  # fmt: skip
    assert [number_text(x) for x in (0, 0.03123, 4.2, -4.2, 1234.5, 1e-9)] == [
        "0", "0.0312", "4.20", "-4.20", "1,234", "1.00e-09",
    ]  # fmt: skip
    assert [u.name for u in BYTES][:3] == ["B", "kB", "MB"]


def test_clipped_names_keep_both_ends() -> None:
    assert clipped("short", 9) == "short"
    assert clipped("simulated-device-0042", 9) == "simu…0042"


def test_safe_text_has_nothing_that_html_or_xml_minds() -> None:
    assert safe("a<b>&\"'\x00\ud800") == "a&lt;b&gt;&amp;&quot;&#x27;\ufffd\ufffd"


@given(st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=20))
def test_a_logarithmic_scale_keeps_the_order_and_puts_the_rest_at_its_start(values: list[float]) -> None:
    scale = Axis("x", BYTES, log=True).scale([0.0, *values], 0.0, 100.0)
    pixels = [scale(v) for v in sorted(values)]
    assert pixels == sorted(pixels)
    assert all(-1e-6 <= x <= 100 + 1e-6 for x in (*pixels, *(scale.tick_pixel(t) for t in scale.ticks)))
    assert scale.ticks
    if scale.log:
        assert scale(0.0) == 0.0
        assert len({scale.tick_text(t) for t in scale.ticks}) == len(scale.ticks)


def test_ticks_of_a_logarithmic_axis_are_powers_of_ten_or_between() -> None:
    def ticks(*values: float) -> tuple[float, ...]:
        return Axis("x", log=True).scale(values, 0.0, 1.0).ticks

    assert ticks(0.02, 1.0) == (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    assert ticks(3.0, 90_000.0) == (10.0, 100.0, 1000.0, 10_000.0)
    assert ticks(3.0, 5.0) == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
