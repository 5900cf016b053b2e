"""What `docker build` would send: the tree as `.dockerignore` leaves it, by Docker's own rules.

The rules, from Docker's reference: the last line that matches a path decides; `!` takes it back in; a
line that matches a folder matches all that lies in it; `*` and `?` stay within one name, `**` does not;
`#` begins a comment; leading and trailing slashes do not count.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

Rule = tuple[re.Pattern[str], bool, str]  # what it matches, whether that stays in, its text
TOKENS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def rules(text: str) -> list[Rule]:
    """The lines of a `.dockerignore`, in order."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    made = []
    for line in lines:
        pattern = line.removeprefix("!").strip().strip("/")
        tokens = re.findall(r"\*\*/|\*\*|\*|\?|[^*?]+", pattern)
        expression = "".join(TOKENS.get(token, re.escape(token)) for token in tokens)
        made.append((re.compile(expression + r"(?:/.*)?\Z"), line.startswith("!"), pattern))
    return made


def included(path: PurePosixPath, lines: Sequence[Rule]) -> bool:
    """Whether a path, relative to the root of the context, is sent."""
    return next((stays for pattern, stays, _ in reversed(lines) if pattern.match(str(path))), True)


def copy_context(root: Path, target: Path) -> None:
    """Lay what would be sent of `root` into `target`, links as links."""
    lines = rules((root / ".dockerignore").read_text(encoding="utf-8"))
    shutil.copytree(root, target, symlinks=True, ignore=_left_out(root, lines))


def _left_out(root: Path, lines: Sequence[Rule]) -> Callable[[str, list[str]], list[str]]:
    """For `copytree`: the names in a folder that are not sent, nor anything below them."""

    def leads_on(path: PurePosixPath) -> bool:
        return any(stays and text.startswith(f"{path}/") for _, stays, text in lines)

    def names(folder: str, entries: list[str]) -> list[str]:
        here = PurePosixPath(Path(folder).relative_to(root).as_posix())
        return [name for name in entries if not included(here / name, lines) and not leads_on(here / name)]

    return names
