"""The tables of a report's page, as its reader sees them."""

from __future__ import annotations

import re
from html import unescape


def cells_of(page: str, title: str, number: int = 0) -> list[list[str]]:
    """A table of the card with this title, line by line, its head among them."""
    card = page.split(f"<h2>{title}</h2>")[1].split("</section>")[0]
    table = re.findall(r"<table>(.*?)</table>", card, re.DOTALL)[number]
    lines = (re.findall(r"<t[hd]>(.*?)</t[hd]>", line) for line in re.findall(r"<tr>(.*?)</tr>", table))
    return [[unescape(re.sub("<.*?>", "", cell)) for cell in line] for line in lines]
