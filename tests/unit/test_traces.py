"""The trace of a fleet: what a table says of each device at any moment, and how bad ones are named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import ROOT

from anabranch.core.errors import DataError
from anabranch.workloads import traces
from anabranch.workloads.trace_forms import synthetic
from anabranch.workloads.traces import (
    DeviceMoment,
    DeviceTrace,
    Trace,
    read_trace,
    trace_of,
    write_trace,
)

HEAD = "device,time_s,state,up_mbps,down_mbps,latency_s,step_time_s"


def table(*rows: str, head: str = HEAD) -> Trace:
    return trace_of([head, *rows], "a.csv")


def state(device: DeviceTrace, now_s: float) -> DeviceMoment:
    _, number = device.at(now_s)
    return device.moments[number]


def test_a_row_holds_until_the_next_of_its_device() -> None:
    trace = table("b,5,off,1,,,0.2", "a,0,,,8,,", "b,9,on,,4,0.5,", "b,20,again,,,,", "a,7,off,2,,,")
    b, a = trace.devices
    assert (b.name, a.name) == ("b", "a"), "in the order in which they first come"
    assert b.moments == (
        DeviceMoment(),
        DeviceMoment(5.0, False, 1.0),
        DeviceMoment(9.0, True, 1.0, 4.0, 0.5),
    )
    assert (b.again_s, b.step_time_s, a.again_s, a.step_time_s) == (20.0, 0.2, math.inf, None)
    assert a.moments == (DeviceMoment(0.0, True, None, 8.0), DeviceMoment(7.0, False, 2.0, 8.0))
    for now_s, on in ((0, True), (4.9, True), (5, False), (8.9, False), (9, True), (20, True), (25, False)):
        assert state(b, now_s).on is on, now_s
    assert not state(a, 1e9).on
    assert trace.of(0) is trace.of(2) is b, "a larger fleet has the same devices again"
    assert (trace.has_rates, trace.span_s) == (True, 20.0)


def test_what_comes_next_is_what_is_then() -> None:
    """Walking from moment to moment and looking a time up are two ways to one answer."""
    device = table("a,2,off,,,,", "a,3,on,5,,,", "a,7.5,again,,,,").devices[0]
    turn, number = device.at(0.0)
    for _ in range(10):
        coming = device.after(turn, number)
        assert coming is not None
        at_s, turn, number = coming
        assert device.at(at_s) == (turn, number)
        assert state(device, at_s - 1e-6) != device.moments[number]
    assert (at_s, turn) == (7.5 * 3 + 2.0, 3)


def test_what_a_spreadsheet_adds_to_a_table_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "sheet.csv"
    path.write_bytes("\ufeffdevice, time_s, state\r\n\r\na, 0, on\r\n,,\r\na, 5, off\r\n , ,\r\n".encode())
    assert read_trace(str(path)) == table("a,0,on", "a,5,off")


def test_what_never_changes_needs_no_events() -> None:
    assert table("a,0,on,,,,", "a,5,on,,,,", "a,9,again,,,,").devices[0].after(0, 0) is None
    gone, there = table("a,0,off,1,,,", "a,5,,2,,,", "a,9,again,,,,", "b,0,,,,,").devices
    assert gone.moments == (DeviceMoment(on=False),), (
        "rates of who is never there would be events without end"
    )
    assert there.after(0, 0) is None


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["a,5,on,,,,", "a,5,off,,,,"], "line 3: time_s 5 is not later"),
        (["a,5,on,,,,", "a,4,off,,,,"], "line 3: time_s 4 is not later"),
        (["a,-1,on,,,,"], "line 2: time_s must be a number from 0 up, not '-1'"),
        (["a,inf,on,,,,"], "time_s must be a number"),
        (["a,nan,on,,,,"], "time_s must be a number"),
        (["a,,on,,,,"], "line 2: it names no time_s"),
        ([",1,on,,,,"], "line 2: it names no device"),
        (["a,0,up,,,,"], "state must be on, off, again or empty, not 'up'"),
        (["a,0,on,fast,,,"], "up_mbps must be a number from 0 up, not 'fast'"),
        (["a,0,on,,,,0"], "step_time_s must be one number of a device, above 0"),
        (["a,0,on,,,,1", "a,1,off,,,,2"], "step_time_s must be one number of a device"),
        (["a,5,again,,,,", "a,6,on,,,,"], "line 3: it comes after the device's row with 'again'"),
        (["a,0,again,,,,"], "cannot come again at once"),
        (["a,5,again,1,,,"], "has nothing else to say"),
        (["a,0,on,,,,,,9"], "more cells than there are columns"),
        (["a,0,off,,,,"], "no device that is ever on"),
        ([], "no row after its first line"),
        (["", ""], "no row after its first line"),
    ],
)
def test_a_bad_row_is_named_with_its_line(rows: list[str], says: str) -> None:
    with pytest.raises(DataError, match=r"fleet\.trace: a\.csv") as error:
        table(*rows)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ("device,time_s,up_mbs", "'up_mbs'; did you mean 'up_mbps'?"),
        ("device,weather", "'weather'. It may have device,"),
        ("device,state", "no column time_s"),
        ("device,time_s", "nothing but device and time_s"),
        ("device,time_s,state,state", "a column twice"),
        ("", "no column device"),
        ("device;time_s;state", "semicolons between its columns: write commas"),
        ("device\ttime_s\tstate", "tabs between its columns: write commas"),
    ],
)
def test_bad_columns_are_named(head: str, says: str) -> None:
    with pytest.raises(DataError) as error:
        table("a,0,on,1", head=head)
    assert says in str(error.value)


def test_who_waits_hears_how_far_the_reading_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "TOLD_ROWS", 10)
    told: list[int] = []
    rows = "".join(f"a,{second},{'off' if second % 2 else 'on'}\n" for second in range(21))
    (tmp_path / "long.csv").write_text(f"device,time_s,state\n{rows}")
    (device,) = read_trace(str(tmp_path / "long.csv"), told.append).devices
    assert (told, len(device.moments)) == ([10, 20], 21)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.csv cannot be read"):
        read_trace(str(tmp_path / "nowhere.csv"))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"bytes\.csv is not in UTF-8"):
        read_trace(str(tmp_path / "bytes.csv"))


def test_speeds_are_asked_of_every_device() -> None:
    assert table("a,0,,,,,2", "b,0,,,,,1").step_times_s() == [2.0, 1.0]
    with pytest.raises(DataError, match="device b of the trace has no step_time_s"):
        table("a,0,,,,,2", "b,0,,,,,").step_times_s()


numbers = st.one_of(st.none(), st.floats(0.001, 1000.0))
links = st.tuples(numbers, numbers, numbers)
own = st.tuples(numbers, st.one_of(st.none(), st.floats(0.001, 1.0)), numbers, numbers, numbers)


@st.composite
def devices(draw: st.DrawFn, name: str) -> DeviceTrace:
    """One whose rates, once given, stay given."""
    times = sorted(draw(st.sets(st.floats(0.001, 1e6), max_size=5)))
    found = [DeviceMoment(0.0, draw(st.booleans()), *draw(links))]
    for time_s in times:
        rates = (new or old for new, old in zip(draw(links), found[-1].rates, strict=True))
        moment = DeviceMoment(float(time_s), draw(st.booleans()), *rates)
        if not moment.same_as(found[-1]):
            found.append(moment)
    again_s = draw(st.sampled_from([math.inf, 2e6]))
    if not any(m.on for m in found):
        found = [DeviceMoment(on=False)]
    return DeviceTrace(name, tuple(found), again_s, *draw(own))


@given(st.data())
def test_a_trace_is_its_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(["a", "b,c", 'd"', "é"]), min_size=1, max_size=4, unique=True))
    trace = Trace((*(data.draw(devices(name)) for name in names), DeviceTrace("there", (DeviceMoment(),))))
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    write_trace(trace, path)
    assert read_trace(str(path)) == trace


def test_the_shipped_one_is_what_it_is_said_to_be(tmp_path: Path) -> None:
    write_trace(synthetic(24, 0), tmp_path / "day.csv")
    shipped = ROOT / "examples" / "day.csv"
    assert shipped.read_bytes() == (tmp_path / "day.csv").read_bytes()
    trace = read_trace(str(shipped))
    by_hour = trace.there_by_hour()
    assert min(by_hour[:4]) > 0.5 > max(by_hour[8:18]), "phones are there at night"
    assert {d.again_s for d in trace.devices} == {86_400.0}
    assert len(trace.step_times_s()) == 24
    for device in trace.devices:
        assert all(m.down_mbps > m.up_mbps for m in device.moments if m.up_mbps and m.down_mbps)


def test_how_much_of_the_time_a_device_is_there() -> None:
    device = table("a,2,off,,,,", "a,3,on,,,,", "a,4,again,,,,").devices[0]
    assert device.share_on(100.0) == 0.75
    assert device.share_on(2.5) == 2.0 / 2.5
    assert table("a,0,on,,,,").devices[0].share_on(7.0) == 1.0
