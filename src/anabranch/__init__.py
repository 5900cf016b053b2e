"""anabranch: asynchronous federated learning for real fleets."""

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
