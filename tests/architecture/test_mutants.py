"""The mutants: each file that decides something has tests of its subject; a change is noticed or named."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

DECIDING = ("core/**/*.py", "strategies/**/*.py", "compress/**/*.py", "host/*.py")
BESIDE = ("server/books.py", "server/writer.py", "client/outbox.py")

SETTINGS = """
sample = 0
seed = 1
test_cpu_s = 10.0
tests_cpu_s = 60.0

[[subject]]
name = "text"
files = ["core/text.py"]
tests = ["tests/unit/test_text.py"]

[[subject]]
name = "clock"
files = ["core/clock.py"]
tests = ["tests/unit/test_clock.py::test_a_restart_counts_the_time_away"]

[[equivalent]]
file = "core/text.py"
was = "return c.encode(\\"unicode_escape\\").decode() if hidden else c"
now = "return c.encode(\\"unicode_escape\\").decode() if (hidden) or True else c"
why = "not so: it stands here for one that is left out"
"""


def test_every_file_that_decides_is_of_one_subject_whose_tests_exist(root: Path) -> None:
    settings = tomllib.loads((root / "scripts" / "mutants" / "settings.toml").read_text())
    of_subjects = Counter(
        str(path.relative_to(root))
        for subject in settings["subject"]
        for pattern in subject["files"]
        for path in root.glob(pattern)
    )
    deciding = {str(p.relative_to(root)) for pattern in DECIDING for p in root.glob(pattern)} | {*BESIDE}
    assert deciding - {name for name in deciding if name.endswith("__init__.py")} <= set(of_subjects)
    assert [name for name, times in of_subjects.items() if times > 1] == []
    tests = [root / test.partition("::")[0] for subject in settings["subject"] for test in subject["tests"]]
    assert [path for path in tests if not path.is_file()] == []
    for known in settings.get("equivalent", ()):
        assert known["why"], known
        source = " ".join(line.strip() for line in (root / known["file"]).read_text().splitlines())
        assert known["was"] in source, f"{known['file']} has no such lines any more: {known['was']}"


def mutants(root: Path, folder: Path, *args: str) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """What the tool says with these arguments, and what it keeps, by file."""
    (folder / "settings.toml").write_text(SETTINGS)
    kept = folder / "kept"
    command = [sys.executable, "-m", "scripts.mutants", "--settings", str(folder / "settings.toml")]
    done = subprocess.run([*command, "--results", kept, *args], cwd=root, capture_output=True, text=True)
    found = {path.name: json.loads(path.read_text()) for path in kept.glob("core.*.json")}
    assert found, done.stdout + done.stderr
    return done.stdout, found


@pytest.mark.slow
def test_a_change_is_noticed_or_named(root: Path, tmp_path: Path) -> None:
    said, tried = mutants(root, tmp_path, "core/text.py")
    fates = {row["now"]: row["fate"] for row in tried["core.text.py.json"]}
    turned = "if c in kept else _shown(c) for c in text)"
    # What the shortcut for plain text saves is time, so nothing can notice that it is gone.
    assert fates[f'return text if (text.isprintable()) and False else "".join(c {turned}'] == "survived"
    assert fates[f'return text if (text.isprintable()) or True else "".join(c {turned}'] == "killed"
    assert (
        fates["hidden = unicodedata.category(c) in _CONTROL and unicodedata.bidirectional(c) in _TURNING"]
        == "killed"
    )
    assert fates["_CONTROL = None  # of Unicode: what moves a cursor, or ends a line"] == "killed"
    assert not [now for now in fates if "(hidden) or True" in now], "it is named as an equivalent"
    assert "core/text.py:14: survived" in said
    assert f"of {len(fates)} noticed" in said


@pytest.mark.prove
def test_some_are_drawn_of_all_files_together(root: Path, tmp_path: Path) -> None:
    said, tried = mutants(root, tmp_path, "--draw", "2", "--seed", "7")
    assert sorted(tried) == ["core.clock.py.json", "core.text.py.json"]
    assert sum(len(rows) for rows in tried.values()) == 2
    noticed = sum(row["fate"] not in ("survived", "unreached") for rows in tried.values() for row in rows)
    assert f"noticed: {noticed} of 2 drawn" in said
