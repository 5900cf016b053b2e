"""The commands that a page tells its reader to type: lines of `console` blocks, and of tables of commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "$ "
LABEL = re.compile(r"anabranch \w+ \d+")  # what a signature is of begins so


@dataclass(frozen=True)
class Command:
    """`text` as it is typed, without its comment; `prints`: the lines that the page shows under it."""

    page: str
    line: int
    text: str
    prints: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def pages() -> list[str]:
    """Every page that somebody reads, by its path in the tree."""
    found = (path for part in ("*.md", "docs/**/*.md", "examples/*/*.md") for path in ROOT.glob(part))
    return sorted(str(path.relative_to(ROOT)) for path in found)


def commands_of(page: str) -> list[Command]:
    """What the page tells its reader to type, in its order."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    return sorted([*_blocks(page, lines), *_tables(page, lines)], key=lambda command: command.line)


def mentioned(page: str) -> list[str]:
    """Every `anabranch ...` in the page's prose."""
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = (" ".join(span.split()) for span in re.findall(r"`(anabranch [^`]+)`", prose))
    return [span for span in spans if not LABEL.fullmatch(span)]


def _blocks(page: str, lines: list[str]) -> Iterator[Command]:
    """Those of the blocks that are marked `console`: `$ ` begins a command, a backslash continues it."""
    inside, number = False, 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.startswith("```"):
            inside = line == "```console"
        elif inside and line.startswith(PROMPT):
            first, text = number, line.removeprefix(PROMPT)
            while text.endswith("\\"):
                text = text.removesuffix("\\") + lines[number].strip()
                number += 1
            prints = []
            while not lines[number].startswith(("```", PROMPT)):
                prints.append(lines[number])
                number += 1
            yield Command(page, first, _bare(text), tuple(prints))


def _tables(page: str, lines: list[str]) -> Iterator[Command]:
    """Those of tables with a column `command`."""
    inside = False
    for number, line in enumerate(lines, 1):
        inside = line.startswith("|") and (inside or "| command |" in line)
        if inside:
            for span in re.findall(r"`(anabranch [^`]+)`", line):
                yield Command(page, number, span)


def _bare(text: str) -> str:
    """Without the comment behind it."""
    return re.sub(r"\s{2,}#\s.*$", "", text).strip()
