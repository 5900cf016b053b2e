"""A walk: what a person does with a page in front of them, in a folder that is not the checkout.

A step names a line of the page by how it begins, and the line is typed as it stands, less what `fills` lists:
names that stand for something (`HOST`, `TOKEN`), numbers that are another run's. So a page that changes
under its walk fails, and so does a line that no walk types.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pages import Command, commands_of
from terminals import Machine, Terminal

LIMIT_S = 1800.0  # generous: a busy machine is slow
ENDING_S = 60.0
CRASH = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Line:
    """A command that is typed, in a terminal of its own if it `stays`.

    `own`: it is the walk's, word for word, and on no page. `ends`: its exit code; `says`: what it prints, a
    pattern; `until`: what it prints once it does its work; `fills`: words of the page for what stands there
    instead; `keeps`: patterns with a group, for later steps to be filled with; `name`: of the terminal, where
    its line alone does not tell.
    """

    text: str
    own: bool = False
    stays: bool = False
    ends: int = 0
    says: str = ""
    fills: Mapping[str, str] = field(default_factory=dict)
    keeps: Mapping[str, str] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True)
class End:
    """A command in its terminal, by name or line, ends: by itself, or by a signal, such as Ctrl-C."""

    text: str
    by: signal.Signals | None = None
    ends: int = 0
    says: str = ""


@dataclass(frozen=True)
class Send:
    """A command in its terminal gets a signal, and need not end by it."""

    text: str
    signal: signal.Signals


@dataclass(frozen=True)
class Wait:
    """A command in its terminal prints what matches."""

    text: str
    says: str


@dataclass(frozen=True)
class Write:
    """A file is written in an editor."""

    path: str
    text: str


@dataclass(frozen=True)
class Left:
    """A line of the page that no walk types, and why not."""

    text: str
    why: str


@dataclass(frozen=True)
class Look:
    """Something is looked at that no command prints."""

    check: Callable[[Walker], None]


Step = Line | End | Send | Wait | Write | Left | Look


def types(text: str, **how: object) -> Line:
    """Type a line of the page and wait until it is done."""
    return Line(text, **how)  # type: ignore[arg-type]


def starts(text: str, until: str, **how: object) -> Line:
    """Type a line of the page in a terminal of its own, and go on when it prints `until`."""
    return Line(text, stays=True, says=until, **how)  # type: ignore[arg-type]


def also(text: str, **how: object) -> Line:
    """Type a line that is not on the page."""
    return Line(text, own=True, **how)  # type: ignore[arg-type]


def also_starts(text: str, until: str, **how: object) -> Line:
    """Type a line that is not on the page in a terminal of its own."""
    return Line(text, own=True, stays=True, says=until, **how)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Walk:
    """`page`: whose lines are typed, if any; `needs`: the environment; `fills`: what fills every line.

    `at`: the folder where every terminal is opened; `copies`: what of the tree lies there. `database`: there
    is a PostgreSQL, `{database}`; `mounts`: a disk is mounted, which only a machine of its own allows.
    `leaves`: what may go on after it, a pattern of command lines.
    """

    name: str
    steps: tuple[Step, ...]
    page: str = ""
    needs: str = "all"
    fills: Mapping[str, str] = field(default_factory=dict)
    at: str = "."
    copies: tuple[str, ...] = ()
    mounts: bool = False
    database: bool = False
    leaves: str = ""

    def lines(self) -> Iterator[Line]:
        """What is typed."""
        return (step for step in self.steps if isinstance(step, Line))

    def command(self, text: str) -> Command:
        """The page's one command that begins so."""
        found = {c.text: c for c in commands_of(self.page) if c.text.startswith(text)}
        assert len(found) == 1, f"{self.name}: {len(found)} commands of {self.page} begin with {text!r}"
        return next(iter(found.values()))


class Walker:
    """Whoever walks: at a machine, in a folder."""

    def __init__(self, walk: Walk, machine: Machine, folder: Path, kept: Mapping[str, str]) -> None:
        self.walk = walk
        self.machine = machine
        self.folder = folder
        self.kept = dict(kept)
        self._open: dict[str, Terminal] = {}
        self._typed = 0

    def go(self) -> None:
        """Walk to the end: every step, nothing crashes, nothing is left running."""
        for step in self.walk.steps:
            self._do(step)
        assert not self._open, f"still open: {', '.join(self._open)}"
        # Python's own tracker of resources ends after who began it.
        deadline_s = time.monotonic() + ENDING_S
        while (left := self._left_running()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert not left, left

    def _left_running(self) -> list[str]:
        leaves = self.walk.leaves
        commands = self.machine.left_running().values()
        return [command for command in commands if not (leaves and re.search(leaves, command))]

    def _do(self, step: Step) -> None:
        match step:
            case Line():
                self._type(step)
            case End(text, by, ends, says):
                terminal = self._open.pop(text)
                if by is not None:
                    terminal.send(by)
                self._ended(terminal, ends, says)
            case Send(text, number):
                self._open[text].send(number)
            case Wait(text, says):
                self._open[text].until(says, LIMIT_S)
            case Write(path, text):
                (self.folder / path).write_text(text, encoding="utf-8")
            case Look(check):
                check(self)

    def _type(self, line: Line) -> None:
        self._typed += 1
        shown = Command("", 0, line.text) if line.own else self.walk.command(line.text)
        text = self._filled(shown.text, {**self.walk.fills, **line.fills})
        log = self.folder.parent / f"terminal-{self._typed}.txt"
        terminal = Terminal(self.machine, text, self.folder / self.walk.at, log)
        if line.stays:
            self._open[line.name or line.text] = terminal
            terminal.until(line.says, LIMIT_S)
        else:
            self._ended(terminal, line.ends, line.says)
            for shows in shown.prints:
                assert re.search(_any_numbers(shows), terminal.said), f"the page shows {shows!r}:\n{terminal}"
        for name, pattern in line.keeps.items():
            found = re.search(pattern, terminal.said)
            assert found, f"no {pattern!r}:\n{terminal}"
            self.kept[name] = found[1]

    def _ended(self, terminal: Terminal, ends: int, says: str) -> None:
        code = terminal.end(LIMIT_S)
        assert code == ends, f"it ended with {code}, not {ends}:\n{terminal}"
        assert CRASH not in terminal.said, str(terminal)
        assert re.search(self._filled(says, {}), terminal.said, re.MULTILINE), f"no {says!r}:\n{terminal}"

    def _filled(self, text: str, fills: Mapping[str, str]) -> str:
        for word, by in fills.items():
            pattern = rf"(?<![\w.]){re.escape(word)}(?!\w)"
            if re.search(pattern, text):  # what it is filled with may not be known before
                text = re.sub(pattern, by.format_map(self.kept).replace("\\", r"\\"), text)
        return re.sub(r"\{(\w+)\}", lambda name: self.kept[name[1]], text)  # other braces are TOML's


def _any_numbers(shown: str) -> str:
    """A pattern of what a page shows, for a run that counts otherwise."""
    return re.sub(r"\d+", lambda _: r"\d+", re.escape(shown))
