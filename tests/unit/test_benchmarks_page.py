"""docs/benchmarks.md: a section is measured alone, and takes nothing of the others with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from measuring import benchmark

benchmarks = benchmark("__main__")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Figures and a page of their own, of two sections that measure at once."""
    sections: dict[str, Callable[[], str]] = {"a": lambda: "## A\n\none\n", "b": lambda: "## B\n\ntwo\n"}
    monkeypatch.setattr(benchmarks, "SECTIONS", sections)
    monkeypatch.setattr(benchmarks, "FIGURES", tmp_path)
    monkeypatch.setattr(benchmarks, "PAGE", tmp_path / "page.md")
    return tmp_path


def test_the_page_is_what_the_figures_say() -> None:
    assert benchmarks.PAGE.read_text(encoding="utf-8") == benchmarks.page()
    known = {f"{name}{kind}" for name in benchmarks.SECTIONS for kind in (".md", ".remarks.md")}
    assert {file.name for file in benchmarks.FIGURES.iterdir()} <= known, "and there are no others"
    for file in benchmarks.FIGURES.iterdir():
        if not file.name.endswith(".remarks.md"):
            assert re.search(r"^\*20\d\d-\d\d-\d\d, ", file.read_text(encoding="utf-8"), re.M), file.name


def test_the_sections_are_known_where_nothing_was_compiled() -> None:
    """As on a machine without a compiler, which tests its checkout all the same."""
    command = [sys.executable, "-c", "import benchmarks.__main__"]
    environment = os.environ | {"ANABRANCH_KERNELS": "numpy", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, check=True, timeout=600)


def test_a_section_is_measured_alone(elsewhere: Path) -> None:
    benchmarks.main([])
    (elsewhere / "a.remarks.md").write_text("(By whom.)\n")
    benchmarks.SECTIONS["b"] = lambda: "## B\n\nthree\n"
    benchmarks.main(["b"])
    lines = (elsewhere / "page.md").read_text().splitlines()
    said = [line for line in lines if line in ("## A", "one", "(By whom.)", "## B", "two", "three")]
    assert said == ["## A", "one", "(By whom.)", "## B", "three"]
    assert sum("load" in line for line in lines) == 2, "each says how busy the machine was"


@pytest.mark.parametrize("arguments", [["nix"], ["a", "nix"], ["--nix"]])
def test_what_there_is_not_measures_nothing(
    elsewhere: Path, arguments: list[str], capsys: pytest.CaptureFixture[Any]
) -> None:
    with pytest.raises(SystemExit):
        benchmarks.main(arguments)
    assert "nix" in capsys.readouterr().err
    assert not list(elsewhere.iterdir())
