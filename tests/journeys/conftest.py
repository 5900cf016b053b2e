"""What walks need: the wheel, environments to install it in, a machine, a folder that is not the checkout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from blank import blank_environment, borrowing_environment, copy_tree
from pages import ROOT
from terminals import machine
from walking import Walk, Walker
from walks.installing import ENVIRONMENTS
from wheels import build

Environment = Callable[[str], Path]
GoFor = Callable[[Walk, Path], None]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    work = tmp_path_factory.mktemp("wheel")
    return build(copy_tree(ROOT, work / "tree"), work / "dist")


@pytest.fixture(scope="session")
def borrowed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and, for speed, the packages of the tests."""
    return borrowing_environment(wheel, tmp_path_factory.mktemp("borrowed"))


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Blank environments by name, each made once, as the pages say it."""

    @cache
    def made(name: str) -> Path:
        return blank_environment(wheel, tmp_path_factory.mktemp(name), ENVIRONMENTS[name])

    return made


@pytest.fixture
def go(tmp_path: Path, request: pytest.FixtureRequest) -> GoFor:
    """Walk, with the programs of an environment."""

    def gone(walk: Walk, programs: Path) -> None:
        folder = tmp_path / "here"
        folder.mkdir()
        for name in walk.copies:
            _copy(ROOT / name, folder)
        kept = {"environment": str(programs)}
        if walk.database:
            kept["database"] = request.getfixturevalue("postgresql_url")
        with machine(tmp_path / "home", programs / "bin") as at:
            if walk.mounts and not at.enter:
                pytest.skip("no namespace can be made here, so no small disk can be mounted")
            Walker(walk, at, folder, kept).go()

    return gone


def _copy(found: Path, folder: Path) -> None:
    """What a walk begins with: a folder of the tree, a file of it, or what is in an archive."""
    if found.is_dir():
        copy_tree(found, folder / found.name)
    elif found.name.endswith(".tar.gz"):
        shutil.unpack_archive(found, folder, filter="tar")  # the modes of private files, too
    else:
        shutil.copy(found, folder)
