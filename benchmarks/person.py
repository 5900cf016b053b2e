"""Somebody at several machines, who types, writes and carries files: what it took is kept as steps.

A machine is a folder with a home of its own, and a terminal: what runs there sees its own files alone, and
what is carried to it. All share one environment of Python, this computer's loopback and its cores.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

MARK = "FIRST_HOUR"  # in the environment of all that was started here, however far from the terminal
LIMIT_S, STEP_S = 900.0, 0.2
SHOWN = 2000  # characters of what a command said, where it fails


class WentWrong(Exception):
    """A command did not do what its documentation says; the message has the end of what it said."""


@dataclass(frozen=True)
class Step:
    """One thing that a person does. `does`: types, writes or carries; `lines` by hand; `files` carried.

    `seconds`: of the command; None: it is typed, but could not be run here, and `why` says why.
    """

    machine: str
    does: str
    what: str
    lines: int = 0
    files: int = 0
    seconds: float | None = 0.0
    why: str = ""


def lines_by_hand(before: str, after: str) -> int:
    """How many lines, less empty ones, somebody writes who makes `after` of `before`."""
    old, new = before.splitlines(), after.splitlines()
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return sum(bool(line.strip()) for kind, _, _, i, j in changes if kind != "equal" for line in new[i:j])


def replaced(text: str, first: str, last: str, by: str) -> str:
    """`text` with `by` in the place of what goes from `first` to right before `last`. Raises `WentWrong`."""
    start = text.find(first)
    end = text.find(last, start + len(first))
    if start < 0 or end < 0:
        raise WentWrong(f"a file of the documentation has changed: no {first if start < 0 else last!r} in it")
    return text[:start] + by + text[end:]


class Terminal:
    """A command that stays, such as a server. `step`: which one of its person's it is."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str], log: Path) -> None:
        self.command, self._log, self.step = command, log, -1
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """What it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def until(self, says: str) -> re.Match[str]:
        """Wait until it prints what matches. Raises `WentWrong`."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            ended = self.process.poll()
            if found := re.search(says, self.said, re.MULTILINE):
                return found
            if ended is not None or time.monotonic() > deadline:
                raise WentWrong(f"{self.command}: ended with {ended}, without {says!r}: {self.said[-SHOWN:]}")
            time.sleep(STEP_S)

    def end(self) -> str:
        """Wait until it ends well; returns what it said. Raises `WentWrong`."""
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            raise WentWrong(f"{self.command}: ended with {code}: {self.said[-SHOWN:]}")
        return self.said


class Person:
    """Who does it, with the programs of one environment. `steps` is what was done."""

    def __init__(self, home: Path, programs: Path, own: Sequence[Path] = ()) -> None:
        self.home, self.programs, self._own = home, programs, own
        self._mark = uuid.uuid4().hex
        self.steps: list[Step] = []

    def at(self, machine: str) -> Path:
        """The folder of a machine. A new one has what its owner has before all: `own`."""
        folder = self.home / machine
        if not folder.exists():
            (folder / "home").mkdir(parents=True)
            for path in self._own:
                shutil.copy(path, folder)
        return folder

    def types(self, machine: str, command: str, folder: str = ".") -> str:
        """Type a command, wait until it has ended well; returns what it said."""
        began = time.monotonic()
        said = self._start(machine, command, folder).end()
        self._typed(machine, command, began)
        return said

    def starts(
        self, machine: str, command: str, folder: str = ".", *, until: str, as_typed: str = ""
    ) -> Terminal:
        """Type a command that stays, and wait until it says that it is ready. `as_typed`: as documented."""
        began = time.monotonic()
        terminal = self._start(machine, command, folder)
        terminal.until(until)
        self._typed(machine, as_typed or command, began)
        terminal.step = len(self.steps) - 1
        return terminal

    def waits(self, terminal: Terminal, until: str = "") -> None:
        """Wait until a command that stays has ended, or says so; its step has those seconds too."""
        began = time.monotonic()
        if until:
            terminal.until(until)
        else:
            terminal.end()
        known = self.steps[terminal.step]
        took = (known.seconds or 0.0) + time.monotonic() - began
        self.steps[terminal.step] = replace(known, seconds=round(took, 1))

    def cannot(self, machine: str, command: str, why: str) -> None:
        """A command of the documentation that cannot be run here: it counts as typed, without a time."""
        self.steps.append(Step(machine, "types", command, seconds=None, why=why))

    def repeats(self, machine: str, commands: Sequence[str]) -> None:
        """Commands that this machine needs as the first one did, at the same time."""
        self.steps.extend(Step(machine, "types", command) for command in commands)

    def writes(self, machine: str, file: str, text: str) -> None:
        """Write or edit a file; the lines that differ from what is there are by hand."""
        path = self.at(machine) / file
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self.steps.append(Step(machine, "writes", file, lines=lines_by_hand(before, text)))

    def carries(self, machine: str, to: str, path: str, into: str = ".") -> None:
        """Carry a file or a folder to another machine."""
        found, target = self.at(machine) / path, self.at(to) / into / Path(path).name
        target.parent.mkdir(parents=True, exist_ok=True)
        if found.is_dir():
            shutil.copytree(found, target)
        else:
            shutil.copy(found, target)
        files = sum(f.is_file() for f in found.rglob("*")) if found.is_dir() else 1
        self.steps.append(Step(to, "carries", path, files=files))

    def tells(self, to: str, what: str) -> None:
        """Tell another machine's owner a line of text, a token perhaps."""
        self.steps.append(Step(to, "carries", what, lines=1))

    def ends(self) -> None:
        """End all that was started here and still runs."""
        found = [process for process in psutil.process_iter() if _marked(process) == self._mark]
        for process in found:
            process.kill()
        psutil.wait_procs(found, 10)

    def _start(self, machine: str, command: str, folder: str) -> Terminal:
        at = self.at(machine)
        ours = ("PYTHON", "VIRTUAL_ENV", "ANABRANCH")  # what a new user's shell does not have
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
            MARK: self._mark,
            "HOME": str(at / "home"),
            "DATA": str(at / "data.npz"),
            "LANG": "C.UTF-8",
            "PATH": f"{self.programs / 'bin'}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self.programs),
        }
        log = self.home / f"{machine}-{uuid.uuid4().hex}.log"
        return Terminal(command, at / folder, environment, log)

    def _typed(self, machine: str, command: str, began: float) -> None:
        self.steps.append(Step(machine, "types", command, seconds=round(time.monotonic() - began, 1)))


def _marked(process: psutil.Process) -> str:
    try:
        return str(process.environ().get(MARK, "")) if process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.Error:
        return ""
