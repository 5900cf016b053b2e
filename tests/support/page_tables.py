"""Tables of a report's page and of a terminal, as their reader sees them."""

from __future__ import annotations

import re
from html import unescape


def cells_of(page: str, title: str, number: int = 0) -> list[list[str]]:
    """A table of the card with this title, line by line, its head among them."""
    card = page.split(f"<h2>{title}</h2>")[1].split("</section>")[0]
    table = re.findall(r"<table>(.*?)</table>", card, re.DOTALL)[number]
    lines = (re.findall(r"<t[hd]>(.*?)</t[hd]>", line) for line in re.findall(r"<tr>(.*?)</tr>", table))
    return [[unescape(re.sub("<.*?>", "", cell)) for cell in line] for line in lines]


def lines_of(said: str) -> list[list[str]]:
    """The cells of all tables in what a terminal shows, line by line, their heads among them."""
    lines = (re.split("[┃│]", line)[1:-1] for line in said.splitlines() if line[:1] in {"┃", "│"})
    return [[cell.strip() for cell in line] for line in lines]
