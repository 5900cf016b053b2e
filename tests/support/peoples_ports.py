"""The files of docs/moving.md, as a reader writes them."""

from __future__ import annotations

import re

from pages import ROOT

PAGE = ROOT / "docs" / "moving.md"
SCRIPT, APP, STUDY = "hospital.py", "study.py", "run.toml"


def written() -> dict[str, str]:
    """Every block of code of the page, by its file; the second goes on from the head of the first."""
    page = PAGE.read_text(encoding="utf-8")
    script, app = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (settings,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    head, _, _ = script.partition("def main")
    return {SCRIPT: script, APP: head + app, STUDY: settings}
