"""One mutant, one process: forked from one that has the tests collected, it runs those that reach the change.

A change inside a function takes the place of that function's code in the fork. A change that runs at the
import (a constant, a default) needs a process in which nothing of ours is imported yet.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import inspect
import os
import resource
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.mutants.making import Mutant
from scripts.mutants.measuring import PYTEST_ARGS, Profile

# A fork that does nothing for so long waits for what never comes; one that works for so much longer than the
# tests need does not end. Neither asks how fast the machine is.
IDLE_S = 30.0
CPU_FACTOR, CPU_EXTRA_S = 5.0, 10
MEMORY_BYTES = 8 << 30

SURVIVED, KILLED, UNPATCHED = 0, 1, 3


class Fate(StrEnum):
    """What became of a mutant."""

    KILLED = "killed"
    TIMEOUT = "timeout"
    SURVIVED = "survived"
    UNREACHED = "unreached"  # survived too: no quick test of the subject reaches it


@contextlib.contextmanager
def scratch() -> Iterator[str]:
    """Temporary files of a process that is ended where it stands."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        before = tempfile.tempdir
        os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.tempdir = folder
        try:
            yield folder
        finally:
            tempfile.tempdir = before


def forked(work: Callable[[], int], cpu_s: float) -> int | None:
    """The exit status of a fork that does this work; None: it does not end. It leaves nothing behind."""
    with scratch():
        pid = os.fork()
        if pid == 0:
            _child(work, cpu_s)
        try:
            return _waited(pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _child(work: Callable[[], int], cpu_s: float) -> None:
    os.setpgid(0, 0)
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silent, descriptor)
    limit_s = int(CPU_FACTOR * cpu_s) + CPU_EXTRA_S
    used_s = int(time.process_time()) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + limit_s, used_s + limit_s))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code = KILLED
    try:
        code = work()
    finally:
        os._exit(code)


def _waited(pid: int) -> int | None:
    process = psutil.Process(pid)
    worked, since = -1.0, time.monotonic()
    pause_s = 0.01
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            overrun = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
            return None if overrun else os.waitstatus_to_exitcode(status)
        with contextlib.suppress(psutil.NoSuchProcess):
            cpu_s = process.cpu_times().user
            if cpu_s != worked or process.status() == psutil.STATUS_RUNNING:
                worked, since = cpu_s, time.monotonic()
        if time.monotonic() - since > IDLE_S:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(pause_s)
        pause_s = min(0.2, pause_s * 1.2)


def fate_of(status: int | None) -> Fate:
    """Anything but tests that all pass has killed it."""
    if status is None:
        return Fate.TIMEOUT
    return Fate.SURVIVED if status == SURVIVED else Fate.KILLED


class Nursery:
    """A pytest that collects the tests once and then, in place of running them, runs what it is given."""

    def __init__(self, tests: Sequence[str], work: Callable[[Nursery], None]) -> None:
        self.items: dict[str, pytest.Item] = {}
        self._work = work
        self._failed = False
        if (code := pytest.main([*PYTEST_ARGS, *tests], plugins=[Profile(), self])) != 0:
            raise SystemExit(f"pytest cannot collect {list(tests)}: {code}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self._work(self)
        return True

    def survives(self, mutant: Mutant, module: str, tests: Sequence[str]) -> int:
        """In a fork: put the change in place and run the tests until one fails."""
        if not patched(mutant, sys.modules[module]):
            return UNPATCHED
        items = [self.items[test] for test in tests]
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                return KILLED
        return SURVIVED


def patched(mutant: Mutant, module: types.ModuleType) -> bool:
    """Whether the function's code could be replaced; no where a decorator hides it or its closure differs."""
    compiled = compile(mutant.source, str(module.__file__), "exec", dont_inherit=True)
    function = _function(module, mutant.function)
    new = _code(compiled, mutant.function.split("."), mutant.line)
    if function is None or new is None:
        return False
    old = function.__code__
    if old.co_firstlineno != new.co_firstlineno or old.co_freevars != new.co_freevars:
        return False
    function.__code__ = new
    return True


def _code(outer: types.CodeType, names: list[str], line: int) -> types.CodeType | None:
    inner = [c for c in outer.co_consts if isinstance(c, types.CodeType)]
    found = [c for c in inner if c.co_name == names[0] and c.co_firstlineno <= line]
    if not found:
        return None
    return found[-1] if len(names) == 1 else _code(found[-1], names[1:], line)


def _function(module: types.ModuleType, name: str) -> types.FunctionType | None:
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
    for _ in range(5):
        if isinstance(found, property):
            found = found.fget
        elif isinstance(found, classmethod | staticmethod):
            found = found.__func__
        elif isinstance(found, functools.cached_property):
            found = found.func
        elif hasattr(found, "__wrapped__"):
            found = found.__wrapped__
    return found if isinstance(found, types.FunctionType) else None


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> types.CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, module: str, path: Path, source: str) -> None:
        self.module, self.path, self.source = module, path, source

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname != self.module:
            return None
        loader = _Loader(fullname, str(self.path), self.source)
        return importlib.util.spec_from_file_location(fullname, self.path, loader=loader)


def survives_import(mutant: Mutant, module: str, path: Path, tests: Sequence[str]) -> int:
    """In a fork that has imported nothing of ours: import the changed file and run the tests."""
    sys.meta_path.insert(0, _Finder(module, path, mutant.source))
    return SURVIVED if pytest.main([*PYTEST_ARGS, *tests], plugins=[Profile()]) == 0 else KILLED
