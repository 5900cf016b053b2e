"""Studies of what a method reaches with the same updates: equal grids, paired seeds, the worst told first."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anabranch.reports.result import Result
from benchmarks.studies import STUDIES, Point, Tables, late_accuracy, mean, pool_of, run, study_parser, table

TUNING_SEEDS, SEEDS = (101, 102), (1, 2, 3, 4, 5)
QUICK_PART = 4  # a quick form takes this part of the updates
FACTOR = 2.0  # between learning rates
EXTENSIONS_MAX = 4  # rates that a grid gets beside those it begins with


@dataclass(frozen=True)
class Method:
    """What is compared: a name, and the tables of each point of its grid, by what is said of the point.

    `against`: the method that it is held against, by its name; empty: the study's first. `rates`: the tables
    are those of the grid's only point, and its points are of these learning rates; as long as the best is the
    lowest or the highest of them, there is one beyond it. `parts`: into how many updates it cuts one of the
    others, and takes so many times more.
    """

    name: str
    grid: Mapping[str, Tables]
    against: str = ""
    rates: tuple[float, ...] = ()
    parts: int = 1

    @property
    def first(self) -> Mapping[str, Tables]:
        """The points that its tuning begins with."""
        return dict(map(self._of, self.rates)) if self.rates else self.grid

    def beyond(self, scores: Mapping[str, float]) -> Mapping[str, Tables]:
        """The next point, of what has been found: none where the best is inside, or enough were tried."""
        if not self.rates or len(scores) >= len(self.rates) + EXTENSIONS_MAX:
            return {}
        tried = {float(said.removeprefix("rate ")): score for said, score in scores.items()}
        best = max(tried, key=lambda rate: tried[rate])
        if best == min(tried):
            return dict([self._of(best / FACTOR)])
        return dict([self._of(best * FACTOR)]) if best == max(tried) else {}

    def _of(self, rate: float) -> tuple[str, Tables]:
        (tables,) = self.grid.values()
        return f"rate {rate:g}", {**tables, "client": {**tables.get("client", {}), "learning_rate": rate}}

    def quick(self) -> Method:
        """The same with half of the points, and none beyond them."""
        if not self.rates:
            return replace(self, grid=dict(list(self.grid.items())[1::2]))
        return replace(self, grid=dict(map(self._of, self.rates[1::2])), rates=())


@dataclass(frozen=True)
class Reached:
    """What a run came to; `accuracy` in %, the mean of its last fifth.

    `megabytes`: up and down together, and until the target, if it was reached; seconds are virtual ones.
    `kilobytes_up`: of an update.
    """

    seed: int
    accuracy: float
    virtual_s: float
    staleness: float
    model_sha256: str
    megabytes: float
    megabytes_to_target: float | None
    seconds_to_target: float | None = None
    kilobytes_up: float = 0.0

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
            result.time_to_target_s,
            result.uplink_bytes / 1e3 / max(1, result.updates_applied + result.updates_rejected),
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
    counts_time: bool = False  # and how long it took to the target
    counts_messages: bool = False  # and how large an update is
    seeds: Sequence[int] = SEEDS
    tuning_seeds: Sequence[int] = TUNING_SEEDS
    less: int = 1  # how many times fewer updates than `base` says
    extensions_max: int = EXTENSIONS_MAX  # as the methods have it

    def main(self, description: str | None) -> None:
        """What the command line asks for; `description` is of its help."""
        parser = study_parser(description, "fewer updates, points and seeds; into /tmp")
        arguments = parser.parse_args()
        study, folder = (self._quick(), Path("/tmp")) if arguments.quick else (self, STUDIES)
        data_file = folder / f"{self.name}.json"
        if not arguments.render:
            data_file.write_text(json.dumps(study.measured(), indent=1) + "\n", encoding="utf-8")
        page = study.page(json.loads(data_file.read_text(encoding="utf-8")))
        (folder / f"{self.name}.md").write_text(page, encoding="utf-8")

    def _quick(self) -> Study:
        return replace(
            self,
            command=f"{self.command} --quick",
            methods=[method.quick() for method in self.methods],
            seeds=self.seeds[:2],
            tuning_seeds=self.tuning_seeds[:1],
            less=QUICK_PART,
        )

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
        tables, tuned, wanted = dict(method.first), dict[str, float](), method.first
        while wanted:
            tables |= wanted
            tuned |= self._scores(pool, method, wanted)
            wanted = method.beyond(tuned) if self.less == 1 else {}
        best = max(tuned, key=lambda said: tuned[said])
        point = self._point(method, tables[best])
        finals = pool.map(run, [(point, seed, "test", 1) for seed in self.seeds])
        return {"tuned": tuned, "best": best, "runs": [vars(Reached.of(result)) for result in finals]}

    def _point(self, method: Method, *tables: Tables) -> Point:
        until: Tables = {"run": {"updates_max": self.updates * method.parts}}
        return Point(method.name, (self.base, *tables, until), {})

    def _scores(self, pool: Executor, method: Method, points: Mapping[str, Tables]) -> dict[str, float]:
        """Of each point, over the tuning seeds, each to the end of its run."""
        whole: Tables = {"run": {"target_accuracy": 0.0}}
        jobs = [
            (self._point(method, tables, whole), seed, "validation", 1)
            for tables in points.values()
            for seed in self.tuning_seeds
        ]
        scores = [late_accuracy(result) for result in pool.map(run, jobs)]
        width = len(self.tuning_seeds)
        return {s: statistics.fmean(scores[i * width : (i + 1) * width]) for i, s in enumerate(points)}

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

{self._grids}, on the validation part of seeds that are not compared; the best goes on.

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
    def _grids(self) -> str:
        """How they were tuned."""
        if any(method.rates for method in self.methods):
            return (
                "The same learning rates for all to begin with, and as long as the best is the lowest or\n"
                f"the highest of them one beyond it, {self.extensions_max} at most"
            )
        return "Grids of one size for all"

    @property
    def _bytes(self) -> tuple[str, ...]:
        """The columns of what travelled, and of what it took."""
        target = f"to {100 * self.base['run'].get('target_accuracy', 0.0):.0f} %"
        return (
            *(("MB, both ways", f"MB {target}") if self.counts_bytes else ()),
            *(("kB up an update",) if self.counts_messages else ()),
            *((f"seconds {target}",) if self.counts_time else ()),
        )

    def _travelled(self, runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """These columns of a method."""
        return (
            *((mean(r["megabytes"] for r in runs),) if self.counts_bytes else ()),
            *((_of_those_there(runs, "megabytes_to_target", 2),) if self.counts_bytes else ()),
            *((mean(r["kilobytes_up"] for r in runs),) if self.counts_messages else ()),
            *((_of_those_there(runs, "seconds_to_target", 0),) if self.counts_time else ()),
        )

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


def _of_those_there(runs: Sequence[Mapping[str, Any]], key: str, digits: int) -> str:
    """The mean over the runs that came to the target, and how many did where some did not."""
    there = [r[key] for r in runs if r[key] is not None]
    missing = f" ({len(there)} of {len(runs)} runs)" if len(there) < len(runs) else ""
    return (mean(there, digits) if there else "") + missing
