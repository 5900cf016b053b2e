"""L1, built-in learning problems and the code that runs one: Apps, trainers, data splits, device speeds.

May import numpy and the core; torch and scikit-learn only inside the functions that need them, or in
modules that only such functions import (`model_graph`, the `unit_*` behind it, `submodule`, `residual`), or
Apps that have a torch model (`adapters`).
"""

from anabranch.core.model.stages import ModelStage
from anabranch.workloads.app import App, Examples, Shard, load_app
from anabranch.workloads.trainer import Trainer, TrainResult, trainer_for

__all__ = ["App", "Examples", "ModelStage", "Shard", "TrainResult", "Trainer", "load_app", "trainer_for"]
