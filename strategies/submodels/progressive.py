"""Growing models: the first blocks are trained with a head of their own, and the next ones come later.

| symbol | name             | meaning                                                                     |
|--------|------------------|-----------------------------------------------------------------------------|
| S      |                  | stages of the model: what the App's `stages` says                           |
| E_s    | stage.blocks     | the blocks that come with stage s                                           |
| G_s    | stage.head       | its temporary head; G_S is the model's own                                  |
| g_s    | grow_at          | where stage s + 1 begins, as a share of V                                   |
| V      |                  | versions of the run: `run.versions_max`, or `run.updates_max` / K           |
| K      |                  | updates that make a version                                                 |
| W      | warm_up_versions | versions in which what is new is trained alone                              |

    stage s begins at version T_s = round(g_{s-1} V);   T_1 = 0
    a task at version v of stage s:    trains E_1, ..., E_s and G_s
    for T_s <= v < T_s + W, s > 1:     trains E_s and G_s on top of the others, which stay as they are

A device fetches what it needs to compute, E_1, ..., E_s and G_s, and sends what it has trained. An update
that comes after its stage is over is folded as any late one: its blocks are there still, and nobody reads
its head.

ProgFed is of Wang et al., "ProgFed: effective, communication, and computation efficient federated learning by
progressive training", arXiv 2110.05323, whose g is (.125, .25, .375) and whose W is 25 of 3000 rounds. There
the optimisers of server and devices begin anew at each growth; here a server's momentum goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from anabranch.core.config.tables import Config, RunTable, SubmodelTable
from anabranch.core.engine.planner import Applicant
from anabranch.core.engine.strategy import Strategy
from anabranch.core.errors import ConfigError
from anabranch.core.model.growing import stage_set
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.stages import Growth
from anabranch.core.model.submodels import TensorSet
from anabranch.strategies.annealed import Annealed
from anabranch.strategies.registry import strategy_of
from anabranch.strategies.scheduled import unscheduled
from anabranch.strategies.submodels.planner import Forgetful, NoMemory
from anabranch.strategies.waves import Waves

LAST_GROWTH = 0.375  # of the run, where `grow_at` says nothing


class Progressive(Forgetful):
    """A `Planner`; `within` says how long its run is. Raises `ConfigError` for stages that do not fit."""

    name: ClassVar[str] = "progressive"
    of_tensors: ClassVar[bool] = True
    grows: ClassVar[bool] = True

    def __init__(self, spec: ParamSpec, growth: Growth) -> None:
        self.spec, self.growth = spec, growth

    @classmethod
    def of(cls, spec: ParamSpec, table: SubmodelTable, seed: int) -> Progressive:
        """By the `[submodel]` table, for a run whose length is not said: it stays in the last stage."""
        if not spec.stages:
            raise ConfigError(
                "submodel.name is 'progressive', but this model has no stages: write stages(self, model) in "
                "the App, and make the manifest anew with `anabranch init`"
            )
        shares_of(table, len(spec.stages))
        return cls(spec, Growth((0,) * len(spec.stages), table.warm_up_versions))

    def within(self, config: Config, strategy: Strategy) -> Progressive:
        """Itself in a run. Raises `ConfigError` where that says no number of versions."""
        return Progressive(self.spec, growth_of(config, strategy, len(self.spec.stages)))

    def plan(
        self, state: NoMemory, vector: Vector, applicant: Applicant
    ) -> tuple[NoMemory, TensorSet | None]:
        """The stage of the version, or what is new in it; of a single stage the whole model."""
        growth, version = self.growth, applicant.version
        since = growth.before(version) if growth.warms_up(version) else 0
        single = len(self.spec.stages) == 1
        return state, None if single else stage_set(self.spec, growth.stage_of(version), since)


def growth_of(config: Config, strategy: Strategy, stages: int) -> Growth:
    """When a model of so many stages grows in a run. Raises `ConfigError`, naming the key."""
    table = config.submodel
    shares = shares_of(table, stages)
    versions = versions_of(config.run, strategy) if shares else 0.0
    return Growth((0, *(round(share * versions) for share in shares)), table.warm_up_versions)


def shares_of(table: SubmodelTable, stages: int) -> Sequence[float]:
    """g, one number fewer than there are stages. Raises `ConfigError`."""
    if not table.grow_at:
        return [LAST_GROWTH * s / (stages - 1) for s in range(1, stages)]
    if len(table.grow_at) != stages - 1:
        raise ConfigError(
            f"submodel.grow_at has {len(table.grow_at)} numbers, but the model has {stages} stages: "
            f"{stages - 1} are needed, one for each stage after the first"
        )
    return table.grow_at


def versions_of(run: RunTable, strategy: Strategy) -> float:
    """V. Raises `ConfigError` where nobody says it."""
    if run.versions_max:
        return run.versions_max
    updates: int = getattr(unscheduled(strategy), "updates_in_sum", 0)
    if run.updates_max and updates:
        return run.updates_max / updates
    if run.updates_max:
        raise ConfigError(
            "submodel.grow_at are shares of the run's versions, and how many updates of "
            f"{strategy.name!r} make one is not known before: set run.versions_max"
        )
    raise ConfigError(
        "submodel.grow_at are shares of the run's versions, and nothing says how many there will be: set "
        "run.versions_max, or run.updates_max"
    )


def length_doubts(config: Config, strategy: Strategy) -> Iterator[str]:
    """What its user should know of when a model grows that is as they want it."""
    grows, strategy = config.submodel.name == Progressive.name, unscheduled(strategy)
    if grows and not config.run.versions_max and isinstance(strategy, Annealed | Waves):
        yield (
            "submodel.grow_at are shares of the run's versions, which are taken to be run.updates_max / "
            f"strategy.buffer_size, and {strategy.name!r} makes versions of other numbers of updates: set "
            "run.versions_max, or stages may begin far too early, or never"
        )


def grown(config: Config, spec: ParamSpec) -> Growth | None:
    """When the model grows in a run; None where it does not."""
    if config.submodel.name != Progressive.name or len(spec.stages) < 2:
        return None
    return growth_of(config, strategy_of(config), len(spec.stages))
