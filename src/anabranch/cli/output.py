"""What commands print: rich on a terminal, plain lines otherwise, JSON lines for programs."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from anabranch.core.errors import NO_SPACE, StoreFull, disk_error
from anabranch.core.text import LAYOUT, visible

STDOUT, STDERR = 1, 2
NAMES = {STDOUT: "stdout", STDERR: "stderr"}
PLAIN_EVERY_S = 2.0
UNBROKEN_CHARS_MAX = 40  # of a word in a table: a digest may be broken, a name may not
_ALONE: list[TextIO] = []  # what was stdout, where nothing but answers may be on it
ASCII = str.maketrans({"±": "+/-", "\N{EN DASH}": "-", "…": "..."})  # of the signs that commands print


def for_programs(as_json: bool) -> bool:
    """Of `--json`: stdout is for answers alone, and what parts print goes to stderr.

    So does what their libraries and processes print.
    """
    if as_json and not _ALONE:
        sys.stdout.flush()
        own, spoken, errors = os.dup(STDOUT), sys.stdout.encoding, sys.stdout.errors
        # Never closed: who is interrupted still answers.
        _ALONE.append(open(own, "w", encoding=spoken, errors=errors, closefd=False))  # noqa: SIM115
        os.dup2(STDERR, STDOUT)
        sys.stdout = sys.stderr
    return as_json


def answers() -> TextIO:
    """Where a command answers."""
    return _ALONE[0] if _ALONE else sys.stdout


def descriptor(stream: int) -> int:
    """That of STDOUT, wherever answers go, or of STDERR."""
    return _ALONE[0].fileno() if _ALONE and stream == STDOUT else stream


def silence(stream: int) -> None:
    """What is written on it goes nowhere, and what its file still has is no error at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor(stream))
    os.close(nowhere)


class _Console(Console):
    """Of one that serves: rich would end the process where nobody reads what it prints."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Output:
    """One command's voice. With `as_json` every line on stdout is one JSON object.

    One that `serves` goes on when nobody reads it any more, such as a `grep` that has seen enough, or the
    disk of its log is full; any other is there to be read, and ends.
    """

    def __init__(self, as_json: bool = False, serves: bool = False) -> None:
        self.as_json, self._serves = as_json, serves
        self.console = self._console(stderr=as_json)
        self._terminals = [stream for stream in (STDOUT, STDERR) if os.isatty(descriptor(stream))]

    def say(self, text: str) -> None:
        """A line for people; programs are not bothered with it."""
        if not self.as_json:
            with self.unless_closed(STDOUT):
                self.console.print(_written(text, self.console), soft_wrap=True, markup=False)

    def warn(self, text: str) -> None:
        """A line for people that is no answer: on stderr, whoever reads stdout."""
        with self.unless_closed(STDERR):
            console = self._console(stderr=True)
            console.print(_written(text, console), style="yellow", soft_wrap=True, markup=False)

    def event(self, kind: str, text: str = "", /, **data: Any) -> None:
        """Something that happened: a JSON line for programs, `text` for people.

        `data` may have a `kind` of its own, which then counts.
        """
        if self.as_json:
            self._json({"kind": kind, **data})
        elif text:
            self.say(text)

    def result(self, data: Mapping[str, Any], text: str = "") -> None:
        """The command's answer: one JSON object for programs, `text` for people."""
        if self.as_json:
            self._json(data)
        elif text:
            self.say(text)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """A table for people; columns that have no room on their terminal stand below, beside the first."""
        if self.as_json:
            return
        lines = [[_written(cell, self.console) for cell in row] for row in rows]
        found = [_Column(name, [line[at] for line in lines]) for at, name in enumerate(columns)]
        for part in _parts(found, self.console.width):
            self._print_table(title, part)
            title = ""

    def _print_table(self, title: str, columns: list[_Column]) -> None:
        table = Table(title=_written(visible(title), self.console), title_justify="left", header_style="bold")
        lined = 2 * len(columns) + 2  # columns more for lines between them, where there is room
        room = self.console.width - _least(columns)
        if room < lined:
            table.box, table.pad_edge, table.padding = None, False, (0, 1, 0, 0)
        for number, (column, width) in enumerate(zip(columns, _widths(columns, room, lined), strict=True)):
            side: Literal["left", "right"] = "left" if number == 0 else "right"
            table.add_column(column.name, justify=side, overflow="fold", width=width)
        for line in zip(*(column.cells for column in columns), strict=True):
            table.add_row(*line)
        if room < 0:  # a line that the terminal wraps can be read, a broken word cannot
            table.width = _least(columns)
        with self.unless_closed(STDOUT):
            self.console.print(table, markup=False, crop=False)

    def _json(self, data: Mapping[str, Any]) -> None:
        with self.unless_closed(STDOUT):
            answers().write(json_line(data))
            answers().flush()

    def _console(self, stderr: bool) -> Console:
        return (_Console if self._serves else Console)(stderr=stderr, highlight=False, emoji=False)

    @contextmanager
    def unless_closed(self, stream: int) -> Iterator[None]:
        """What a closed terminal does not take goes nowhere: who writes has still to end in order."""
        try:
            yield
        except OSError as error:
            closed = {errno.EIO: self._terminals, errno.EPIPE: [stream]}.get(error.errno or 0, [])
            for lost in closed:
                silence(lost)
            if error.errno in NO_SPACE:
                self._leave_out(stream, error)
            elif not closed or (error.errno == errno.EPIPE and not self._serves):
                raise

    def _leave_out(self, stream: int, error: OSError) -> None:
        """A line for which there is no room: of who serves it is lost, and the next one may have room."""
        if not self._serves:  # and it is not the disk of the folder that is worked on
            silence(stream)  # or Python would come upon the rest at its end, and exit by a code of its own
            raise disk_error(NAMES[stream], error) from error
        number = descriptor(stream)
        kept, nowhere = os.dup(number), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        (answers() if stream == STDOUT else sys.stderr).flush()  # of what came through a part is kept there
        os.dup2(kept, number)
        os.close(kept)
        os.close(nowhere)
        self.console = self._console(self.as_json)  # and in this one all of it


@dataclass(frozen=True)
class _Column:
    name: str
    cells: list[str]

    @property
    def least(self) -> int:
        """So wide it breaks no word."""
        words = (word for cell in (self.name, *self.cells) for word in cell.split())
        return min(max(map(len, words), default=0), UNBROKEN_CHARS_MAX)

    @property
    def most(self) -> int:
        """So wide each of its cells is one line."""
        return max(map(len, (self.name, *self.cells)))


def _written(text: str, console: Console) -> str:
    """The text as a terminal may show it; where its encoding lacks a sign, in letters that have room."""
    found = visible(text, LAYOUT)
    try:
        found.encode(console.encoding)
    except UnicodeEncodeError:
        return found.translate(ASCII).encode(console.encoding, "backslashreplace").decode(console.encoding)
    return found


def _least(columns: list[_Column]) -> int:
    """So wide is a table of these without lines, with a space between them."""
    return sum(column.least for column in columns) + len(columns) - 1


def _parts(columns: list[_Column], width: int) -> list[list[_Column]]:
    """Columns of tables that are no wider, each with the first one."""
    parts = [columns[:1]]
    for column in columns[1:]:
        if len(parts[-1]) > 1 and _least([*parts[-1], column]) > width:
            parts.append(columns[:1])
        parts[-1].append(column)
    return parts


def _widths(columns: list[_Column], room: int, lined: int) -> list[int]:
    """What is left of the room goes first to whose cells lack least: a number is sooner whole than a name."""
    widths = [column.least for column in columns]
    left = room - lined if room >= lined else room
    for lacking, at in sorted((column.most - column.least, at) for at, column in enumerate(columns)):
        given = max(0, min(left, lacking))
        widths[at] += given
        left -= given
    return widths


def json_line(data: Mapping[str, Any]) -> str:
    """Data as a line of JSON, which has neither NaN nor infinity: what is one, a loss perhaps, is null."""
    return json.dumps(_finite(data), allow_nan=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(its) for key, its in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(its) for its in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Ticker:
    """Progress of long work: a live line on a terminal, a plain line every few seconds elsewhere.

    Plain lines come from a thread of their own: they come although the work has nothing new to show. The
    first one comes at once, or, of one that is `patient`, where the work lasts.
    """

    def __init__(self, output: Output, patient: bool = False) -> None:
        self.output, self._patient = output, patient
        self._began_at = time.monotonic()
        self._shown: tuple[str, dict[str, Any]] | None = None
        self._live: Live | None = None
        if output.console.is_terminal and not output.as_json:
            # It asks: work may have something new far more often than a line can be read.
            self._live = Live(
                get_renderable=self._line, console=output.console, refresh_per_second=8, transient=True
            )
        self._before = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="anabranch-ticker", daemon=True)

    def show(self, text: str, **data: Any) -> None:
        """The state of the work now."""
        first, self._shown = self._shown is None, (text, data)
        if self._live is None and first:
            if not self._patient:
                self._print()
            self._thread.start()

    def _line(self) -> Text:
        return Text("" if self._shown is None else _written(self._shown[0], self.output.console))

    def _go_on(self) -> None:
        # Work is not lost for its progress: of a reader that has gone or a full disk the answer will tell.
        with suppress(OSError, StoreFull):
            while not self._over.wait(PLAIN_EVERY_S):
                self._print()

    def _print(self) -> None:
        assert self._shown is not None
        text, data = self._shown
        seconds = round(time.monotonic() - self._began_at)
        again = f" (after {seconds} s)" if text == self._before else ""
        self.output.event("progress", text + again, **data)
        self._before = text

    def __enter__(self) -> Ticker:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._over.set()
        if self._live is not None:
            with self.output.unless_closed(STDOUT):
                self._live.stop()
        elif self._thread.is_alive():
            self._thread.join()
