"""Pools of processes for runs side by side, several in one program."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from meeting import says_first, told_twice

from anabranch.api.pool import run_processes


def test_what_two_processes_have_to_say_is_said_once(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    for new in ([False, True], [False, False]):  # of the second pool what the first one has said is old
        with run_processes(2) as pool:
            both = [pool.submit(says_first, pipe, mode) for mode in ("r", "w")]
            assert sorted(one.result() for one in both) == new
    with run_processes(2) as pool:
        assert pool.submit(says_first, tmp_path / "file", "w", "another text").result()


def test_a_pool_in_which_something_fails_breaks_off_its_own_runs_alone(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with run_processes(1) as other:
        under_way = other.submit(Path.read_text, pipe)
        with pipe.open("w") as line:  # once it is read from
            with pytest.raises(ZeroDivisionError), run_processes(1) as pool:
                pool.submit(divmod, 1, 0).result()
            line.write("goes on")
        assert under_way.exception() is None
        assert under_way.result() == "goes on"


def test_ctrl_c_that_is_passed_on_breaks_off_nothing_that_an_interrupted_run_leaves(tmp_path: Path) -> None:
    with run_processes(1) as pool:
        assert isinstance(pool.submit(told_twice, tmp_path).exception(), KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):  # none begins after it
            pool.submit(divmod, 1, 1).result()
    assert (tmp_path / "left").exists()
