"""The arena's pages, of what was run: the study, what was found, and the tables of each workload."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arena import chains, deadlines, published, stepped, tables
from benchmarks.arena.cells import CELLS, DEVICES, EVALUATIONS, FAULTS, LEAVERS, LINKS, SPLITS, WORKLOADS
from benchmarks.arena.picture import SPARSELY, TITLE, drawn
from benchmarks.arena.play import Match, matches
from benchmarks.arena.rows import (
    CAP,
    CHAINS,
    DEADLINES_S,
    HORIZON_S,
    MATRIX,
    NUMBERS,
    RAW,
    ROWS,
    SPARSE,
    TUNED,
    Row,
)
from benchmarks.arena.standings import AGAINST, BELOW, MARK, MET, WORDS, Count, count, soonness, standings
from benchmarks.arena.store import RESULTS
from benchmarks.arena.tables import TITLES, Ended, Finals
from benchmarks.arena.tuning import KEPT, MORE, SEEDS, SHORT, TUNING_SEEDS
from benchmarks.studies import STUDIES, table

NOTES = Path(__file__).with_name("notes")
STUDY, FINDINGS = "arena.md", "arena-findings.md"
PICTURE = "arena.svg"
CELL_BY_NAME, ROW_BY_NAME = "digits/speed-shards/compute/steady", "waves, Nesterov, steps tuned/raw"


def write(results: Path = RESULTS) -> None:
    """Make them and their pictures, with what was found by looking."""
    ended = ended_of(matches(CELLS, ROWS, results))
    notes = {path.stem: path.read_text(encoding="utf-8") for path in NOTES.glob("*.md")}
    finals = _finals(ended)
    drawings = {PICTURE: drawn(standings(CELLS, finals)), published.PICTURE: published.drawn(finals)}
    for name, text in (pages(ended, notes) | drawings).items():
        (STUDIES / name).write_text(text, encoding="utf-8")


def pages(ended: Ended, notes: Mapping[str, str]) -> dict[str, str]:
    """The pages of what has ended, by their files' names.

    `notes` are what was found by looking: the `summary` and the `limits` of the study, the `findings`, and
    what there is to say of a workload, by its name.
    """
    finals = _finals(ended)
    compared = (part.section(finals) for part in (stepped, deadlines, published))
    made = {
        STUDY: (
            _title(),
            _in_short(finals),
            notes.get("summary"),
            _each_cell(finals),
            _how(),
            notes.get("limits"),
            _not_run(ended),
        ),
        FINDINGS: (_findings_title(), notes.get("findings"), *compared, chains.section(ended)),
    }
    for workload in WORKLOADS:
        titled = (_workload_title(workload), notes.get(workload))
        made[page_of(workload)] = (*titled, *tables.sections(workload, ended))
    return {name: "\n\n".join(part.strip() for part in parts if part) + "\n" for name, parts in made.items()}


def page_of(workload: str) -> str:
    """The file's name of a workload's page."""
    return f"arena-{workload}.md"


def ended_of(all_matches: Sequence[Match]) -> Ended:
    """Those of which every seed has been run."""
    return {(m.cell.name, m.row.name): (m, finals) for m in all_matches if (finals := m.finals)}


def _finals(ended: Ended) -> Mapping[tuple[str, str], Finals]:
    return {names: finals for names, (_, finals) in ended.items()}


def _title() -> str:
    each = _list(f"[{TITLES[workload]}]({page_of(workload)})" for workload in WORKLOADS)
    return f"""# The arena

Made by `python -m benchmarks.arena page` of what `python -m benchmarks.arena run` has left in
[benchmarks/arena/results](../../benchmarks/arena/results); do not edit. A cell or a row that is not here
was not run. [What was found]({FINDINGS}) goes into each question; every row of every cell is in the tables of
its workload: {each}.

A row by oneself, by its cell's name and its own in the tables:
`python -m benchmarks.arena run --cell {CELL_BY_NAME} --row '{ROW_BY_NAME}'
--results runs/arena --minutes 600` tunes and runs it anew; with `again` in the place of `run`, without that
folder, published runs of it are drawn and compared with what they come to now."""


def _findings_title() -> str:
    return f"""# The arena: what was found

What [the arena]({STUDY}) was looked at for, question by question, in points of accuracy at the end of the
same time unless it says otherwise; intervals in brackets, "level" where one has zero in it, † where a
neighbour of the setting was left; "ratio" is how many times slower the slowest device is than the fastest.
What it rests on cell by cell is in the tables from
[tuned steps](#tuned-steps-cell-by-cell) on and in those of each workload."""


def _workload_title(workload: str) -> str:
    return f"""# The arena: {TITLES[workload]}

Every row of this workload's cells, of [the arena]({STUDY}), which says how it was run."""


def _in_short(finals: Mapping[tuple[str, str], Finals]) -> str:
    """In how many cells each is over each."""
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

    return f"""## In short

A cell is a workload, how its data are shared out, the links, and whether devices leave. In how many of
{len(found)} cells a strategy ends over another by the whole interval / level with it / under it, at the end
of the same time, all tuned alike:

{each(count)}

In how many it is sooner / no sooner and no later / later at what plain rounds by the same chain come to less
{BELOW:g} point; a run that never was there counts with all of its time:

{each(soonness)}"""


def _each_cell(finals: Mapping[tuple[str, str], Finals]) -> str:
    """The picture of every cell."""
    sparsely = sum(standing.chain == SPARSE for standing in standings(CELLS, finals))
    marked = f"`{SPARSELY}`: all travel by the sparse chain ({sparsely} cells), else whole."
    return f"""## Cell by cell

![{TITLE}, by cell]({PICTURE})

Accuracy at the end of the same time less that of {WORDS[MARK]}, by cell: the mean of five paired seeds and
its interval. A ring is level with them, an arrow is beyond the edge.
{marked if sparsely else "All travel whole."}"""


def _how() -> str:
    return f"""## How it is run

{DEVICES} devices, {HORIZON_S:g} virtual seconds, measured {EVALUATIONS} times. A task is ten local steps; the
slowest device's takes 5 s, the fastest's a fifth of that (speed-shards-20: a twentieth). `dirichlet`: devices
have labels in unequal shares. `speed-shards`: data go with speed, devices of like speed have like classes.
In `compute` cells
links are fast; in `link` cells a model's way up takes about as long as its training. `leavers`:
{LEAVERS:.0%} of the devices leave for good, each at a random moment. At most {CAP} devices train at a
time, who has waited longest first; rounds, FedCompass and `all at once` have no such bound. `cosine`,
`decaying` and `then rounds` are strategies of the arena's own
([what they are]({FINDINGS}#the-end-of-a-run-a-rate-that-decays-a-synchronous-last-phase)). Rounds wait for
all of their cohort, without over-selection or a deadline; in `leavers` cells for
{DEADLINES_S[RAW]["compute"]:g} s, on narrow links for {DEADLINES_S[RAW]["link"]:g}, and there by the sparse
chain for {DEADLINES_S[SPARSE]["link"]:g}.
`raw`: everything travels whole. `{SPARSE}`: up `{chain_of("uplink")}`,
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


def _not_run(ended: Ended) -> str:
    """In how many cells rows are, those first that all are to have: the rest was not run."""
    kinds = f"{len(SPLITS)} splits, {len(LINKS)} links, {len(FAULTS)} faults"
    of_each = len(CELLS) // len(WORKLOADS)
    asked = [row for row in ROWS if row not in MATRIX]
    return f"""## Not run

Every cell is to have {len(MATRIX)} rows: each rule by whole values and, where it goes by them, by the sparse
chain and its own. In how many of a workload's {of_each} cells ({kinds}) each has ended:

{_counts(ended, MATRIX)}

The other rows are of a question, which was asked in some cells or in none yet:

{_counts(ended, asked)}"""


def _counts(ended: Ended, rows: Sequence[Row]) -> str:
    """In how many cells of each workload they are; those that are in as many together."""
    counted = Counter((cell.split("/")[0], row) for cell, row in ended)
    alike: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for row in rows:
        alike[tuple(counted[workload, row.name] for workload in WORKLOADS)].append(f"`{row.name}`")
    lines = [[_list(names), *map(str, counts)] for counts, names in sorted(alike.items(), reverse=True)]
    sums = (sum(counts[i] * len(names) for counts, names in alike.items()) for i in range(len(WORKLOADS)))
    lines.append([f"all {len(rows)}", *map(str, sums)])
    return table(("rows", *WORKLOADS), lines)
