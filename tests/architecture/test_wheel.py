"""The wheel holds the whole package and works where the tree is not."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import wheels
from build_context import copy_context

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel installed by itself; what it depends on comes from the environment of the tests."""
    target = tmp_path_factory.mktemp("site")
    wheels.install(wheel, target)
    return target


def test_every_file_is_in_the_wheel(wheel: Path, package_dirs: dict[str, Path]) -> None:
    assert len(list(wheel.parent.glob("*.tar.gz"))) == 1
    packed = set(wheels.contents(wheel))
    for name, folder in package_dirs.items():
        for path in folder.rglob("*.py"):
            if not any(parent.is_symlink() for parent in path.parents):
                assert f"{name.replace('.', '/')}/{path.relative_to(folder).as_posix()}" in packed
    assert "anabranch/py.typed" in packed
    assert {name.partition("/")[0] for name in packed} <= {
        "anabranch",
        wheel.name.rsplit("-", 3)[0] + ".dist-info",
    }


def test_every_package_imports_from_the_wheel(site: Path, pyproject: dict[str, Any]) -> None:
    packages = pyproject["tool"]["setuptools"]["packages"]
    assert wheels.import_everything(site, packages) == site / "anabranch"


def test_the_command_runs_from_the_wheel(site: Path, pyproject: dict[str, Any]) -> None:
    printed = wheels.run([str(site / "bin" / "anabranch"), "--version"], cwd=site, pythonpath=site)
    assert pyproject["project"]["version"] in printed


SAYS = "from anabranch.core.kernels.chosen import loops; print(loops.__name__.rpartition('.')[2])"


def test_without_links_and_a_compiler_the_files_are_the_same_and_numpy_does_the_work(
    root: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree is the build context of the images, which lacks nothing that belongs into the wheel."""
    tree, target = tmp_path / "tree", tmp_path / "site"
    copy_context(root, tree)
    for link in [path for path in (tree / "src" / "anabranch").iterdir() if path.is_symlink()]:
        name = str(link.readlink())  # as git lays a checkout on a system without symbolic links
        link.unlink()
        link.write_text(name)
    monkeypatch.setenv("CC", "/bin/false")
    bare = wheels.build(tree, tmp_path / "dist", "--wheel")
    assert wheels.contents(bare) == [name for name in wheels.contents(wheel) if not name.endswith(".so")]
    wheels.install(bare, target)
    assert wheels.run([sys.executable, "-c", SAYS], cwd=target, pythonpath=target).strip() == "plain"


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")
def test_with_one_its_loops_are_compiled(site: Path) -> None:
    assert wheels.run([sys.executable, "-c", SAYS], cwd=site, pythonpath=site).strip() == "compiled"
