"""The published rules against FedBuff, in every cell that has both: counts and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anabranch.reports.page import standalone
from anabranch.reports.scales import AxisScale
from anabranch.reports.svg import WIDTH, svg, text
from benchmarks.arena.cells import CELLS, SPLITS, WORKLOADS, Cell
from benchmarks.arena.intervals import Interval
from benchmarks.arena.picture import LEFT, RIGHT, axis, dot, edge_arrow, scale_of
from benchmarks.arena.rows import RAW
from benchmarks.arena.standings import BELOW, MARK, PLAIN, WORDS, Ended, Lead, over, sooner, tally
from benchmarks.studies import table

PEER = "fedbuff"  # zero of the picture
RULES: Mapping[str, str] = {
    "fedasync": "FedAsync",
    "teasq": "TEASQ-Fed",
    "port": "PORT",
    "fadas": "FADAS",
    "ca2fl": "CA2FL",
    "ace": "ACE",
    "aced": "ACED",
    "fedasmu": "FedASMU",
    "fedfa": "FedFa",
    "fedcompass": "FedCompass",
    "delayed_nesterov": "delayed Nesterov",
}
KEY, UNDER = 44.0, 34.0  # what the key takes, and what is under the drawing
HEAD, STEP, GAP = 24.0, 14.0, 4.0  # a workload's title; from a rule to the next; after a workload
LEAST, MOST, EVERY = -8.0, 4.0, 2  # points: beyond them an arrow
PICTURE = "arena-rules.svg"
TITLE = f"points over {WORDS[PEER]}, a dot a cell"

Met = Mapping[Cell, Interval]  # a rule's lead in each cell that has it and who it is against


@dataclass(frozen=True)
class Rule:
    """A rule in the cells of a workload: its leads over FedBuff, by cell, and what is counted of them."""

    name: str
    over_peer: Met
    columns: tuple[str, ...]


def section(ended: Ended) -> str:
    """What the page says of them; empty where none has been run."""
    found = {workload: _rules(workload, ended) for workload in WORKLOADS}
    parts = [_workload(workload, rules) for workload, rules in found.items() if rules]
    if not parts:
        return ""
    each = "\n\n".join(parts)
    return f"""## Published rules, cell by cell

![{TITLE}]({PICTURE})

Accuracy at the end less {WORDS[PEER]}'s, the same devices, chain and budget of tuning; whole values, so that
TEASQ-Fed is here without its compression. A ring is level by its interval, an arrow is beyond the
edge, the bar is the mean of the cells.
Beneath: in how many cells a rule ends over another by the whole interval / level with it / under it; then in
how many it is sooner / no sooner and no later / later than {WORDS[PEER]} at what plain rounds come to less
{BELOW:g} point. Not every rule is in every cell: each line counts those that have both.

{each}"""


def drawn(ended: Ended) -> str:
    """An SVG file: of each workload a line a rule, of each cell a dot."""
    scale = scale_of(LEAST, MOST, EVERY)
    parts: list[str] = []
    y = KEY
    for workload in WORKLOADS:
        rules = _rules(workload, ended)
        if rules:
            parts.append(text(4, y + 17, workload, "legend"))
            y += HEAD
        for rule in rules:
            parts += _line(rule, y + STEP / 2, scale)
            y += STEP
        y += GAP if rules else 0
    return standalone(svg([*_key(), *axis(scale, KEY, y, TITLE), *parts], y + UNDER, TITLE))


def _rules(workload: str, ended: Ended) -> list[Rule]:
    """The lowest first."""
    cells = [cell for cell in CELLS if cell.workload == workload]
    rules = [rule for name in RULES if (rule := _rule(name, cells, ended)) is not None]
    return sorted(rules, key=_mean)


def _rule(name: str, cells: Sequence[Cell], ended: Ended) -> Rule | None:
    def met(how: Lead, against: str) -> Met:
        found = ((cell, how(cell, RAW, name, against, ended)) for cell in cells)
        return {cell: lead for cell, lead in found if lead is not None}

    over_peer = met(over, PEER)
    if not over_peer:
        return None
    others = (over_peer, met(over, PLAIN), met(over, MARK), met(sooner, PEER))
    return Rule(name, over_peer, tuple(str(tally(of.values())) for of in others))


def _mean(rule: Rule) -> float:
    return statistics.fmean(lead.mean for lead in rule.over_peer.values())


def _workload(workload: str, rules: Sequence[Rule]) -> str:
    head = (
        f"`{workload}`",
        "cells",
        f"points over {WORDS[PEER]}: mean, lowest to highest cell",
        *(f"against {WORDS[name]}" for name in (PEER, PLAIN, MARK)),
        f"sooner than {WORDS[PEER]}",
    )
    lines = []
    for rule in rules:
        leads = [lead.mean for lead in rule.over_peer.values()]
        points = f"{_points(_mean(rule))}, {_points(min(leads))} to {_points(max(leads))}"
        lines.append([RULES[rule.name], str(len(leads)), points, *rule.columns])
    return table(head, lines)


def _points(lead: float) -> str:
    return f"{lead:+.1f}".replace("-0.0", "0.0").replace("+0.0", "0.0")


def _key() -> list[str]:
    parts = []
    for i, split in enumerate(SPLITS):
        x, y = 8 + (i % 3) * WIDTH / 3, 10 + 18 * (i // 3)
        parts += [dot(x, y, i, told=True), text(x + 8, y + 4, split, "legend")]
    return parts


def _line(rule: Rule, y: float, scale: AxisScale) -> list[str]:
    parts = [text(LEFT - 8, y + 4, RULES[rule.name], "tick end")]
    for cell, lead in rule.over_peer.items():
        colour = list(SPLITS).index(cell.split)
        if LEAST <= lead.mean <= MOST:
            parts.append(dot(scale(lead.mean), y, colour, lead.above or lead.below))
        else:
            parts.append(edge_arrow(lead.mean < LEAST, y, colour))
    mean = _mean(rule)
    if not LEAST <= mean <= MOST:
        beyond = (LEFT + 12, "tick") if mean < LEAST else (WIDTH - RIGHT - 12, "tick end")
        parts.append(text(beyond[0], y + 4, f"{mean:+.1f}", beyond[1]))
    at = scale(min(max(mean, LEAST), MOST))
    return [*parts, f'<path class="axis" d="M{at:.1f} {y - 5:.1f}v10" style="stroke-width:2"/>']
