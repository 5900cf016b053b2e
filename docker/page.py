"""The code blocks of a page, for docker/test.sh, which runs what a reader is told to type.

python3 docker/page.py PAGE HEADING LANGUAGE [WORD=OTHER ...]

Prints the blocks of LANGUAGE under HEADING, with every WORD replaced. Of a `console` block it prints the
commands, one a line: without the prompt, the comments and the breaks.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def blocks(page: str, heading: str, language: str) -> list[str]:
    """The fenced blocks of `language` under the heading, up to the next heading of its kind or above."""
    start = re.search(rf"^(#+) {re.escape(heading)}$", page, re.MULTILINE)
    if start is None:
        raise SystemExit(f"no heading {heading!r}")
    section = re.split(rf"^#{{1,{len(start[1])}}} ", page[start.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    if not found:
        raise SystemExit(f"no {language} under {heading!r}")
    return found


def commands(console: str) -> str:
    """The commands of a console block, one a line."""
    lines = console.replace("\\\n", " ").splitlines()
    typed = (re.sub(r"\s+#\s.*$", "", line.removeprefix("$ ")) for line in lines if line.startswith("$ "))
    return "".join(" ".join(line.split()) + "\n" for line in typed)


def main() -> None:
    """Print the blocks that the command line asks for."""
    page, heading, language, *words = sys.argv[1:]
    text = "\n".join(blocks(Path(page).read_text(encoding="utf-8"), heading, language))
    if language == "console":
        text = commands(text)
    for word in words:
        text = re.sub(*word.split("=", 1), text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
