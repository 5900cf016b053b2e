"""The river of a run: versions along time, and each task a thread that leaves them and comes back.

The figure is drawn by river.js, which is built of the cockpit's own sources (cockpit/front/src/report.ts), so
that both show the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.core.errors import DataError
from anabranch.reports.page import card, empty, table
from anabranch.reports.picture.happening import of_lines
from anabranch.reports.picture.picture import Picture
from anabranch.reports.picture.river import river
from anabranch.reports.recorder import EVENTS_FILE
from anabranch.reports.result import Kind
from anabranch.reports.text import NOTHING, count_text, duration_text, number_text, safe

RIVER_SCRIPT = "river.js"
LANES_MAX, LANES_OF_MANY = 100, 60
THREADS_MAX = 6000  # about 60 bytes each: the page stays far below 2 MB
TABLE_ROWS = 50
DIGITS = 7  # of moments: more than a screen has pixels
STALENESS_STEPS = 7

River = dict[str, Any]


def river_of(run: Path) -> River | None:
    """What the figure shows of a run's folder; None where it has left no events. Raises `DataError`."""
    path = run / EVENTS_FILE
    if not path.is_file():
        return None
    picture = Picture()
    try:
        with path.open("rb") as file:
            for found, _ in of_lines(file):
                picture.tell(found)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if not len(picture.devices):
        return None
    many = len(picture.devices) > LANES_MAX
    lanes = picture.devices.sample(LANES_OF_MANY if many else LANES_MAX)
    found_river = river(picture, lanes, 0.0, picture.now_s, THREADS_MAX)
    of_lanes = int(np.isin(picture.threads.columns["device"], lanes).sum())
    return {**found_river, "threads_of": of_lanes, "now_s": picture.now_s, "version": picture.version}


def river_card(shown: River | None, kind: Kind, why: str = "") -> str:
    """The figure with its data; or why there is none."""
    if shown is None:
        return card(
            "The river",
            empty(why or f"There is no {EVENTS_FILE} of this run, which tells what happened when."),
        )
    data = json.dumps(
        {**_rounded(shown), "units": "virtual" if kind == "simulated" else "real"}, separators=(",", ":")
    )
    label = "Versions along time; the same stands in the table below."
    figure = (
        f'<figure class="river">{_legend(shown["staleness_max"])}'
        f'<div class="river-place"><canvas tabindex="0" role="img" aria-label="{safe(label)}"></canvas>'
        '<div class="tip" hidden=""></div></div>'
        f'<script type="application/json">{data.replace("<", chr(92) + "u003c")}</script></figure>'
    )
    return card("The river", figure + _as_table(shown), _caption(shown))


def _caption(shown: River) -> str:
    lanes, of_all, threads, of_lanes = (
        len(shown["lanes"]),
        shown["lanes_of"],
        len(shown["threads"]),
        shown["threads_of"],
    )
    told = (
        "Each device leaves the channel with a version and comes back where its update counted: the colour "
        "says how many versions had passed by then. The channel is the wider, the faster updates come in."
    )
    if lanes < of_all:
        told += f" {count_text(lanes)} of {count_text(of_all)} devices are shown, drawn by lot;"
        told += " the channel is that of all."
    if threads < of_lanes:
        told += f" Of their {count_text(of_lanes)} tasks {count_text(threads)} are shown, drawn by lot."
    return told


def _legend(stalest: int) -> str:
    ramp = "".join(f'<i class="stale-{i}"></i>' for i in range(STALENESS_STEPS))
    marks = (
        ("bad", '<path d="M2 2l8 8M10 2l-8 8"/>', "rejected"),
        ("", '<circle cx="6" cy="6" r="4"/>', "lost"),
        ("held", '<path d="M6 1l5 5-5 5-5-5z"/>', "in no version yet"),
        ("out", '<circle cx="6" cy="6" r="3.5"/>', "still out"),
    )
    rest = "".join(
        f'<li><svg class="mark {style}" viewBox="0 0 12 12" aria-hidden="true">{drawn}</svg>{name}</li>'
        for style, drawn, name in marks
    )
    scale = f'<li>fresh<span class="ramp">{ramp}</span>{count_text(stalest)} stale</li>'
    return f'<ul class="legend">{scale}{rest}</ul>'


def _as_table(shown: River) -> str:
    """The newest tasks in words, for who sees no figure."""
    newest = sorted(shown["threads"], key=lambda t: -(t[2] or 0.0 if t[4] is None else t[4]))[:TABLE_ROWS]
    rows = [
        (
            safe(shown["lanes"][lane]),
            count_text(base),
            NOTHING if left is None else safe(duration_text(left)),
            NOTHING if version is None else count_text(version),
            NOTHING if joined is None else safe(duration_text(joined)),
            safe("still out" if verdict == "open" else verdict),
            NOTHING if staleness is None else count_text(staleness),
            NOTHING if weight is None else safe(number_text(weight)),
        )
        for lane, base, left, version, joined, staleness, verdict, weight in newest
    ]
    head = ("device", "left version", "at", "counted in", "at", "verdict", "staleness", "weight")
    summary = f"The same as a table: the newest {count_text(len(rows))} tasks"
    return f"<details><summary>{summary}</summary>{table(head, rows)}</details>"


def _rounded(shown: River) -> River:
    """With as many digits as can be seen: a page is sent by mail, too."""

    def short(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.{DIGITS}g}")
        return [short(each) for each in value] if isinstance(value, list) else value

    return {key: short(value) for key, value in shown.items()}
