"""What Python costs over the command line: docs/tutorials/two-strategies.ipynb, and the command for the same.

    python -m benchmarks.notebook --pairs 3

Ten runs each time: two strategies from five seeds, of a torch model of one's own. In turn by the notebook in
a kernel, by its cells as a program, and by `anabranch simulate` of a file with `[sweep]`; each in processes
of its own, whose processor time counts, so that what runs beside does not. What an empty notebook takes is
Jupyter's, and told apart.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorials" / "two-strategies.ipynb"
KERNEL = """
import sys, nbformat
from nbclient import NotebookClient
NotebookClient(nbformat.read(sys.argv[1], 4), timeout=1200, kernel_name="python3").execute()
"""
SETTINGS = """
[run]
workload = "mine.py:Digits"
updates_max = 80
[client]
epochs = 4
learning_rate = 0.2
[fleet]
clients = 16
speed_ratio = 8.0
[sweep]
seeds = 5
[[sweep.choices]]
strategy = { name = "fedasync" }
[[sweep.choices]]
strategy = { name = "fedbuff", buffer_size = 4 }
"""
WAYS = ("notebook", "empty", "program", "command")
EMPTY = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def main() -> None:
    """Measure the pairs, and print what each took."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--pairs", type=int, default=3)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(arguments.parse_args().pairs):
        for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
            taken[way].append(processor_s(way))
            print(f"{way}: {taken[way][-1]:.1f} s of processor time", flush=True)
    medians = {way: statistics.median(taken[way]) for way in WAYS}
    for way in WAYS[:-1]:
        print(f"{way}: median {medians[way]:.1f} s")
    own = [a - b for a, b in zip(taken["notebook"], taken["empty"], strict=True)]
    for name, times in (("notebook, less an empty one", own), ("program", taken["program"])):
        more = [100 * (a / b - 1) for a, b in zip(times, taken["command"], strict=True)]
        print(f"{name}: {statistics.median(more):+.1f} % over the command's (median of pairs)")


def processor_s(way: str) -> float:
    """The processor time of one way, its processes' all together."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    code = ["".join(cell["source"]) for cell in cells]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mine.py").write_text(code[0])
        (folder / "all.py").write_text("\n".join(code))
        (folder / "run.toml").write_text(SETTINGS)
        (folder / "empty.ipynb").write_text(json.dumps(EMPTY))
        commands = {
            "notebook": ["-c", KERNEL, str(NOTEBOOK)],
            "empty": ["-c", KERNEL, "empty.ipynb"],
            "program": ["all.py"],
            "command": ["-m", "anabranch.cli.main", "simulate", "run.toml"],
        }
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, *commands[way]], cwd=folder, capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{done.stderr.decode()}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
