"""The page on Python: every block is run, from top to bottom, where a reader would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import anabranch as ab
from anabranch.api.fleets import GROUPS
from anabranch.strategies.registry import STRATEGIES

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")


@pytest.mark.journeys
def test_every_block_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 11
    (tmp_path / "page.py").write_text("\n".join(blocks), encoding="utf-8")
    command = [sys.executable, "-W", "error", "page.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "<Run teasq on synthetic, seed 1: accuracy" in done.stdout
    assert 'name = "teasq"\nkept = 0.1' in done.stdout
    assert "12 ['hidden.bias'" in done.stdout
    assert "halves 12" in done.stdout
    *_, local, jobs, script = done.stdout.splitlines()
    assert (local, jobs, script) == ("12 12", "wards 4, everybody 6", "5")
    for name in ("accuracy.svg", "comparison.svg"):
        assert (tmp_path / name).read_text().startswith("<svg")


@pytest.mark.journeys
def test_the_readmes_lines_run(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    block = re.findall(r"```python\n(import anabranch as ab.*?)```", readme, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", block[0]], cwd=tmp_path, timeout=600)
    assert done.returncode == 0


def test_the_names_of_the_page_are_those_of_the_package() -> None:
    table = PAGE[PAGE.index("| argument |") : PAGE.index("Objects do not change")]
    kinds = {kind.__name__ for kinds in GROUPS.values() for kind in kinds.values()}
    assert (
        set(re.findall(r"`([A-Z]\w+)`", table))
        == {cls.__name__ for cls in STRATEGIES.ours().values()} | kinds
    )
    named = set(re.findall(r"\bab\.([A-Za-z]\w+)", PAGE))
    assert named <= set(ab.__all__)
