"""The range of flwr is said once, and flwr stays at the edge. Needs no flwr."""

from __future__ import annotations

import ast
import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from anabranch.core.errors import AppError
from anabranch.flower import installed


def test_the_tested_range_is_that_of_the_extra(pyproject: dict[str, Any]) -> None:
    assert pyproject["project"]["optional-dependencies"]["flower"][0] == f"flwr{installed.RANGE}"


def test_the_document_says_the_range(root: Path) -> None:
    oldest, newest = installed.OLDEST, (installed.BELOW[0], installed.BELOW[1] - 1)
    said = f"**flwr {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}**"
    assert said in (root / "docs" / "flower.md").read_text(encoding="utf-8")


def test_only_one_folder_imports_flwr(package_dirs: dict[str, Path]) -> None:
    importers = set()
    for name, folder in package_dirs.items():
        for path in folder.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "flwr" not in text or any(parent.is_symlink() for parent in path.parents):
                continue
            for node in ast.walk(ast.parse(text)):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                importers |= {name for n in names if n.partition(".")[0] == "flwr"}
    assert importers == {"anabranch.flower"}


@pytest.mark.parametrize(
    ("found", "why"), [("1.40.2", "flwr 1.40.2 is installed"), ("1.43.0", "needed is flwr>=")]
)
def test_another_flwr_is_refused(found: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version", lambda _: found)
    with pytest.raises(AppError, match=why):
        installed.flwr_version.__wrapped__()


def test_without_flwr_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(installed, "version", absent)
    with pytest.raises(AppError, match=r'pip install "anabranch\[flower\]"'):
        installed.flwr_version.__wrapped__()


def test_flwr_is_kept_from_phoning_home(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(installed, "version", lambda _: "1.41.0")
    installed.flwr_version.__wrapped__()
    assert environment == {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
