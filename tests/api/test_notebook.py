"""The notebooks of the docs: each is executed by a kernel, cell after cell, and shows what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""
LINES_MAX = 30


def executed(name: str, folder: Path) -> list[dict[str, Any]]:
    """The cells of code, with what they have shown."""
    out = folder / name
    command = [sys.executable, "-c", EXECUTE, str(TUTORIALS / name), str(out)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return [cell for cell in json.loads(out.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.journeys
def test_two_strategies_five_seeds_a_frame_and_a_figure(tmp_path: Path) -> None:
    cells = executed("two-strategies.ipynb", tmp_path)
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines() if line.strip()]
    assert len(lines) <= LINES_MAX
    shown = [
        [o.get("data", {}) for o in cell["outputs"] if o["output_type"] == "execute_result"] for cell in cells
    ]
    drawn = [o["data"] for o in cells[1]["outputs"] if o["output_type"] == "display_data"]
    assert "100 %, 10 of 10 runs" in "".join(drawn[0]["text/html"])
    assert not [o for o in cells[1]["outputs"] if o["output_type"] == "stream"], "nothing else is said"
    [frame], [figure] = shown[1], shown[2]
    text = "".join(frame["text/plain"])
    rows = {words[0]: [float(w) for w in words[1:]] for words in map(str.split, text.splitlines()[2:])}
    assert set(rows) == {"fedasync", "fedbuff(buffer_size=4)"}
    assert all(mean > 0.5 and deviation >= 0 for mean, deviation in rows.values())
    assert "data:image/svg+xml;base64," in "".join(figure["text/html"])


@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_is_kept_without_what_it_has_shown(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code" and cell["outputs"]] == []
