"""The images can be built from what `.dockerignore` lets through: `test_wheel.py` makes one of it."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from build_context import copy_context, included, rules


@pytest.fixture
def context(root: Path, tmp_path: Path) -> Path:
    """The build context of this tree."""
    target = tmp_path / "context"
    copy_context(root, target)
    return target


def test_every_folder_that_the_images_copy_is_in_the_context(root: Path, context: Path) -> None:
    copied = set()
    for path in (root / "docker").glob("*.Dockerfile"):
        text = path.read_text(encoding="utf-8")
        copied |= set(re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE))
    assert copied == {".", "docker/wheels"}
    assert all((context / path).is_dir() for path in copied)


def test_nothing_else_is_sent(context: Path, pyproject: dict[str, Any]) -> None:
    packages = set(pyproject["tool"]["setuptools"]["package-dir"].values())
    top = {folder.partition("/")[0] for folder in packages}
    files = {"LICENSE", "README.md", "pyproject.toml", "setup.py"}
    assert {path.name for path in context.iterdir()} == top | files | {"docker"}
    assert [path.name for path in (context / "docker").iterdir()] == ["wheels"]
    assert not list(context.rglob("__pycache__"))
    assert not list(context.rglob("*.so"))  # of this machine: the image makes its own


@pytest.mark.parametrize(
    ("lines", "path", "sent"),
    [
        ("*\n!src", "src/a/b.py", True),
        ("*\n!src", "source/a.py", False),
        ("*.md\n!README*.md\nREADME-secret.md", "README-secret.md", False),
        ("*.md\nREADME-secret.md\n!README*.md", "README-secret.md", True),
        ("*/temp*", "somedir/temporary.txt", False),
        ("*/temp*", "somedir/deeper/temporary.txt", True),
        ("**/*.go", "x.go", False),
        ("**/*.go", "a/b/x.go", False),
        ("temp?", "tempa", False),
        ("temp?", "temp", True),
        ("# temp", "temp", True),
        ("/foo/bar/", "foo/bar/baz", False),
        ("a.c", "abc", True),
    ],
)
def test_the_rules_are_dockers(lines: str, path: str, sent: bool) -> None:
    """The examples of Docker's reference of `.dockerignore`."""
    assert included(PurePosixPath(path), rules(lines)) is sent
