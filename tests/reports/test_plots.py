"""Curves: their lines, bands, marks and axes, with nothing written over a curve."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.reports.page import resource, standalone
from anabranch.reports.plots import Series, Span, line_chart, plot
from anabranch.reports.scales import Axis
from anabranch.reports.svg import CHAR_WIDTH, WIDTH
from anabranch.reports.text import PERCENT, SECONDS

SVG = "{http://www.w3.org/2000/svg}"
TIME, ACCURACY = Axis("time", SECONDS), Axis("accuracy", PERCENT, from_zero=False)
HOSTILE = "<script>alert('x')</script>&\x00\ud800\""
POINTS = [(0.0, 0.1), (1.0, 0.2)]


def parse(svg: str) -> ET.Element:
    root = ET.fromstring(svg.encode())
    assert root.tag == f"{SVG}svg"
    return root


def marks(root: ET.Element, style: str) -> list[ET.Element]:
    return [p for p in root.iter(f"{SVG}path") if style in (p.get("class") or "").split()]


def numbers(path: ET.Element) -> list[float]:
    return [float(n) for n in re.findall(r"-?[\d.]+", path.get("d") or "")]


def window(root: ET.Element) -> ET.Element:
    [found] = root.findall(f"{SVG}svg")
    return found


def test_a_line_chart_has_its_line_its_units_and_its_target() -> None:
    root = parse(line_chart([Series("run", [(0, 0.1), (300, 0.6), (600, 0.8)])], TIME, ACCURACY, target=0.75))
    assert {"time (min)", "accuracy (%)", "target 75 %", "10", "80"} <= {
        t.text for t in root.iter(f"{SVG}text")
    }
    [line] = marks(root, "line")
    assert (line.get("d") or "").count("L") == 2
    assert [d.get("data-tip") for d in marks(root, "dot")] == [
        "10 % at 0 min", "60 % at 5 min", "80 % at 10 min",
    ]  # fmt: skip


def test_several_series_get_a_legend_and_thin_ones_do_not() -> None:
    series = [Series("one", POINTS, 0), Series("two", POINTS, 1), Series("seed", POINTS, 1, thin=True)]
    root = parse(line_chart(series, TIME, ACCURACY))
    assert [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "legend"] == ["one", "two"]
    assert len(marks(root, "thin")) == 1


def test_more_series_than_colours_are_told_apart_by_dashes() -> None:
    root = parse(line_chart([Series(str(i), POINTS, i) for i in range(10)], TIME, ACCURACY, names=False))
    assert len({p.get("class") for p in marks(root, "line")}) == 10


@pytest.mark.parametrize("points", [[], [(0.0, 0.0)], [(5.0, 0.8)], [(0.0, 0.5), (0.0, 0.5)]])
def test_few_points_make_a_chart_too(points: list[tuple[float, float]]) -> None:
    root = parse(line_chart([Series("run", points)], TIME, ACCURACY))
    assert len(marks(root, "dot")) == len(points)


def test_very_many_points_are_thinned() -> None:
    svg = line_chart([Series("run", [(float(i), i / 1e5) for i in range(100_000)])], TIME, ACCURACY)
    assert len(svg) < 60_000
    parse(svg)


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(-1e12, 1e12)), max_size=20), st.booleans(), st.booleans()
)
def test_every_mark_is_inside_the_drawing(points: list[tuple[float, float]], log: bool, flawed: bool) -> None:
    flaws = [x for x, _ in points] if flawed else []
    series = [Series("run", points, flaws=flaws), Series("other", points[::2], 1)]
    root = parse(line_chart(series, Axis("time", SECONDS, log=log), Axis("loss", from_zero=False)))
    height = float((root.get("viewBox") or "").split()[3])
    inner = window(root)
    left, top, wide, tall = (float(inner.get(k) or "") for k in ("x", "y", "width", "height"))
    for dot in (*marks(inner, "dot"), *marks(inner, "flaw")):
        x, y = numbers(dot)[:2]
        assert left - 0.01 <= x <= left + wide + 0.01
        assert top <= y <= top + tall
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("y") or "") <= height
    assert len(marks(inner, "flaw")) == len(flaws)


@given(
    names=st.lists(st.text("abc =.0", min_size=1, max_size=60), min_size=1, max_size=9, unique=True),
    target=st.floats(0.01, 1.0),
    flawed=st.booleans(),
)
def test_nothing_is_written_over_a_curve_or_another_text(
    names: list[str], target: float, flawed: bool
) -> None:
    points = [(0.0, 0.0), (50.0, 1.0), (100.0, target)]
    flaws = [0.0, 1.0, 100.0] if flawed else []
    series = [Series(name, points, i, flaws=flaws) for i, name in enumerate(names)]
    root = parse(line_chart(series, TIME, ACCURACY, target))
    inner = window(root)
    assert not list(inner.iter(f"{SVG}text"))
    lines = [numbers(line)[1::2] for line in marks(inner, "line")]
    upper, lower = min(map(min, lines)), max(map(max, lines))
    flaw_rows = [(numbers(f)[1], numbers(f)[1] + 7) for f in marks(inner, "flaw")]
    begin, boxes = float(inner.get("x") or ""), []
    end = begin + float(inner.get("width") or "")
    for text in root.iter(f"{SVG}text"):
        baseline, x, style = (
            float(text.get("y") or ""),
            float(text.get("x") or ""),
            (text.get("class") or "").split(),
        )
        width = CHAR_WIDTH * len(text.text or "")
        left = x - width * (1.0 if "end" in style else 0.5 if "mid" in style else 0.0)
        boxes.append((left, left + width, baseline - 8, baseline))
        over = begin < left + width and left < end
        assert not over or baseline <= upper or baseline - 8 >= lower, text.text
        assert not over or all(baseline <= a or baseline - 8 >= b for a, b in flaw_rows), text.text
    for one, two in itertools.combinations(boxes, 2):
        apart = one[1] <= two[0] or two[1] <= one[0] or one[3] <= two[2] or two[3] <= one[2]
        assert apart, (one, two)


def test_a_band_goes_along_the_greatest_and_back_along_the_least() -> None:
    band = [Span(0.0, 0.0, 0.4), Span(1.0, 0.3, 0.5), Span(2.0, 0.5, 1.0)]
    root = parse(line_chart([Series("mean", [(s.x, s.low + 0.1) for s in band], band=band)], TIME, ACCURACY))
    [outline] = marks(root, "band")
    assert (outline.get("d") or "").endswith("Z")
    found = numbers(outline)
    xs, ys = found[::2], found[1::2]
    assert xs == [*xs[:3], *reversed(xs[:3])]
    top, floor = ys[2], ys[5 - 0]
    scale = (floor - top) / 1.0
    assert [round((floor - y) / scale, 2) for y in ys] == [0.4, 0.5, 1.0, 0.5, 0.3, 0.0]
    assert marks(root, "dot")[0].get("data-tip") == "10 % (0 % to 40 %) at 0 s"


def test_a_run_that_is_much_shorter_is_no_sliver() -> None:
    quick = Series("quick", [(float(i), i / 10) for i in range(1, 11)])
    slow = Series("slow", [(400.0 * i, i / 10) for i in range(1, 11)], 1)
    figure = ET.fromstring(plot([quick, slow], TIME, ACCURACY))
    ways = {d.get("data-way") or "": d for d in figure}
    assert [(name, d.get("hidden")) for name, d in ways.items()] == [("linear", ""), ("logarithmic", None)]

    def share(way: str) -> float:
        xs = numbers(marks(ways[way], "line")[0])[::2]
        return (max(xs) - min(xs)) / WIDTH

    assert share("linear") < 0.01
    assert share("logarithmic") > 0.2
    drawn = next(e for e in ways["logarithmic"].iter(f"{SVG}svg") if e.get("class") == "window")
    assert drawn.get("data-log") == "1"
    ticks = [
        float(t.text or "") for t in ways["logarithmic"].iter(f"{SVG}text") if t.get("class") == "tick mid x"
    ]
    assert ticks == sorted(ticks)
    assert all(math.log10(t).is_integer() for t in ticks)


def test_runs_that_are_alike_begin_on_a_linear_axis_and_one_alone_has_no_other() -> None:
    alike = [Series(str(i), [(1.0, 0.1), (50.0 + i, 0.9), (60.0, 0.9)], i) for i in range(2)]
    figure = ET.fromstring(plot(alike, TIME, ACCURACY))
    assert [(d.get("data-way"), d.get("hidden")) for d in figure] == [("linear", None), ("logarithmic", "")]
    assert [d.get("data-way") for d in ET.fromstring(plot(alike[:1], TIME, ACCURACY))] == [""]


def test_a_measurement_that_was_not_finite_is_marked_with_its_moment() -> None:
    root = parse(line_chart([Series("run", [(0.0, 0.1), (90.0, 0.2)], flaws=[30.0, 60.0])], TIME, ACCURACY))
    assert [f.get("data-tip") for f in marks(root, "flaw")] == ["not finite at 30 s", "not finite at 60 s"]
    assert max(numbers(f)[1] for f in marks(root, "flaw")) + 7 < min(numbers(marks(root, "line")[0])[1::2])


def test_hostile_names_stay_text() -> None:
    series = [Series(HOSTILE, POINTS, flaws=[0.5]), Series("b", POINTS, band=[Span(0.0, 0.0, 1.0)])]
    root = parse(line_chart(series, Axis(HOSTILE), Axis(HOSTILE)))
    assert {e.tag for e in root.iter()} <= {SVG + t for t in ("svg", "path", "text")}


def test_a_standalone_chart_brings_its_style() -> None:
    root = parse(standalone(line_chart([Series("run", POINTS)], TIME, ACCURACY)))
    assert "--c0" in (root[0].text or "")


@pytest.mark.parametrize("greatest", [0.5, 2.4e6, 3e-7, 2.4e275])
def test_no_number_beside_an_axis_is_cut_off(greatest: float) -> None:
    line = Series("run", [(0.0, greatest / 3), (1.0, greatest)])
    root = parse(line_chart([line], TIME, Axis("mse", from_zero=False)))
    ticks = [t for t in root.iter(f"{SVG}text") if t.get("class") == "tick end"]
    assert len(ticks) > 1
    for tick in ticks:
        wide = float(tick.get("textLength") or CHAR_WIDTH * len(tick.text or ""))
        assert float(tick.get("x") or 0) - wide >= 0


def test_the_page_prints_without_its_tools() -> None:
    style = resource("style.css")
    printed = style[style.index("@media print") :]
    assert re.search(r"\.tools, #tip \{ display: none; \}", printed)
