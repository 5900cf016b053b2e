"""A folder is one run's: numbered siblings, claims, and what an explicit folder that holds a run is told."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.core.errors import ConfigError
from anabranch.reports.folders import MARKS, claimed, has_ended, holds_run
from anabranch.reports.result import RESULT_FILE, Result


def test_the_next_folder_of_a_name_is_numbered(tmp_path: Path) -> None:
    for name in ("run", "run-2", "run-3"):
        with claimed(tmp_path / "deep" / "run", explicit=False) as folder:
            assert folder == tmp_path / "deep" / name
            (folder / RESULT_FILE).write_text("{}")


def test_runs_that_begin_together_get_folders_of_their_own(tmp_path: Path) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(8) as threads:
        claims = [claimed(tmp_path / "run", explicit=False) for _ in range(24)]
        assert len(set(threads.map(stack.enter_context, claims))) == 24


@pytest.mark.parametrize("mark", MARKS)
def test_an_explicit_folder_is_never_another_runs(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).touch()
    assert holds_run(tmp_path)
    with pytest.raises(ConfigError, match="name another folder with --out"), claimed(tmp_path, explicit=True):
        pass


def test_a_folder_goes_if_nothing_came_of_it_unless_it_was_there(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for folder, explicit in ((tmp_path / "a", False), (tmp_path / "b", True), (theirs, True)):
        with pytest.raises(KeyError), claimed(folder, explicit):
            raise KeyError
        assert folder.exists() == (folder == theirs)


def test_an_interrupted_run_has_not_ended(tmp_path: Path, record: Callable[..., Result]) -> None:
    assert not has_ended(tmp_path)
    replace(record(), status="interrupted", why="Ctrl-C").write(tmp_path)
    assert not has_ended(tmp_path)
    record().write(tmp_path)
    assert has_ended(tmp_path)
