"""Processes of Python that start in hundredths of a second: forked from one that has imported the product.

    python -P nursery.py SOCKET [MODULE ...]

An interpreter that imports the product takes a second or two of a processor, which is most of what many
commands take. A process of a nursery is one like any other: it has an id, a folder, an environment and
streams of its own, gets signals, is killed, and ends as its program ends. Only its start is not its own. What
is about starts - imports, Ctrl-C meanwhile, `PYTHONPATH`, runs that must not depend on the seed of hashes -
is started by `sys.executable`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import IO, Any

PIPE = subprocess.PIPE
COMMAND = "anabranch"  # the first word of the command line; else it is the path of a program
# What commands import when they run, beside their own modules.
LATE = (
    "anabranch.client.checkup",
    "anabranch.client.run",
    "anabranch.server.app",
    "anabranch.server.export",
    "anabranch.server.restored",
    "anabranch.server.verify",
    "anabranch.simulation.replay",
    "anabranch.workloads.synthetic",
    "psycopg",
)


class Process:
    """As `subprocess.Popen` of text, as far as tests need it. `enter`: words that put a program elsewhere.

    `has`: modules that it finds imported beside the product, which are to be worth a nursery of their own.
    """

    def __init__(
        self,
        *words: object,
        cwd: Path | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        env: Mapping[str, str] | None = None,
        enter: Sequence[str] = (),
        has: Sequence[str] = (),
    ) -> None:
        self.args, self.returncode = list(map(str, words)), None  # type: list[str], int | None
        self.stdout, out = _stream(stdout, 1)
        self.stderr, err = _stream(stderr, 2)
        told, tell = os.pipe()
        with tempfile.TemporaryFile("w") as asked, open(os.devnull) as nothing:
            json.dump([self.args, str(cwd or Path.cwd()), dict(env or os.environ)], asked)
            asked.flush()
            asked.seek(0)
            line = _nursery(*enter, has=tuple(has))
            socket.send_fds(line, [b"!"], [asked.fileno(), tell, nothing.fileno(), out, err])
        for descriptor in (tell, out, err):
            os.close(descriptor)
        self._told = open(told, "rb", buffering=0)  # noqa: SIM115 - until it has ended
        self.pid = int(self._told.readline())

    def poll(self) -> int | None:
        """The exit code, once there is one."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            with self._told:
                self.returncode = int(self._told.readline())
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it says until it ends. It is killed when that takes too long."""
        with ThreadPoolExecutor(2) as pool:
            said = [pool.submit(stream.read) if stream else None for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        out, err = (text.result() if text else "" for text in said)
        return out, err

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # nobody is left who would stop it
            self.kill()
        # Before the streams: to close one that a thread reads waits for that thread, and no signal ends it.
        self.wait()
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()


def run(*words: object, cwd: Path | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`: to its end, and all that it says."""
    with Process(*words, cwd=cwd, stdout=PIPE, stderr=PIPE, **more) as process:
        out, err = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def _stream(given: int | IO[Any] | None, own: int) -> tuple[IO[str] | None, int]:
    """Our end of a stream of the process, if it has one, and its end."""
    if given == PIPE:
        ours, theirs = os.pipe()
        return open(ours), theirs
    return None, os.dup(own if given is None or isinstance(given, int) else given.fileno())


@cache
def _nursery(*enter: str, has: tuple[str, ...]) -> socket.socket:
    """The one of this process, or that of a place that a program is put into by `enter`. It ends with us."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*enter, sys.executable, "-P", __file__, str(theirs.fileno()), *has],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # else NumPy's import starts threads
        )

    def close() -> None:
        ours.close()
        process.wait()

    atexit.register(close)
    return ours


# --- the nursery itself ---------------------------------------------------------------------------------

PARENT = os.getpid()  # of all that is forked here


def serve(line: socket.socket, more: Sequence[str]) -> list[str]:
    """Fork what is asked for until nobody can ask any more; in a fork, what it shall run."""
    from anabranch.cli.program import COMMANDS

    for name in (*(f"anabranch.cli.{module}" for module, _ in COMMANDS.values()), *LATE, *more):
        import_module(name)
    import_module("anabranch.core.config.tables").merge([]).to_json()  # how settings are read and written
    for kind in import_module("anabranch.host.parts").ENGINE_PARTS:
        kind.ours()  # which are imported when they are named
    gc.freeze()  # what is there stays there, and is shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for those who run something
    while True:
        asked, descriptors, *_ = socket.recv_fds(line, 1, 5)
        if not asked:
            return []
        if not os.fork():
            line.close()
            return _born(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _born(asked: int, tell: int, *streams: int) -> list[str]:
    """Fork a process and stay with it, to say its id, and how it ended; in the fork, what it shall run."""
    with open(asked) as file:
        words, cwd, environment = json.load(file)
    _end_with(PARENT)
    here = os.getpid()
    if child := os.fork():
        for descriptor in streams:
            os.close(descriptor)
        with open(tell, "w") as told:
            told.write(f"{child}\n")
            told.flush()
            told.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        os._exit(0)
    _end_with(here)
    os.close(tell)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a suite under nohup would hand on its own
    found: list[str] = words
    return found


def _end_with(parent: int) -> None:
    """Be killed when that process ends, which has started this one: nothing outlives the tests (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it has ended before
            os._exit(1)


def live(words: list[str]) -> int:
    """Run the command line, or a program as Python runs a file; returns the exit code."""
    sys.argv = words
    try:
        if words[0] == COMMAND:
            from anabranch.cli.main import main

            main()
        else:
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as left:
        if not isinstance(left.code, int | None):
            raise
        return left.code or 0
    return 0


def end(codes: list[int]) -> None:
    """The last thing that a process does that has come to its end, whose threads have ended: it does not take
    its modules apart one by one, which takes longer than most commands."""
    if codes:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


if __name__ == "__main__":
    codes: list[int] = []
    atexit.register(end, codes)  # the first that is registered is the last that is called
    if given := serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]):
        codes.append(live(given))
