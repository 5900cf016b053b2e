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
