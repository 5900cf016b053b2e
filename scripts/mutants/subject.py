"""The mutants of a file against the tests of its subject."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from scripts.mutants.making import Mutant, mutants_of
from scripts.mutants.measuring import Reach, measure, statement_lines
from scripts.mutants.trying import UNPATCHED, Fate, Nursery, fate_of, forked, scratch, survives_import

UNNOTICED = (Fate.SURVIVED, Fate.UNREACHED)


@dataclass(frozen=True)
class Settings:
    """The file `settings.toml`, less the subjects."""

    sample: int
    seed: int
    test_cpu_s: float
    tests_cpu_s: float
    equivalent: list[dict[str, str]] = field(default_factory=list)

    def equivalents(self, file: str) -> set[tuple[str, str]]:
        """The mutants of a file that no test could notice: what was there, what takes its place."""
        return {(e["was"], e["now"]) for e in self.equivalent if e["file"] == file}


@dataclass(frozen=True)
class Tried:
    """One mutant and what became of it."""

    line: int
    was: str
    now: str
    fate: str


@dataclass(frozen=True)
class Case:
    """A mutant and the tests that it has to get past; together they take `cpu_s` without it."""

    mutant: Mutant
    tests: list[str]
    at_import: bool
    cpu_s: float

    @property
    def module(self) -> str:
        """The name that it is imported by."""
        return f"anabranch.{self.mutant.file.removesuffix('.py').replace('/', '.')}"


@dataclass
class Subject:
    """The files of one subject, and its tests."""

    files: list[str]
    tests: list[str]
    settings: Settings
    folder: Path

    def run(self, file: str, sample: int, before: list[Tried] | None) -> list[Tried]:
        """Try a sample of its mutants; `before`: only those that survived then."""
        reach = self._reaches[file]
        statements, tree = statement_lines(file), ast.parse(Path(file).read_text())
        cases = [self._case(m, reach, statements, tree) for m in self._chosen(file, sample, before)]
        fates = {n: Fate.UNREACHED.value for n, case in enumerate(cases) if not case.tests}
        inside = [n for n, case in enumerate(cases) if case.tests and not case.at_import]
        if inside:
            found = self._apart(lambda: _try_inside(cases, inside))
            fates |= {int(n): fate for n, fate in found.items()}
        for n, case in enumerate(cases):
            if n not in fates:  # it runs at the import, or its function could not be changed in place
                work = partial(survives_import, case.mutant, case.module, Path(file).resolve(), case.tests)
                fates[n] = fate_of(forked(work, case.cpu_s)).value
        return [Tried(c.mutant.line, c.mutant.was, c.mutant.now, fates[n]) for n, c in enumerate(cases)]

    @cached_property
    def _reaches(self) -> dict[str, Reach]:
        """By file. Each test file is measured in a process of its own, anew when it or the code changes."""
        code = hashlib.sha256(b"\0".join(Path(f).read_bytes() for f in self.files))
        reaches = {file: Reach({}, set(), {}) for file in self.files}
        for test in self.tests:
            key = code.copy()
            key.update(test.encode() + Path(test.partition("::")[0]).read_bytes())
            kept = self.folder / f"reach-{key.hexdigest()[:16]}.json"
            if not kept.exists():
                found = self._apart(partial(measure, self.files, [test]))
                kept.write_text(json.dumps(found))
            for file, told in json.loads(kept.read_text()).items():
                reaches[file].add(told)
        return reaches

    def _case(self, mutant: Mutant, reach: Reach, statements: dict[int, range], tree: ast.Module) -> Case:
        lines = statements.get(mutant.line, range(mutant.line, mutant.line + 1))
        at_import = not mutant.function or not reach.at_import.isdisjoint(lines)
        tests = reach.of(lines)
        if at_import:  # first who uses the name, then who uses the file, then the others
            names = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)]
            changed = {_name(n) for n in names if n.lineno in lines and isinstance(n.ctx, ast.Store)}
            uses = [statements.get(name.lineno, ()) for name in names if _name(name) in changed]
            tests = reach.of(n for use in uses for n in use)
            tests = list(dict.fromkeys([*tests, *reach.of(reach.tests), *reach.all]))
        chosen, cpu_s = [], 0.0
        for test in tests:
            if reach.cpu_s[test] <= self.settings.test_cpu_s and cpu_s <= self.settings.tests_cpu_s:
                chosen.append(test)
                cpu_s += reach.cpu_s[test]
        return Case(mutant, chosen, at_import, cpu_s)

    def _chosen(self, file: str, sample: int, before: list[Tried] | None) -> Iterator[Mutant]:
        makers = mutants_of(file, Path(file).read_text())
        order = list(range(len(makers)))
        random.Random(f"{self.settings.seed} {file}").shuffle(order)  # noqa: S311 - the same in every run
        equivalent = self.settings.equivalents(file)
        wanted = None if before is None else {(t.was, t.now) for t in before if t.fate in UNNOTICED}
        seen: set[str] = set()
        for index in order:
            if wanted is None and sample and len(seen) >= sample:
                return
            mutant = makers[index]()
            if mutant is None or mutant.source in seen or (mutant.was, mutant.now) in equivalent:
                continue
            seen.add(mutant.source)
            if wanted is None or (mutant.was, mutant.now) in wanted:
                yield mutant

    def _apart(self, work: Callable[[], Any]) -> Any:
        """What it returns (as JSON), worked out in a fork, which imports our code. Its words go to a log."""
        log = self.folder / "log.txt"
        with scratch() as place:
            answer = Path(place) / "answer.json"
            pid = os.fork()
            if pid == 0:
                _answer(work, answer, log)
            os.waitpid(pid, 0)
            if not answer.exists():
                raise SystemExit(f"the tests cannot be run: see {log}")
            return json.loads(answer.read_text())


def _name(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _answer(work: Callable[[], Any], answer: Path, log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        answer.write_text(json.dumps(work()))
    except BaseException:  # noqa: BLE001 - the fork ends here, and the log says why
        traceback.print_exc()
    finally:
        os._exit(0)


def _try_inside(cases: list[Case], chosen: list[int]) -> dict[int, str]:
    """The fates of those whose function can be changed in place."""
    fates: dict[int, str] = {}

    def work(nursery: Nursery) -> None:
        for n in chosen:
            case = cases[n]
            status = forked(partial(nursery.survives, case.mutant, case.module, case.tests), case.cpu_s)
            if status != UNPATCHED:
                fates[n] = fate_of(status).value

    Nursery(sorted({test.partition("::")[0] for n in chosen for test in cases[n].tests}), work)
    return fates
