"""A file that somebody names, and that is there already, is not overwritten: it may be any other one."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import anabranch

from anabranch.core.errors import (
    OUTCOMES,
    AnabranchError,
    AppError,
    ConfigError,
    FolderMissing,
    StoreError,
    Unavailable,
)


@pytest.mark.parametrize(
    ("command", "then"),
    [
        (("admin", "export", "mine.toml", "--admin", "127.0.0.1:1"), Unavailable),
        (("bundle", "make", "none.py:App", "--out", "mine.toml"), AppError),
        (("calibrate", "nowhere", "--out", "mine.toml"), FolderMissing),
        (("trace", "mine.toml", "--synthetic", "3"), None),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
def test_a_file_that_is_there_is_replaced_with_force_alone(
    command: tuple[str, ...], then: type[AnabranchError] | None, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("[run]\n")
    refused = anabranch(tmp_path, *command)
    said = "error: mine.toml is there already: name another file, or replace this one with --force\n"
    assert (refused.returncode, refused.stderr) == (OUTCOMES[ConfigError].exit_code, said)
    assert mine.read_text() == "[run]\n"
    forced = anabranch(tmp_path, *command, "--force")
    assert forced.returncode == (0 if then is None else OUTCOMES[then].exit_code), forced.stderr
    assert "is there already" not in forced.stderr
    assert (mine.read_text() == "[run]\n") is (then is not None)


def test_a_folder_is_not_said_to_be_replaced_by_force(tmp_path: Path) -> None:
    done = anabranch(tmp_path, "trace", ".", "--synthetic", "3")
    said = "error: . cannot be used: Is a directory\n"
    assert (done.returncode, done.stderr) == (OUTCOMES[StoreError].exit_code, said)
