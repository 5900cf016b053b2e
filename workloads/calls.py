"""The calls of an App's methods, each inside the boundary round a user's code."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from anabranch.core.errors import AppError, DataError
from anabranch.core.model.metrics import MEASURED_MAX
from anabranch.core.model.updates import LocalPlan
from anabranch.support.own_code import head, own_code, told
from anabranch.workloads.app import App, Array, Examples, Model, Shard, examples_of
from anabranch.workloads.batches import every_generator
from anabranch.workloads.metrics import metrics_of
from anabranch.workloads.zeroth import Zeroth


def model_of(app: App, seed: int) -> Model:
    """`app.model()`, with the seed where it takes one; a module that it keeps is copied."""
    with own_code(app, "model"):
        takes_seed = "seed" in inspect.signature(app.model).parameters
        found = app.model(seed=seed) if takes_seed else app.model()  # type: ignore[call-arg]
    if not hasattr(found, "named_buffers"):
        return found
    from anabranch.workloads.kept_modules import own_module

    return own_module(found, app)


def data_of(app: App, shard: Shard) -> Examples:
    """`app.data(shard)`, checked. Raises `AppError`, and `DataError` where they are no examples."""
    about = f"shard {shard.index}/{shard.count}" if shard.role == "train" else f"the {shard.role} part"
    with own_code(app, "data", about):
        found = app.data(shard)
    try:
        return examples_of(found)
    except DataError as error:
        raise DataError(told(head(app, "data", about), error, str(error))) from error


def arrived_of(app: App, examples: Examples, now: float) -> Examples | None:
    """Those of a device's examples that `app.arrived(...)` says are there; None where none is.

    Raises `AppError`, and `DataError` where it returns no rows of theirs.
    """
    with own_code(app, "arrived"):
        found = app.arrived(given(examples), now)
    if found is None:
        return examples
    if isinstance(found, Examples):
        return found
    try:
        rows = np.arange(len(examples))[np.asarray(found, None if np.size(found) else np.int64).ravel()]
        return Examples(examples.x[rows], examples.y[rows]) if rows.size else None
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise DataError(
            f"{app.name}.arrived returned a {type(found).__name__} that is no rows of its {len(examples)} "
            f"examples ({error}): return None, their numbers, a bool for each, or Examples(x, y)"
        ) from error


def train(app: App, model: Model, examples: Examples, plan: LocalPlan, seed: int) -> Any:
    """`app.train(...)`, or `train_zeroth`, as the run says: its metrics, unchecked."""
    name = "train" if app.zeroth is None else "train_zeroth"
    with own_code(app, name), drawing(examples, seed):
        found = getattr(app, name)(model, given(examples), plan, seed)
        kept: Any = app.kept
        if not isinstance(kept, bytes):
            said = f"kept is a {type(kept).__name__}: keep bytes, such as json.dumps(...).encode()"
            raise broken(app, name, said)
        return found


def broken(app: App, method: str, said: str) -> AppError:
    """The error of a method that has come to its end, and has done what it may not."""
    return AppError(told(head(app, method, ""), AppError(said), said))


def evaluate(app: App, model: Model, examples: Examples) -> dict[str, float]:
    """`app.evaluate(...)` as numbers. Raises `AppError` where it returns something else, or nothing."""
    with own_code(app, "evaluate"), drawing(examples, 0):
        found: Any = app.evaluate(model, given(examples))
    metrics = metrics_of(found, f"{app.name}.evaluate", MEASURED_MAX)
    if not metrics and app.measures:
        raise AppError(f"{app.name}.evaluate returned no metric: return some, such as accuracy and loss")
    return metrics


def given(examples: Examples) -> Any:
    """What an App's methods get: a Dataset or a DataLoader as `data` has returned it."""
    return getattr(examples, "source", examples)


def drawing(examples: Examples, seed: int) -> AbstractContextManager[None]:
    """Inside, what a Dataset draws from global generators is fixed by the seed; torch's are the trainer's."""
    return every_generator(seed) if hasattr(examples, "source") else nullcontext()


def merged(app: App, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """`app.merged(...)` of a run's tensors."""
    with own_code(app, "merged"):
        return {name: np.asarray(array) for name, array in app.merged(tensors).items()}


def settings_of(app: App, seed: int) -> Mapping[str, Mapping[str, Any]]:
    """`app.settings(seed)`."""
    with own_code(app, "settings"):
        found = app.settings(seed)
    if not found:
        return {}
    if not (isinstance(found, Mapping) and all(isinstance(keys, Mapping) for keys in found.values())):
        fix = "return a dict of tables, such as {'client': {'epochs': 2}}"
        raise broken(app, "settings", f"returned a {type(found).__name__}: {fix}")
    return found


def join_run(app: App, config: Mapping[str, Any]) -> None:
    """`app.join(config)`; and the App trains by gradients or without them, as the run says."""
    app.zeroth = Zeroth.of(config)
    with own_code(app, "join"):
        app.join(config)
