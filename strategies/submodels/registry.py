"""Planners by name, from the `[submodel]` table; see `core/parts.py` for those of others."""

from __future__ import annotations

from typing import Any

from anabranch.core.config.tables import Config
from anabranch.core.engine.planner import Narrowest, Planner
from anabranch.core.engine.strategy import Strategy
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO
from anabranch.core.model.params import ParamSpec
from anabranch.core.parts import PartKind, members
from anabranch.strategies.submodels.alternate import Alternate
from anabranch.strategies.submodels.asyncdrop import HeteroWindows, RandomUnits
from anabranch.strategies.submodels.fragments import Fragments
from anabranch.strategies.submodels.ist import Ist
from anabranch.strategies.submodels.progressive import Progressive
from anabranch.strategies.submodels.widths import FedRolex, FjORD, HeteroFL

NONE = "none"
BUILT_IN: dict[str, type[Any]] = {
    c.name: c
    for c in (
        *(RandomUnits, HeteroWindows, HeteroFL, FedRolex, FjORD, Ist),
        *(Fragments, Progressive, Alternate),
    )
}
PLANNERS = PartKind(
    "planner", "planners", ("submodel.name",), BUILT_IN, (*members(Planner), "of"), also=(AUTO, NONE)
)


def make_planner(spec: ParamSpec, strategy: Strategy, config: Config) -> Planner | None:
    """Who chooses the sub-models of a run; None: every task is of the whole model.

    Raises `ConfigError` where the strategy or the model knows no sub-models.
    """
    table = config.submodel
    name = strategy.submodel if table.name == AUTO else table.name
    if name == NONE:
        return None
    found = PLANNERS.find(name)
    if not strategy.supports_submodels:
        raise ConfigError(
            f"submodel.name is {name!r}, but strategy {strategy.name!r} takes whole models only"
        )
    if not spec.groups and not getattr(found, "of_tensors", False):
        raise ConfigError(
            f"submodel.name is {name!r}, but no units that may be left out are known of this model: "
            "`anabranch init` says why; set submodel.name = 'none' to train it whole"
        )
    if spec.stages and getattr(found, "of_tensors", False) and not getattr(found, "grows", False):
        raise ConfigError(
            f"submodel.name is {name!r}, which deals tensors of a whole model, but this one has stages, with "
            "heads that the whole does not train: set submodel.name = 'progressive', or take an App without "
            "stages"
        )
    planner: Planner = found.of(spec, table, config.run.seed)
    narrowest = getattr(planner, "narrowest", None)
    if narrowest is not None and not isinstance(told := narrowest(), Narrowest):
        raise ConfigError(f"planner {name!r}: narrowest() must return a Narrowest(width, why), not {told!r}")
    return planner.within(config, strategy) if isinstance(planner, Progressive) else planner
