"""Planners by name, from the `[submodel]` table; see `core/parts.py` for those of others."""

from __future__ import annotations

from anabranch.core.config.tables import Config
from anabranch.core.engine.planner import Narrowest, Planner
from anabranch.core.engine.strategy import Strategy
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO
from anabranch.core.model.params import ParamSpec
from anabranch.core.parts import PartKind, members
from anabranch.strategies.submodels.progressive import Progressive

NO_PLANNER = "none"
_HERE = "anabranch.strategies.submodels"
BUILT_IN = {
    "random": f"{_HERE}.asyncdrop:RandomUnits",
    "hetero": f"{_HERE}.asyncdrop:HeteroWindows",
    "heterofl": f"{_HERE}.widths:HeteroFL",
    "fedrolex": f"{_HERE}.widths:FedRolex",
    "fjord": f"{_HERE}.widths:FjORD",
    "ist": f"{_HERE}.ist:Ist",
    "fragments": f"{_HERE}.fragments:Fragments",
    "progressive": f"{_HERE}.progressive:Progressive",
    "alternate": f"{_HERE}.alternate:Alternate",
}
PLANNERS = PartKind(
    "planner", "planners", ("submodel.name",), BUILT_IN, (*members(Planner), "of"), also=(AUTO, NO_PLANNER)
)


def make_planner(spec: ParamSpec, strategy: Strategy, config: Config) -> Planner | None:
    """Who chooses the sub-models of a run; None: every task is of the whole model.

    Raises `ConfigError` where the strategy or the model knows no sub-models.
    """
    table = config.submodel
    name = strategy.submodel if table.name == AUTO else table.name
    if name == NO_PLANNER:
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
