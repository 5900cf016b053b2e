"""What a command's end says: the page has every code of the table, and messages are in plain words."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import anabranch

from anabranch.core.errors import OUTCOMES, FolderMissing, StoreError, StoreUnreachable, Unavailable

PAGE = Path(__file__).parents[2] / "docs" / "exit-codes.md"
OF_NO_ERROR = {0, 1, 129, 130, 137, 143}


def rows() -> Iterator[tuple[int, str, list[str]]]:
    """The page's table: code, name, and what is said of it."""
    for line in PAGE.read_text().splitlines():
        if found := re.match(r"\| (\d+) \| (?:`(\w+)`)? ?\| (.*) \| (.*)\|$", line):
            yield int(found[1]), found[2] or "", [found[3], found[4]]


def test_the_page_lists_every_code() -> None:
    assert {(code, name) for code, name, _ in rows() if name} == {
        (outcome.exit_code, error.__name__) for error, outcome in OUTCOMES.items()
    }
    assert {code for code, name, _ in rows() if not name} == OF_NO_ERROR
    assert [code for code, name, said in rows() if name and not all(text.strip() for text in said)] == []
    assert [code for code, _, _ in rows()] == sorted(code for code, _, _ in rows())


@pytest.fixture
def nobody() -> str:
    """An address at which nobody serves."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return "127.0.0.1:{1}".format(*taken.getsockname())


def test_a_server_that_is_not_there_is_said_in_words(tmp_path: Path, nobody: str) -> None:
    done = anabranch(tmp_path, "admin", "status", "--admin", nobody)
    assert done.returncode == OUTCOMES[Unavailable].exit_code
    said, _, what_helps = done.stderr.partition("; ")
    assert said == f"error: {nobody}: nobody answers (Connection refused)"
    assert "says `serving`" in what_helps
    assert "--admin" in what_helps


def test_a_database_that_is_not_there_has_a_code_of_its_own(tmp_path: Path, nobody: str) -> None:
    (tmp_path / "data").mkdir()
    done = anabranch(tmp_path, "verify", "data", "--database", f"postgresql://me:secret@{nobody}/runs")
    assert done.returncode == OUTCOMES[StoreUnreachable].exit_code, done.stderr
    assert done.stderr.startswith(f"error: postgresql://me:***@{nobody}/runs cannot be reached: ")
    assert len(done.stderr.splitlines()) == 1


def test_folders_and_files_that_cannot_be_used(tmp_path: Path) -> None:
    missing = anabranch(tmp_path, "admin", "attest-restore", "--data-dir", "nowhere", "--insecure")
    assert missing.returncode == OUTCOMES[FolderMissing].exit_code, missing.stderr
    (tmp_path / "file").write_text("")
    unusable = anabranch(tmp_path, "admin", "ca", "init", "--folder", "file")
    assert unusable.returncode == OUTCOMES[StoreError].exit_code, unusable.stderr


def test_windows_is_refused_in_one_line() -> None:
    code = "import anabranch.cli.main as main; main.PLATFORM = 'nt'; main.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert done.stderr == (
        "error: anabranch runs on Linux and macOS: on Windows use WSL 2, or the container images\n"
    )
