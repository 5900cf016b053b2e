"""The tests that docs/extending has one write: every name in them is imported, and is there."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "extending"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
BLOCKS = {
    f"{path.stem}, {number}": block
    for path in sorted((ROOT / "docs" / "extending").glob("*.md"))
    for number, block in enumerate(BLOCK.findall(path.read_text(encoding="utf-8")), 1)
}


@pytest.mark.parametrize("page", BLOCKS)
def test_what_a_page_has_one_write_has_all_its_names(page: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,E9", "-"]
    checked = subprocess.run(command, input=BLOCKS[page], capture_output=True, text=True, timeout=600)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("page", BLOCKS)
def test_what_is_imported_there_is_there(page: str) -> None:
    for node in ast.walk(ast.parse(BLOCKS[page])):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        names = [alias.name for alias in node.names]
        if node.module.startswith("anabranch"):
            assert all(hasattr(importlib.import_module(node.module), name) for name in names)
        elif node.module != "mine":  # whose page has no class that a kit takes as it is
            source = (EXAMPLES / f"{node.module}.py").read_text(encoding="utf-8")
            assert all(re.search(rf"^class {name}\b", source, re.MULTILINE) for name in names)
