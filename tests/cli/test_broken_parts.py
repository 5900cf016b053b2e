"""What a part of one's own raises ends any command with its own lines, not with a traceback."""

from __future__ import annotations

from pathlib import Path

from commands import anabranch

STRATEGY = """from dataclasses import dataclass
from typing import ClassVar
from anabranch.strategies.mixing import MixingStrategy
@dataclass(frozen=True)
class Mine(MixingStrategy):
    name: ClassVar[str] = "mine"
    def weight(self, update, context):
        return WEIGHT
"""


def test_a_replay_by_a_strategy_that_breaks_names_its_method(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(STRATEGY.replace("WEIGHT", "0.5"))
    run = ["simulate", "synthetic", "--updates", "4", "--clients", "2", "--strategy", "mine.py:Mine"]
    assert anabranch(tmp_path, *run, "--out", "run").returncode == 0
    mine.write_text(STRATEGY.replace("WEIGHT", "context.no_such_thing"))
    done = anabranch(tmp_path, "replay", "run", "--load-code")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert "error: strategy Mine.weight (mine.py:8): AttributeError: 'Context' object has no" in done.stderr


def test_a_run_that_its_own_strategy_ends_is_not_told_to_go_on_by_the_same_error(tmp_path: Path) -> None:
    """A run keeps the code that it was begun with, and that would come to the same error."""
    mine = tmp_path / "mine.py"
    mine.write_text(STRATEGY.replace("WEIGHT", "0.5 if context.version < 3 else nothing"))
    run = ["simulate", "synthetic", "--updates", "8", "--clients", "2", "--strategy", "mine.py:Mine"]
    done = anabranch(tmp_path, *run, "--out", "run")
    assert "error: strategy Mine.weight (mine.py:8): NameError: name 'nothing'" in done.stderr
    assert "where the code is not at fault it can go on (mended code is another run):" in done.stdout
    mine.write_text(STRATEGY.replace("WEIGHT", "0.5"))
    again = anabranch(tmp_path, *run, "--out", "run", "--resume")
    assert "the code of mine.py:Mine has changed; name another folder" in again.stderr
