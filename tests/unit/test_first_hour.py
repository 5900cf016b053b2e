"""The first hour: what counts as a step, and that its page says what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from measuring import benchmark
from waits import until

hour = benchmark("first_hour")
hand = benchmark("person")


@pytest.fixture
def person(tmp_path: Path) -> Any:
    """Somebody with an empty environment, and a file that every machine has."""
    own = tmp_path / "data.npz"
    own.write_bytes(b"mine")
    return hand.Person(tmp_path / "machines", tmp_path / "environment", (own,))


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("", "a\nb\n", 2),
        ("a\nb\n", "a\nb\n", 0),
        ("a\nb\nc\n", "a\nB\nc\n", 1),
        ("a\nb\nc\n", "a\n", 0),  # what is taken out is not written
        ("a\n", "a\n\n   \nb\n", 1),  # nor is an empty line
        ("a\nb\nc\n", "x\ny\nb\nc\nz\n", 3),
    ],
)
def test_lines_that_differ_are_by_hand(before: str, after: str, lines: int) -> None:
    assert hand.lines_by_hand(before, after) == lines


def test_a_part_of_an_example_is_replaced_or_it_has_changed() -> None:
    assert hand.replaced("head\nold part\nnext\n", "old", "next", "new\n") == "head\nnew\nnext\n"
    for first, last in (("gone", "next"), ("next", "old")):
        with pytest.raises(hand.WentWrong, match="has changed"):
            hand.replaced("head\nold part\nnext\n", first, last, "")


def test_machines_have_only_their_own_and_what_is_carried(person: Any) -> None:
    person.writes("a", "kit/start.sh", "echo started\n\n# and no more\n")
    person.carries("a", "b", "kit")
    person.tells("b", "a token")
    said = person.types("b", "sh kit/start.sh; cat $DATA; ls")
    assert said == "started\nminedata.npz\nhome\nkit\n"
    assert "kit" not in person.types("c", "ls")
    done = [(step.machine, step.does, step.lines, step.files) for step in person.steps]
    assert done == [
        ("a", "writes", 2, 0),
        ("b", "carries", 0, 1),
        ("b", "carries", 1, 0),
        ("b", "types", 0, 0),
        ("c", "types", 0, 0),
    ]


def test_a_command_that_fails_is_no_step(person: Any) -> None:
    with pytest.raises(hand.WentWrong, match="ended with 3: no such luck"):
        person.types("a", "echo no such luck; exit 3")
    with pytest.raises(hand.WentWrong, match="without 'ready'"):
        person.starts("a", "echo off", until="ready")
    assert person.steps == []


def test_what_stays_is_waited_for_and_ended_wherever_it_went(person: Any) -> None:
    over = "until [ -e go ]; do sleep 0.1; done; echo over"
    server = person.starts("a", f"setsid sleep 600 & echo ready $!; {over}", until="ready")
    (said,) = (line for line in server.said.splitlines() if line.startswith("ready"))
    (person.at("a") / "go").touch()
    person.waits(server, "over")
    assert server.end() == f"{said}\nover\n"
    assert [(step.does, step.what) for step in person.steps] == [("types", server.command)]
    person.ends()
    until(lambda: is_gone(int(said.split()[1])))


def is_gone(number: int) -> bool:
    """Whether no process of this number runs; one that is ending may go between two looks."""
    try:
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_bytes_count_once_and_without_what_is_kept_aside(tmp_path: Path) -> None:
    for name, count in (("lib/a", 10), (".cache/b", 100), ("home/c", 1000)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * count)
    (tmp_path / "home/d").hardlink_to(tmp_path / "lib/a")
    assert hour.installed_bytes(tmp_path / "lib") == 10
    assert hour.installed_bytes(tmp_path / "lib", tmp_path / "home", tmp_path / ".cache") == 1010


def test_a_row_adds_up_what_was_done() -> None:
    steps = (
        hand.Step("a", "types", "pip install it", seconds=30.0),
        hand.Step("b", "types", "pip install it"),
        hand.Step("a", "types", "it new", seconds=None, why="no network"),
        hand.Step("a", "writes", "app.py", lines=3),
        hand.Step("a", "writes", "app.py", lines=2),
        hand.Step("b", "writes", "app.py", lines=1),
        hand.Step("b", "carries", "kit", files=12),
        hand.Step("b", "carries", "a token", lines=1),
        hand.Step("a", "types", "it run", seconds=12.4),
    )
    way = hour.Way("It", hour.LIVE, "1.0", steps, 42.4, hour.LEARNED)
    row = (
        "4 (1 not run here)",
        "2",
        "6",
        "12 files, 1 lines told",
        "30",
        "12",
        "42",
        "trained: 90.0 % right",
    )
    assert hour.figures(way) == row
    assert (
        hour.figures(hour.Way("It", hour.LIVE, "1.0", steps, 42.4, 0.25))[-1] == "not trained: 25.0 % right"
    )
    assert hour.figures(hour.Way("It", hour.LIVE, "1.0", (), 0.0, None))[-1] == "none"


def test_the_page_is_made_of_the_figures() -> None:
    data = json.loads(hour.DATA.read_text(encoding="utf-8"))
    assert hour.PAGE.read_text(encoding="utf-8") == hour.page(data), (
        "python -m benchmarks.first_hour --render"
    )
    ways = [hour.Way.from_json(found) for found in data["ways"]]
    assert [(way.product, way.goal) for way in ways] == [
        (p, goal) for p in hour.WAYS for goal in (hour.SIMULATED, hour.LIVE)
    ]
    for way in ways:
        assert all(step.why for step in way.steps if step.seconds is None), "not run, and nobody knows why"
        assert way.accuracy is not None or way.wrong, "no model, and nobody knows why"
