"""Which tests reach which line of a file, and what each test costs; measured once for each run."""

from __future__ import annotations

import ast
import os
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coverage
import pytest

# The tests run in this process, without what would make a run long (shrinking) or another one each time.
PYTEST_ARGS = [
    *("-x", "-s", "-o", "timeout=0", "--assert=plain", "-k", "not postgresql"),
    *("-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:terminal"),
]


class Profile:
    """A plug-in: the same examples in every run, and no shrinking of one that fails."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """After the conftest has loaded its own profile, before the tests are imported."""
        # A plug-in of pytest itself: it shall not be there before pytest.
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", deadline=None, derandomize=True, database=None, phases=phases)
        settings.load_profile("mutants")


@dataclass(frozen=True)
class Reach:
    """`tests`: by line of the file. `at_import`: the lines that run when it is imported. `cpu_s`: by test."""

    tests: dict[int, list[str]]
    at_import: set[int]
    cpu_s: dict[str, float]

    def of(self, lines: Iterable[int]) -> list[str]:
        """The tests that reach one of these lines, the cheapest first."""
        found = {test for line in lines for test in self.tests.get(line, ())}
        return sorted(found, key=lambda test: (self.cpu_s[test], test))

    @property
    def all(self) -> list[str]:
        """Every test, the cheapest first."""
        return sorted(self.cpu_s, key=lambda test: (self.cpu_s[test], test))

    def add(self, measured: dict[str, Any]) -> None:
        """Take in what `measure` found with other tests."""
        for line, contexts in measured["contexts"].items():
            self.tests.setdefault(int(line), []).extend(name for name in contexts if name)
            if "" in contexts:
                self.at_import.add(int(line))
        self.cpu_s.update(measured["cpu_s"])


class _Probe:
    def __init__(self, measurement: coverage.Coverage) -> None:
        self.measurement = measurement
        self.cpu_s: dict[str, float] = {}
        self.failed: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.measurement.switch_context(item.nodeid)
        began = time.process_time()
        result = yield
        self.cpu_s[item.nodeid] = time.process_time() - began
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def measure(files: list[str], tests: list[str]) -> dict[str, dict[str, Any]]:
    """Run the tests once, in this process: call it in one that has imported nothing of ours and ends after.

    By file: the `contexts` (tests, or "" for the import) that reach each line, and `cpu_s` by test.

    Raises:
        SystemExit: a test fails without any mutant.
    """
    measurement = coverage.Coverage(data_file=None, include=files, config_file=False)
    probe = _Probe(measurement)
    measurement.start()
    code = pytest.main([*PYTEST_ARGS, *tests], plugins=[Profile(), probe])
    measurement.stop()
    if code != 0:
        raise SystemExit(f"{', '.join(probe.failed or tests)} fails without any mutant: mend it first")
    data = measurement.get_data()
    return {
        f: {"contexts": data.contexts_by_lineno(os.path.realpath(f)), "cpu_s": probe.cpu_s} for f in files
    }


def statement_lines(file: str) -> dict[int, range]:
    """The lines of the statement that a line belongs to; of one with a body, those above the body."""
    found: dict[int, range] = {}
    for node in ast.walk(ast.parse(Path(file).read_text())):  # outer statements come before inner ones
        if isinstance(node, ast.stmt | ast.match_case | ast.ExceptHandler):
            first = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno
            body = getattr(node, "cases", None) or getattr(node, "body", None)
            inner = body[0] if body else None
            below = inner.pattern if isinstance(inner, ast.match_case) else inner
            last = below.lineno - 1 if below else (getattr(node, "end_lineno", None) or first)
            lines = range(first, max(first, last) + 1)
            found.update(dict.fromkeys(lines, lines))
    return found
