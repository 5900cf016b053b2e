"""`python -m scripts.mutants [FILE ...]`: try a sample of the mutants of each file and say which survived.

`--again` tries those that survived the last time; `--sample N` takes another number of each file (0: all);
`--draw N` takes so many of all files together, each mutant with the same chance: a score of the whole.
What became of each is kept in `build/mutants/`. The exit status is 1 where under 85 % are noticed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import random
import resource
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.mutants.making import mutants_of
from scripts.mutants.score import Score, overall
from scripts.mutants.subject import UNNOTICED, Settings, Subject, Tried
from scripts.mutants.trying import Fate

ROOT = Path(__file__).resolve().parents[2]
SETTINGS, RESULTS = Path("scripts/mutants/settings.toml"), Path("build/mutants")
SHARE_MIN = 0.85

# What the code stands on, imported once: a fork has it at once. Nothing of ours, and no plug-in of pytest.
FOREIGN = (
    *("numpy", "numpy.testing", "grpc.aio", "sqlalchemy", "alembic.command"),
    *("backports.zstd", "safetensors.numpy", "cryptography.x509", "google.protobuf.message", "cattrs"),
)


@dataclass(frozen=True)
class Results:
    """What became of the mutants of each file, one file of JSON for each."""

    folder: Path

    def of(self, file: str) -> list[Tried]:
        """The newest result of each mutant that was tried."""
        path = self._path(file)
        return [Tried(**row) for row in json.loads(path.read_text())] if path.exists() else []

    def keep(self, file: str, tried: list[Tried], again: bool) -> None:
        """Write them down; `again`: in the place of what was known of these mutants."""
        new = {(t.was, t.now): t for t in tried}
        rows = [new.get((t.was, t.now), t) for t in self.of(file)] if again else tried
        self._path(file).write_text(json.dumps([asdict(row) for row in rows], indent=1))

    def _path(self, file: str) -> Path:
        return self.folder / f"{file.replace('/', '.')}.json"


def main() -> int:
    """Try them and print the table."""
    args = _arguments()
    os.chdir(ROOT)
    table: dict[str, Any] = tomllib.loads(args.settings.read_text())
    subjects = table.pop("subject")
    settings = Settings(**table)
    settings = replace(settings, seed=settings.seed if args.seed is None else args.seed)
    sample = settings.sample if args.sample is None else args.sample
    wanted = [f for entry in subjects for f in _files(entry["files"], args.files)]
    drawn = _drawn(wanted, args.draw, settings.seed) if args.draw else None
    args.results.mkdir(parents=True, exist_ok=True)
    results = Results(args.results)
    for name in FOREIGN:
        import_module(name)
    for entry in subjects if not args.table else ():
        subject = Subject(_files(entry["files"]), entry["tests"], settings, args.results)
        for file in _files(entry["files"], args.files):
            before = results.of(file) if args.again else None
            none = drawn is not None and not drawn[file]
            tried = [] if none else subject.run(file, drawn[file] if drawn else sample, before)
            results.keep(file, tried, args.again)
            if tried:
                _print_survivors(file, tried)
    return _print_table(wanted, results, settings, drawn is not None)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("files", nargs="*", help="patterns of files; all without")
    parser.add_argument("--sample", type=int, help="mutants a file; 0: all of them")
    parser.add_argument("--draw", type=int, help="mutants of all files together, in the place of --sample")
    parser.add_argument("--seed", type=int, help="another one than that of the settings")
    parser.add_argument("--again", action="store_true", help="only those that survived the last time")
    parser.add_argument("--table", action="store_true", help="try nothing, print what is kept")
    parser.add_argument("--settings", type=Path, default=SETTINGS, help="what is mutated and what tests it")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of what is kept")
    return parser.parse_args()


def _files(patterns: list[str], wanted: Sequence[str] = ()) -> list[str]:
    found = sorted({str(path) for pattern in patterns for path in Path().glob(pattern)})
    return [f for f in found if not wanted or any(fnmatch.fnmatch(f, w) for w in wanted)]


def _drawn(files: list[str], count: int, seed: int) -> Counter[str]:
    """How many of `count` mutants fall on each file where every mutant has the same chance."""
    pool = [file for file in files for _ in mutants_of(file, Path(file).read_text())]
    chance = random.Random(f"{seed} all")  # noqa: S311 - the same in every run
    return Counter(chance.sample(pool, min(count, len(pool))))


def _print_survivors(file: str, tried: list[Tried]) -> None:
    for t in sorted(tried, key=lambda t: t.line):
        if t.fate in UNNOTICED:
            print(f"{file}:{t.line}: {t.fate}\n  - {t.was}\n  + {t.now}", flush=True)
    print(f"{file}: {sum(t.fate not in UNNOTICED for t in tried)} of {len(tried)} noticed", flush=True)


def _print_table(files: list[str], results: Results, settings: Settings, drawn: bool) -> int:
    scores: list[Score] = []
    print(f"{'file':36} mutants  tried  noticed  endless  interval")
    for file in files:
        equivalent = settings.equivalents(file)
        rows = [row for row in results.of(file) if (row.was, row.now) not in equivalent]
        if not rows:
            continue
        noticed = sum(row.fate not in UNNOTICED for row in rows)
        endless = sum(row.fate == Fate.TIMEOUT for row in rows)
        mutants = len(mutants_of(file, Path(file).read_text())) - len(equivalent)
        score = Score(file, mutants, len(rows), noticed)
        low, high = score.interval
        print(
            f"{file:36} {score.mutants:7} {score.tried:6} {noticed:8} {endless:8}  {low:4.0%} to {high:4.0%}"
        )
        scores.append(score)
    if not scores:
        raise SystemExit("no file fits")
    known, tried, noticed = (
        sum(getattr(s, name) for s in scores) for name in ("mutants", "tried", "noticed")
    )
    if drawn:
        share, (low, high) = noticed / tried, Score("all", known, tried, noticed).interval
        print(f"noticed: {noticed} of {tried} drawn, {share:.1%}; of all {low:.1%} to {high:.1%}")
    else:
        share, half = overall(scores)
        print(f"noticed: {share:.1%} ± {half:.1%} of {known} mutants, as {tried} of them say")
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(f"processor time of this run: {sum(used.ru_utime + used.ru_stime for used in spent):.0f} s")
    return 0 if share >= SHARE_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
