"""The short benchmarks: `docs/benchmarks.md`, of what `benchmarks/figures` has.

    python -m benchmarks                 # all of them: over an hour
    python -m benchmarks calls stream    # these sections; the page keeps the others as they were measured
    python -m benchmarks --page          # the page again, of what is there

A section is a file of its own, with the day, the machine and how busy that was; remarks of whoever has looked
at it stand beside it, in `SECTION.remarks.md`.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import (
    closed_loop,
    codecs,
    doors,
    fleet_speed,
    hostile_fleet,
    kernels,
    peers,
    rules,
    sessions,
    simulator,
    simulator_ceilings,
    submodels,
    throughput,
)

FIGURES = Path(__file__).parent / "figures"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Made by `make bench`, or a section by `python -m benchmarks SECTION`; do not edit. Ratios are within one run;
absolute figures are this machine's. What was tried by hand, and what came of it, is in
[measurements](measurements.md).
"""
SECTIONS: Mapping[str, Callable[[], str]] = {
    "updates": throughput.section,
    "calls": doors.section,
    "stream": sessions.section,
    "closed-loop": closed_loop.section,
    "hostile-fleet": hostile_fleet.section,
    "events": simulator.section,
    "simulator": fleet_speed.section,
    "simulator-10000": fleet_speed.ten_thousand,
    "peers": peers.section,
    "bare-loop": simulator_ceilings.section,
    "codecs": codecs.section,
    "kernels": kernels.section,
    "robust-rules": rules.section,
    "submodels": submodels.section,
}


def measured(name: str) -> str:
    """The text of a section, measured now."""
    before = os.getloadavg()[0]
    text = SECTIONS[name]()
    where = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    load = f"the machine's load was {before:.1f} before and {os.getloadavg()[0]:.1f} at the end"
    return f"{text.strip()}\n\n*{time.strftime('%Y-%m-%d')}, {where}; {load}.*\n"


def page() -> str:
    """Every section that was measured, each with its remarks."""
    found = [FIGURES / f"{name}{kind}" for name in SECTIONS for kind in (".md", ".remarks.md")]
    return "\n".join([HEAD, *(file.read_text(encoding="utf-8") for file in found if file.exists())])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--page", action="store_true", help="measure nothing")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.sections if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]!r}: there are {', '.join(SECTIONS)}")
    try:
        for name in [] if given.page else given.sections or SECTIONS:
            text = measured(name)
            (FIGURES / f"{name}.md").write_text(text, encoding="utf-8")
            print(text)
    finally:  # an interrupted run keeps what it has measured
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
