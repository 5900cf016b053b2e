"""Many devices are let in by one command, and open invitations are listed and withdrawn."""

from __future__ import annotations

import csv
import json
import shlex
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from commands import anabranch, answer

from anabranch.cli.members import read_token
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


def test_the_port_that_is_printed_is_said_to_be_the_usual_one(place: Path) -> None:
    for more in ([], ["--count", 2, "--out", "tokens.csv"]):
        head, command = anabranch(place, "admin", "enrol", "device", *more).stdout.splitlines()
        assert head.endswith(
            "device (HOST is the server's name, and 7070 its port unless server.address says another):"
        )
        assert "--server HOST:7070 --token" in command


def test_names_from_a_file(place: Path) -> None:
    (place / "plain.csv").write_text("ward-1\nward-2\n\n")
    (place / "table.csv").write_text("site,Name\nnorth,bed-1\nsouth, bed-2\n")
    done = anabranch(place, "admin", "enrol", "--names", "plain.csv")
    assert [line.partition(",")[0] for line in done.stdout.splitlines()] == ["ward-1", "ward-2"]
    assert anabranch(place, "admin", "enrol", "--names", "table.csv", "--valid-s", 1000).returncode == 0
    assert listed(place) == dict.fromkeys(["bed-1", "bed-2", "ward-1", "ward-2"], "open")


def test_a_table_of_a_spreadsheet_elsewhere(place: Path) -> None:
    """Where a comma is for decimals, Excel and LibreOffice put something else between cells."""
    (place / "n.csv").write_text('Name;ward\r\nbed-1;north\r\nbed-2;"south, 2"\r\n', "utf-8-sig", newline="")
    done = anabranch(place, "admin", "enrol", "--names", "n.csv")
    assert done.returncode == 0, done.stderr
    assert listed(place) == {"bed-1": "open", "bed-2": "open"}
    (place / "line").write_text("bed-1\tt.oken\tab12\t1795828912\r\n")
    assert read_token(place / "line") == ("t.oken", "ab12")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "say who"),
        (("a", "--names", "n.csv"), "say who"),
        (("--names", "n.csv", "--count", 2), "say who"),
        (("--names", "nowhere.csv"), "cannot be read"),
        (("--names", "empty.csv"), "there is no name in it"),
        (("--names", "twice.csv"), "'a' is there twice"),
        (("--names", "bad.csv"), "which has ' '"),
    ],
)
def test_what_is_refused(place: Path, words: tuple[object, ...], why: str) -> None:
    for name, text in (("n", "a"), ("empty", "name\n"), ("twice", "a\nb\na"), ("bad", "a b\n")):
        (place / f"{name}.csv").write_text(text)
    done = anabranch(place, "admin", "enrol", *words)
    assert (done.returncode, why in done.stderr) == (REFUSED, True), done.stderr
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


@pytest.mark.parametrize("valid_s", ["1e30", "nan", "inf", "0", "315360001"])
@pytest.mark.parametrize("who", ["enrol", "operator"])
def test_how_long_a_token_may_be_good(who: str, valid_s: str, place: Path) -> None:
    refused = anabranch(place, "admin", who, "someone", "--valid-s", valid_s)
    assert refused.returncode == REFUSED
    assert "--valid-s" in refused.stderr
    assert listed(place) == {}
    assert not (place / "someone").exists()


def test_a_token_that_an_older_release_made_good_for_ever_is_listed(place: Path) -> None:
    with Authority.open(place / "anabranch-identity") as authority:
        authority.invite("old", 60.0)
        end = authority.certificate.not_valid_after_utc
    register = sqlite3.connect(place / "anabranch-identity" / "register.db")
    with closing(register), register:
        register.execute("UPDATE tokens SET expires_at = 1e30")
    assert listed(place) == {"old": "open"}
    assert f"{end:%Y-%m-%d %H:%M:%S} UTC" in anabranch(place, "admin", "invitations").stdout


@pytest.mark.parametrize("command", [("enrol",), ("operator",), ("revoke",)], ids=lambda words: words[0])
def test_a_name_that_is_none_is_a_bad_argument(command: tuple[str, ...], place: Path) -> None:
    refused = anabranch(place, "admin", *command, "dev 1/../x")
    assert (refused.returncode, "name must be" in refused.stderr) == (REFUSED, True)


@pytest.mark.parametrize("head", [False, True], ids=["the line", "with the head"])
def test_a_device_is_handed_its_line_of_the_file(head: bool, place: Path) -> None:
    said = answer(anabranch(place, "admin", "enrol", "device", "--count", 3, "--out", "tokens.csv", "--json"))
    first, _, second, _ = lines = (place / "tokens.csv").read_text().splitlines()
    file = place / "one"
    file.write_text("\n".join([first, second] if head else [second]) + "\n")
    token = second.split(",")[1]
    assert read_token(file) == (token, said["ca_sha256"])
    file.write_text(f"{token}\n")
    assert read_token(file) == (token, "")
    for wrong in ("", "\n".join(lines), "\n".join(lines[1:]), "a,b"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="handed its own line"):
            read_token(file)


def test_what_is_left_of_an_authority_without_its_key(place: Path) -> None:
    """Nothing says to make one in that folder, which is refused, or that it is of another release."""
    folder = place / "anabranch-identity"
    key = (folder / "ca.key").read_bytes()
    (folder / "ca.key").write_bytes(b"not a key")
    damaged = anabranch(place, "admin", "enrol", "a")
    assert (damaged.returncode, "restore it from a backup" in damaged.stderr) == (REFUSED, True)
    (folder / "ca.key").unlink()
    for command in (["enrol", "a"], ["ca", "init"]):
        missing = anabranch(place, "admin", *command)
        assert missing.returncode == REFUSED
        assert "ca.key is missing" in missing.stderr
    (folder / "ca.key").write_bytes(key)
    (folder / "register.db").write_bytes(b"")
    empty = anabranch(place, "admin", "enrol", "a")
    assert (empty.returncode, "register.db is empty or damaged" in empty.stderr) == (REFUSED, True)


def test_what_is_said_next_is_for_the_authority_that_was_named(tmp_path: Path) -> None:
    """A second one, as after a key was lost: a token of the usual one would let nobody in."""
    anabranch(tmp_path, "admin", "ca", "init")
    said = anabranch(tmp_path, "admin", "ca", "init", "--folder", "the new").stdout
    command = shlex.split(said.splitlines()[-1].replace("NAME", "device-1"))
    assert command[0] == "anabranch"
    anabranch(tmp_path, *command[1:])
    known = anabranch(tmp_path, "admin", "invitations", "--folder", "the new")
    assert "device-1" in known.stdout


def test_what_a_name_may_have_is_said_exactly(place: Path) -> None:
    """'ä' is a letter to whoever types it."""
    file = place / "names.txt"
    file.write_text("device-1\ngerät-2\n")
    for words, odd in (
        (("admin", "enrol", "gerät-1"), "ä"),
        (("admin", "enrol", "--names", file, "--out", "tokens.csv"), "ä"),
        (("client", "synthetic", "--id", "gerät-1"), "ä"),
        (("client", "synthetic", "--id", "my device"), " "),
        (("client", "synthetic", "--server", "127.0.0.1:1/größe"), "ö"),
    ):
        said = anabranch(place, *words)
        assert said.returncode == REFUSED, words
        assert "1 to 64 ASCII letters, digits, '.', '_' or '-', the first a letter or a digit" in said.stderr
        assert f"which has {odd!r}" in said.stderr
    long = anabranch(place, "client", "synthetic", "--id", "d" * 65)
    assert (long.returncode, "which has" in long.stderr) == (REFUSED, False)
