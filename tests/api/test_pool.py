"""Pools of processes for runs side by side, several in one program."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anabranch.api.pool import run_processes


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
