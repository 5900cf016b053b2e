"""docs/files.md names every file that runs leave, a result's fields, each kind of event and its fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from commands import started
from nursery import COMMAND, run

from anabranch.core.config.privacy import Promise
from anabranch.core.config.secagg import SecaggSummary
from anabranch.core.journal import KINDS
from anabranch.reports.result import (
    ChangedSetting,
    ClientShare,
    CompressionStep,
    Coverage,
    Fairness,
    Point,
    Result,
    Staleness,
)

PAGE = (Path(__file__).parents[2] / "docs" / "files.md").read_text(encoding="utf-8")
BESIDE = re.compile(r"(\.tmp|-wal|-shm)$")
SIMULATED = (
    *("--set", "run.workload=synthetic", "--set", "fleet.clients=4", "--set", "fleet.examples_per_client=40"),
    *("--updates", 24),
)


def section(title: str) -> str:
    """The text under a heading, with the headings under it."""
    level = title.split(" ")[0]
    found = PAGE.partition(f"\n{title}\n")[2]
    assert found, title
    return re.split(rf"^#{{1,{len(level)}}} ", found, maxsplit=1, flags=re.MULTILINE)[0]


def rows(title: str) -> dict[str, set[str]]:
    """Of a section's tables: each name of a first cell, and what else its row names."""
    found: dict[str, set[str]] = {}
    for line in section(title).splitlines():
        first, _, rest = line.removeprefix("| ").partition(" | ")
        for name in re.findall(r"`([^`]+)`", first) if line.startswith("| `") else ():
            found[name] = set(re.findall(r"`([^`]+)`", rest))
    return found


def named(title: str, path: str) -> bool:
    """Whether the section has a row for a file."""
    patterns = (
        re.sub(r"<[^>]*>", "[^/]+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">"))
        for name in rows(title)
    )
    return any(re.fullmatch(pattern, BESIDE.sub("", path)) for pattern in patterns)


def files(folder: Path) -> Iterator[str]:
    """Of a folder, by their paths in it."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix()


RUN, DATA, STATE = "## The folder of a run", "## A server's data", "## A device's state"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one of each was made."""
    folder: Path = tmp_path_factory.mktemp("files")
    commands = (
        ("simulate", *SIMULATED, "--out", "run"),
        ("simulate", *SIMULATED, "--set", "uplink.codec=ef(0.9)|topk(0.1)|int8", "--out", "compressed"),
        ("search", *SIMULATED[:-2], "--updates", 4, "--warm-up-updates", 4, "--out", "found"),
        (
            *("tune", *SIMULATED, "--no-defaults", "--range", "client.learning_rate=0.1,0.2", "--trials", 2),
            *("--seeds", 1, "--fresh-seeds", 2, "--extensions", 0, "--out", "tuned"),
        ),
        ("init", "synthetic", "--out", "model"),
        ("admin", "ca", "init"),
    )
    for words in commands:
        done = run(COMMAND, *words, "--json", cwd=folder)
        assert done.returncode == 0, done.stderr
    settings = ("--set", "run.updates_max=8", "--set", "fleet.examples_per_client=40")
    done = started(
        folder, "demo", "--workload", "synthetic", "--clients", 2, "--out", "demo", *settings, "--json"
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    ("title", "where"),
    [
        (RUN, "run"),
        (RUN, "compressed"),
        ("## A search", "found"),
        ("## A tuning", "tuned"),
        ("## A model's folder", "model"),
        ("## An authority's folder", "anabranch-identity"),
        (DATA, "demo/server"),
        (STATE, "demo/devices/0"),
    ],
)
def test_every_file_is_on_the_page(place: Path, title: str, where: str) -> None:
    found = list(files(place / where))
    assert found
    unnamed = [path for path in found if not named(title, path)]
    if where in ("found", "tuned"):  # the runs that it has tried are runs
        unnamed = [path for path in unnamed if not named(RUN, path.rpartition("/")[2])]
    assert unnamed == [], "docs/files.md does not name them"


def test_a_demo_is_a_run_with_what_was_live(place: Path) -> None:
    parts = {"server": DATA, "devices": STATE, "model": "## A model's folder"}
    unnamed = [
        path
        for path in files(place / "demo")
        if path.split("/")[0] not in parts and not named("## A demo", path) and not named(RUN, path)
    ]
    assert unnamed == []


def test_every_field_of_a_result_is_on_the_page() -> None:
    table = rows("### `result.json`")
    known = set(table) | {name for told in table.values() for name in told}
    assert {f.name for f in fields(Result)} <= set(table)
    of_rows = (
        Point,
        Staleness,
        ClientShare,
        Fairness,
        Promise,
        SecaggSummary,
        CompressionStep,
        ChangedSetting,
        Coverage,
    )
    assert {f.name for cls in of_rows for f in fields(cls)} <= known


def test_every_record_of_a_journal_is_on_the_page() -> None:
    table = rows("### `journal.jsonl`")
    assert set(table) == {"run", *KINDS}
    for kind, cls in KINDS.items():
        assert {f.name for f in fields(cls)} - {"now"} <= table[kind], kind


@pytest.mark.parametrize("where", ["run", "compressed", "demo"])
def test_every_event_is_on_the_page(place: Path, where: str) -> None:
    table, measured = rows("### `events.jsonl`"), {"accuracy", "loss"}
    for line in (place / where / "events.jsonl").read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        told = table[event["kind"]] | measured if event["kind"] == "evaluated" else table[event["kind"]]
        assert set(event) - {"time_s", "kind"} <= told, event
