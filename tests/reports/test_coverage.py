"""Who trained which units: the counts against a count by hand, and what the pictures show."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from fleets import config
from hypothesis import given, settings
from hypothesis import strategies as st
from long_lists import lists_up_to

from anabranch.api.live_result import result_of_journal
from anabranch.core.config.goal import Goal
from anabranch.core.model.submodels import unit_map
from anabranch.core.model.units import Member, UnitGroup
from anabranch.reports.coverage import GROUPS_MAX, SHADES, by_device, over_time
from anabranch.reports.coverage_tally import DEVICES_MAX, ROWS_MAX, SLOTS, Coverages, CoverageTally
from anabranch.reports.html import report_html
from anabranch.reports.recorder import Recorder
from anabranch.reports.result import Coverage, Result
from anabranch.reports.scales import Axis
from anabranch.reports.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from anabranch.simulation.run import simulate
from anabranch.testing.models import GROUPS, SPEC

Heard = Sequence[tuple[float, str, tuple[int, ...] | None]]
TIME = Axis("seconds")


def group(size: int) -> UnitGroup:
    return UnitGroup("hidden", size, (Member("w", 0),))


def tally(size: int, heard: Heard) -> Coverage:
    found = CoverageTally(group(size))
    for now, client, kept in heard:
        found.add(now, client, kept)
    return found.coverage()


@st.composite
def runs(draw: Any) -> tuple[int, Heard]:
    size = draw(st.integers(1, 100))
    units = st.sets(st.integers(0, size - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    moments = st.one_of(st.floats(0, 10), st.floats(0, 1e6), st.sampled_from([0.0, 6.0, 11.999, 12.0, 0.125]))
    clients = st.sampled_from("abcd") | st.integers(0, 60).map(str)
    heard = lists_up_to(40, st.tuples(moments, clients, st.none() | units), least=1)
    return size, sorted(draw(heard), key=lambda one: one[0])


@settings(max_examples=150)
@given(runs())
def test_the_tally_is_the_count_by_hand(run: tuple[int, Heard]) -> None:
    size, heard = run
    c = tally(size, heard)
    rows = len(c.row_units)
    assert (sum(c.row_units), rows) == (size, min(size, ROWS_MAX))
    assert max(c.row_units) - min(c.row_units) <= 1
    row_of = [row for row, units in enumerate(c.row_units) for _ in range(units)]
    updates: Counter[int] = Counter()
    trained: Counter[tuple[int, int]] = Counter()
    devices: Counter[str] = Counter()
    by: Counter[tuple[str, int]] = Counter()
    for now, client, kept in heard:
        slot = int(now // c.slot_s)
        updates[slot] += 1
        devices[client] += 1
        for unit in range(size) if kept is None else kept:
            trained[row_of[unit], slot] += 1
            by[client, row_of[unit]] += 1
    slots = max(updates) + 1
    assert slots <= SLOTS
    assert c.updates == tuple(updates[slot] for slot in range(slots))
    assert c.trained == tuple(tuple(trained[row, s] for s in range(slots)) for row in range(rows))
    assert sum(map(sum, c.trained)) == sum(size if kept is None else len(kept) for _, _, kept in heard)
    busiest = sorted(devices, key=lambda name: (-devices[name], name))[:DEVICES_MAX]
    assert list(c.device_updates.items()) == [(name, devices[name]) for name in busiest]
    assert c.device_trained == {name: tuple(by[name, row] for row in range(rows)) for name in busiest}


def test_slots_double_and_no_more_than_needed() -> None:
    heard = [(0.1 * i, "a", (0,)) for i in range(60)]
    assert (tally(2, heard).slot_s, len(tally(2, heard).updates)) == (0.125, SLOTS)
    longer = tally(2, [*heard, (6.0, "a", (0,))])
    assert (longer.slot_s, sum(longer.updates), len(longer.updates)) == (0.25, 61, SLOTS // 2 + 1)
    assert tally(2, [(86_400.0, "a", (0,))]).slot_s * SLOTS > 86_400.0


@settings(max_examples=30)
@given(runs())
def test_what_was_counted_goes_through_json(run: tuple[int, Heard]) -> None:
    size, heard = run
    base = Recorder("asyncdrop", "digits", 0, Goal(), {}, "simulated").result("", "", 0.0)
    result = replace(base, coverage=(tally(size, heard),) * 2)
    assert Result.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False))) == result


def test_results_without_coverage_are_still_read() -> None:
    data = Recorder("fedavg", "digits", 0, Goal(), {}, "simulated").result("", "", 0.0).to_json()
    assert not data.pop("coverage")
    assert Result.from_json(data).coverage == ()


def test_every_group_has_a_tally_and_what_covers_all_counts_for_all() -> None:
    recorder = Recorder("asyncdrop", "digits", 0, Goal(), {}, "live")
    recorder.trained(1.0, "a", SPEC, unit_map(SPEC, [(0, 7), (1,)]))
    recorder.trained(2.0, "b", SPEC, None)
    hidden, lstm = recorder.result("", "", 0.0).coverage
    assert [c.group for c in (hidden, lstm)] == [g.name for g in GROUPS]
    assert hidden.device_trained == {"a": (1, 0, 0, 0, 0, 0, 0, 1), "b": (1,) * 8}
    assert lstm.device_trained == {"a": (0, 1, 0), "b": (1, 1, 1)}
    assert Coverages().coverages() == ()


# --- pictures ------------------------------------------------------------------------------------


def cells(picture: str, rows: int, columns: int) -> dict[tuple[int, int], float]:
    """The opacity of every cell by (row, column), row 0 the lowest; what is not drawn is white."""
    width, height = (WIDTH - RIGHT - LEFT) / columns, (HEIGHT - BOTTOM - TOP) / rows
    found = dict.fromkeys([(i, j) for i in range(rows) for j in range(columns)], 0.0)
    for path in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}path"):
        opacity = path.get("fill-opacity")
        if opacity is None:
            continue
        for x, y, w, h in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h", path.get("d") or ""):
            if float(y) < TOP - 1:  # the key
                continue
            assert (float(w), float(h)) == pytest.approx((width, height), abs=0.01)
            at = round((HEIGHT - BOTTOM - float(y)) / height) - 1, round((float(x) - LEFT) / width)
            assert found[at] == 0.0, "two cells in one place"
            found[at] = float(opacity)
    return found


def test_rows_are_units_from_below_and_columns_are_time() -> None:
    heard = [(0.0, "a", (0,)), (0.0, "a", (0, 2)), (0.2, "a", (0, 1)), (0.3, "b", (0, 1))]
    shown = cells(over_time(tally(4, heard), TIME), 4, 3)
    assert {column: shown[0, column] for column in range(3)} == {0: 1.0, 1: 1.0, 2: 1.0}  # always
    assert {column: shown[1, column] for column in range(3)} == {0: 0.0, 1: 1.0, 2: 1.0}
    assert {column: shown[2, column] for column in range(3)} == {0: 0.5, 1: 0.0, 2: 0.0}
    assert {column: shown[3, column] for column in range(3)} == {0: 0.0, 1: 0.0, 2: 0.0}  # never


def test_columns_are_devices_the_busiest_first() -> None:
    heard = [(0.0, "idle", (1,)), *[(1.0, "busy", (0,))] * 3, (2.0, "busy", (0, 1))]
    shown = cells(by_device(tally(3, heard)), 3, 2)
    assert shown == {(0, 0): 1.0, (1, 0): 0.25, (2, 0): 0.0, (0, 1): 0.0, (1, 1): 1.0, (2, 1): 0.0}


@settings(max_examples=60)
@given(runs())
def test_every_picture_is_whole(run: tuple[int, Heard]) -> None:
    c = tally(*run)
    rows = len(c.row_units)
    shown = cells(over_time(c, TIME), rows, len(c.updates))
    for (row, column), opacity in shown.items():
        share = c.trained[row][column] / max(1, c.row_units[row] * c.updates[column])
        assert abs(opacity - share) <= 0.5 / SHADES + 1e-9
    for (row, column), opacity in cells(by_device(c), rows, len(c.device_updates)).items():
        name = list(c.device_updates)[column]
        share = c.device_trained[name][row] / (c.row_units[row] * c.device_updates[name])
        assert abs(opacity - share) <= 0.5 / SHADES + 1e-9


@pytest.mark.parametrize("groups", [0, 1, GROUPS_MAX, GROUPS_MAX + 1, 40])
def test_a_page_has_a_card_for_each_group_but_not_too_many(
    groups: int, record: Callable[..., Result]
) -> None:
    c = tally(5, [(0.0, "a", (0, 3)), (2.0, "b", None)])
    coverage = tuple(replace(c, group=f"layer{i}") for i in range(groups))
    page = report_html(replace(record(), coverage=coverage))
    assert page.count("Who trained which units of") == min(groups, GROUPS_MAX)
    assert ("more groups of units are in result.json" in page) == (groups > GROUPS_MAX)
    assert (f"{groups - GROUPS_MAX} more groups" in page) == (groups > GROUPS_MAX)
    pictures = re.findall(r'<svg[^>]*aria-label="units of layer.*?</svg>', page, re.DOTALL)
    assert len(pictures) == 2 * min(groups, GROUPS_MAX)
    for picture in pictures:
        ET.fromstring(picture)


def test_names_from_outside_stay_text(record: Callable[..., Result]) -> None:
    hostile = "<script>alert(1)</script>"
    c = replace(tally(2, [(0.0, hostile, (0,))]), group=hostile)
    plain = replace(c, group="plain", device_updates={"a": 1}, device_trained={"a": (1, 0)})
    pages = [report_html(replace(record(), coverage=(one,))) for one in (c, plain)]
    assert hostile not in pages[0]
    assert pages[0].count("<script") == pages[1].count("<script")


# --- runs ----------------------------------------------------------------------------------------


def test_a_journal_tells_a_report_what_the_simulation_told(tmp_path: Path) -> None:
    settings = config("asyncdrop", run={"keep_payloads": True, "updates_max": 40}, fleet={"latency_s": 0.0})
    simulated = simulate(settings, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "copy" / "result.json").unlink()
    told = result_of_journal(tmp_path / "copy", {})
    assert told.coverage == simulated.coverage
    (hidden,) = told.coverage
    assert (hidden.group, hidden.units, sum(hidden.updates)) == ("hidden", 32, simulated.updates_applied)
    assert sum(map(sum, hidden.trained)) == 24 * simulated.updates_applied
    assert (told.uplink_bytes, told.uplink_bytes_raw) == (simulated.uplink_bytes, simulated.uplink_bytes_raw)
    assert told.updates_applied == simulated.updates_applied > 20
    # Here a download counts when it is granted, there when it has ended.
    assert 0 <= told.downlink_bytes - simulated.downlink_bytes <= 6 * 4 * 24 * 33


def test_runs_of_whole_models_have_no_coverage(tmp_path: Path) -> None:
    few: dict[str, Any] = {"run": {"updates_max": 12}}
    wholes = {"a": config("fedasync", **few), "b": config("asyncdrop", submodel={"name": "none"}, **few)}
    for name, whole in wholes.items():
        assert simulate(whole, tmp_path / name).coverage == ()
        assert "Who trained which units" not in (tmp_path / name / "report.html").read_text()
