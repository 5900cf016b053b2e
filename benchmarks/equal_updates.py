"""Studies of what a method reaches with the same updates: equal grids, paired seeds, the worst told first."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.reports.result import Result
from benchmarks.studies import Point, Tables, late_accuracy, mean, pool_of, run, table

STUDIES = Path(__file__).parents[1] / "docs" / "studies"
TUNING_SEEDS, SEEDS = (101, 102), (1, 2, 3, 4, 5)
QUICK_PART = 4  # a quick form takes this part of the updates


@dataclass(frozen=True)
class Method:
    """What is compared: a name, and the tables of each point of its grid, by what is said of the point.

    `against`: the method that it is held against, by its name; empty: the study's first.
    """

    name: str
    grid: Mapping[str, Tables]
    against: str = ""


@dataclass(frozen=True)
class Reached:
    """What a run came to; `accuracy` in %, the mean of its last fifth.

    `megabytes`: up and down together, and until the target, if it was reached.
    """

    seed: int
    accuracy: float
    virtual_s: float
    staleness: float
    model_sha256: str
    megabytes: float
    megabytes_to_target: float | None

    @classmethod
    def of(cls, result: Result) -> Reached:
        """Of a run."""
        last, to_target = result.history[-1], result.bytes_to_target
        return cls(
            result.seed,
            late_accuracy(result),
            last.time_s,
            result.staleness.mean,
            result.model_sha256,
            (result.uplink_bytes + result.downlink_bytes) / 1e6,
            None if to_target is None else to_target / 1e6,
        )


@dataclass(frozen=True)
class Study:
    """Which question, of which methods. The first method is what the others are held against."""

    name: str
    title: str
    command: str
    about: str
    base: Tables
    methods: Sequence[Method]
    counts_bytes: bool = False  # whether the page says what travelled
    seeds: Sequence[int] = SEEDS
    tuning_seeds: Sequence[int] = TUNING_SEEDS
    less: int = 1  # how many times fewer updates than `base` says

    def main(self, arguments: argparse.Namespace) -> None:
        """What the command line asks for."""
        study, folder = (self._quick(), Path("/tmp")) if arguments.quick else (self, STUDIES)
        data_file = folder / f"{self.name}.json"
        if not arguments.render:
            data_file.write_text(json.dumps(study.measured(), indent=1) + "\n", encoding="utf-8")
        page = study.page(json.loads(data_file.read_text(encoding="utf-8")))
        (folder / f"{self.name}.md").write_text(page, encoding="utf-8")

    def _quick(self) -> Study:
        methods = [Method(m.name, dict(list(m.grid.items())[1::2]), m.against) for m in self.methods]
        return Study(
            self.name, self.title, f"{self.command} --quick", self.about, self.base, methods,
            self.counts_bytes, self.seeds[:2], self.tuning_seeds[:1], QUICK_PART,
        )  # fmt: skip

    @property
    def updates(self) -> int:
        """Of each run."""
        whole: int = self.base["run"]["updates_max"]
        return whole // self.less

    def measured(self) -> dict[str, Any]:
        """Tune each method, then run it on the paired seeds: all that the page says, as JSON."""
        began, found = time.monotonic(), {}
        with pool_of() as pool:
            for method in self.methods:
                found[method.name] = self._measured(pool, method)
                print(method.name, [round(r["accuracy"], 1) for r in found[method.name]["runs"]], flush=True)
        spent = {"minutes": (time.monotonic() - began) / 60, "cores": os.cpu_count(), "updates": self.updates}
        return {**spent, "methods": found}

    def _measured(self, pool: Executor, method: Method) -> dict[str, Any]:
        cut: Tables = {"run": {"updates_max": self.updates}}
        points = {
            said: Point(method.name, (self.base, tables, cut), {}) for said, tables in method.grid.items()
        }
        jobs = [(point, seed, "validation", 1) for point in points.values() for seed in self.tuning_seeds]
        scores = [late_accuracy(result) for result in pool.map(run, jobs)]
        width = len(self.tuning_seeds)
        tuned = {s: statistics.fmean(scores[i * width : (i + 1) * width]) for i, s in enumerate(points)}
        best = max(tuned, key=lambda said: tuned[said])
        finals = pool.map(run, [(points[best], seed, "test", 1) for seed in self.seeds])
        return {"tuned": tuned, "best": best, "runs": [vars(Reached.of(result)) for result in finals]}

    # --- the page --------------------------------------------------------------------------------

    def page(self, data: Mapping[str, Any]) -> str:
        """In Markdown, the lowest accuracy first."""
        methods: dict[str, Any] = data["methods"]
        order = sorted(
            methods, key=lambda name: statistics.fmean(r["accuracy"] for r in methods[name]["runs"])
        )
        first = self.methods[0].name
        against = {m.name: methods[m.against or first]["runs"] for m in self.methods}
        rows = [self._row(name, methods[name], against[name]) for name in order]
        head = ("method", "accuracy, %", self._less, *self._bytes, "virtual seconds", "staleness", "tuned to")
        tuning = [
            (name, said, f"{score:.1f}", "**yes**" if said == methods[name]["best"] else "")
            for name in order
            for said, score in methods[name]["tuned"].items()
        ]
        seeds = ", ".join(str(r["seed"]) for r in against[first])
        form = (
            "**The quick form: few seeds, few updates; a first look, and no proof.** "
            if self.less > 1
            else ""
        )
        return f"""# Study: {self.title}

Made by `{self.command}`; do not edit. {data["minutes"]:.0f} minutes on {data["cores"]} cores.

{self._remarks}{self.about}

{form}{data["updates"]} updates a run, paired seeds {seeds}.
What did worst is first. Accuracy is the mean of a run's last fifth, mean ± standard deviation of the seeds;
the difference is taken seed by seed.

{table(head, rows)}

## Tuning

Grids of one size for all, on the validation part of seeds that are not compared; the best goes on.

{table(("method", "point", "accuracy, %", "chosen"), tuning)}
"""

    @property
    def _remarks(self) -> str:
        """What was found by looking, of the whole study: in a file of its own, if there is one."""
        file = Path(__file__).with_name(f"study_{self.name}.remarks.md")
        return f"{file.read_text(encoding='utf-8')}\n" if self.less == 1 and file.exists() else ""

    @property
    def _less(self) -> str:
        """What the differences are taken from."""
        own = any(method.against for method in self.methods)
        return "less its own" if own else f"less {self.methods[0].name}"

    @property
    def _bytes(self) -> tuple[str, ...]:
        """The columns of what travelled."""
        target = 100 * self.base["run"].get("target_accuracy", 0.0)
        return ("MB, both ways", f"MB to {target:.0f} %") if self.counts_bytes else ()

    def _travelled(self, runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """These columns of a method; where a run never got there, how many did."""
        if not self.counts_bytes:
            return ()
        there = [r["megabytes_to_target"] for r in runs if r["megabytes_to_target"] is not None]
        missing = f" ({len(there)} of {len(runs)} runs)" if len(there) < len(runs) else ""
        return mean(r["megabytes"] for r in runs), mean(there) + missing

    def _row(self, name: str, of: Mapping[str, Any], against: Sequence[Mapping[str, Any]]) -> Sequence[str]:
        runs = of["runs"]
        apart = [r["accuracy"] - a["accuracy"] for r, a in zip(runs, against, strict=True)]
        itself = against is runs
        return (
            name,
            mean(r["accuracy"] for r in runs),
            "" if itself else mean(apart),
            *self._travelled(runs),
            mean((r["virtual_s"] for r in runs), 0),
            mean(r["staleness"] for r in runs),
            of["best"],
        )
