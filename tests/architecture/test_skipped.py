"""What a machine lacks keeps its own tests from running, and no others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDY = "tests/cockpit/browser/test_report.py"
OTHERS = "tests/unit/test_ids.py"


def outcomes(*paths: str, path: str) -> dict[str, set[str]]:
    """What became of the tests of each of these files, run where programs are looked for in `path`."""
    command = [sys.executable, "-m", "pytest", "-v", "-m", "", "-p", "no:cacheprovider", *paths]
    environment = {**os.environ, "PATH": path}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {name: set[str]() for name in paths}
    for name, became in re.findall(r"^(\S+?)::.* ([A-Z]+)\b.*%]$", ended.stdout, re.MULTILINE):
        found[name].add(became)
    return found


def test_without_a_browser_only_its_own_tests_are_skipped(tmp_path: Path) -> None:
    """A fresh machine has no Chromium: `make test` skipped every test there, and said that all was well."""
    found = outcomes(OTHERS, NEEDY, path=str(tmp_path))
    assert found == {OTHERS: {"PASSED"}, NEEDY: {"SKIPPED"}}
