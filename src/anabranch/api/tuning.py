"""`tune`: settings for a target or a budget, by successive halving in the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from anabranch.api.configuration import Choice, is_config
from anabranch.api.figures import Figure
from anabranch.api.halving import Halving, Leg, score
from anabranch.api.objects import FileTables, RunObjects, Source
from anabranch.api.pool import PROCESSES, RunPool, run_pool
from anabranch.api.progress import LiveBar
from anabranch.api.records import Records
from anabranch.api.temporary import folder_at
from anabranch.api.tune_file import TuneTable, read_ranges, read_tune
from anabranch.api.tune_legs import LegEnd, LegJob, TuneBudget, carry_leg, unstable
from anabranch.api.tune_log import LegKind, TuneLog
from anabranch.api.tune_ranges import deal, settings_of, value_of
from anabranch.api.tune_request import TuneRequest
from anabranch.core.config.goal import Goal
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO
from anabranch.core.plain import of_python
from anabranch.core.spelling import spelled
from anabranch.reports.folders import CHECKPOINT, FRESH_RUNS, locked
from anabranch.reports.metrics import metric_text
from anabranch.reports.spreads import spread
from anabranch.reports.text import bytes_text, count_text, duration_text
from anabranch.reports.tuning import (
    FreshFigures,
    FrontAgainst,
    TunedRange,
    TunePoint,
    TuneReport,
    fresh_text,
    front_svg,
    tuning_html,
    with_front,
)
from anabranch.simulation.executors.pool import check_no_worker_begins, check_seen

CANDIDATES = 3  # of the best, which fresh seeds are asked about until one stands
DEALS = 20  # until there are as many different trials as were asked for, or nearly all that there can be
RECOMMENDED, PAGE = "recommended.toml", "tune.html"
HEAD = "# What `anabranch tune` recommends. From seeds that took no part in the choice:\n# {}\n\n"


@dataclass(frozen=True)
class TuneProgress:
    """How far a tuning is: the share of the legs that are planned, and what has just come of one, if any."""

    share: float
    text: str
    leg: Leg | None = None
    end: LegEnd | None = None


Tell = Callable[[TuneProgress], object]


@dataclass(frozen=True)
class Tuning:
    """What a tuning came to.

    `choice` is what is recommended, by setting, and `config` the whole configuration of it; `folder` has the
    files of docs/tuning.md.
    """

    choice: Choice
    config: Config
    folder: Path
    report: TuneReport = field(repr=False)
    holds: object = field(default=None, repr=False)  # what keeps a temporary folder there

    @property
    def toml(self) -> str:
        """The configuration as the text of a file, which runs as it is."""
        return self.report.toml

    @cached_property
    def fresh(self) -> Records:
        """A row for each fresh seed: of the recommendation, the settings as given, what was passed over."""
        return Records(
            {"settings": f.name, "seed": seed, f"{self.report.metric}": value, "reached": reached}
            | {"time_s": time_s, "updates": updates, "traffic_bytes": traffic}
            for f in self.report.fresh
            for seed, value, reached, time_s, updates, traffic in zip(
                f.seeds, f.values, f.reached, f.times_s, f.updates, f.traffic_bytes, strict=True
            )
        )

    @cached_property
    def trials(self) -> Records:
        """A row for each trial at each share of the budget that it was carried to, means over the seeds."""
        return Records(map(self._row, self.report.points))

    @cached_property
    def front(self) -> Records:
        """Those of them that nothing is preferable to, from the cheapest on."""
        return Records(map(self._row, self.report.front))

    def _row(self, point: TunePoint) -> dict[str, Any]:
        value = None if point.value is None else point.value.mean
        used = {"time_s": point.time_s, "updates": point.updates, "traffic_bytes": point.traffic_bytes}
        shown = {"trial": point.trial, "share": point.share, **point.settings, self.report.metric: value}
        return {**shown, "reached": point.reached, **used, "on_front": point.on_front}

    def plot(self, against: FrontAgainst = "bytes") -> Figure:
        """What counts over `bytes` or `time`, with the front."""
        return Figure(front_svg(self.report, against), f"{self.report.metric} over {against}")

    def save(self, path: str | Path) -> Path:
        """Write what the name ends with: the page (.html), the settings (.toml), trials (.csv), .svg, .png.

        Raises `ConfigError` for another kind of file.
        """
        where = Path(path)
        match where.suffix:
            case ".html":
                where.write_text(tuning_html(self.report), encoding="utf-8")
            case ".toml":
                where.write_text(self.toml, encoding="utf-8")
            case ".csv":
                self.trials.to_csv(where)
            case ".svg" | ".png":
                self.plot().save(where)
            case _:
                raise ConfigError(f"{where}: end the name with .html, .toml, .csv, .svg or .png")
        return where

    def _repr_html_(self) -> str:
        return f"{self.front._repr_html_()}{self.plot()._repr_html_()}"


@spelled(RunObjects)
def tune(
    source: Source,
    ranges: Mapping[str, Any] | None = None,
    *,
    aim: str | None = None,
    bytes_max: int | None = None,
    trials: int | None = None,
    seeds: int | None = None,
    fresh_seeds: int | None = None,
    extensions: int | None = None,
    defaults: bool | None = None,
    out: str | Path | None = None,
    parallel: int | None = None,
    on: str | None = None,
    progress: bool = True,
    **objects: Unpack[RunObjects],
) -> Tuning:
    """Tune a run in the simulator: for a target, or for a budget of updates, virtual seconds or bytes.

    Trials are choices of settings, the one that is given among them, each simulated from the same seeds and
    judged on the validation part. All are carried to a quarter of the budget, the better half to half of it,
    half of those to the end. Where the best is at the end of a range, the range is extended. What is best is
    measured once more from fresh seeds, and so are the settings that were given. Where it collapses from one
    of them, the next best takes its place.

    Args:
        source: As for `simulate`; a file of settings may say all that follows in `[tune]`.
        ranges: What to choose from, for each setting (`"table.key"`) a list of values or
            `{"from": ..., "to": ..., "points": ..., "scale": "log" or "even"}`; one value holds it.
        aim: What is to be best: `time`, `updates` or `bytes` to the target, or the `value` at the end of the
            budget. None: the time where there is a target, or else the value.
        bytes_max: A budget of bytes, up and down, beside those of `until`. One is needed, or a target.
        trials: How many to begin with; 16.
        seeds: From how many each is run, from the run's own on; 2.
        fresh_seeds: How many others the recommendation is measured from; 5.
        extensions: How many trials there may be beyond the ends of ranges; 4.
        defaults: Tune what is worth it beside what `ranges` names; True.
        out: A folder for what the tuning leaves. Called again with the same arguments it goes on there, with
            nothing run twice. None: a temporary one.
        parallel: Processes that simulate, a run at a time each. Apps and strategies then come from files.
        on: `processes` of this machine, or `ray`; as for `sweep`.
        progress: Show a bar on standard error, or lines where that is no terminal.
        objects: The arguments of `simulate` from `strategy` to `settings`.

    Raises `ConfigError` before anything is run, and what `simulate` raises.
    """
    given = {"aim": aim, "bytes_max": bytes_max, "trials": trials, "seeds": seeds, "parallel": parallel}
    given |= {"fresh_seeds": fresh_seeds, "extensions": extensions, "defaults": defaults, "on": on}
    source, said = tune_source(source)
    table = said.over(
        of_python(given),
        read_ranges(of_python(dict(ranges) if isinstance(ranges, Mapping) else ranges or {})),
    )
    if table.parallel > 1:
        check_no_worker_begins()
    with LiveBar(progress) as bar:
        return carry_tuning(source, table, out, lambda p: bar.show(p.share, p.text), objects)


def tune_source(source: Source) -> tuple[Source, TuneTable]:
    """The source without its `[tune]`, and what that says. Raises `ConfigError`."""
    if not (isinstance(source, str | Path) and is_config(str(source))):
        return source, TuneTable()
    tables, found = read_tune(Path(source))
    return FileTables(Path(source), tables), found


def carry_tuning(
    source: Source, table: TuneTable, out: str | Path | None, tell: Tell, objects: RunObjects
) -> Tuning:
    """Begin a tuning, or go on with it, to its end."""
    asked = TuneRequest(source, table, objects)
    asked.check()
    folder, temporary = folder_at(out, "anabranch-tune-")
    with locked(folder, "a tuning"):
        return replace(TuneRun(asked, folder, tell, shared=out is not None).run(), holds=temporary)


class TuneRun:
    """A tuning under way in its folder, which other machines may have where it is `shared`."""

    def __init__(self, asked: TuneRequest, folder: Path, tell: Tell, shared: bool) -> None:
        self._asked, self._folder, self._tell, self._shared = asked, folder, tell, shared
        self._ranges = list(asked.ranges)
        self._choices = self._dealt()
        self._halving = Halving(len(self._choices), asked.seeds)
        self._log = TuneLog(folder, asked.to_json(), asked.code)
        self._done = 0
        self._passed: list[int] = []
        self._pool: RunPool | None = None

    def run(self) -> Tuning:
        """To its end; what is on record is not run again."""
        parallel, on = self._asked.table.parallel, self._asked.table.on
        self._tell(TuneProgress(0.0, f"{self._halving.trials} trials, {len(self._asked.seeds)} seeds each"))
        pool = run_pool(parallel, on, self._asked.base.ray, self._shared)
        with nullcontext() if parallel == 1 and on == PROCESSES else pool as self._pool:
            best = self._best()
        self._tell(TuneProgress(1.0, "done"))
        for checkpoint in self._folder.glob(f"*/*/{CHECKPOINT}*"):  # none of these runs goes on any more
            checkpoint.unlink()
        return self._left(best)

    def _best(self) -> int:
        """The best trial that stands, as fresh seeds measure it and the settings as given."""
        while True:
            if due := self._halving.due():
                self._carry("trial", due)
            elif not self._extend():
                break
        candidates = self._halving.ranked()[:CANDIDATES]
        for before, trial in enumerate(candidates):
            self._carry("trial", self._halving.missing([trial], self._halving.last))
            measured = dict.fromkeys([trial] if before else [trial, 0])
            self._carry("fresh", [leg for each in measured for leg in self._fresh_legs(each)])
            if not self._unstable(trial):
                self._passed = candidates[:before]
                return trial
        self._passed = candidates[1:]  # none of them stands: the best is recommended, with a warning
        return candidates[0]

    def _unstable(self, trial: int) -> int:
        """From how many fresh seeds it does not come to what its trials did."""
        legs = [Leg(trial, self._halving.last, seed) for seed in self._asked.seeds]
        return unstable(self._fresh_ends(trial), self._ends("trial", legs))

    # --- choices -------------------------------------------------------------------------------

    def _dealt(self) -> list[Choice]:
        """The settings as given, which choose nothing, and others, each once."""
        found: list[Choice] = [{}]
        seen, wanted = [self._settings({})], self._asked.table.trials
        for again in range(DEALS):
            for choice in deal(self._ranges, wanted - 1, self._asked.base.run.seed, again):
                if len(found) < wanted and (its := self._settings(choice)) not in seen:
                    found.append(choice)
                    seen.append(its)
        return found

    def _settings(self, choice: Choice) -> dict[str, Any]:
        """Every setting that is tuned, with its value."""
        return {r.path: choice.get(r.path, value_of(self._asked.base, r.path)) for r in self._ranges}

    def _extend(self) -> bool:
        """Add a trial for each range at whose end the best one is; False where there is none to add."""
        best = self._choices[self._halving.best()]
        room = self._asked.table.extensions - self._halving.added
        before = self._halving.added
        for place, r in enumerate(self._ranges):
            end = r.edge(self._settings(best)[r.path])
            if not end or not room:
                continue
            value = r.beyond(end)
            choice = {**best, r.path: value}
            if value is not None and self._can(choice) and self._is_new(choice):
                self._ranges[place] = r.with_point(value)
                self._choices.append(choice)
                self._halving.add()
                room -= 1
        return self._halving.added > before

    def _is_new(self, choice: Choice) -> bool:
        return all(self._settings(choice) != self._settings(other) for other in self._choices)

    def _can(self, choice: Choice) -> bool:
        try:
            self._asked.plan(choice)
        except ConfigError:  # the setting itself ends here
            return False
        return True

    # --- legs ----------------------------------------------------------------------------------

    def _carry(self, kind: LegKind, legs: Sequence[Leg]) -> None:
        """Have them, from the record or by running them."""
        waiting = []
        for leg in legs:
            if (end := self._log.end(kind, leg)) is None:
                waiting.append(leg)
            else:
                self._take(kind, leg, end)
        for leg, end in self._run([self._job(kind, leg) for leg in waiting]):
            self._log.add(kind, leg, self._halving.shares[leg.rung], self._choices[leg.trial], end)
            self._take(kind, leg, end)

    def _take(self, kind: LegKind, leg: Leg, end: LegEnd) -> None:
        self._done += 1
        if kind == "trial":
            self._halving.tell(leg, end.merit(self._asked.aim))
        share = 100 * self._halving.shares[leg.rung]
        value = metric_text(end.metric, end.value)
        whose = "fresh seed" if kind == "fresh" else "seed"
        text = f"trial {leg.trial} at {share:.0f} % of the budget, {whose} {leg.seed}: {end.metric} {value}"
        self._tell(TuneProgress(min(1.0, self._done / self._planned()), text, leg, end))

    def _planned(self) -> int:
        """Legs that there will be, as far as is known: one for each seed of each trial of each rung."""
        trials, count = self._halving.trials, self._halving.added
        for _ in self._halving.shares:
            count, trials = count + trials, math.ceil(trials / 2)
        return count * len(self._asked.seeds) + 2 * len(self._asked.fresh_seeds)

    def _job(self, kind: LegKind, leg: Leg) -> LegJob:
        fresh = kind == "fresh"
        plan = self._asked.plan(self._choices[leg.trial], leg.seed, fresh)
        folder = self._folder / (FRESH_RUNS if fresh else "runs") / f"trial-{leg.trial}-seed{leg.seed}"
        return LegJob(leg, plan.config, plan.app, folder, self._asked.budget, self._halving.shares[leg.rung])

    def _run(self, jobs: Sequence[LegJob]) -> Iterator[tuple[Leg, LegEnd]]:
        if self._pool is None:
            yield from ((job.leg, carry_leg(job)) for job in jobs)
            return
        if self._asked.table.on == PROCESSES:
            check_seen((job.app for job in jobs), f"tune(parallel={self._asked.table.parallel})")
        futures = {self._pool.submit(carry_leg, job): job.leg for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()

    # --- what it leaves ------------------------------------------------------------------------

    def _left(self, best: int) -> Tuning:
        report = self._report(best)
        choice = self._settings(self._choices[best])
        config = self._recommended(choice, best)
        head = HEAD.format(fresh_text(report)) + _secret_lines(config)
        report = replace(report, toml=head + config.to_toml(besides=settings_of(self._asked.base, choice)))
        found = Tuning(choice, config, self._folder, report)
        found.save(self._folder / RECOMMENDED)
        found.save(self._folder / PAGE)
        return found

    def _recommended(self, choice: Choice, best: int) -> Config:
        """The run of it; a budget of bytes is the updates that it pays for, as no setting ends that."""
        config = self._asked.plan(choice).config
        if not self._asked.table.bytes_max:
            return config
        updates = max((self._paid(end) for end in self._fresh_ends(best)), default=0)
        given = config.run.updates_max or updates
        return replace(config, run=replace(config.run, updates_max=max(1, min(updates, given))))

    def _paid(self, end: LegEnd) -> int:
        """Updates that the budget of bytes pays for: of a run that its target ended, as many more."""
        if self._asked.aim == "value" or not end.reached or not end.traffic_bytes:
            return end.updates
        return end.updates * self._asked.table.bytes_max // end.traffic_bytes

    def _fresh_ends(self, trial: int) -> list[LegEnd]:
        return self._ends("fresh", self._fresh_legs(trial))

    def _fresh_legs(self, trial: int) -> list[Leg]:
        return [Leg(trial, self._halving.last, seed) for seed in self._asked.fresh_seeds]

    def _ends(self, kind: LegKind, legs: Sequence[Leg]) -> list[LegEnd]:
        """Those of the legs that have ended."""
        return [end for leg in legs if (end := self._log.end(kind, leg))]

    def _report(self, best: int) -> TuneReport:
        named = [end for end in self._fresh_ends(best) if end.metric != AUTO]
        metric, mode = (named[0].metric, named[0].mode) if named else (AUTO, AUTO)
        points = with_front([*self._points()], mode)
        fresh = [self._fresh_figures("recommended", best)]
        fresh += [self._fresh_figures("as given", 0)] if best else []
        fresh += [self._fresh_figures(f"passed over: trial {t}", t) for t in self._passed if t]
        ranges = self._tuned_ranges(best)
        return TuneReport(
            strategy=self._asked.base.strategy.name,
            workload=self._asked.base.run.workload,
            metric=metric,
            mode=mode,
            target=Goal.of(self._asked.base.run).target,
            aim=self._asked.aim,
            budget=_budget_text(self._asked.budget),
            points=points,
            best=best,
            ranges=ranges,
            fresh=fresh,
            said=[*_said(ranges, best, fresh[0]), *self._fresh_said(best)],
            toml="",
        )

    def _fresh_said(self, best: int) -> Iterator[str]:
        """What fresh seeds say of the choice."""
        seeds = len(self._asked.fresh_seeds)
        for trial in self._passed:
            yield PASSED.format(trial=trial, fell=self._unstable(trial), seeds=seeds)
        if fell := self._unstable(best):
            yield UNSTABLE.format(fell=fell, seeds=seeds)
        if self._is_chance(best):
            yield CHANCE

    def _is_chance(self, best: int) -> bool:
        """Whether the settings as given did better, from seeds that took no part in the choice."""
        fresh = (self._fresh_ends(trial) for trial in (0, best))
        given, recommended = (score([end.merit(self._asked.aim) for end in ends]) for ends in fresh)
        return given > recommended

    def _points(self) -> Iterator[TunePoint]:
        """Each trial at each rung that it was carried to, but for those before which it had ended."""
        seeds = self._asked.seeds
        for trial in range(len(self._choices)):
            before: list[LegEnd] = []
            for rung, share in enumerate(self._halving.shares):
                ends = self._ends("trial", [Leg(trial, rung, seed) for seed in seeds])
                if len(ends) < len(seeds) or ends == before:
                    continue
                before = ends
                values = [end.value for end in ends if end.value is not None]
                whole = spread(values) if len(values) == len(ends) else None
                used = (sum(getattr(end, name) for end in ends) / len(ends) for name in USED)
                reached = sum(end.reached for end in ends)
                settings = self._settings(self._choices[trial])
                yield TunePoint(trial, share, settings, len(seeds), whole, reached, *used)

    def _fresh_figures(self, name: str, trial: int) -> FreshFigures:
        ends = self._fresh_ends(trial)
        columns = ([getattr(end, key) for end in ends] for key in ("value", "reached", *USED))
        return FreshFigures(
            name, self._settings(self._choices[trial]), list(self._asked.fresh_seeds), *columns
        )

    def _tuned_ranges(self, best: int) -> list[TunedRange]:
        chosen = self._settings(self._choices[best])
        found = []
        for r in self._ranges:
            end = r.edge(chosen[r.path])
            choice = {**self._choices[best], r.path: r.beyond(end)} if end else {}
            is_open = end and choice[r.path] is not None and self._can(choice)
            found.append(TunedRange(r.path, r.points, chosen[r.path], end if is_open else ""))
        return found


USED = ("time_s", "updates", "traffic_bytes")
NO_VERSION = "from no fresh seed a version has come of this budget: nothing was learned, give it more"
CHANCE = (
    "from the fresh seeds the settings as given did better than what is recommended: it may be chance that "
    "has chosen; more seeds (tune.seeds) choose with less of it"
)
PASSED = (
    "trial {trial} is passed over: from {fell} of {seeds} fresh seeds it came to nothing, or to less than "
    "half of what it had gained when it was chosen"
)
UNSTABLE = (
    "from {fell} of {seeds} fresh seeds the recommendation came to nothing, or to less than half of what it "
    "had gained when it was chosen: take it with care, or try gentler settings"
)
AT_ONCE = "the first weights reach the target, before anything is learned: give another, or another run.mode"


def _said(ranges: Sequence[TunedRange], best: int, fresh: FreshFigures) -> list[str]:
    """What whoever takes the recommendation should know."""
    found = [
        f"{r.path} = {r.chosen!r} is the {r.end} that was tried: a wider range may have a better one"
        for r in ranges
        if r.end
    ]
    if not best:
        found.append("nothing that was tried is better than the settings as given")
    if not any(fresh.updates):
        found.append(AT_ONCE if any(fresh.reached) else NO_VERSION)
    return found


def _budget_text(budget: TuneBudget) -> str:
    parts = (
        f"{count_text(budget.updates)} updates" if budget.updates else "",
        f"{duration_text(budget.virtual_s)} of virtual time" if budget.virtual_s else "",
        bytes_text(budget.traffic_bytes) if budget.traffic_bytes else "",
    )
    return f"budget: {', '.join(part for part in parts if part)}"


def _secret_lines(config: Config) -> str:
    names = sorted(config.secrets())
    return f"# Give what is masked here once more: {', '.join(names)}\n\n" if names else ""
