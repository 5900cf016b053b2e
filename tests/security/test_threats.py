"""SECURITY.md names the test that holds each threat: the tests exist, and all files here are named."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| threat")]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", TEXT)


@lru_cache
def functions_of(path: str) -> set[str]:
    """The names of a file's tests."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_named_test_exists(path: str, name: str) -> None:
    assert name in functions_of(path)


def test_every_threat_has_a_test() -> None:
    assert len(ROWS) >= 30
    assert [row for row in ROWS if "::test_" not in row] == []


def test_every_file_of_security_tests_holds_a_threat() -> None:
    here = {f"tests/security/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    about_words = {"tests/security/test_threats.py", "tests/security/test_what_is_told.py"}
    assert here - {path for path, _ in NAMED} == about_words
