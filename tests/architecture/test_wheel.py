"""The wheel holds the whole package and works where the tree is not."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import wheels

LEFT_OUT = (".*", "*.egg-info", "build", "dist", "__pycache__", "runs", "docs")


def _build(root: Path, work: Path, *, links: bool) -> Path:
    """Build the sdist, and from it the wheel, in a copy of the tree; return the wheel."""
    tree = work / "tree"
    shutil.copytree(root, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    if not links:  # as git lays a checkout on a system without symbolic links
        for link in [path for path in (tree / "src" / "anabranch").iterdir() if path.is_symlink()]:
            target = str(link.readlink())
            link.unlink()
            link.write_text(target)
    wheel = wheels.build(tree, work / "dist")
    assert len(list((work / "dist").glob("*.tar.gz"))) == 1
    return wheel


def _names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    return _build(root, tmp_path_factory.mktemp("wheel"), links=True)


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel installed by itself; what it depends on comes from the environment of the tests."""
    target = tmp_path_factory.mktemp("site")
    wheels.install(wheel, target)
    return target


def test_every_file_is_in_the_wheel(wheel: Path, package_dirs: dict[str, Path]) -> None:
    packed = set(_names(wheel))
    for name, folder in package_dirs.items():
        for path in folder.rglob("*.py"):
            if not any(parent.is_symlink() for parent in path.parents):
                assert f"{name.replace('.', '/')}/{path.relative_to(folder).as_posix()}" in packed
    assert "anabranch/py.typed" in packed
    assert {name.partition("/")[0] for name in packed} <= {
        "anabranch",
        wheel.name.rsplit("-", 3)[0] + ".dist-info",
    }


def test_links_make_no_difference(root: Path, wheel: Path, tmp_path: Path) -> None:
    assert _names(_build(root, tmp_path, links=False)) == _names(wheel)


def test_every_package_imports_from_the_wheel(site: Path, pyproject: dict[str, Any]) -> None:
    packages = pyproject["tool"]["setuptools"]["packages"]
    assert wheels.import_everything(site, packages) == site / "anabranch"


def test_the_command_runs_from_the_wheel(site: Path, pyproject: dict[str, Any]) -> None:
    printed = wheels.run([str(site / "bin" / "anabranch"), "--version"], cwd=site, pythonpath=site)
    assert pyproject["project"]["version"] in printed


SAYS = "from anabranch.core.kernels.chosen import loops; print(loops.__name__.rpartition('.')[2])"


def test_without_a_compiler_the_wheel_works_by_numpy(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    target = tmp_path / "site"
    wheels.install(_build(root, tmp_path, links=True), target)
    assert wheels.run([sys.executable, "-c", SAYS], cwd=target, pythonpath=target).strip() == "plain"


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")
def test_with_one_its_loops_are_compiled(site: Path) -> None:
    assert wheels.run([sys.executable, "-c", SAYS], cwd=site, pythonpath=site).strip() == "compiled"
