"""What walks need: environments to install the wheel in, a machine, a folder that is not the checkout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from blank import blank_environment, copy_tree
from pages import ROOT
from sharing import once
from terminals import machine
from walking import Walk, Walker
from walks.installing import ENVIRONMENTS

Environment = Callable[[str], Path]
GoFor = Callable[[Walk, Path], None]


@pytest.fixture(scope="session")
def environment(wheel: Path, shared: Path) -> Environment:
    """Blank environments by name, each made once, as the pages say it."""
    return lambda name: once(
        shared / name, lambda folder: blank_environment(wheel, folder, ENVIRONMENTS[name])
    )


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
