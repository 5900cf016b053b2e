"""FedScale's and MobiPerf's files as traces: by examples in the forms that these publish."""

from __future__ import annotations

import json
import os
from multiprocessing.reduction import ForkingPickler  # to write what others publish
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import DataError
from anabranch.workloads.plain_pickles import NotPlain, plain_pickle
from anabranch.workloads.trace_forms import fedscale, mobiperf
from anabranch.workloads.traces import DeviceMoment

# One device of each of FedScale's files, as a comment in a simulator built on it quotes them.
CAPACITY = {432802: {"computation": 162.0, "communication": 5648.109619499134}}
BEHAVIOUR = {
    3834: {
        "duration": 211625,
        "inactive": [65881, 133574, 208292, 276575, 295006, 356236, 400906, 475099],
        "finish_time": 518400,
        "active": [12788, 100044, 188992, 271372, 276663, 352625, 356267, 441193],
        "model": "CPH1801",
    }
}


def pickled(folder: Path, name: str, data: Any, protocol: int = 4) -> Path:
    path = folder / name
    path.write_bytes(ForkingPickler.dumps(data, protocol))
    return path


def is_active(row: dict[str, Any], now_s: float) -> bool:
    """What FedScale's simulator says, by its definition."""
    inside_s = now_s % row["finish_time"]
    return any(a <= inside_s <= b for a, b in zip(row["active"], row["inactive"], strict=True))


def test_fedscale_capacity(tmp_path: Path) -> None:
    found = fedscale(pickled(tmp_path, "capacity", CAPACITY), None, batch=20).devices
    mbps = 5648.109619499134 * 1024 / 1e6
    (device,) = found
    assert (device.name, device.moments) == ("432802", (DeviceMoment(0.0, True, mbps, mbps),))
    assert device.step_time_s == pytest.approx(9.72)  # 3 x 20 x 162 ms


def test_fedscale_behaviour_is_what_its_simulator_says(tmp_path: Path) -> None:
    row = BEHAVIOUR[3834]
    (device,) = fedscale(None, pickled(tmp_path, "behaviour", BEHAVIOUR), batch=32).devices
    assert (device.name, device.again_s) == ("3834", 518400.0)
    for turn in (0, 3):
        for now_s in range(0, 518400, 997):
            number = device.at(turn * 518400.0 + now_s)[1]
            assert device.moments[number].on is is_active(row, turn * 518400.0 + now_s), (turn, now_s)


def test_the_shorter_file_is_dealt_again(tmp_path: Path) -> None:
    speeds = {i: {"computation": float(i), "communication": 1e6 / 1024} for i in (1, 2)}
    moves = {n: {"finish_time": 10, "active": [n], "inactive": [n + 1]} for n in (0, 1, 2)}
    capacity, behaviour = pickled(tmp_path, "c", speeds), pickled(tmp_path, "b", moves)
    found = fedscale(capacity, behaviour, batch=1).devices
    assert [d.name for d in found] == ["0", "1", "2"]
    assert [d.step_time_s for d in found] == [0.003, 0.006, 0.003]
    assert found[0].moments == (DeviceMoment(0.0, True, 1.0, 1.0), DeviceMoment(1.0, False, 1.0, 1.0))
    assert found[2].moments[1] == DeviceMoment(2.0, True, 1.0, 1.0)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({7: {"finish_time": 10, "active": [3], "inactive": []}}, "device 7"),
        ({7: {"finish_time": 10, "active": [3], "inactive": [2]}}, "take turns"),
        ({7: {"finish_time": 10, "active": [1, 2], "inactive": [3, 4]}}, "take turns"),
        ({7: {"finish_time": 0, "active": [], "inactive": []}}, "finish_time must be"),
        ({7: {"active": [], "inactive": []}}, "it has no 'finish_time'"),
        ({7: {"finish_time": 10**400, "active": [], "inactive": []}}, "too large"),
        ([1], "dictionary of devices"),
        ({}, "dictionary of devices"),
    ],
)
def test_bad_behaviours_are_named(tmp_path: Path, rows: Any, says: str) -> None:
    with pytest.raises(DataError, match="FedScale") as error:
        fedscale(None, pickled(tmp_path, "behaviour", rows), batch=32)
    assert says in str(error.value)


def test_bad_capacities_are_named(tmp_path: Path) -> None:
    for row in ({"computation": 0, "communication": 1}, {"computation": 1, "communication": float("inf")}):
        with pytest.raises(DataError, match=r"device 7.*numbers above 0"):
            fedscale(pickled(tmp_path, "capacity", {7: row}), None, batch=32)


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.integers(), st.text(max_size=4)), inner, max_size=4),
    ),
    max_leaves=20,
)


@given(plain, st.integers(0, 5))
def test_a_pickle_of_plain_data_is_read(data: Any, protocol: int) -> None:
    found = plain_pickle(bytes(ForkingPickler.dumps(data, protocol)))
    assert found == data
    assert repr(found) == repr(data), "True is not 1"


class Calls:
    """Makes a folder when Python's own reader loads it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_call_something_calls_nothing(tmp_path: Path, protocol: int) -> None:
    harmful = pickled(tmp_path, "harmful", {1: Calls(str(tmp_path / "made"))}, protocol)
    with pytest.raises(DataError, match="harmful cannot be read: it has more than plain data"):
        fedscale(harmful, None, batch=32)
    assert not (tmp_path / "made").exists()


@given(st.binary(max_size=60))
def test_a_broken_pickle_is_said_to_be_one(data: bytes) -> None:
    try:
        plain_pickle(data)
    except NotPlain:
        return


NESTED = b")" + b"\x85" * 300_000  # each step puts the tuple before into another
SHARED = b")\x94" + b"".join(b"h" + bytes([i]) + b"\x86\x94" for i in range(60))  # has the one before twice


@pytest.mark.parametrize("key", [NESTED, SHARED], ids=["nested", "shared"])
def test_a_key_whose_hash_would_end_the_process_or_never_end_is_refused(key: bytes) -> None:
    with pytest.raises(NotPlain, match="a key is neither a text nor a number"):
        plain_pickle(b"\x80\x04}" + key + b"K\x01s.")


def measurement(device: str, stamp: Any, up: bool, values: Any) -> dict[str, Any]:
    return {
        "device_id": device,
        "type": "tcpthroughput",
        "timestamp": stamp,
        "success": True,
        "parameters": {"dir_up": str(up).lower()},
        "values": values,
    }


def test_measurements_of_one_device_are_its_rows(tmp_path: Path) -> None:
    down = [
        measurement("x", "2018-03-01T00:00:10Z", False, {"tcp_speed_results": "[1000.0, 2000.0, 9000.0]"}),
        measurement("y", 1519862400000000, False, [{"duration": "15"}, {"tcp_speed_results": [500, 700]}]),
        measurement("x", "2018-03-01T00:01:00.5Z", False, {"tcp_speed_results": "[4000]"}),
        measurement("x", "2018-03-01T00:02:00Z", False, {"tcp_speed_results": "[]"}),
        {"type": "ping", "device_id": "x", "timestamp": "never"},
    ]
    up = [measurement("x", "2018-03-01T00:00:30Z", True, {"tcp_speed_results": [250]})]
    (tmp_path / "down.json").write_text("\n".join(json.dumps(one) for one in down))
    (tmp_path / "up.json").write_text(json.dumps(up))
    found = {d.name: d for d in mobiperf(tmp_path / "down.json", tmp_path / "up.json").devices}
    # 1519862400 is 2018-03-01 00:00:00 UTC
    assert found["y"].moments == (DeviceMoment(0.0, True, None, 0.6),)
    assert found["x"].moments == (
        DeviceMoment(),
        DeviceMoment(10.0, True, None, 2.0),
        DeviceMoment(30.0, True, 0.25, 2.0),
        DeviceMoment(60.5, True, 0.25, 4.0),
    )


def test_lists_that_name_no_device_have_one_in_each_row(tmp_path: Path) -> None:
    (tmp_path / "down.json").write_text(
        json.dumps(
            [{"tcp_speed_results": [4121, 4753.5]}, {"tcp_speed_results": [0]}, {"tcp_speed_results": [1]}]
        )
    )
    found = mobiperf(tmp_path / "down.json", None).devices
    assert [(d.name, d.moments) for d in found] == [
        ("measurement 1", (DeviceMoment(0.0, True, None, 4.43725),)),
        ("measurement 3", (DeviceMoment(0.0, True, None, 0.001),)),
    ]


DEEP, LARGE = "[" * 100_000, 10**400


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no list of measurements"),
        ("[1]", "measurement 1 is no object"),
        ('[{"tcp_speed_results": "fast"}]', "measurement 1"),
        ('[{"tcp_speed_results": ["fast"]}]', "measurement 1"),
        ("[]", "no measurement with a rate"),
        ('[{"device_id": "x", "timestamp": "noon", "tcp_speed_results": [1]}]', "noon"),
        ('[{"device_id": "x", "timestamp": NaN, "tcp_speed_results": [1]}]', "timestamp must be a number"),
        (f'[{{"device_id": "x", "timestamp": {LARGE}, "tcp_speed_results": [1]}}]', "too large"),
        (f'[{{"tcp_speed_results": [{LARGE}]}}]', "measurement 1: int too large"),
        pytest.param(
            f'[{{"tcp_speed_results": "{DEEP}"}}]', "measurement 1: maximum recursion", id="deep rates"
        ),
        pytest.param(DEEP, "no list of measurements", id="deep list"),
        ('[{"values": [1, 2]}]', "no measurement with a rate"),
    ],
)
def test_bad_measurements_are_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "down.json").write_text(text)
    with pytest.raises(DataError, match="MobiPerf") as error:
        mobiperf(tmp_path / "down.json", None)
    assert says in str(error.value)
