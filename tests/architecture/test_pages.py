"""Every page of the repository as a reader gets it: its tables are tables, its links lead somewhere."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for part in ("*.md", "docs/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(part)
    if path.is_file()
)
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")


def flaws(page: Path, root: Path = ROOT) -> list[str]:
    """What is wrong with a page of the tree under `root`, a line each."""
    source = page.read_text(encoding="utf-8")
    tokens = MARKDOWN.parse(source)
    return [*_torn_tables(tokens), *_open_fences(tokens, source), *_dead_links(tokens, page, root)]


def _torn_tables(tokens: list[Token]) -> list[str]:
    return [
        f"a row of a table is a paragraph: {line[:60]}"
        for token in tokens
        if token.type == "inline"
        for line in token.content.splitlines()
        if line.lstrip().startswith("|")
    ]


def _open_fences(tokens: list[Token], source: str) -> list[str]:
    lines, found = source.splitlines(), []
    for token in tokens:
        if token.type == "fence" and token.map is not None:
            begin, end = token.map
            last = lines[end - 1].strip().lstrip("> ")
            if end - 1 == begin or not last.startswith(token.markup) or last.strip(token.markup[0]):
                found.append(f"the fence of line {begin + 1} is not closed")
    return found


def _dead_links(tokens: list[Token], page: Path, root: Path) -> list[str]:
    return [
        f"{href} leads nowhere"
        for token in tokens
        for child in token.children or ()
        if (href := str(child.attrGet("href") or child.attrGet("src") or ""))
        if not re.match(r"[a-z]+:", href) and not _leads_somewhere(page, unquote(href), root)
    ]


def _leads_somewhere(page: Path, href: str, root: Path) -> bool:
    name, _, anchor = href.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists() or not target.is_relative_to(root):
        return False
    return not anchor or anchor in _anchors(target.read_text(encoding="utf-8"))


@cache  # a page is led to from many places
def _anchors(source: str) -> set[str]:
    """The names of a page's headings as GitHub makes them: a repeated one is numbered."""
    seen: Counter[str] = Counter()
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', source))
    tokens = MARKDOWN.parse(source)
    for opening, inline in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(c.content for c in inline.children or () if c.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_page_renders_as_it_is_meant(page: Path) -> None:
    assert flaws(page) == []


def test_the_readme_and_the_settings_are_among_the_pages() -> None:
    assert {"README.md", "SECURITY.md", "CHANGELOG.md", "configuration.md"} <= {page.name for page in PAGES}


def test_the_settings_of_every_strategy_are_in_tables() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    tokens = MARKDOWN.parse(page)
    cells = {b.content for a, b in itertools.pairwise(tokens) if a.type == "td_open"}
    assert {"`fedasync`", "`qafel`", "`teasq`", "`decay_every`", "`fedprox`"} <= cells


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("| a | b |\n|---|---|\n| 1 | 2 |\n\n| 3 | 4 |\n", "a row of a table is a paragraph: | 3 | 4 |"),
        ("- text\n| a |\n", "a row of a table is a paragraph: | a |"),
        ("```\ncode\n", "the fence of line 1 is not closed"),
        ("~~~\ncode\n```\n", "the fence of line 1 is not closed"),
        ("[x](gone.md)\n", "gone.md leads nowhere"),
        ("# A `b` c!\n\n[x](#a-b-d)\n", "#a-b-d leads nowhere"),
    ],
)
def test_flaws_are_found(tmp_path: Path, text: str, flaw: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    assert flaws(page, tmp_path) == [flaw]


def test_a_sound_page_has_no_flaws(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` c!\n\n## A b c\n\n[x](#a-b-c) [y](page.md#a-b-c-1) <a href='no.md'>z</a>\n\n"
        "- in a list\n\n  ```console\n  $ a | b\n  ```\n\n"
        "```\n| no table |\n```\n\n[z](https://example.com)\n",
        encoding="utf-8",
    )
    assert flaws(page, tmp_path) == []
