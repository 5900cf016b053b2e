"""A machine to type at: its own ports, and terminals in which commands run as they do for a person."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

MARK = "JOURNEY"  # in the environment of all that a person has started, however far from the terminal
STEP_S = 0.1
SHOWN_LINES = 60  # of what a command printed, where something is wrong
NAMESPACES = (("--net", "--mount"), ("--user", "--map-root-user", "--net", "--mount"))


class Terminal:
    """One command, under way: a process group, as at a shell's prompt."""

    def __init__(self, machine: Machine, text: str, folder: Path, log: Path) -> None:
        self.text = text
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [*machine.enter, "env", "-C", str(folder), "bash", "-c", text],
                env=machine.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def until(self, pattern: str, limit_s: float) -> re.Match[str]:
        """Wait until it prints what matches."""
        deadline = time.monotonic() + limit_s
        while True:
            ended = not self._lives(STEP_S)
            if found := re.search(pattern, self.said, re.MULTILINE):
                return found
            assert not ended, f"it ended with {self._process.returncode}, without {pattern!r}:\n{self}"
            assert time.monotonic() < deadline, f"no {pattern!r} within {limit_s:.0f} s:\n{self}"

    def end(self, limit_s: float) -> int:
        """Wait until it ends; returns the exit code, as a shell says it: 128 and the signal that ended it."""
        assert not self._lives(limit_s), f"it does not end within {limit_s:.0f} s:\n{self}"
        code = int(self._process.returncode)
        return code if code >= 0 else 128 - code

    def send(self, number: signal.Signals) -> None:
        """Send its whole group a signal: SIGINT is Ctrl-C."""
        os.killpg(self._process.pid, number)

    def _lives(self, limit_s: float) -> bool:
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return True
        return False

    def __str__(self) -> str:
        return "\n".join([f"$ {self.text}", *self.said.splitlines()[-SHOWN_LINES:]])


class Machine:
    """Where a person types. `enter`: what comes before a command; `environment`: all that it has of one."""

    def __init__(self, enter: tuple[str, ...], home: Path, programs: Path) -> None:
        self.enter = enter
        self._mark = uuid.uuid4().hex
        self.environment = {
            MARK: self._mark,
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "RAY_ADDRESS": "local",  # what `ray start` began here is asked by Ray, ended or not
            "VIRTUAL_ENV": str(programs.parent),
        }

    def left_running(self) -> dict[psutil.Process, str]:
        """Every process that was started here and still runs, with its command."""
        commands = ((process, _command(process, self._mark)) for process in psutil.process_iter())
        return {process: command for process, command in commands if command is not None}

    def end_all(self) -> None:
        """End what still runs."""
        for process in (found := self.left_running()):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(list(found), 10)


def _command(process: psutil.Process, mark: str) -> str | None:
    """The command of a process that runs with this mark. None: of another mark, or it ends as it is asked."""
    try:
        return " ".join(process.cmdline()) if process.environ().get(MARK) == mark else None
    except psutil.Error:  # a zombie's too
        return None


@contextmanager
def machine(home: Path, programs: Path) -> Iterator[Machine]:
    """A machine with all ports free, so that what a page says of ports is typed as it stands.

    That is a namespace with nothing but its loopback, whose mounts are its own. Where none can be made it is
    this machine, for one person after the other.
    """
    home.mkdir(parents=True, exist_ok=True)
    with _namespace() as enter:
        found = Machine(enter, home, programs)
        try:
            yield found
        finally:
            found.end_all()


@contextmanager
def _namespace() -> Iterator[tuple[str, ...]]:
    for options in NAMESPACES if shutil.which("unshare") and shutil.which("ip") else ():
        # It lives as long as its input is open: it cannot outlast the tests.
        command = ["unshare", *options, "sh", "-c", "ip link set lo up && echo up && exec cat"]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        ) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            if holder.stdout.readline() == "up\n":
                users = ("--user", "--preserve-credentials") if "--user" in options else ()
                yield ("nsenter", "--target", str(holder.pid), "--net", "--mount", *users)
                holder.stdin.close()
                return
    with (Path(tempfile.gettempdir()) / "anabranch-journeys.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield ()
