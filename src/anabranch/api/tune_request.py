"""What is to be tuned, and by what: a run, its ranges, its budget and seeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anabranch.api.configuration import UPDATES_TO_TARGET, Choice
from anabranch.api.halving import SHARES
from anabranch.api.objects import RunObjects, RunPlan, Source, plan_run
from anabranch.api.pool import check_place
from anabranch.api.tune_file import TuneTable
from anabranch.api.tune_legs import TuneBudget
from anabranch.api.tune_ranges import default_ranges, settings_of, value_of
from anabranch.core.config.goal import Goal
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO
from anabranch.simulation.checkpoint import code_of

NO_MATTER = ("ranges", "parallel", "on")  # what a tuning does not follow from; its ranges stand apart


class TuneRequest:
    """What is to be tuned, and by what. Raises `ConfigError` where there is neither a target nor a budget."""

    def __init__(self, source: Source, table: TuneTable, objects: RunObjects) -> None:
        self._source, self.table, self._objects = source, table, objects
        self.base = plan_run(source, objects, ends=False).config
        if held := {r.path: r.points[0] for r in table.ranges if len(r.points) == 1}:
            settings = {**(objects.get("settings") or {}), **settings_of(self.base, held)}
            self._objects = {**objects, "settings": settings}
            with _of_ranges(held):
                self.base = plan_run(source, self._objects, ends=False).config
        run = self.base.run
        self.aim = self._aim(Goal.of(run))
        updates = run.updates_max
        if not (updates or run.virtual_s_max):  # a target, or bytes, that may never be there
            updates = UPDATES_TO_TARGET
        self.budget = TuneBudget(updates, run.virtual_s_max, table.bytes_max)
        pays = self.aim == "bytes" or table.bytes_max > 0
        links = self.base.fleet.up_mbps > 0 or self.base.fleet.down_mbps > 0
        named = {r.path: r for r in table.ranges}
        usual = default_ranges(self.base, pays or links) if table.defaults else []
        self.ranges = [*(r for r in usual if r.path not in named), *named.values()]

    @property
    def seeds(self) -> range:
        """Those of the trials."""
        return range(self.base.run.seed, self.base.run.seed + self.table.seeds)

    @property
    def fresh_seeds(self) -> range:
        """Those that take no part in the choice."""
        return range(self.seeds.stop, self.seeds.stop + self.table.fresh_seeds)

    def check(self) -> None:
        """Raises `ConfigError` for a range with a value that its setting cannot have."""
        check_place(self.table.on, "tune.on", self.base)
        for r in self.ranges:
            if r.path.startswith(("run.", "fleet.")):
                raise ConfigError(
                    f"tune.ranges: {r.path} is what a tuning is for, and not tuned: set it in the file"
                )
            value_of(self.base, r.path)
            for value in r.points:
                with _of_ranges({r.path: value}):
                    self.plan({r.path: value})
        if all(len(r.points) < 2 for r in self.ranges):
            raise ConfigError(
                "there is nothing to tune: give tune.ranges (--range) a setting with two values"
            )

    def plan(self, choice: Choice, seed: int | None = None, fresh: bool = False) -> RunPlan:
        """A run of a choice; without a seed as it is recommended. Raises `ConfigError`."""
        settings = {**(self._objects.get("settings") or {}), **settings_of(self.base, choice)}
        run = self.base.run
        if seed is not None:
            settings |= {"run.seed": seed, "run.versions_max": 0, "run.updates_max": self.budget.updates}
            settings |= {"run.stop_at_target": self.aim != "value", "run.trackers": []}
            settings |= {"run.evaluate_on": run.evaluate_on if fresh else "validation"}
            if not 0 < run.evaluate_every_s <= SHARES[0] * run.virtual_s_max:  # some before any share's end
                settings |= {"run.evaluate_every_s": 0.0, "run.evaluate_every_versions": 1}
        elif not (run.updates_max or run.virtual_s_max):
            settings |= {"run.updates_max": self.budget.updates, "run.stop_at_target": self.aim != "value"}
        return plan_run(self._source, {**self._objects, "settings": settings}, ends=False)

    def to_json(self) -> dict[str, Any]:
        """What a tuning follows from."""
        table = {key: value for key, value in vars(self.table).items() if key not in NO_MATTER}
        ranges = {r.path: list(r.points) for r in self.ranges}
        return {"config": self.base.to_json(), **table, "ranges": ranges, "shares": list(SHARES)}

    @property
    def code(self) -> dict[str, str]:
        """The digests of the code that it follows from, by its places. Raises `AppError`."""
        plan = self.plan({})
        return code_of(plan.config, plan.app)

    def _aim(self, goal: Goal) -> str:
        run, aim = self.base.run, self.table.aim
        if goal.target is None and not (run.updates_max or run.virtual_s_max or self.table.bytes_max):
            why = " (run.versions_max is none: versions of another K are other work)"
            ends = why if run.versions_max else ""
            raise ConfigError(
                "there is neither a target nor a budget to tune for: set run.target_accuracy or run.target "
                f"(--target), run.updates_max (--updates), run.virtual_s_max (--seconds) or tune.bytes_max "
                f"(--bytes){ends}"
            )
        if aim == AUTO:
            return "value" if goal.target is None else "time"
        if aim != "value" and goal.target is None:
            raise ConfigError(
                f"tune.aim = {aim!r} is what a target takes: set run.target_accuracy or run.target "
                "(--target), or aim = 'value'"
            )
        return aim


@contextmanager
def _of_ranges(choice: Choice) -> Iterator[None]:
    """What is wrong with a choice is said of the ranges that it is from, and not of `settings=`."""
    try:
        yield
    except ConfigError as error:
        points = ", ".join(f"{path} = {value!r}" for path, value in choice.items())
        raise ConfigError(f"tune.ranges: {points}: {str(error).removesuffix(' (settings=)')}") from None
