"""An App is a device's code: `model`, `data` and `train`, in one class.

    from anabranch.workloads import App, Examples

    class Mine(App):
        def model(self): return torch.nn.Linear(20, 2)
        def data(self, shard): return Examples(x, y)

The live client, the simulator and `anabranch evaluate` run the same App. `train` has a default: SGD on
the cross entropy. The only framework imported here is numpy; torch comes in when a torch model does.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.config.tables import FleetTable
from anabranch.core.errors import AppError, DataError
from anabranch.core.model.stages import ModelStage
from anabranch.core.model.units import UnitGroup
from anabranch.core.model.updates import LocalPlan
from anabranch.support.own_code import own_code, own_frames
from anabranch.workloads.registry import adapter_of, resolve

Array = npt.NDArray[Any]
# A `torch.nn.Module`, or a dict of named numpy arrays. Any, so that an App may name its own type.
Model = Any

ROLES = ("train", "validation", "test")
BLOCK_VALUES = 2**20  # that are looked at in one go


@dataclass(frozen=True)
class Shard:
    """Which part of the data is asked for.

    `role`: `train` is the part of device `index` of `count`; `validation` and `test` are whole.
    `fleet` says how the training part is split, `seed` fixes every draw of the split, and
    `speed_groups[i]` is the speed group of device i (needed by the split `speed-shards`). `own`: the data are
    one device's own, by `App.own_data`, and nothing of them is another's: all but the test part trains.
    Raises `DataError` for an unknown role or an index out of range.
    """

    role: str
    index: int = 0
    count: int = 1
    fleet: FleetTable = field(default_factory=FleetTable)
    seed: int = 0
    speed_groups: tuple[int, ...] = ()
    own: bool = False

    looked_at = False  # whether `fleet` was: an App that does not look splits the data in its own way

    def __getattribute__(self, name: str) -> Any:
        if name == "fleet":
            object.__setattr__(self, "looked_at", True)
        return object.__getattribute__(self, name)

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise DataError(f"shard.role must be one of {', '.join(ROLES)}, not {self.role!r}")
        for name in ("index", "count"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or (name == "count" and value < 1):
                raise DataError(f"shard.{name} must be a whole number, the count at least 1, not {value!r}")
        if not 0 <= self.index < self.count:
            raise DataError(f"shard.index must be from 0 to {self.count - 1}, not {self.index}")


@dataclass(frozen=True, eq=False)
class Examples:
    """`x` (count, ...) as the model takes it, and `y` (count, ...): class numbers for the default loss.

    Arrays; lists and torch tensors become such. Two are equal only if they are the same object, so one can
    key a cache. Raises `DataError` for what is no array of numbers, when the lengths differ, and when there
    is no example.
    """

    x: Array
    y: Array

    def __post_init__(self) -> None:
        for name in ("x", "y"):
            object.__setattr__(self, name, _array(name, getattr(self, name)))
        if len(self.x) != len(self.y):
            raise DataError(
                f"examples: x has {len(self.x)} rows and y has {len(self.y)}; give each its label"
            )
        if len(self.x) == 0:
            raise DataError("examples: there are none; give every device at least one")

    def __len__(self) -> int:
        return len(self.x)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Trainings on examples of one kind can be stacked."""
        return self.x.shape[1:], self.x.dtype.str, self.y.dtype.str, self.y.ndim

    def not_finite(self) -> list[str]:
        """What of the arrays is no number, in words: NaN, infinite. It takes a pass over both."""
        found = ((name, _not_finite(array), array.size) for name, array in (("x", self.x), ("y", self.y)))
        return [
            f"{name} has {count} of {size} values that are not finite" for name, count, size in found if count
        ]


def _not_finite(array: Array) -> int:
    """How many values are not; by blocks, as arrays may be larger than the memory."""
    if array.dtype.kind not in "fc":
        return 0
    rows = max(1, BLOCK_VALUES * len(array) // max(1, array.size))
    blocks = (array[first : first + rows] for first in range(0, len(array), rows))
    return sum(block.size - int(np.count_nonzero(np.isfinite(block))) for block in blocks)


def _array(name: str, given: Any) -> Array:
    """What was given as an array of numbers. Raises `DataError`."""
    if isinstance(given, Mapping):  # as a tokenizer's answer is
        raise DataError(
            f"examples: {name} is a {type(given).__name__}, and one array is wanted: for a model of several "
            "inputs return a torch Dataset of pairs whose x is a dict, of one example's inputs by name"
        )
    if hasattr(given, "detach"):  # a torch tensor, wherever it lies
        given = given.detach().cpu()
    try:
        found = np.asarray(given)
    except (ValueError, TypeError) as error:
        raise DataError(f"examples: {name} is a {type(given).__name__} that is no array: {error}") from error
    if found.dtype.kind not in "iufbc":
        raise DataError(
            f"examples: {name} is a {type(given).__name__} of {_item(found)}: "
            "give numbers, in one array of equal rows"
        )
    if found.ndim == 0:
        raise DataError(f"examples: {name} is one {type(given).__name__}: give an array with a row for each")
    return found


def _item(found: Array) -> str:
    if found.dtype.kind == "O":
        return f"unequal rows or of {type(found.flat[0]).__name__}s" if found.size else "nothing"
    return {"U": "text", "S": "bytes", "M": "dates", "m": "times"}.get(found.dtype.kind, found.dtype.name)


def examples_of(found: Any) -> Examples:
    """What an App's `data` has returned, as examples. Raises `DataError`."""
    if isinstance(found, Examples):
        return found
    if isinstance(found, tuple | list) and len(found) == 2:
        return Examples(*found)
    if sys.modules.get("torch") is not None:
        from anabranch.workloads.streams import Streamed, is_stream

        if is_stream(found):
            return Streamed(found)
    what = f"a {type(found).__name__}"
    if isinstance(found, tuple | list):
        what += f" of {len(found)}"
    raise DataError(
        f"data returned {what}: return Examples(x, y), the pair (x, y), a torch Dataset or DataLoader"
    )


class App:
    """Base of every App: override `model` and `data`, and `train` and `evaluate` where SGD is not it.

    `data_path` is `[run] data_path`. `runtime` is set by the trainer before it calls `train` or
    `evaluate` with a torch model: a `TorchRuntime`, with the device the model is on, the mixed
    precision (`with self.runtime.autocast(): ...`) and `self.runtime.batch(...)`.

    Before `train` and `evaluate` is set: `version`, of the model that they are given; before `train`: `kept`,
    the bytes that the same device's App had there after its last training whose result counts; what is in it
    afterwards is kept, through restarts.
    `options` are this device's own, as its command line gives them. `own_data`: a live device finds data of
    its own where `data` reads, and trains on all of them, whatever the number in its name. An App of
    `any_model` trains whatever model the run is of: only who starts a run asks for its `model`.

    What the default `train` and `evaluate` shall do otherwise, as attributes or methods: `loss(output, y)`, a
    mean, in the place of the cross entropy; `optimizer(params, plan)`, or a class of torch's, in the place of
    SGD; `metrics`, a mapping of functions of (output, y), or a function that gives a mapping.

    `batch_loss(model, x, y)`, the mean loss of a batch, is a method of Apps with a `train` of their own, or a
    model of arrays, that can learn without gradients too. `zeroth` is set where a run is of such training.
    """

    name: str = "app"
    data_path: str = ""
    runtime: Any = None
    options: Mapping[str, Any] = MappingProxyType({})
    any_model: bool = False
    measures: bool = True  # whether `evaluate` always has a metric: what an App stands for may have none
    own_data: bool = False
    version: int = 0
    kept: bytes = b""
    loss: Any = None
    optimizer: Any = None
    metrics: Any = None
    batch_loss: Any = None
    zeroth: Any = None
    split_known: bool = False  # it has looked at `shard.fleet`, or its user was told that it does not

    def __init__(self, data_path: str = "") -> None:
        self.data_path = data_path

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = cls.__dict__.get("name", cls.__name__)

    def model(self) -> Model:
        """A new model: a `torch.nn.Module`, or a dict of named arrays.

        May take a `seed` argument; torch's own generator is seeded before the call in any case.
        """
        raise AppError(f"{self.name}: write model(self), which returns a torch module or a dict of arrays")

    def data(self, shard: Shard) -> Any:
        """The examples of a shard; the same shard gives the same examples.

        `Examples`, a pair (x, y), a torch `Dataset` of pairs, or a `DataLoader` with batches of its own.
        """
        raise AppError(
            f"{self.name} has no {shard.role} data: write data(self, shard), which returns Examples(x, y)"
        )

    def arrived(self, examples: Examples, now: float) -> Any:  # noqa: ARG002 - the contract's
        """Which of a live device's examples are there at `now`, seconds since 1970.

        Asked before a task is, and when its training begins. None: all of them. Else the numbers of their
        rows, a bool for each, or other `Examples`; with no row the device waits, and asks again.
        """
        return None

    def drift(self, examples: Examples, share: Array) -> Examples | None:  # noqa: ARG002 - the contract's
        """How examples change as they arrive in a simulation, by `fleet.arrival_drift = "rotate"`.

        They are in the order of their arrival; `share` (count,), from 0 to below 1, says how far that has
        come. None: they are pictures, and turned by quarters.
        """
        return None

    def settings(self, seed: int) -> Mapping[str, Mapping[str, Any]]:  # noqa: ARG002 - the contract's
        """Tables of settings that a run of this App needs, below what anybody says; `seed` is `model`'s."""
        return {}

    def join(self, config: Mapping[str, Any]) -> None:
        """The run's configuration is known: the tables that a device may read. Before `data`."""

    def units(self, model: Model) -> Iterable[UnitGroup] | None:  # noqa: ARG002 - the contract's
        """The units of `model` that a sub-model may leave out; None: they are found from its graph.

        For a model of numpy arrays, or one that torch.fx cannot trace. `train` is then given a smaller
        model of the same kind.
        """
        return None

    def buffers(self, model: Model) -> Iterable[str] | None:  # noqa: ARG002 - the contract's
        """The names of the float tensors of `model` that are no parameters, such as running statistics.

        None: those that torch calls so; none of a model of numpy arrays. `[model] buffers` says what
        becomes of them.
        """
        return None

    def trained(self, model: Model) -> Iterable[str] | None:  # noqa: ARG002 - the contract's
        """The names of the float tensors of `model` that are trained; the others are frozen.

        None: of a torch module the parameters that require a gradient, and float buffers, unless the
        parameters of the innermost module round one require none; of numpy arrays all. What is frozen is in
        no update, and reaches a device once: docs/frozen.md.
        """
        return None

    def merged(self, tensors: Mapping[str, Array]) -> Mapping[str, Array]:
        """The plain model's tensors, of those of a run: what was put beside its weights is in them.

        The default merges adapters. Raises `AppError` where there is nothing to merge, and
        `ManifestMismatch` for tensors of another model.
        """
        from anabranch.workloads import calls

        model = calls.model_of(self, 0)  # whatever its weights: those of the run take their place
        if not hasattr(model, "load_state_dict"):
            raise AppError(f"{self.name}: a model of numpy arrays has no adapters: there is nothing to merge")
        from anabranch.workloads import adapters

        return adapters.merged(model, tensors)

    def stages(self, model: Model) -> Iterable[ModelStage] | None:  # noqa: ARG002 - the contract's
        """How `model` may grow: the blocks that each stage adds, and the head that it alone has.

        Each by the names of tensors or modules, and every trained tensor in one of them; the last stage's
        head is the model's own. The module has an attribute `stage`, from 1, which is the last one unless it
        is set from outside: its `forward` goes through the blocks so far, and then through that head. None:
        the model does not grow.
        """
        return None

    def train(self, model: Model, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        """Train `model` in place and return metrics. A metric `steps` is the number of local steps.

        A metric `examples` is how many examples there were, where `len(examples)` does not say it. The
        default is SGD on the cross entropy, exactly as `plan` says, shuffled by `seed`.
        """
        from anabranch.workloads import torch_loop
        from anabranch.workloads.objective import Objective

        self._need_torch_model(model)
        return torch_loop.sgd(model, examples_of(examples), plan, seed, self.runtime, Objective.of(self))

    def train_zeroth(self, model: Model, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        """What is called in the place of `train` where `client.gradient = "zeroth"`: no gradients.

        Raises `AppError` where the App has no loss to call: see `batch_loss`.
        """
        from anabranch.workloads import zeroth

        return zeroth.train(self, model, examples_of(examples), plan, seed)

    def evaluate(self, model: Model, examples: Examples) -> dict[str, float]:
        """`accuracy` (0 to 1) and `loss` (mean cross entropy, nats) of `model`, which stays as it is."""
        from anabranch.workloads import torch_loop
        from anabranch.workloads.objective import Objective

        self._need_torch_model(model)
        return torch_loop.evaluate(model, examples_of(examples), self.runtime, Objective.of(self))

    def _need_torch_model(self, model: Model) -> None:
        if isinstance(model, dict):
            raise AppError(f"{self.name}: a model of numpy arrays needs train and evaluate of its own")


# What an object without the base may have of an App's, by the same names.
_METHODS = (
    *("model", "units", "buffers", "trained", "stages", "merged", "train", "train_zeroth", "evaluate"),
    *("arrived", "drift", "join"),
)


def _of_target(name: str) -> Any:
    """An attribute that lies with what was adapted: its methods read it there, and set `kept` there."""

    def found(self: _Adapted) -> Any:
        return getattr(self.holder, name, self.given[name])

    def put(self: _Adapted, value: Any) -> None:
        self.given[name] = value
        # Frozen, of slots, or (pydantic's) of its fields alone: its methods have no way to ask for it.
        with suppress(AttributeError, ValueError):
            setattr(self.holder, name, value)

    return property(found, put)


class _Adapted(App):
    """Any object with the three functions: a module, or an instance that is no `App`."""

    options, runtime, version = _of_target("options"), _of_target("runtime"), _of_target("version")
    kept, zeroth = _of_target("kept"), _of_target("zeroth")

    def __init__(self, target: Any, name: str) -> None:
        self.name = str(getattr(target, "name", name))
        self.adapted = target
        of_module = inspect.ismodule(target)
        # A module's functions have no `self`, and its names, such as an `options`, are its own.
        self.holder, self.given = None if of_module else target, dict[str, Any]()
        # What is there before it is given; unlike App's own, all of it can be sent to other processes.
        first: dict[str, Any] = {"options": {}, "runtime": None, "version": 0, "kept": b"", "zeroth": None}
        for name, value in first.items():
            setattr(self, name, getattr(self.holder, name, value))
        super().__init__(str(getattr(target, "data_path", "")))
        for method in _METHODS:
            own = getattr(target, method, None)
            if of_module and method == "join" and getattr(own, "__module__", "") != target.__name__:
                continue  # such as os.path's, which it has imported
            if callable(own):
                setattr(self, method, own)
        for name in ("loss", "optimizer", "metrics", "batch_loss"):
            setattr(self, name, getattr(target, name, None))
        said = getattr(target, "own_data", False)
        if not of_module and not isinstance(said, bool):
            raise AppError(f"{self.name}: own_data is {said!r}: say True where each device has its own data")
        self.own_data = said is True  # in a module another thing may have that name

    def data(self, shard: Shard) -> Examples:
        """The target's data; a plain pair (x, y) will do."""
        return examples_of(self.adapted.data(shard))


class _ModelAlone(App):
    """A model that scripts train which have joined: nobody else has data for it."""

    def __init__(self, target: Any, spec: str) -> None:
        super().__init__()
        self.name = spec.rpartition(":")[2].rpartition(".")[2]
        self.adapted = target

    def model(self) -> Model:
        """What the function makes, or a copy of the model: with the weights that it has."""
        return self.adapted() if inspect.isfunction(self.adapted) else copy.deepcopy(self.adapted)


def load_app(spec: str, data_path: str = "") -> App:
    """The App that `spec` names: a built-in workload, `module:App`, `path/to/file.py:App`, `flower:FOLDER`.

    Without `:App`, an attribute `App` is taken, or else the module itself. A class is instantiated
    (with `data_path` where it takes one), an instance is used as it is. Raises `AppError`.
    """
    if adapter := adapter_of(spec):
        make, place = adapter
        found: App = make(place, data_path)
        return found
    return app_of(resolve(spec), spec, data_path)


def app_of(target: Any, spec: str, data_path: str = "") -> App:
    """The App that an object, a class or a module is; `spec`: what to call it. Raises `AppError`.

    A model alone, a torch module or a dict of arrays, or a function that makes one, is what a server starts
    from, and scripts train.
    """
    if inspect.isclass(target):
        target = _instantiate(target, spec, data_path)
    if inspect.isfunction(target) or isinstance(target, dict) or hasattr(target, "load_state_dict"):
        return _ModelAlone(target, spec)
    for method in ("model", "data"):
        if not callable(getattr(target, method, None)) or not has_own(target, method):
            hint = _other_names(target, spec)
            raise AppError(f"{spec}: it has no method {method!r}; an App needs model and data{hint}")
    return target if isinstance(target, App) else _Adapted(target, spec)


def has_own(target: Any, method: str) -> bool:
    """Whether a method is an App's own, or that of what the App stands for, and not the one of every App."""
    return getattr(getattr(target, method, None), "__func__", None) is not getattr(App, method)


def _other_names(target: Any, spec: str) -> str:
    """Under which names a module has Apps of its own, as the end of a message; empty where it has none."""
    if not inspect.ismodule(target):
        return ""
    own = [name for name, found in vars(target).items() if name[0] != "_" and _is_app_of(found, target)]
    return f"; did you mean {' or '.join(f'{spec}:{name}' for name in own)}?" if own else ""


def _is_app_of(found: Any, module: Any) -> bool:
    if inspect.isclass(found):
        return issubclass(found, App) and found.__module__ == module.__name__
    return isinstance(found, App)


def _instantiate(cls: type[Any], spec: str, data_path: str) -> Any:
    try:
        takes_path = "data_path" in inspect.signature(cls).parameters
    except ValueError:  # of Python's own, such as int
        raise AppError(f"{spec}: {cls.__name__} is no App; an App needs model and data") from None
    with own_code(cls, "__init__"):
        try:
            return cls(data_path=data_path) if takes_path else cls()
        except TypeError as error:
            if own_frames(error):
                raise
            raise AppError(f"{spec}: {cls.__name__} must be made without arguments: {error}") from error
