"""The committed build of the cockpit's pages: it is that of the sources, small, and asks nobody outside."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

BYTES_MAX = 300_000
OF_THE_BUILD = (
    *("index.html", "package-lock.json", "package.json", "src"),
    *("tsconfig.json", "vite.config.ts", "vite.report.config.ts"),
)
BUNDLED = ("preact", "uplot")


COCKPIT = Path(__file__).parents[2] / "cockpit"


@pytest.fixture
def front() -> Path:
    return COCKPIT / "front"


@pytest.fixture
def static() -> Path:
    return COCKPIT / "static"


def test_the_build_is_that_of_the_sources(front: Path, static: Path) -> None:
    paths = [front / name for name in OF_THE_BUILD]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*"))]
    total = hashlib.sha256()
    for name in sorted(str(file.relative_to(front)) for file in files if file.is_file()):
        total.update(f"{name}\0".encode() + (front / name).read_bytes() + b"\0")
    committed = (static / "sources.sha256").read_text().strip()
    assert committed == total.hexdigest(), (
        "the sources have changed: run `make cockpit`, commit cockpit/static"
    )


def test_it_is_small_and_has_the_licences_of_what_is_in_it(static: Path) -> None:
    files = {path.name: path.stat().st_size for path in static.iterdir()}
    assert set(files) == {
        *("index.html", "cockpit.js", "cockpit.css", "river.svg"),
        *("LICENSES.txt", "sources.sha256"),
    }
    assert sum(files.values()) < BYTES_MAX
    licences = (static / "LICENSES.txt").read_text()
    assert all(re.search(rf"^{name} [\d.]+ \(MIT\)$", licences, re.MULTILINE) for name in BUNDLED)
    assert licences.count("Permission is hereby granted") == len(BUNDLED)


def test_the_page_keeps_to_its_policy(static: Path) -> None:
    page = (static / "index.html").read_text()
    assert not re.search(r"\sstyle=|\son\w+=|<style|javascript:", page)
    assert re.findall(r"<script[^>]*>([^<]*)</script>", page) == [""]
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//""", page)
    code = (static / "cockpit.js").read_text()
    assert not re.search(r"\beval\(|new Function\(", code)
    named = set(re.findall(r"https?://[\w.-]+", code + (static / "cockpit.css").read_text()))
    assert named <= {"http://www.w3.org"}  # the name of SVG


def test_the_lock_file_names_versions_and_no_host(front: Path) -> None:
    lock = json.loads((front / "package-lock.json").read_text())
    declared = json.loads((front / "package.json").read_text())
    wanted = declared["dependencies"] | declared["devDependencies"]
    assert set(declared["dependencies"]) == set(BUNDLED)
    assert all(re.fullmatch(r"[\d.]+", version) for version in wanted.values())
    assert all("resolved" not in package for package in lock["packages"].values())
    assert all("integrity" in package for name, package in lock["packages"].items() if name)
