"""anabranch: asynchronous federated learning for real fleets."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# gRPC reads it when it is imported. Else its C core writes lines of its own among ours, one for each worker
# of a DataLoader; what it has to say comes as the status of a call as well.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

if TYPE_CHECKING:
    from anabranch import strategies
    from anabranch.aggregation import Aggregation, AggregationStep, Update, aggregate
    from anabranch.api import codecs
    from anabranch.api.calibrating import Calibration, calibrate
    from anabranch.api.comparing import Comparison, compare
    from anabranch.api.configuration import load_config
    from anabranch.api.devices import Client
    from anabranch.api.figures import Figure
    from anabranch.api.fleets import (
        AllAtOnce,
        Arriving,
        Dirichlet,
        Draws,
        FadasLarge,
        FadasMild,
        Fleet,
        Iid,
        Levels,
        Links,
        Lognormal,
        Measured,
        Shards,
        SpeedShards,
        Traced,
    )
    from anabranch.api.job_server import JobServer, ServedJob
    from anabranch.api.joining import JoinedFederation, JoinedTask, join
    from anabranch.api.lightning_callback import LightningCallback as LightningCallback
    from anabranch.api.live import Server
    from anabranch.api.objects import configure
    from anabranch.api.records import Records
    from anabranch.api.run import Run, open_run
    from anabranch.api.simulating import simulate
    from anabranch.api.sweeping import Sweep, sweep
    from anabranch.api.transformers_callback import TransformersCallback as TransformersCallback
    from anabranch.api.tuning import Tuning, tune
    from anabranch.api.until import Until
    from anabranch.core.config.faults import FaultsTable as Faults
    from anabranch.core.config.tables import ClientTable as Training
    from anabranch.core.config.tables import Config
    from anabranch.core.engine.robust import RobustTable as Robust
    from anabranch.core.errors import AnabranchError
    from anabranch.core.model.updates import LocalPlan
    from anabranch.reports.origin import StopRun
    from anabranch.simulation.run import RunProgress
    from anabranch.workloads.app import App, Examples, Shard
    from anabranch.workloads.dataset_app import app

__version__ = "0.1.0"

__all__ = [
    "Aggregation",
    "AggregationStep",
    "AllAtOnce",
    "AnabranchError",
    "App",
    "Arriving",
    "Calibration",
    "Client",
    "Comparison",
    "Config",
    "Dirichlet",
    "Draws",
    "Examples",
    "FadasLarge",
    "FadasMild",
    "Faults",
    "Figure",
    "Fleet",
    "Iid",
    "JobServer",
    "JoinedFederation",
    "JoinedTask",
    "Levels",
    "Links",
    "LocalPlan",
    "Lognormal",
    "Measured",
    "Records",
    "Robust",
    "Run",
    "RunProgress",
    "ServedJob",
    "Server",
    "Shard",
    "Shards",
    "SpeedShards",
    "StopRun",
    "Sweep",
    "Traced",
    "Training",
    "Tuning",
    "Until",
    "Update",
    "aggregate",
    "app",
    "calibrate",
    "codecs",
    "compare",
    "configure",
    "join",
    "load_config",
    "open_run",
    "simulate",
    "strategies",
    "sweep",
    "tune",
]

_HOMES = {
    "anabranch.aggregation": ("Aggregation", "AggregationStep", "Update", "aggregate"),
    "anabranch.api.calibrating": ("Calibration", "calibrate"),
    "anabranch.api.comparing": ("Comparison", "compare"),
    "anabranch.api.configuration": ("load_config",),
    "anabranch.api.devices": ("Client",),
    "anabranch.api.figures": ("Figure",),
    "anabranch.api.fleets": (
        *("Arriving", "AllAtOnce"),
        *("Dirichlet", "Draws", "Iid", "Shards", "SpeedShards"),
        *("FadasLarge", "FadasMild", "Levels", "Lognormal", "Measured", "Traced"),
        *("Fleet", "Links"),
    ),
    "anabranch.api.job_server": ("JobServer", "ServedJob"),
    "anabranch.api.joining": ("JoinedFederation", "JoinedTask", "join"),
    "anabranch.api.live": ("Server",),
    "anabranch.api.objects": ("configure",),
    "anabranch.api.records": ("Records",),
    "anabranch.api.run": ("Run", "open_run"),
    "anabranch.api.simulating": ("simulate",),
    "anabranch.api.sweeping": ("Sweep", "sweep"),
    "anabranch.api.tuning": ("Tuning", "tune"),
    "anabranch.api.until": ("Until",),
    "anabranch.core.config.tables": ("Config",),
    "anabranch.core.errors": ("AnabranchError",),
    "anabranch.core.model.updates": ("LocalPlan",),
    "anabranch.reports.origin": ("StopRun",),
    "anabranch.simulation.run": ("RunProgress",),
    "anabranch.workloads.app": ("App", "Examples", "Shard"),
    "anabranch.workloads.dataset_app": ("app",),
    # These stand on libraries of others, which not everybody has: so they are not in `__all__`.
    "anabranch.api.lightning_callback": ("LightningCallback",),
    "anabranch.api.transformers_callback": ("TransformersCallback",),
}
# Tables of settings, which are the objects themselves, by shorter names.
_TABLES = {
    "Faults": ("anabranch.core.config.faults", "FaultsTable"),
    "Robust": ("anabranch.core.engine.robust", "RobustTable"),
    "Training": ("anabranch.core.config.tables", "ClientTable"),
}

_MODULES = {"codecs": "anabranch.api.codecs", "strategies": "anabranch.strategies"}


def __getattr__(name: str) -> Any:
    # When it is first asked for: the command line shall hear Ctrl-C before numpy and the rest are there.
    if name in _MODULES:
        return import_module(_MODULES[name])
    home, attribute = _TABLES.get(name) or (next((h for h, its in _HOMES.items() if name in its), ""), name)
    if not home:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = globals()[name] = getattr(import_module(home), attribute)
    except ModuleNotFoundError as error:
        from anabranch.core.config.extras import how_to_install

        if command := how_to_install(error.name):
            error.add_note(f"anabranch.{name} needs it: {command}")
        raise
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
