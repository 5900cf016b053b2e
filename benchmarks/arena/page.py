"""The arena's page, of what was run."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arena import deadlines, published, stepped
from benchmarks.arena.cells import (
    CELLS,
    DEVICES,
    EVALUATIONS,
    FAULTS,
    LEAVERS,
    LINKS,
    SPLITS,
    WORKLOADS,
    Cell,
)
from benchmarks.arena.picture import SPARSELY, TITLE, drawn
from benchmarks.arena.play import Match, matches
from benchmarks.arena.rows import (
    CAP,
    CHAINS,
    DEADLINES_S,
    HORIZON_S,
    NUMBERS,
    REFERENCE,
    ROWS,
    SPARSE,
    TUNED,
    Row,
)
from benchmarks.arena.standings import (
    AGAINST,
    BELOW,
    MARK,
    MET,
    WORDS,
    Count,
    count,
    half_way,
    lead,
    reached,
    soonness,
    standings,
)
from benchmarks.arena.store import RESULTS, Record
from benchmarks.arena.tuning import KEPT, MORE, SEEDS, SHORT, TUNING_SEEDS
from benchmarks.studies import table

SUMMARY, REMARKS = (Path(__file__).with_name(name) for name in ("summary.md", "remarks.md"))
PAGE = Path(__file__).parents[2] / "docs" / "studies" / "arena.md"
PICTURE = PAGE.with_suffix(".svg")

Finals = Sequence[Record]
Ended = Mapping[tuple[str, str], tuple[Match, Finals]]  # by the names of a cell and a row
Figure = Callable[[Record], float | None]


def write(results: Path = RESULTS) -> None:
    """Make it and its picture, with what was found by looking."""
    found = matches(CELLS, ROWS, results)
    summary, remarks = (path.read_text(encoding="utf-8") for path in (SUMMARY, REMARKS))
    PAGE.write_text(text(found, summary, remarks), encoding="utf-8")
    finals = _finals(_ended(found))
    PICTURE.write_text(drawn(standings(CELLS, finals)), encoding="utf-8")
    PAGE.with_name(published.PICTURE).write_text(published.drawn(finals), encoding="utf-8")


def text(all_matches: Sequence[Match], summary: str = "", remarks: str = "") -> str:
    """The page of what has ended of these; `summary` and `remarks` are what was found by looking."""
    ended = _ended(all_matches)
    cells = [cell for cell in CELLS if any(at == cell.name for at, _ in ended)]
    shown = [row for row in ROWS if any(whose == row.name for _, whose in ended)]
    first = (_title(), _in_short(ended), summary.strip(), _how(), remarks.strip())
    each = (_cell(cell, ended) for cell in cells)
    finals = _finals(ended)
    sections = (stepped.section(finals), deadlines.section(finals), published.section(finals))
    parts = (*first, *sections, _overview(cells, shown, ended), *each, _not_run(cells, ended))
    return "\n\n".join(part for part in parts if part) + "\n"


def _ended(all_matches: Sequence[Match]) -> Ended:
    return {(m.cell.name, m.row.name): (m, finals) for m in all_matches if (finals := m.finals)}


def _finals(ended: Ended) -> Mapping[tuple[str, str], Finals]:
    return {names: finals for names, (_, finals) in ended.items()}


def _title() -> str:
    return """# The arena

Made by `python -m benchmarks.arena page` of what `python -m benchmarks.arena run` has left in
[benchmarks/arena/results](../../benchmarks/arena/results); do not edit. A cell or a row that is not here
was not run."""


def _in_short(ended: Ended) -> str:
    """The picture, and in how many cells each is over each."""
    finals = _finals(ended)
    found = standings(CELLS, finals)

    def each(counted: Callable[..., Count]) -> str:
        lines = [
            [
                WORDS[mine],
                *("" if mine == theirs else str(counted(found, mine, theirs, finals)) for theirs in AGAINST),
            ]
            for mine in (MARK, *MET)
        ]
        return table(("", *(f"against {WORDS[theirs]}" for theirs in AGAINST)), lines)

    sparsely = sum(standing.chain == SPARSE for standing in found)
    chains = f"`{SPARSELY}`: all travel by the sparse chain ({sparsely} cells), else whole."
    return f"""## In short

![{TITLE}, by cell]({PICTURE.name})

Accuracy at the end of the same time less that of {WORDS[MARK]}, by cell: the mean of five paired seeds and
its interval. A ring is level with them, an arrow is beyond the edge.
{chains if sparsely else "All travel whole."}

In how many of these {len(found)} cells a strategy ends over another by the whole interval / level with it /
under it:

{each(count)}

In how many it is sooner / no sooner and no later / later at what plain rounds by the same chain come to less
{BELOW:g} point; a run that never was there counts with all of its time:

{each(soonness)}"""


def _how() -> str:
    return f"""## How it is run

{DEVICES} devices, {HORIZON_S:g} virtual seconds, measured {EVALUATIONS} times. A task is ten local steps; the
slowest device's takes 5 s, the fastest's a fifth of that (speed-shards-20: a twentieth). `dirichlet`: devices
have labels in unequal shares. `speed-shards`: data go with speed, devices of like speed have like classes.
In `compute` cells
links are fast; in `link` cells a model's way up takes about as long as its training. `leavers`:
{LEAVERS:.0%} of the devices leave for good, each at a random moment. At most {CAP} devices train at a
time, who has waited longest first; rounds, FedCompass and `all at once` have no such bound. Rounds wait for
all of their cohort, without over-selection or a deadline; in `leavers` cells for
{DEADLINES_S["compute"]:g} s, on narrow links for {DEADLINES_S["link"]:g}. `raw`: everything
travels whole. `{SPARSE}`: up `{chain_of("uplink")}`,
down `{chain_of("downlink")}`, the same for all. `own`: the strategy's own compression.

`digits` is a perceptron; `text` a transformer that says the next token of generated texts, whose topics
are what devices differ in; `regression` a perceptron on generated points, whose regions are. Its accuracy
is R2 in %, by one variance for all points.

**Tuning**, the same for all: 12 points, four learning rates of devices (on `fashion-mnist`, a convolution,
half of the others') by three values of the strategy's most important setting
({_list(f"`{row.strategy}`" for row in TUNED if NUMBERS in row.grid.axes)}:
two rates by two sizes of the buffer by three numbers of devices that train at a time; `deadline tuned`: two
rates by two cohorts, or numbers of steps, by three deadlines); each for
{SHORT:.0%} of the time from seeds {_list(TUNING_SEEDS)}, on the validation part; the best {KEPT} to the end;
then neighbours of the best, those beyond the grid's ends first, {MORE} at most (†: a neighbour was left).
**Figures** are of seeds {_list(SEEDS)}, which took no part in
that, on the test part: the same devices, data and first weights for every row. Accuracy is the mean of a
run's last fifth. A run whose model is no longer finite ends there, and its last fifth is of the time until
then: what such a seed is given lies between what it had and chance. An interval is the bootstrap's, 95 %, of
what is paired by seed; of five values it is somewhat narrow. `times as long`: at the point that was chosen
for the usual time. `half as long`: in half of the time, tuned for that; its last fifth is that half's, and
beside it stands what others come to in all."""


def chain_of(way: str) -> str:
    """The sparse chain of a direction."""
    return str(CHAINS[SPARSE][way]["codec"])


def _list(seeds: Iterable[Any]) -> str:
    return ", ".join(map(str, seeds))


def _overview(cells: Sequence[Cell], rows: Sequence[Row], ended: Ended) -> str:
    """A table for each workload, links and who leaves: rows by splits."""
    alike: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        alike.setdefault((cell.workload, cell.links, cell.faults), []).append(cell)
    each = "\n\n".join(_group(", ".join(of), found, rows, ended) for of, found in alike.items())
    return f"""## Accuracy at the end, less FedAvg's

Points, with their interval: **bold** where all of it is over or under zero. The line of `{REFERENCE}`
has its accuracy in %, as all lines have in a cell without it.

{each}"""


def _group(title: str, cells: Sequence[Cell], rows: Sequence[Row], ended: Ended) -> str:
    lines = [[row.name, *(_at(cell, row, ended) for cell in cells)] for row in rows]
    return table((title, *(cell.split for cell in cells)), [line for line in lines if any(line[1:])])


def _at(cell: Cell, row: Row, ended: Ended) -> str:
    found = ended.get((cell.name, row.name))
    if found is None:
        return ""
    reference = _reference(cell, ended)
    if reference is None or row.name == REFERENCE:
        return _mean(found[1], lambda r: r.accuracy)
    return str(lead(found[1], reference))


def _reference(cell: Cell, ended: Ended) -> Finals | None:
    found = ended.get((cell.name, REFERENCE))
    return None if found is None else found[1]


def _cell(cell: Cell, ended: Ended) -> str:
    reference = _reference(cell, ended)
    found = [of for (at, _), of in ended.items() if at == cell.name]
    found.sort(key=lambda of: statistics.fmean(r.accuracy for r in of[1]))
    target = statistics.fmean(r.accuracy for r in reference or found[0][1]) - BELOW
    lines = [_line(match, finals, reference, target) for match, finals in found]
    to = f"to {target:.1f} %"
    head = ("", "accuracy, %", "less FedAvg", "at half the time, less FedAvg's end", f"seconds {to}")
    more = (
        f"MB up {to}",
        f"MB down {to}",
        "MB, both ways",
        "worst tenth, %",
        "updates",
        "staleness",
        "tuned to",
    )
    whose = f"`{REFERENCE}`'s" if reference else "the lowest row's"
    of_target = f"{to.removeprefix('to ')} is {whose} accuracy less {BELOW:g}"
    return f"## {cell.name}\n\nThe worst first; {of_target}.\n\n{table((*head, *more), lines)}"


def _line(match: Match, finals: Finals, reference: Finals | None, target: float) -> list[str]:
    against = half = ""
    if reference is not None and match.row.name != REFERENCE:
        against = str(lead(finals, reference))
        half = str(half_way(finals, reference))
    there = [at for r in finals if (at := reached(r, target)) is not None]
    some = "" if len(there) == len(finals) else f" ({len(there)} of {len(finals)})"
    return [
        match.row.name,
        _mean(finals, lambda r: r.accuracy),
        against,
        half,
        _average([seconds for seconds, _, _ in there], 0) + some,
        _average([up for _, up, _ in there], 2) + some,
        _average([down for _, _, down in there], 2) + some,
        _mean(finals, lambda r: r.up_mb + r.down_mb),
        _mean(finals, lambda r: r.worst_tenth),
        _mean(finals, lambda r: r.updates, 0),
        _mean(finals, lambda r: r.staleness),
        tuned_to(match, finals),
    ]


def _mean(finals: Finals, figure: Figure, digits: int = 1) -> str:
    return _average([value for r in finals if (value := figure(r)) is not None], digits)


def _average(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f}" if values else "-"


def tuned_to(match: Match, finals: Finals) -> str:
    """The setting that a row has ended at; †: a neighbour of it was left."""
    setting = ", ".join(f"{key.rsplit('.', 1)[1]} {value:g}" for key, value in finals[0].setting.items())
    return setting + ("" if match.progress.settled else " †")


def _not_run(cells: Sequence[Cell], ended: Ended) -> str:
    """Which cells have no row, and in how many cells each row is: the rest of them was not run."""
    names = [f"`{cell.name}`" for cell in CELLS if cell not in cells]
    kinds = f"{len(WORKLOADS)} workloads, {len(SPLITS)} splits, {len(LINKS)} links, {len(FAULTS)} faults"
    counts = Counter(row for _, row in ended)
    lines = [
        [str(times), _list(f"`{row.name}`" for row in ROWS if counts[row.name] == times)]
        for times in sorted({counts[row.name] for row in ROWS}, reverse=True)
    ]
    without = f"\n\n{len(names)} have no row yet: {_list(names)}." if names else ""
    return f"""## Not run

In how many of the {len(CELLS)} cells ({kinds}) each row has ended:

{table(("cells", "rows"), lines)}{without}"""
