"""What an installation takes on the disk: ours by extras, the peers' beside it, each in a blank environment.

    python -m benchmarks.sizes [--out docs/sizes.md] [--only NVFlare]

pip installs as a reader would, from the checkout and from the package index. Rows that `--only` leaves out
stay on the page as they were. Where a package wants torch, which a device has anyway and which would hide all
else, everything but torch (and what only torch brings: CUDA, triton) is installed. Packed: the packages as a
tar file, compressed by gzip as a layer of an image is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OF_TORCH = ("torch", "triton", "nvidia-", "cuda-")  # and what begins so
MB = 1_000_000
GOALS = {"a device, less torch": ("installed", 120), "a server": ("packed", 200)}


MADE = "Made by `python -m benchmarks.sizes --out docs/sizes.md`; do not edit."
MEANS = (
    "Each row in a blank environment; Python is not counted.\nPacked: as a layer of an image, by gzip. "
    "Less torch: a device has it for its App, and it would\nhide what the rows differ by."
)


@dataclass(frozen=True)
class Wanted:
    """A row: what it is for and what pip is told. `own`: the checkout, with these extras."""

    what: str
    packages: str
    own: bool = False

    @property
    def spec(self) -> str:
        """As pip is told."""
        return f"{ROOT}{self.packages.removeprefix('anabranch')}" if self.own else self.packages


ROWS = (
    Wanted("a device, less torch", "anabranch", own=True),
    Wanted("a server", "anabranch[server]", own=True),
    Wanted("a server on PostgreSQL", "anabranch[server,postgresql]", own=True),
    Wanted("a server with the cockpit", "anabranch[server,cockpit]", own=True),
    Wanted("Flower", "flwr"),
    Wanted("NVFlare", "nvflare"),
    Wanted("APPFL, less torch", "appfl"),
)


@dataclass(frozen=True)
class Size:
    """What was installed: bytes on the disk and as a layer, packages, and which release was asked for."""

    installed: int
    packed: int
    packages: int
    release: str
    torch: bool


def measured(wanted: Wanted, work: Path) -> Size:
    """Install into a blank environment. Raises `CalledProcessError`, with pip's words on stderr."""
    folder = work / wanted.what.replace(" ", "-").replace(",", "")
    venv.create(folder)
    python = str(folder / "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet"]
    site = next((folder / "lib").glob("python*")) / "site-packages"
    before = {path.name for path in site.iterdir()}
    found = _resolved(pip, wanted.spec, folder / "report.json")
    needs = {name: url for name, url in found.items() if not name.startswith(OF_TORCH)}
    subprocess.run([*pip, "install", "--no-deps", "--no-compile", *needs.values()], check=True)
    parts = [path for path in site.iterdir() if path.name not in before]
    names = [path.name for path in parts if path.suffix == ".dist-info"]
    own = wanted.packages.partition("[")[0]
    release = next(n for n in names if n.lower().startswith(f"{own}-")).removesuffix(".dist-info")
    return Size(
        _bytes(parts), _packed(parts, folder / "layer.tar.gz"), len(names), release, len(needs) < len(found)
    )


def _resolved(pip: Sequence[str], spec: str, report: Path) -> dict[str, str]:
    """What pip would install, by name: each with where it comes from."""
    command = [*pip, "install", "--dry-run", "--ignore-installed", "--report", str(report), spec]
    subprocess.run(command, check=True)
    found = {}
    for item in json.loads(report.read_text())["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        found[name.lower()] = spec if name == "anabranch" else f"{name}=={version}"
    return found


def _bytes(parts: Sequence[Path]) -> int:
    files = (f for part in parts for f in ([part] if part.is_file() else part.rglob("*")) if f.is_file())
    return sum(f.lstat().st_size for f in files)


def _packed(parts: Sequence[Path], out: Path) -> int:
    with tarfile.open(out, "w:gz", compresslevel=6) as layer:
        for part in parts:
            layer.add(part, part.name)
    return out.stat().st_size


def page(sizes: dict[Wanted, Size], before: str = "") -> str:
    """The table; what was not measured now is as the page of `before` has it."""
    known = {line.split(" | ")[0].removeprefix("| "): line for line in before.splitlines()}
    rows = [row_of(w, sizes[w]) if w in sizes else known.get(w.what, "") for w in ROWS]
    lines = [
        "# What an installation takes",
        "",
        f"{MADE} Python {sys.version.split()[0]}, x86_64. {MEANS}",
        "",
        "| what | `pip install` | installed | packed | packages | goal | measured |",
        "|---|---|---|---|---|---|---|",
        *filter(None, rows),
    ]
    return "\n".join(lines) + "\n"


def row_of(wanted: Wanted, size: Size) -> str:
    """A line of the table."""
    told = f"{wanted.packages} ({size.release.rpartition('-')[2]})"
    told += ", without its torch" if size.torch else ""
    goal = ""
    if wanted.what in GOALS:
        kind, bound = GOALS[wanted.what]
        kept = getattr(size, kind) < bound * MB
        goal = f"{kind} under {bound} MB: {'kept' if kept else 'missed'}"
    figures = f"{size.installed / MB:.0f} MB | {size.packed / MB:.0f} MB | {size.packages}"
    return f"| {wanted.what} | {told} | {figures} | {goal} | {time.strftime('%Y-%m-%d')} |"


def main() -> None:
    """Measure every row, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="Write the page here, and not to stdout.")
    parser.add_argument("--only", help="Rows whose name has this.", default="")
    given = parser.parse_args()
    sizes: dict[Wanted, Size] = {}
    before = given.out.read_text(encoding="utf-8") if given.out is not None and given.out.exists() else ""
    with tempfile.TemporaryDirectory() as work:
        for wanted in (row for row in ROWS if given.only in row.what):
            try:
                sizes[wanted] = measured(wanted, Path(work))
            except subprocess.CalledProcessError as error:
                sys.stderr.write(f"{wanted.what}: cannot be installed: {error}\n")
            if given.out is not None:
                given.out.write_text(page(sizes, before), encoding="utf-8")
    if given.out is None:
        sys.stdout.write(page(sizes))


if __name__ == "__main__":
    main()
