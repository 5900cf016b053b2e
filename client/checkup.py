"""A dry run of an App, before a federation stands on it: what devices and a server will do with it.

One after the other: the model, the data, a training step, a restart from what a device keeps on its disk, an
export and its way back, an evaluation, sub-models. What went wrong before makes the rest senseless, where it
stands on it.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from anabranch.client.base_model import BaseModel
from anabranch.client.held import keep_model, kept_model
from anabranch.client.shards import shard_of
from anabranch.compress.model import frozen_size_bytes
from anabranch.core.config.goal import AUTO_GOAL
from anabranch.core.config.tables import Config
from anabranch.core.errors import AnabranchError
from anabranch.core.model.arrays import plain_tensors
from anabranch.core.model.chains import AUTO
from anabranch.core.model.growing import stage_set
from anabranch.core.model.metrics import ACCURACY, NO_SHARE
from anabranch.core.model.params import ParamSpec, Tensors, Vector
from anabranch.core.model.submodels import TensorSet, gathered, scatter
from anabranch.core.model.units import layer_text
from anabranch.core.model.updates import LocalPlan
from anabranch.strategies.submodels.alternate import Alternate
from anabranch.support.own_code import on_device, own_name
from anabranch.workloads.app import App, Examples, has_own
from anabranch.workloads.batches import watched
from anabranch.workloads.calls import data_of, model_of, train
from anabranch.workloads.numpy_trainer import NumpyTrainer
from anabranch.workloads.objective import Objective
from anabranch.workloads.resident import place
from anabranch.workloads.splits import doubting
from anabranch.workloads.streams import Streamed
from anabranch.workloads.trainer import Trainer, TrainResult, trainer_for

OK, WARN, FAIL = "ok", "warn", "fail"
SHAPES_DIFFER = "Using a target size"  # of torch's warning, where a loss broadcasts
NAMES_MAX = 4  # that are listed
SHARDS_MAX = 100  # whose values are looked at
ROWS_MAX = 1000  # that are looked for in another part of the data
SEED = 2**62 + 1  # as tasks have them: what takes 32 bits only is seen here


@dataclass(frozen=True)
class Finding:
    """`level` is `ok`, `warn` or `fail`; `about` what was looked at."""

    level: str
    about: str
    text: str


class Checkup:
    """Iterate over its findings. `config` is the run's, as devices hear it; `plan` what they train by."""

    def __init__(self, app: App, config: Mapping[str, Any], plan: LocalPlan, shards: int) -> None:
        self._app, self._config, self._plan, self._shards = app, config, plan, shards
        self._trainer: Trainer
        self._initial: dict[str, npt.NDArray[Any]]
        self._vector: Vector
        self._mine: Examples
        self._held_out: Examples | None = None
        self._flawed: tuple[int, Examples] | None = None  # a shard with values that are not finite
        self._result: TrainResult
        self._measured: dict[str, float] = {}
        self._steps = 0  # that the trainings so far have shown
        self._parts: tuple[TensorSet | None, ...] = (None,)  # that the run's tasks train, each by itself

    def __iter__(self) -> Iterator[Finding]:
        """The findings, as they are made."""
        parts: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
            ("model", self._model),
            ("data", self._data),
            ("training", self._training),
            ("stages", self._stages),
            ("restart", self._restart),
            ("export", self._export),
            ("evaluation", self._evaluation),
            ("fleet", self._fleet),
        ]
        with on_device("this device"):
            for about, part in parts:
                failed = False
                try:
                    for finding in part():
                        failed |= finding.level == FAIL
                        yield finding
                except AnabranchError as error:
                    failed = True
                    yield Finding(FAIL, about, str(error))
                if failed and about in ("model", "data", "training"):
                    return

    # --- the parts ---------------------------------------------------------------------------

    def _model(self) -> Iterator[Finding]:
        self._trainer = trainer_for(self._app)
        self._initial = self._trainer.initial(SEED)
        if isinstance(self._trainer, NumpyTrainer) and self._app.any_model:
            self._trainer.adopt(ParamSpec.of(self._initial))
        spec = self._trainer.spec
        self._vector = spec.flatten(self._initial)
        yield Finding(OK, "model", f"{spec.size} numbers in {len(spec.tensors)} tensors")
        run = Config.from_json(self._config)
        if run.submodel.name == Alternate.name:
            self._parts = Alternate.of(spec, run.submodel, run.run.seed).parts
        if spec.apart:
            yield Finding(OK, "frozen", f"{frozen_size_bytes(spec)} bytes, which a device fetches once")
        again = spec.flatten(self._trainer.initial(SEED))
        if not np.array_equal(again, self._vector):
            yield Finding(WARN, "model", "it begins otherwise each time: draw by torch, or by its `seed`")
        if not np.isfinite(self._vector).all():
            yield Finding(FAIL, "model", "its first weights are not finite")
        model = model_of(self._app, SEED)
        if hasattr(model, "named_buffers"):
            yield from self._tied(model)
            yield from self._buffers(model)

    def _tied(self, model: Any) -> Iterator[Finding]:
        """Tensors of a torch model that have several names."""
        names: dict[object, list[str]] = {}
        for name, tensor in model.state_dict().items():
            if tensor.numel():
                names.setdefault(place(tensor), []).append(name)
        for tied in names.values():
            if len(tied) > 1:
                text = f"{_listed(tied)} are one tensor, which travels once for each name"
                yield Finding(WARN, "model", text)

    def _buffers(self, model: Any) -> Iterator[Finding]:
        """What is no parameter of a torch model, and no optimizer trains."""
        averaged = {t.name for t in self._trainer.spec.tensors if t.aggregated}
        kept = [name for name, _ in model.named_buffers() if name in self._initial]
        if kept:
            statistics = [name for name in kept if name in averaged]
            yield Finding(
                OK,
                "buffers",
                f"{_listed(kept)}: {len(statistics)} travel with the parameters, "
                f"{len(kept) - len(statistics)} are whole numbers or frozen, which no update changes",
            )
        if norms := _frozen_norms(model, averaged):
            yield Finding(
                WARN,
                "frozen",
                f"{_listed(norms)}: in training they normalise by the batch, in an evaluation by the "
                "statistics of the start, which nothing moves: train them, or keep them in evaluation mode",
            )

    def _data(self) -> Iterator[Finding]:
        shard = shard_of(self._config, 0, self._shards)
        doubts: list[str] = []
        with doubting(doubts.append):
            self._mine = data_of(self._app, shard)
        yield Finding(OK, "data", f"shard 0/{self._shards}: {self._described(self._mine)}")
        yield from (Finding(WARN, "data", flaw) for flaw in (*doubts, *self._mine.not_finite()))
        yield from self._other_values()
        yield from self._another_shard()
        if isinstance(self._mine, Streamed) and self._mine.is_loader:
            yield Finding(WARN, "data", "a DataLoader's batches are its own: client.batch_size says nothing")
            if getattr(self._mine.source, "persistent_workers", False):
                yield Finding(WARN, "data", "persistent_workers keep their draws: no task repeats itself")
        for role in ("validation", "test"):
            try:
                found = data_of(self._app, shard_of(self._config, 0, self._shards, role))
            except AnabranchError as error:
                yield Finding(WARN, "data", f"no {role} part, so nothing is measured on it: {error}")
            else:
                self._held_out = found if role == "test" or self._held_out is None else self._held_out
                yield Finding(OK, "data", f"the {role} part: {self._described(found)}")
                if not self._app.any_model and _has_all(found, self._mine):
                    text = "has all that shard 0 trains on, so what is measured on it is no test"
                    yield Finding(WARN, "data", f"the {role} part {text}")

    def _other_values(self) -> Iterator[Finding]:
        """What of other devices' arrays is no number; which of the first one is tried in `_training`."""
        self._flawed = (0, self._mine) if self._mine.not_finite() else None
        if isinstance(self._mine, Streamed):
            return  # what streams is looked at by nobody before it is trained on
        flawed: dict[int, list[str]] = {}
        for number in range(1, min(self._shards, SHARDS_MAX)):
            try:
                other = data_of(self._app, shard_of(self._config, number, self._shards))
            except AnabranchError:
                continue  # see `_another_shard`
            if flaws := other.not_finite():
                flawed[number] = flaws
                self._flawed = self._flawed or (number, other)
        if flawed:
            first = next(iter(flawed))
            text = f"shard {first}/{self._shards}: {', '.join(flawed[first])}"
            more = _listed([str(number) for number in flawed if number != first])
            yield Finding(WARN, "data", text + (f"; so have shards {more}" if more else ""))

    def _another_shard(self) -> Iterator[Finding]:
        if self._shards == 1 or self._app.own_data:
            return
        try:
            other = data_of(self._app, shard_of(self._config, 1, self._shards))
        except AnabranchError:
            return  # it is of another device, which may be the only one to have it
        if len(other) == len(self._mine) and _has_all(other, self._mine):
            text = "are the same examples: let `data` go by shard.index, unless each device brings its own"
            yield Finding(WARN, "data", f"shards 0 and 1 of {self._shards} {text}")

    def _training(self) -> Iterator[Finding]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result = self._result = self._trained_in_turns(self._vector)
        for text in dict.fromkeys(str(w.message) for w in said if SHAPES_DIFFER in str(w.message)):
            yield Finding(WARN, "training", f"{text.strip()} Give outputs and y one shape")
        told = "".join(f", {name} {value:.4g}" for name, value in result.metrics.items())
        if not np.isfinite(result.delta).all() or not math.isfinite(result.metrics.get("loss", 0.0)):
            fix = "mend the data" if self._mine.not_finite() else "lower the rate"
            yield Finding(FAIL, "training", f"not finite after {result.steps} steps{told}: {fix}")
            return
        if not result.delta.any():
            yield Finding(FAIL, "training", "no weight has moved: does `train` change the model in place?")
            return
        yield Finding(OK, "training", f"{result.steps} steps{told}")
        spec = self._trainer.spec
        idle = {name for stage in spec.stages[:-1] for name in stage.head}  # in the last stage
        still = [n for n, at in spec.slices.items() if n not in idle and not result.delta[at].any()]
        if still:
            yield Finding(WARN, "training", f"{_listed(still)} did not move, and travel all the same")
        if not np.array_equal(self._trained_in_turns(self._vector).delta, result.delta):
            yield Finding(
                WARN,
                "training",
                "the same task came to another result: a simulation will not repeat itself. Draw by `seed`",
            )
        yield from self._whole_numbers()
        yield from self._flawed_values()

    def _flawed_values(self) -> Iterator[Finding]:
        """Whether the App's training leaves out what is no number: a batch in which there is some."""
        if self._flawed is None:
            return
        number, examples = self._flawed
        sound = np.ones(len(examples), bool)
        for array in (examples.x, examples.y):
            sound &= np.isfinite(array.reshape(len(array), -1)).all(1)
        size = max(2, self._plan.batch_size)
        half = size // 2 if sound.any() else 0
        rows = np.resize(np.flatnonzero(sound), half), np.resize(np.flatnonzero(~sound), size - half)
        mixed = Examples(*(array[np.concatenate(rows)] for array in (examples.x, examples.y)))
        delta = self._trained(self._vector, self._parts[0], mixed).delta
        if not np.isfinite(delta).all():
            text = f"not finite with those values of shard {number}: mend the data, or leave those rows out"
            yield Finding(FAIL, "training", text)

    def _whole_numbers(self) -> Iterator[Finding]:
        """Arrays that an App of numpy trains in vain."""
        whole = {name: array for name, array in self._initial.items() if array.dtype.kind in "biu"}
        if not whole or self._app.any_model or not isinstance(self._trainer, NumpyTrainer):
            return
        model = {name: array.copy() for name, array in self._initial.items()}
        train(self._app, model, self._mine, self._short(), SEED)
        if changed := [name for name, array in whole.items() if not np.array_equal(model[name], array)]:
            text = "whole numbers stay as they were when the run began: what is learned has a fraction"
            yield Finding(WARN, "training", f"{_listed(changed)}: {text}, such as np.float64")

    def _stages(self) -> Iterator[Finding]:
        """Each stage by itself: whatever is no part of it is not there."""
        spec = self._trainer.spec
        for number, stage in enumerate(spec.stages, 1):
            part = stage_set(spec, number)
            vector = np.full_like(self._vector, np.nan)
            scatter(gathered(self._vector, part), vector, part)
            delta = spec.unflatten(self._trained(vector, part).delta)
            if not all(np.isfinite(delta[name]).all() for name in part.names):
                text = "the module reads what is no part of it: its forward must go by self.stage"
                yield Finding(FAIL, "stages", f"stage {number}: {text}")
                return
            if still := [name for name in stage.head if not delta[name].any()]:
                text = f"{_listed(still)} did not move: forward must end with this stage's head"
                yield Finding(FAIL, "stages", f"stage {number}: {text}")
                return
        if spec.stages:
            yield Finding(OK, "stages", f"{len(spec.stages)}, each trained by itself")

    def _restart(self) -> Iterator[Finding]:
        spec = self._trainer.spec
        base = BaseModel(3, self._vector, spec.frozen(self._initial))
        with tempfile.TemporaryDirectory(prefix="anabranch-check-") as folder:
            keep_model(Path(folder), base, "check", spec)
            found = kept_model(Path(folder), "check", spec)
        if found is None or not np.array_equal(found.vector, base.vector):
            yield Finding(FAIL, "restart", "a device does not get back what it kept")
            return
        delta = self._trained_in_turns(found.vector, found.frozen).delta
        same = np.array_equal(delta, self._result.delta)
        text = "trains on from what it kept" + ("" if same else ", to another result")
        yield Finding(OK if same else WARN, "restart", text)

    def _export(self) -> Iterator[Finding]:
        spec = self._trainer.spec
        trained = spec.unflatten(self._vector + self._result.delta, spec.frozen(self._initial))
        back = load(save(plain_tensors(trained)))
        model = model_of(self._app, SEED)
        if hasattr(model, "load_state_dict"):
            import torch

            model.load_state_dict({name: torch.tensor(back[name]) for name in model.state_dict()})
            again = {name: tensor.detach().cpu().numpy() for name, tensor in model.state_dict().items()}
        else:
            again = dict(back)
        if any(not np.array_equal(again[name], trained[name]) for name in trained):
            yield Finding(FAIL, "export", "other weights came back from safetensors")
        else:
            yield Finding(OK, "export", f"{len(back)} tensors by safetensors, and into a new model")

    def _evaluation(self) -> Iterator[Finding]:
        if self._held_out is None:
            yield Finding(WARN, "evaluation", "there is nothing to measure on")
            return
        trained = self._vector + self._result.delta
        frozen = self._trainer.spec.frozen(self._initial)
        found = self._trainer.evaluate(trained, frozen, self._held_out)
        if not found:
            yield Finding(WARN, "evaluation", "no metric: versions are not measured")
            return
        text = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        finite = all(map(math.isfinite, found.values()))
        yield Finding(OK if finite else FAIL, "evaluation", text)
        if finite and AUTO_GOAL.among(found).metric == AUTO:
            yield Finding(
                WARN,
                "evaluation",
                "no accuracy and no loss: run.metric and run.mode must say what counts",
            )
        if not 0 <= found.get(ACCURACY, 0.0) <= 1:
            yield Finding(WARN, "evaluation", NO_SHARE)

    def _fleet(self) -> Iterator[Finding]:
        """What of the rest works with it."""
        spec = self._trainer.spec
        if spec.groups:
            units = ", ".join(
                f"{group.size} of {layer_text(group.name)}" for group in spec.groups[:NAMES_MAX]
            )
            more = ", and others" if len(spec.groups) > NAMES_MAX else ""
            yield Finding(OK, "sub-models", f"they may leave out units: {units}{more}")
        else:
            yield Finding(WARN, "sub-models", f"none: {self._trainer.whole_because}")
        if self._app.any_model:
            yield Finding(WARN, "elastic push", "a ClientApp shows no local steps: take 'task' or 'overlap'")
            return
        own = has_own(self._app, "train")
        if own and not self._steps:
            yield Finding(
                WARN,
                "elastic push",
                "works only if `train` draws its batches with anabranch.workloads.batches, which it does not",
            )
        own_part = "train" if own else Objective.of(self._app).trains_otherwise
        why = own_part and f"its own {own_part}"
        if isinstance(self._mine, Streamed):
            why = "a Dataset"
            yield Finding(WARN, "attacks", "fleet.attack = 'label_flip' needs labels in an array")
        if why:
            yield Finding(
                WARN, "batched executor", f"devices are trained one by one: {own_name(self._app)} has {why}"
            )

    # --- small things ------------------------------------------------------------------------

    def _described(self, examples: Examples) -> str:
        if self._app.any_model:
            return "what the ClientApp reads by itself"
        if isinstance(examples, Streamed):
            return f"{len(examples)} examples of a {type(examples.source).__name__}"
        x, y = examples.x, examples.y
        return f"{len(examples)} examples, x {x.shape} {x.dtype}, y {y.shape} {y.dtype}"

    def _short(self) -> LocalPlan:
        """Two steps: momentum counts from the second."""
        plan = self._plan
        return LocalPlan(
            steps=2, batch_size=plan.batch_size, learning_rate=plan.learning_rate, momentum=plan.momentum
        )

    def _trained_in_turns(self, vector: Vector, frozen: Tensors | None = None) -> TrainResult:
        """What tasks of the parts of the model come to, each from where the one before has ended."""
        delta = np.zeros_like(vector)
        for part in self._parts:
            result = self._trained(vector + delta, part, frozen=frozen)
            moved = np.zeros_like(vector)
            scatter(gathered(result.delta, part), moved, part)
            delta += moved
        return replace(result, delta=delta)

    def _trained(
        self,
        vector: Vector,
        part: TensorSet | None = None,
        examples: Examples | None = None,
        frozen: Tensors | None = None,
    ) -> TrainResult:
        self._app.kept = b""
        frozen = self._trainer.spec.frozen(self._initial) if frozen is None else frozen
        with watched(self._count_step):
            return self._trainer.train(
                vector, frozen, self._mine if examples is None else examples, self._short(), SEED, None, part
            )

    def _count_step(self) -> None:
        self._steps += 1


def _has_all(there: Examples, mine: Examples) -> bool:
    """Whether every example of one part is in another, as far as arrays in memory show it."""
    if isinstance(there, Streamed) or isinstance(mine, Streamed):
        return False
    looked_for = slice(None, None, -(-len(mine) // ROWS_MAX))
    missing = set(_rows(mine.x[looked_for], mine.y[looked_for]))
    for row in _rows(there.x, there.y):  # of which no copy is kept: they may be larger than the memory
        missing.discard(row)
        if not missing:
            return True
    return False


def _rows(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> Iterator[tuple[bytes, bytes]]:
    return ((a.tobytes(), b.tobytes()) for a, b in zip(x, y, strict=True))


def _frozen_norms(model: Any, averaged: Collection[str]) -> list[str]:
    """Batch norms that go by the batch in training, and whose running statistics are frozen."""
    from torch.nn.modules.batchnorm import _BatchNorm

    model.train()
    return [
        path
        for path, part in model.named_modules()
        if isinstance(part, _BatchNorm) and part.training and part.running_mean is not None
        if f"{path}.running_mean".lstrip(".") not in averaged
    ]


def _listed(names: list[str]) -> str:
    more = len(names) - NAMES_MAX
    return ", ".join(names[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
