"""The mutants: each file that decides something has tests of its subject; a change is noticed or named."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

DECIDING = ("core/**/*.py", "strategies/**/*.py", "compress/**/*.py")
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
    assert [t for subject in settings["subject"] for t in subject["tests"] if not (root / t).is_file()] == []
    for known in settings.get("equivalent", ()):
        assert known["why"], known
        source = " ".join(line.strip() for line in (root / known["file"]).read_text().splitlines())
        assert known["was"] in source, f"{known['file']} has no such lines any more: {known['was']}"


def test_a_change_is_noticed_or_named(root: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(SETTINGS)
    kept = tmp_path / "kept"
    command = [sys.executable, "-m", "scripts.mutants", "--settings", str(tmp_path / "settings.toml")]
    done = subprocess.run([*command, "--results", str(kept)], cwd=root, capture_output=True, text=True)
    assert (kept / "core.text.py.json").exists(), done.stdout + done.stderr
    fates = {row["now"]: row["fate"] for row in json.loads((kept / "core.text.py.json").read_text())}
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
    assert "core/text.py:14: survived" in done.stdout
    assert f"of {len(fates)} noticed" in done.stdout
