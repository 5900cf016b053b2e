"""anabranch: asynchronous federated learning for real fleets."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.aggregation import Aggregation, AggregationStep, Update, aggregate
    from anabranch.core.errors import AnabranchError
    from anabranch.workloads.app import App, Examples, Shard

__version__ = "0.1.0"

__all__ = [
    "Aggregation",
    "AggregationStep",
    "AnabranchError",
    "App",
    "Examples",
    "Shard",
    "Update",
    "aggregate",
]

_HOMES = {
    "anabranch.aggregation": ("Aggregation", "AggregationStep", "Update", "aggregate"),
    "anabranch.core.errors": ("AnabranchError",),
    "anabranch.workloads.app": ("App", "Examples", "Shard"),
}


def __getattr__(name: str) -> Any:
    # When it is first asked for: the command line shall hear Ctrl-C before numpy and the rest are there.
    for home, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(home), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
