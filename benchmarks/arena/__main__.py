"""The arena: every strategy in every cell.

    python -m benchmarks.arena run [--cell 'digits/*'] [--row 'fedbuff*'] [--minutes 25] [--shard 1/2]
    python -m benchmarks.arena left        # how far each row is, of those that every cell is to have
    python -m benchmarks.arena page        # docs/studies/arena.md, of what was run
    python -m benchmarks.arena again       # published runs, drawn at random, beside what they come to now

`run` does what is missing of what is asked for, by default of the rows that every cell is to have
(`--row '*'`: of all), one run after the other, and ends at the time. What has ended stays, in
`benchmarks/arena/results/`: the same command goes on, also after a kill, and so another row costs its own
runs alone. Shards may run side by side. With --gpu devices train on a GPU, in stacks: so were run the cells
that the page says it of. With --compiled a text takes half as long, once its programs are compiled, by the
same steps but for rounding.
"""

from __future__ import annotations

import argparse
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.arena.cells import CELLS
from benchmarks.arena.play import Match, again, matches, play, tell
from benchmarks.arena.rows import MATRIX, ROWS
from benchmarks.arena.runs import record_compiled, record_of, record_on_gpu
from benchmarks.arena.store import RESULTS
from benchmarks.studies import one_thread


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "left", "page", "again"))
    parser.add_argument("--cell", default="*", help="a pattern of cells, such as 'digits/*/compute/steady'")
    parser.add_argument("--row", help="a pattern of rows, such as 'fedbuff/*'")
    parser.add_argument("--minutes", type=float, default=25.0, help="no run begins later")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of what was run")
    parser.add_argument("--draw", type=int, default=0, help="with again: another number draws other runs")
    parser.add_argument("--shard", default="1/1", help="the first of two: 1/2")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--gpu", action="store_true", help="with run and again: train on a CUDA GPU")
    how.add_argument("--compiled", action="store_true", help="the same: by programs that torch compiles")
    arguments = parser.parse_args()
    runner = record_on_gpu if arguments.gpu else record_compiled if arguments.compiled else record_of
    if arguments.what == "page":
        from benchmarks.arena.page import write

        write(arguments.results)
        return
    one_thread()
    which, shards = map(int, arguments.shard.split("/"))
    cells = [cell for cell in CELLS if fnmatch(cell.name, arguments.cell)]
    known = MATRIX if arguments.row is None and arguments.what != "again" else ROWS
    rows = [row for row in known if fnmatch(row.name, arguments.row or "*")]
    todo = matches(cells, rows, arguments.results)[which - 1 :: shards]
    if arguments.what == "left":
        for match in todo:
            print(f"{match.cell.name} {match.row.name}: {_next_of(match)}")
    elif arguments.what == "again":
        for one in again(todo, 60 * arguments.minutes, arguments.draw, runner):
            said = f"seed {one.published.seed}: {one.alike}"
            print(f"{one.match.cell.name} {one.match.row.name}, {said}", flush=True)
    elif play(todo, 60 * arguments.minutes, tell, runner):
        waiting = [match for match in todo if match.waits]
        for match in waiting:
            print(f"{match.cell.name} {match.row.name}: {_next_of(match)}")
        if not waiting:
            print("everything that was asked for has been run")


def _next_of(match: Match) -> str:
    if match.waits:
        return f"waits for the point of {match.row.like!r}, of which runs are left"
    return f"{len(match.progress.wanted)} runs next"


if __name__ == "__main__":
    main()
