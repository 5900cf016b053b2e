"""The root folders become one package: the list, the mapping, the links and the tree agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# Extras whose tests are in tests/libraries, and in no other environment.
LIBRARIES = (
    "transformers",
    "peft",
    "lightning",
    "opacus",
    "tensorboard",
    "mlflow",
    "wandb",
    "prometheus",
    "tracing",
)


def _packages_in_tree(package_dirs: dict[str, Path]) -> set[str]:
    found = set()
    for name, folder in package_dirs.items():
        for path in folder.rglob("*.py"):
            inside = path.parent.relative_to(folder).parts
            if not any(parent.is_symlink() for parent in path.parents):
                found.add(".".join((name, *inside)))
    return found


def _unlinked_files(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and not any(parent.is_symlink() for parent in path.parents)
    ]


def test_every_package_of_the_tree_is_listed(
    pyproject: dict[str, Any], package_dirs: dict[str, Path]
) -> None:
    listed = pyproject["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(set(listed))
    assert set(listed) == _packages_in_tree(package_dirs)


def test_every_package_has_an_init_file(root: Path, package_dirs: dict[str, Path]) -> None:
    folders = {path.parent for folder in package_dirs.values() for path in folder.rglob("*.py")}
    assert [str(f.relative_to(root)) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_the_links_are_the_mapping(root: Path, package_dirs: dict[str, Path]) -> None:
    links = {path for path in (root / "src" / "anabranch").iterdir() if path.is_symlink()}
    mapped = {name.removeprefix("anabranch."): folder for name, folder in package_dirs.items() if "." in name}
    assert {link.name for link in links} == set(mapped)
    for link in links:
        # Relative, so that they hold in every clone.
        assert link.readlink() == Path("..", "..", mapped[link.name].name)
        assert link.resolve() == mapped[link.name]


def test_data_files_are_in_package_data(
    root: Path, pyproject: dict[str, Any], package_dirs: dict[str, Path]
) -> None:
    globs: dict[str, list[str]] = pyproject["tool"]["setuptools"]["package-data"]
    for name, folder in package_dirs.items():
        packed = {path for pattern in globs.get(name, []) for path in folder.glob(pattern)}
        data = {path for path in _unlinked_files(folder) if path.suffix != ".py"}
        data = {path for path in data if "front" not in path.relative_to(folder).parts}  # built into `static`
        data = {path for path in data if path.suffix not in (".c", ".h", ".so")}  # compiled, and of what
        assert sorted(str(path.relative_to(root)) for path in data - packed) == []


def test_all_is_the_sum_of_the_extras(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = everything.removeprefix("anabranch[").removesuffix("]").split(",")
    # Ray is large, and for clusters; those of LIBRARIES are larger still; the site is for readers.
    assert set(named) == set(extras) - {"all", "dev", "docs", "ray", "libraries", *LIBRARIES}
    assert "anabranch[all,ray]" in extras["dev"]


def test_large_libraries_are_in_an_environment_of_their_own(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    everything = next(need for need in extras["libraries"] if need.startswith("anabranch["))
    assert set(everything.removeprefix("anabranch[").removesuffix("]").split(",")) > set(LIBRARIES)
    large = {re.split(r"[\[>=<]", need)[0] for name in LIBRARIES for need in extras[name]}
    assert not [need for need in extras["dev"] if re.split(r"[\[>=<]", need)[0] in large]


def _with_inner(extras: set[str], known: dict[str, list[str]]) -> set[str]:
    """These extras, and those that they are made of."""
    inner = {
        name
        for extra in extras
        for wanted in known[extra]
        for found in re.findall(r"^anabranch\[(.*)\]$", wanted)
        for name in found.split(",")
    }
    return extras if inner <= extras else _with_inner(extras | inner, known)


def test_what_the_images_install_is_downloaded_for_their_test(pyproject: dict[str, Any], root: Path) -> None:
    known = pyproject["project"]["optional-dependencies"]
    engine = (root / "docker" / "engine.sh").read_text()
    (fetched,) = re.findall(r'"\.\[([\w,]+)\]"', engine)
    there = _with_inner(set(fetched.split(",")), known)
    images = sorted((root / "docker").glob("*.Dockerfile"))
    assert len(images) >= 3
    for image in images:
        text = image.read_text()
        wanted = re.findall(r"^ARG EXTRAS=([\w,]+)|/src\[([\w,]+)\]", text, re.MULTILINE)
        extras = {name for pair in wanted for name in "".join(pair).split(",")}
        assert extras, image.name
        assert _with_inner(extras, known) <= there, image.name
