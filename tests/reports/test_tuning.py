"""The front of a tuning, by its definition; the drawing of points; what is told of fresh seeds."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from page_tables import cells_of

from anabranch.reports.scales import Axis
from anabranch.reports.scatter import Dot, DotKind, scatter
from anabranch.reports.spreads import spread
from anabranch.reports.text import NOTHING, duration_text
from anabranch.reports.tuning import (
    FreshFigures,
    TunedRange,
    TunePoint,
    TuneReport,
    fresh_table,
    fresh_text,
    front_table,
    ranges_table,
    trials_table,
    tuning_html,
    used_text,
    value_text,
    with_front,
)

FIGURES = st.tuples(
    *(st.sampled_from([0.0, 0.5, 1.0, 2.0]),) * 2, st.sampled_from([10.0, 20.0]), st.booleans()
)


def point(number: int, value: float, time_s: float, traffic: float, known: bool) -> TunePoint:
    return TunePoint(number, 1.0, {}, 1, spread([value]) if known else None, 0, time_s, 1.0, traffic)


@given(st.lists(FIGURES, max_size=8), st.sampled_from(["max", "min"]))
def test_on_the_front_is_what_none_is_as_good_as_in_all_and_better_in_one(
    figures: list[tuple[float, float, float, bool]], mode: str
) -> None:
    points = with_front([point(i, *f) for i, f in enumerate(figures)], mode)
    sign = 1 if mode == "max" else -1

    def beats(a: TunePoint, b: TunePoint) -> bool:
        assert a.value is not None
        assert b.value is not None
        gains = (sign * (a.value.mean - b.value.mean), b.time_s - a.time_s, b.traffic_bytes - a.traffic_bytes)
        return min(gains) >= 0 and max(gains) > 0

    for p in points:
        rivals = [q for q in points if q.value is not None]
        assert p.on_front == (p.value is not None and not any(beats(q, p) for q in rivals))


def test_dots_lie_where_their_figures_say() -> None:
    dots = [Dot(0.0, 1.0, "low <left>"), Dot(10.0, 3.0, "high right", 2.0), Dot(5.0, 2.0, "middle")]
    drawn = scatter([DotKind("some", 0, dots[:2]), DotKind("other", 1, dots[2:])], Axis("x"), Axis("y"))
    found = re.findall(r'cx="([\d.]+)" cy="([\d.]+)" r="([\d.]+)" data-tip="([^"]*)"', drawn)
    (lx, ly, small, tip), (hx, hy, large, _), (mx, my, _, _) = (
        (*map(float, places), tip) for *places, tip in found
    )
    assert float(lx) < float(mx) < float(hx)
    assert float(ly) > float(my) > float(hy)
    assert abs(float(lx) + float(hx) - 2 * float(mx)) < 0.2
    assert float(large) == 2 * float(small)
    assert tip == "low &lt;left&gt;"
    assert ">other</text>" in drawn


def tuned() -> TuneReport:
    """Two trials, the first carried on; what the second came to is on the front, and recommended."""
    own = ({"client.steps": 4}, {"client.steps": 8})
    points = (
        TunePoint(0, 0.25, own[0], 2, spread([0.5, 0.7]), 0, 30.0, 10.0, 4_000.0),
        TunePoint(1, 0.25, own[1], 2, spread([0.7]), 1, 50.0, 11.0, 3_000.0),
        TunePoint(1, 1.0, own[1], 2, spread([0.8]), 2, 200.0, 40.0, 12_000.0),
        TunePoint(0, 1.0, own[0], 2, None, 0, 120.0, 41.0, 16_000.0),
    )
    fresh = FreshFigures(
        "recommended", own[1], (5, 6), (0.7, 0.7), (True, False), (90.0, 90.0), (39, 39), (800, 800)
    )
    ranges = (TunedRange("client.steps", (4, 8), 8, "greatest"),)
    return TuneReport(
        strategy="fedbuff",
        workload="digits",
        metric="accuracy",
        mode="max",
        target=0.75,
        aim="value",
        budget="40 updates",
        points=with_front(points, "max"),
        best=1,
        ranges=ranges,
        fresh=(fresh,),
        said=("take care",),
        toml="[run]",
    )


def test_each_figure_of_a_tuning_is_under_its_head() -> None:
    heads = ["trial", "budget", "accuracy", "time", "updates", "bytes", "client.steps"]
    early = [
        ["1 (recommended)", "25 %", "70.00 %", "50.0 s", "11.0", "3.00 kB", "8"],
        ["0", "25 %", "60.00 %", "30.0 s", "10.0", "4.00 kB", "4"],
    ]
    late = [
        ["0", "100 %", "\N{EN DASH}", "2.00 min", "41.0", "16.0 kB", "4"],
        ["1 (recommended)", "100 %", "80.00 %", "3.33 min", "40.0", "12.0 kB", "8"],
    ]
    report = tuned()
    assert front_table(report) == (heads, [*early, late[1]]), "the cheapest first"
    assert trials_table(report) == (heads, late), "as far as each was carried"
    assert ranges_table(report)[1] == [["client.steps", "4, 8", "8", "greatest"]]
    told = ["recommended", "2", "70.00 %", "1 of 2", "90.0 s", "39.0", "800 B"]
    assert fresh_table(report) == (
        ["settings", "seeds", "accuracy", "reached", "time", "updates", "bytes"],
        [told],
    )
    assert fresh_text(report) == (
        "accuracy 70.00 % after 90.0 s and 800 B; target 75.00 % reached from 1 of 2 seeds"
    )
    page = tuning_html(report)
    assert cells_of(page, "The front") == [heads, *early, late[1]]
    assert cells_of(page, "Trials") == [heads, *late]
    for name, figure in (("virtual time", "90.0 s"), ("bytes up and down", "800 B"), ("trials", "2")):
        assert f"<span>{name}</span><strong>{figure}</strong>" in page
    assert len(re.findall(r'class="dot', page)) == 2 * 3, "of each that was measured, in two charts"


def test_what_is_told_of_fresh_seeds_has_its_interval() -> None:
    assert value_text("accuracy", [0.7, 0.75, 0.8]) == "75.00 % (62.58 % to 87.42 %)"
    assert value_text("accuracy", [0.9, 0.95, 1.0]) == "95.00 % (82.58 % to 100.00 %)"
    assert value_text("accuracy", [0.7, None, 0.7]) == "70.00 %, 1 without"
    assert value_text("mae", [0.7, 0.75, 0.8]) == "0.750 (0.626 to 0.874)"
    assert value_text("accuracy", [None]) == NOTHING
    assert used_text([40.90001, 40.90002], duration_text) == "40.9 s"
    assert used_text([1.0, 2.0], duration_text) == "1.50 s (0 s to 7.85 s)"
