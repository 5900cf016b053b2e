"""Planners by name, from the `[submodel]` table."""

from __future__ import annotations

from anabranch.core.config.tables import Config
from anabranch.core.engine.planner import Planner
from anabranch.core.engine.strategy import Strategy
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO
from anabranch.core.model.params import ParamSpec
from anabranch.strategies.submodels.asyncdrop import HeteroWindows, RandomUnits
from anabranch.strategies.submodels.ist import Ist
from anabranch.strategies.submodels.widths import FedRolex, FjORD, HeteroFL

NONE = "none"


def make_planner(spec: ParamSpec, strategy: Strategy, config: Config) -> Planner | None:
    """Who chooses the sub-models of a run; None: every task is of the whole model.

    Raises `ConfigError` where the strategy or the model knows no sub-models.
    """
    table = config.submodel
    name = strategy.submodel if table.name == AUTO else table.name
    if name == NONE:
        return None
    if not strategy.supports_submodels:
        raise ConfigError(
            f"submodel.name is {name!r}, but strategy {strategy.name!r} takes whole models only"
        )
    if not spec.groups:
        raise ConfigError(
            f"submodel.name is {name!r}, but no units that may be left out are known of this model: "
            "`anabranch init` says why; set submodel.name = 'none' to train it whole"
        )
    guard = table.coverage_versions
    if name in (RandomUnits.name, HeteroWindows.name):
        cls = RandomUnits if name == RandomUnits.name else HeteroWindows
        return cls(spec, table.drop, guard)
    if name == Ist.name:
        return Ist(spec, table.parts, config.run.seed)
    widths = {c.name: c for c in (HeteroFL, FedRolex, FjORD)}
    return widths[name](spec, table.widths, guard)
