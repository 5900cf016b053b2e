"""Many devices are let in by one command, and open invitations are listed and withdrawn."""

from __future__ import annotations

import csv
import json
import stat
from pathlib import Path

import pytest
from commands import anabranch, answer

from anabranch.core.errors import OUTCOMES, ConfigError
from anabranch.identity.authority import Authority

REFUSED = OUTCOMES[ConfigError].exit_code


@pytest.fixture
def place(tmp_path: Path) -> Path:
    answer(anabranch(tmp_path, "admin", "ca", "init", "--json"))
    return tmp_path


def listed(place: Path) -> dict[str, str]:
    """Open invitations by name, with their state."""
    lines = anabranch(place, "admin", "invitations", "--json").stdout.splitlines()
    return {line["name"]: line["state"] for line in map(json.loads, lines)}


def test_a_file_of_tokens(place: Path) -> None:
    said = answer(anabranch(place, "admin", "enrol", "device", "--count", 3, "--out", "tokens.csv", "--json"))
    assert (said["file"], said["invitations"]) == ("tokens.csv", 3)
    file = place / "tokens.csv"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert [row["name"] for row in rows] == ["device-0", "device-1", "device-2"]
    assert {row["ca_sha256"] for row in rows} == {said["ca_sha256"]}
    with Authority.open(place / "anabranch-identity") as authority:
        open_ids = {i.token_id: i.name for i in authority.invitations()}
    assert {row["token"].partition(".")[0]: row["name"] for row in rows} == open_ids
    again = anabranch(place, "admin", "enrol", "device", "--count", 3, "--out", "tokens.csv")
    assert again.returncode == REFUSED
    assert "it may hold tokens" in again.stderr
    assert len(listed(place)) == 3, "and none was made"


def test_names_from_a_file(place: Path) -> None:
    (place / "plain.csv").write_text("ward-1\nward-2\n\n")
    (place / "table.csv").write_text("site,Name\nnorth,bed-1\nsouth, bed-2\n")
    done = anabranch(place, "admin", "enrol", "--names", "plain.csv")
    assert [line.partition(",")[0] for line in done.stdout.splitlines()] == ["ward-1", "ward-2"]
    assert anabranch(place, "admin", "enrol", "--names", "table.csv", "--valid-s", 1000).returncode == 0
    assert listed(place) == dict.fromkeys(["bed-1", "bed-2", "ward-1", "ward-2"], "open")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "say who"),
        (("a", "--names", "n.csv"), "say who"),
        (("--names", "n.csv", "--count", 2), "say who"),
        (("--names", "nowhere.csv"), "cannot be read"),
        (("--names", "empty.csv"), "there is no name in it"),
        (("--names", "twice.csv"), "'a' is there twice"),
        (("--names", "bad.csv"), "name"),
    ],
)
def test_what_is_refused(place: Path, words: tuple[object, ...], why: str) -> None:
    for name, text in (("n", "a"), ("empty", "name\n"), ("twice", "a\nb\na"), ("bad", "a b\n")):
        (place / f"{name}.csv").write_text(text)
    done = anabranch(place, "admin", "enrol", *words)
    assert done.returncode != 0
    assert why in done.stderr
    assert listed(place) == {}


def test_invitations_are_withdrawn(place: Path) -> None:
    for name in ("a", "b", "c", "d"):
        answer(anabranch(place, "admin", "enrol", name, "--json"))
    with Authority.open(place / "anabranch-identity", lambda: 1e9) as before:
        before.invite("old", 10.0)
    assert listed(place)["old"] == "expired"
    assert answer(anabranch(place, "admin", "invitations", "--withdraw", "a", "--json")) == {"withdrawn": 1}
    unknown = anabranch(place, "admin", "invitations", "--withdraw", "a")
    assert (unknown.returncode, "'a' has no open token" in unknown.stderr) == (REFUSED, True)
    assert answer(anabranch(place, "admin", "invitations", "--withdraw-expired", "--json")) == {
        "withdrawn": 1
    }
    assert listed(place) == dict.fromkeys("bcd", "open")
    assert answer(anabranch(place, "admin", "invitations", "--withdraw-all", "--json")) == {"withdrawn": 3}
    assert listed(place) == {}
