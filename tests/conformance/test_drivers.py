"""One suite for every driver: the same things said to each get the same answers and leave the same journal.

What a driver answers is compared with what is written here, its journal with that of the live server, record
by record, but for what time it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drivers import CAPABILITY, NOT_HEARD, Driver, driver, story

from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.errors import ConfigError
from anabranch.core.journal import Record

DRIVERS = ("live", "local", "simulated")
INT8 = {"uplink": {"codec": "int8"}}


def config(**tables: Any) -> Config:
    base = {"strategy": {"name": "fedasync"}, "server": {"drain_s": 1.0}}
    return merge([("test", base), ("scenario", tables)])


def wrong_codec(run: Driver) -> list[str]:
    """Refused before a byte of it is taken, and not on record; the task is still open."""
    run.enrol("a")
    return [
        run.ask("a", "t-1"),
        run.push("a", "t-1", "u-1", codec="int4"),
        run.push("a", "t-1", "u-1", codec="raw"),
    ]


def bad_values(run: Driver) -> list[str]:
    """On record with its flaw: the task is closed."""
    run.enrol("a")
    return [
        run.ask("a", "t-1"),
        run.push("a", "t-1", "u-1", value=float("nan"), codec="raw"),
        run.push("a", "t-1", "u-2"),
    ]


def bad_values_twice(run: Driver) -> list[str]:
    """An error the first time; who did not hear it, and sends the same again, hears what was decided."""
    run.enrol("a")
    first = [run.ask("a", "t-1"), run.push("a", "t-1", "u-1", value=1e30)]
    return [*first, run.push("a", "t-1", "u-1", value=1e30), run.push("a", "t-1", "u-1"), run.ask("a", "t-2")]


def too_many_bytes(run: Driver) -> list[str]:
    """More than the codec can need is refused before it comes, and not on record; the task is still open."""
    run.enrol("a")
    told = [run.ask("a", "t-1"), run.push("a", "t-1", "u-1", codec="raw", more=b"1234")]
    return [*told, run.push("a", "t-1", "u-1")]


def too_large_values(run: Driver) -> list[str]:
    """As those that are no numbers."""
    run.enrol("a")
    return [run.ask("a", "t-1"), run.push("a", "t-1", "u-1", value=1e30)]


def expired_lease(run: Driver) -> list[str]:
    """No reason to stop: a late update may still count. Then there is."""
    run.enrol("a")
    asked = run.ask("a", "t-1")
    run.lapse("a", "t-1")
    return [asked, run.beat("a", "t-1", 1.0), run.push("a", "t-1", "u-1"), run.beat("a", "t-1", 2.0)]


def sent_twice(run: Driver) -> list[str]:
    """The same answer, and not on record again; another update of the same id is not taken."""
    run.enrol("a")
    first = [run.ask("a", "t-1"), run.push("a", "t-1", "u-1"), run.push("a", "t-1", "u-1")]
    return [*first, run.push("a", "t-1", "u-1", value=2.0), run.push("a", "t-1", "u-2")]


def said_twice(run: Driver) -> list[str]:
    """What a device has said before changes nothing, and is not on record."""
    run.enrol("a")
    run.enrol("a")
    run.enrol("a", replace(CAPABILITY, examples=7))
    asked = [run.ask("a", "t-1"), run.ask("a", "t-1")]
    run.drop("a", "t-1")
    run.drop("a", "t-1")
    return [*asked, run.beat("a", "t-1", 1.0), run.push("a", "t-1", "u-1"), run.ask("b", "t-2")]


def beats(run: Driver) -> list[str]:
    """On record are those that renew the lease by more than a trifle; nobody's but its device's."""
    run.enrol("a")
    run.enrol("b")
    asked = run.ask("a", "t-1")
    told = [run.beat("a", "t-1", progress) for progress in (0.0, 1.0, 1.0, 0.5, 2.0)]
    return [asked, *told, run.beat("b", "t-1", 9.0), run.beat("a", "t-9", 1.0)]


def ordered_twice(run: Driver) -> list[str]:
    """What an operator has ordered before changes nothing, and is not on record."""
    run.enrol("a")
    told = []
    for _ in range(2):
        run.order(ev.Paused)
    told.append(run.ask("a", "t-1"))
    for _ in range(2):
        run.order(ev.Resumed)
    told.append(run.ask("a", "t-2"))
    for _ in range(2):
        run.order(lambda now: ev.Quarantined(now, "a", "suspicious"))
    told += [run.push("a", "t-2", "u-2"), run.ask("a", "t-3"), run.beat("a", "t-2", 1.0)]
    for _ in range(2):
        run.order(lambda now: ev.Released(now, "a"))
    return [*told, run.ask("a", "t-4")]


def upload_now(run: Driver) -> list[str]:
    """Who is far behind is told so."""
    told = []
    for client_id in ("a", "b"):
        run.enrol(client_id)
    told += [run.ask("a", "t-a"), run.ask("b", "t-1"), run.push("b", "t-1", "u-1"), run.beat("a", "t-a", 1.0)]
    return [*told, run.ask("b", "t-2"), run.push("b", "t-2", "u-2"), run.beat("a", "t-a", 2.0)]


def asked_anew(run: Driver) -> list[str]:
    """A device that asks anew gives its task up, to whoever waits for the place."""
    for client_id in ("a", "b"):
        run.enrol(client_id)
    told = [run.ask("a", "t-1"), run.ask("a", "t-2"), run.push("a", "t-1", "u-1")]
    return [*told, run.ask("b", "t-3"), run.ask("a", "t-4"), run.ask("b", "t-5")]


def the_end(run: Driver) -> list[str]:
    """A budget is used up: no more tasks, no more updates."""
    for client_id in ("a", "b"):
        run.enrol(client_id)
    told = [run.ask("a", "t-a"), run.ask("b", "t-b"), run.push("a", "t-a", "u-a")]
    return [*told, run.beat("b", "t-b", 1.0), run.push("b", "t-b", "u-b"), run.ask("a", "t-c")]


def the_end_by_updates(run: Driver) -> list[str]:
    """What was refused is no update of the budget; the last one may publish no version."""
    for client_id in ("a", "b", "c"):
        run.enrol(client_id)
    told = [run.ask("a", "t-1"), run.push("a", "t-1", "u-1", value=1e30), run.ask("a", "t-2")]
    told += [run.ask("b", "t-3"), run.ask("c", "t-4"), run.push("a", "t-2", "u-2"), run.beat("b", "t-3", 1.0)]
    told += [run.push("b", "t-3", "u-3"), run.beat("c", "t-4", 1.0), run.push("c", "t-4", "u-4")]
    return [*told, run.ask("a", "t-5"), run.push("b", "t-3", "u-3")]


def elastic(run: Driver) -> list[str]:
    """Who trains on while its update is under way asks for its next task at once."""
    run.enrol("a")
    told = [run.ask("a", "t-1"), run.ask("a", "t-2"), run.push("a", "t-1", "u-1"), run.beat("a", "t-2", 1.0)]
    return [*told, run.ask("a", "t-3"), run.push("a", "t-2", "u-2"), run.push("a", "t-3", "u-3")]


def rolled_back(run: Driver) -> list[str]:
    """A client's updates are left out of a version with the next number, and it is in quarantine.

    A task of a later version has ended, where the model that it began with would be mixed in again.
    """
    for client_id in ("a", "b"):
        run.enrol(client_id)
    told = [
        run.ask("b", "t-1"),
        run.push("b", "t-1", "u-1"),
        run.ask("a", "t-2"),
        run.push("a", "t-2", "u-2"),
    ]
    told += [run.ask("b", "t-3"), run.push("b", "t-3", "u-3"), run.ask("a", "t-4"), run.ask("b", "t-5")]
    told += [run.roll_back(9, "a"), run.roll_back(1, "c"), run.roll_back(1, "a")]
    told += [run.push("a", "t-4", "u-4"), run.push("a", "t-2", "u-2"), run.ask("a", "t-6")]
    return [*told, run.push("b", "t-5", "u-5"), run.ask("b", "t-7")]


def published_seldom(run: Driver) -> list[str]:
    """Tasks start from the last version that was published; a rollback publishes at once."""
    for client_id in ("a", "b"):
        run.enrol(client_id)
    told = []
    for turn in range(3):
        told += [run.ask("a", f"t-{turn}"), run.fetch("a", f"t-{turn}").partition(" of ")[0]]
        told.append(run.push("a", f"t-{turn}", f"u-{turn}", value=0.3))
    told += [run.ask("b", "t-b"), run.push("b", "t-b", "u-b"), run.ask("a", "t-3"), run.roll_back(2, "b")]
    return [*told, run.ask("a", "t-4"), run.push("a", "t-4", "u-4"), run.ask("a", "t-5")]


SOON = {"server": {"lease_s": 0.2, "lease_min_s": 0.2}}
Scenario = Callable[[Driver], list[str]]
SCENARIOS: dict[Scenario, tuple[Config, list[str]]] = {
    wrong_codec: (config(**INT8), ["of version 0", "InvalidUpdate", "published"]),
    bad_values: (config(), ["of version 0", "InvalidUpdate", "UnknownTask"]),
    too_large_values: (config(), ["of version 0", "InvalidUpdate"]),
    bad_values_twice: (
        config(),
        ["of version 0", "InvalidUpdate", "rejected invalid", "IdTaken", "of version 0"],
    ),
    too_many_bytes: (config(), ["of version 0", "TooLarge", "published"]),
    expired_lease: (config(**SOON), ["of version 0", "", "published", "cancel"]),
    sent_twice: (config(), ["of version 0", "published", "published", "IdTaken", "UnknownTask"]),
    said_twice: (
        config(),
        ["of version 0", "of version 0", "cancel", "UnknownTask", "refused unknown_client"],
    ),
    beats: (config(), ["of version 0", *[""] * 5, "cancel", "cancel"]),
    ordered_twice: (
        config(),
        ["refused paused", "of version 0", "UnknownTask", "refused quarantined", "cancel", "of version 0"],
    ),
    upload_now: (
        config(server={"upload_now_versions": 2}),
        [*["of version 0"] * 2, "published", "", "of version 1", "published", "upload_now"],
    ),
    asked_anew: (
        config(server={"concurrency": 1}),
        [*["of version 0"] * 2, "UnknownTask", *["refused at_capacity"] * 2, "of version 0"],
    ),
    the_end: (
        config(run={"versions_max": 1}),
        [*["of version 0"] * 2, "published", "finished", "rejected run_finished", "refused run_finished"],
    ),
    the_end_by_updates: (
        config(run={"updates_max": 2}, strategy={"name": "fedbuff", "buffer_size": 3}),
        [
            *["of version 0", "InvalidUpdate", *["of version 0"] * 3, "held", "", "held"],
            *["finished", "rejected run_finished", "refused run_finished", "held"],
        ],
    ),
    elastic: (
        config(client={"push": "elastic"}, server={"tasks_per_client": 2}),
        [*["of version 0"] * 2, "published", "", "of version 1", "published", "published"],
    ),
    rolled_back: (
        config(),
        [
            *["of version 0", "published", "of version 1", "published", "of version 2", "published"],
            *["of version 3", "of version 3", "UnknownVersion", "ConfigError", "version 4 without 1"],
            *["UnknownTask", "published", "refused quarantined", "UnknownTask", "of version 4"],
        ],
    ),
    published_seldom: (
        config(downlink={"codec": "log(1)", "publish_every_versions": 2}),
        [
            *["of version 0", "all", "published"] * 2,
            *["of version 2", "all", "published", "of version 2", "published", "of version 4"],
            *["version 5 without 1", "of version 5", "published", "of version 5"],
        ],
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_every_driver_answers_and_logs_the_same(scenario: Scenario, tmp_path: Path) -> None:
    settings, expected = SCENARIOS[scenario]
    journals = {}
    for name in DRIVERS:
        with driver(name, settings, tmp_path / name) as run:
            assert scenario(run) == expected, name
        journals[name] = story(run.journal())
    assert journals["local"] == journals["live"]
    assert journals["simulated"] == journals["live"]


def parts(run: Driver) -> list[str]:
    """Every task is of a part, and begins with what its device decodes: whole at first, and then of that."""
    for client_id in ("a", "b"):
        run.enrol(client_id)
    told = []
    for turn in range(3):
        for client_id in ("a", "b"):
            task_id = f"t-{client_id}{turn}"
            told += [run.ask(client_id, task_id), run.fetch(client_id, task_id)]
        told.append(run.push("a", f"t-a{turn}", f"u-a{turn}", value=0.3))
        if turn == 1:
            run.drop("b", "t-b1")
        else:
            told.append(run.push("b", f"t-b{turn}", f"u-b{turn}", value=-0.7))
    return told


@pytest.mark.parametrize("downlink", ["int8", "log(0.5)"])
def test_a_planner_and_a_lossy_downlink_go_together(downlink: str, tmp_path: Path) -> None:
    """The same parts of the same decoded models, whichever way they come to a device."""

    def told(name: str, codec: str) -> tuple[list[str], list[Record]]:
        settings = config(submodel={"name": "ist", "parts": 2}, downlink={"codec": codec}, **INT8)
        with driver(name, settings, tmp_path / name / codec) as run:
            answers = parts(run)
        return answers, story(run.journal())

    answers, journal = told("live", downlink)
    assert told("local", downlink) == (answers, journal)
    assert told("simulated", downlink) == (answers, journal)
    exact, _ = told("simulated", "raw")
    begun = [i for i, answer in enumerate(answers) if "{" in answer]
    assert len(begun) == 6, "each task is of a part"
    assert [i for i in begun if answers[i] != exact[i]] == begun[2:], (
        "what is encoded is not what was published"
    )
    assert answers[begun[0]] != answers[begun[1]], "two devices have two parts"
    covered = [r["submodel"] for r in journal if r["kind"] == "update"]
    assert len(covered) == 5
    assert None not in covered


# What cannot be said over Flower's Grid, and why not. Heartbeats are passed over in what can.
NOT_OVER_GRIDS: dict[Scenario, str] = {
    wrong_codec: "a task has one reply: no other can follow one that is refused, so the task is given back",
    sent_twice: "a task has one reply",
    bad_values_twice: "a task has one reply",
    too_many_bytes: "a task has one reply",
    the_end_by_updates: "a task has one reply",
    said_twice: "a node says nothing of itself, and gives no task back but with an error",
    beats: "a node sends no heartbeats",
    asked_anew: "a node is asked, and not while it has a task",
    ordered_twice: "a run on Flower has no operator",
    rolled_back: "a run on Flower has no operator",
    published_seldom: "models travel whole on Flower's Grid, with every message",
}


@pytest.mark.parametrize(
    "scenario", [s for s in SCENARIOS if s not in NOT_OVER_GRIDS], ids=lambda s: s.__name__
)
def test_a_grid_answers_and_logs_as_the_simulator(scenario: Scenario, tmp_path: Path) -> None:
    """And so as the live server; but for what no node says."""
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'anabranch[flower]'")
    from grid_driver import told_to_grids

    settings, expected = SCENARIOS[scenario]
    journals = {}
    for name in ("simulated", "grid"):
        with driver(name, settings, tmp_path / name) as run:
            said = zip(scenario(run), expected, strict=True)
            assert [answer for answer, e in said if answer not in (e, NOT_HEARD)] == [], name
            journals[name] = told_to_grids(story(run.journal()))
    assert journals["grid"] == journals["simulated"]


@pytest.mark.parametrize("name", DRIVERS)
def test_every_driver_refuses_the_same_settings(name: str, tmp_path: Path) -> None:
    """A strategy that adds updates up would add again what a device keeps of its own."""
    settings = config(strategy={"name": "fedbuff"}, client={"push": "elastic", "merge_weight": 0.5})
    with pytest.raises(ConfigError, match=r"client\.merge_weight = 1"), driver(name, settings, tmp_path):
        pass
