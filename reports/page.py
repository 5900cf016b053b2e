"""The shell of a report page: one self-contained HTML file, no request leaves it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files

from anabranch.core.config.toml import setting_text
from anabranch.reports.scales import Axis
from anabranch.reports.svg import hue
from anabranch.reports.text import BYTES, SECONDS, count_text, safe

_PARTS_MEET = re.compile(r"(?<=[._])(?=\w)")

UPDATES = Axis("applied updates", whole=True)
TRAFFIC = Axis("uplink + downlink", BYTES)

SCRIPTS = ("hover.js", "plot.js")
_BRAND = (
    '<svg class="brand" viewBox="0 0 32 32" aria-hidden="true"><path class="brand-water" d="M0 16h32"/>'
    '<path class="brand-stale" d="M2 16c7 0 5-10 12-10s6 10 14 10"/>'
    '<path class="brand-fresh" d="M6 16c6 0 4 9 10 9s5-9 12-9"/></svg>'
)

# Whatever slips in, a browser with this policy fetches nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def time_axis(kind: str) -> Axis:
    """Seconds since the run's start, on the clock that the run had."""
    return Axis("virtual time" if kind == "simulated" else "time", SECONDS)


def document(title: str, body: Iterable[str], scripts: Iterable[str] = SCRIPTS) -> str:
    """A whole page. The title is escaped; the body is HTML already; `scripts` are files beside this one."""
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
{"".join(map(resource, scripts))}</script>
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
    return f"<header>{_BRAND}<div><h1>{safe(title)}</h1><p>{safe(subtitle)}</p></div></header>"


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
    """A table that scrolls sideways where it must. Heads are escaped; cells are HTML already.

    A head that is a setting's name may be broken where its parts meet: paper does not scroll.
    """
    heads = "".join(f"<th>{_PARTS_MEET.sub('<wbr>', safe(h))}</th>" if h else "<td></td>" for h in head)
    top = f"<thead><tr>{heads}</tr></thead>" if head else ""
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table>{top}<tbody>{lines}</tbody></table></div>'


def legend_list(entries: Iterable[tuple[str, int]]) -> str:
    """(name, colour) entries above the charts that they are of; names of any length."""
    items = "".join(f'<li><i class="key {hue(colour)}"></i>{safe(name)}</li>' for name, colour in entries)
    return f'<ul class="legend">{items}</ul>'


def notice(text: str) -> str:
    """A line that nobody shall miss."""
    return f'<p class="notice" role="status">{safe(text)}</p>'


def flaws_text(count: int) -> str:
    """What the marks above a chart mean; nothing where there are none."""
    if not count:
        return ""
    plural = "s were" if count > 1 else " was"
    return f"{count_text(count)} measurement{plural} not finite: marked above the curves."


def settings_table(settings: Mapping[str, object]) -> str:
    """Settings with their values, in as many columns as fit, table by table."""
    tables: dict[str, list[tuple[str, str]]] = {}
    for key, value in settings.items():
        table_name, _, name = key.rpartition(".")
        row = f"<code>{safe(name)}</code>", f"<code>{safe(setting_text(value))}</code>"
        tables.setdefault(table_name, []).append(row)
    titled = {f"[{name}]" if name else "top level": rows for name, rows in tables.items()}
    blocks = (f"<div><h3>{safe(title)}</h3>{table((), rows)}</div>" for title, rows in titled.items())
    return f'<div class="settings">{"".join(blocks)}</div>'


def fold(title: str, content: str) -> str:
    """HTML that is shown when its title is clicked."""
    return f"<details><summary>{safe(title)}</summary>{content}</details>"
