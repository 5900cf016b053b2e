"""The shell of a report page: one self-contained HTML file, no request leaves it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from anabranch.reports.scales import Axis
from anabranch.reports.text import BYTES, PERCENT, SECONDS, safe

ACCURACY = Axis("accuracy", PERCENT, from_zero=False)
LOSS = Axis("loss", from_zero=False)
UPDATES = Axis("applied updates", whole=True)
TRAFFIC = Axis("uplink + downlink", BYTES)

# Whatever slips in, a browser with this policy fetches nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def time_axis(kind: str) -> Axis:
    """Seconds since the run's start, on the clock that the run had."""
    return Axis("virtual time" if kind == "simulated" else "time", SECONDS)


def document(title: str, body: Iterable[str]) -> str:
    """A whole page. The title is escaped; the body is HTML already."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{safe(title)}</title>
<style>
{resource("style.css")}</style>
</head>
<body>
<main>
{"".join(f"{part}{chr(10)}" for part in body)}</main>
<script>
{resource("hover.js")}</script>
</body>
</html>
"""


def resource(name: str) -> str:
    """The text of a file that lies beside this module."""
    return files("anabranch.reports").joinpath(name).read_text(encoding="utf-8")


def standalone(svg: str) -> str:
    """A chart as a file of its own, with the style it needs: for documents that link to an image."""
    opening, end, rest = svg.partition(">")
    return f"{opening}{end}<style>{resource('style.css')}</style>{rest}\n"


def header(title: str, subtitle: str) -> str:
    """The page's heading."""
    return f"<header><h1>{safe(title)}</h1><p>{safe(subtitle)}</p></header>"


def tile(name: str, value: str, remark: str = "") -> str:
    """A key figure."""
    below = f"<small>{safe(remark)}</small>" if remark else ""
    return f'<div class="tile"><span>{safe(name)}</span><strong>{safe(value)}</strong>{below}</div>'


def tiles(items: Iterable[str]) -> str:
    """Key figures side by side."""
    return f'<section class="tiles">{"".join(items)}</section>'


def card(title: str, content: str, caption: str = "") -> str:
    """A titled box around HTML, with a caption under it."""
    below = f"<p>{safe(caption)}</p>" if caption else ""
    return f'<section class="card"><h2>{safe(title)}</h2>{content}{below}</section>'


def empty(remark: str) -> str:
    """What stands in the place of a chart that has nothing to show."""
    return f'<p class="empty">{safe(remark)}</p>'


def grid(items: Iterable[str]) -> str:
    """Cards side by side, as many as fit."""
    return f'<div class="grid">{"".join(items)}</div>'


def columns(*sides: Iterable[str]) -> str:
    """Stacks of cards side by side, for cards of unequal height."""
    return '<div class="columns">' + "".join(f"<div>{''.join(side)}</div>" for side in sides) + "</div>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls sideways where it must. Heads are escaped; cells are HTML already."""
    heads = "".join(f"<th>{safe(h)}</th>" for h in head)
    top = f"<thead><tr>{heads}</tr></thead>" if head else ""
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}<tbody>{lines}</tbody></table></div>'


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as `table.key` -> value."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
