"""Many local trainings in one vectorised pass: the weights of all of them stacked, one step of all at a time.

| symbol | meaning                                                                                  |
|--------|------------------------------------------------------------------------------------------|
| w_i    | weights of training i, row i of tensors (count, ...)                                     |
| B_it   | the examples of its step t, drawn as `App.train` draws them, padded to one length        |
| m_it   | 1 / len(B_it) at an example, 0 at padding                                                |
| g_i    | gradient at w_i of sum m_it loss(w_i; B_it)                                              |

A step of all of them is that of `stacked_sgd.py`. Where the module is a chain of layers known to
`stacked_layers.py`, both passes are written out there. Else the forward pass is one call of the module under
`torch.vmap` with `torch.func.functional_call`; since nothing connects the trainings, one backward pass of the
sum of the losses gives every g_i, as it does of chains under autocast. Longer trainings go first, so that
those that are over leave the stack at its end. Where it is asked for, `compiled_gradients.py` has both passes
compiled by torch in the place of `vmap`. What `linear_descent.py` is for is trained by that, without a stack.

The same steps as `torch_loop.sgd` in another order of sums: equal to float tolerance, not to the bit. A model
that mixes examples or draws at random would be trained otherwise: see `BatchedTraining.objection`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from anabranch.core.model.arrays import Indices
from anabranch.core.model.params import ParamSpec, Tensors, Vector
from anabranch.core.model.submodels import TensorSet, UnitMap
from anabranch.workloads.app import Examples, has_own
from anabranch.workloads.batches import each_step
from anabranch.workloads.compiled_gradients import CompiledGradients, NotCompiledError
from anabranch.workloads.linear_descent import LinearDescent, drawn_together
from anabranch.workloads.objective import IGNORED, Objective
from anabranch.workloads.resident import Resident
from anabranch.workloads.stacked_layers import LayerChain
from anabranch.workloads.stacked_module import stacked_losses, stacked_scores, written_out_attention
from anabranch.workloads.stacked_sgd import StackedSgd
from anabranch.workloads.streams import Streamed
from anabranch.workloads.torch_loop import import_torch
from anabranch.workloads.torch_trainer import TorchTrainer
from anabranch.workloads.trainer import Training, TrainResult

if TYPE_CHECKING:
    import torch

    from anabranch.workloads.stacked_sgd import Stacked

    Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

STEPS_GATHERED = 16  # steps whose examples are gathered at a time
TRIAL_STEPS, TRIAL_BATCH = 3, 16  # at least as many examples, where there are
# Parameters: with more, a core is as fast with one training after the other.
PAYS_BELOW, CHAIN_PAYS_BELOW = 32_000, 200_000
TRIAL_ERROR_MAX = 1e-3  # of the length of the delta
TRIAL_LOSS_ERROR_MAX = 1e-2
# What a trial may say.
ANOTHER_RESULT = "a trial in a stack came to another result"
NOT_COMPARED = "a trial came to weights that are not finite"


class BatchedTraining:
    """Trains stacks of trainings of one kind with the module of a trainer.

    `compiled`: by programs that torch compiles, where the passes are not written out and in float32.
    """

    def __init__(self, trainer: TorchTrainer, compiled: bool = False) -> None:
        self._torch = import_torch()
        self._trainer = trainer
        self._compiles = compiled and trainer.runtime.precision == "float32"
        self._programs: dict[ParamSpec | None, CompiledGradients] = defaultdict(CompiledGradients)
        own = has_own(trainer.app, "train")
        self._own = "train" if own else Objective.of(trainer.app).trains_otherwise

    def objection(self, training: Training, frozen: Tensors) -> str:
        """Why trainings of this kind are better done one by one; empty if nothing speaks against a stack.

        `training`: that of the stack which has the most examples. Known reasons first. Then a trial: two
        trainings of a few steps, stacked and one by one, must come to the same, in float32: the rounding of
        fewer bits would hide other differences. So no model is trained otherwise because nobody had thought
        of its peculiarity.

        What diverges in the trial tells nothing of its kind: it is `NOT_COMPARED`, and asked of another.
        Nothing is remembered: what is said follows from the training alone, in whichever process.
        """
        known = self.objection_to_all(training.submodel, training.only) or self._objection_to(training)
        return known or self._tried(training, frozen)

    def objection_to_all(self, submodel: UnitMap | None, only: TensorSet | None) -> str:
        """Why trainings of this part are done one by one whatever their examples are; empty: those tell."""
        if self._own:
            return (
                f"{self._trainer.app.name} has {'an' if self._own[0] == 'o' else 'a'} {self._own} of its own"
            )
        if self._trainer.app.zeroth is not None:
            return "they train without gradients, which a stack cannot"
        if only is not None:
            return "its tasks are of some tensors, and a stack trains all"
        if self._trainer.runtime.precision == "float16":
            return "float16 needs the scaling of each loss"
        resident = self._trainer.resident(submodel)
        return self._inseparable(resident.module) or self._slower_here(resident, _chain_of(resident))

    def pays(self) -> bool:
        """Whether a stack of the whole model is faster than one training after the other."""
        if self._own or self._trainer.app.zeroth is not None:
            return False
        resident = self._trainer.resident(None)
        return not (self._inseparable(resident.module) or self._slower(resident, _chain_of(resident)))

    def train(self, trainings: Sequence[Training], frozen: Tensors) -> list[TrainResult]:
        """The results, in order, of trainings of one kind that there is no objection to."""
        descended = self._descended(trainings)
        if descended is not None:
            return descended
        order = sorted(range(len(trainings)), key=lambda i: -trainings[i].steps)
        submodel = trainings[0].submodel
        small = None if submodel is None else submodel.small
        programs = self._programs[small] if self._compiles else None
        stack = _Stack(self._trainer, [trainings[i] for i in order], frozen, programs)
        deltas, losses = stack.run()
        found = {}
        for row, i in enumerate(order):
            steps = trainings[i].steps
            found[i] = TrainResult(deltas[row], steps, {"loss": losses[row] / max(1, steps)})
        return [found[i] for i in range(len(trainings))]

    def _descended(self, trainings: Sequence[Training]) -> list[TrainResult] | None:
        """The same by a compiled loop, if that is for them."""
        runtime, resident = self._trainer.runtime, self._trainer.resident(trainings[0].submodel)
        chain = _chain_of(resident, trainings[0].examples)
        if chain is None or (runtime.device.type, runtime.precision) != ("cpu", "float32"):
            return None
        descent = LinearDescent.of(resident, chain)
        found = None if descent is None else descent.train(trainings)
        if found is None:
            return None
        return [
            TrainResult(delta, t.steps, {"loss": loss / max(1, t.steps)})
            for t, (delta, loss) in zip(trainings, found, strict=True)
        ]

    def _objection_to(self, training: Training) -> str:
        """What is known without a trial, by the examples."""
        examples = training.examples
        if isinstance(examples, Streamed):
            return f"{self._trainer.app.name} has its examples in a Dataset"
        if examples.y.ndim != 1 or examples.y.dtype.kind not in "iub":
            return "the labels are not class numbers"
        resident = self._trainer.resident(training.submodel)
        return self._slower_here(resident, _chain_of(resident, examples))

    def _inseparable(self, module: torch.nn.Module) -> str:
        """Why models of this kind cannot be trained side by side, by what it is made of."""
        nn = self._torch.nn
        for name, part in module.named_modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                return f"{name or 'the model'} ({type(part).__name__}) mixes the examples of a batch"
            if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
                return f"{name or 'the model'} ({type(part).__name__}) draws at random"
            if isinstance(part, nn.Embedding | nn.EmbeddingBag):
                if part.padding_idx is not None:
                    return f"{name or 'the model'} has a padding_idx, whose row torch trains in a stack"
                if part.scale_grad_by_freq:
                    return f"{name or 'the model'} mixes the examples of a batch by scale_grad_by_freq"
        tied = len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters()))
        return "layers share their weights" if tied else ""

    def _slower_here(self, resident: Resident, chain: LayerChain | None) -> str:
        """Why a stack takes longer on this device, if that is known of it."""
        return self._slower(resident, chain) if self._trainer.runtime.device.type == "cpu" else ""

    def _slower(self, resident: Resident, chain: LayerChain | None) -> str:
        """Why a stack of models takes longer, by what was measured.

        docs/simulator.md has the figures: on a CPU models without convolutions gain, by all that a step costs
        besides its arithmetic, until their weights fill the caches; `chain`, of which both passes are written
        out, later than others. On a GPU, which a single device's batch leaves idle, all do.
        """
        if self._trainer.runtime.device.type == "cuda":
            return ""
        if any(isinstance(part, self._torch.nn.modules.conv._ConvNd) for part in resident.module.modules()):
            return "a CPU is slower with stacks of convolutions"
        written_out = chain is not None and self._trainer.runtime.precision == "float32"
        size, pays_below = resident.spec.size, CHAIN_PAYS_BELOW if written_out else PAYS_BELOW
        return f"a CPU is slower with stacks of {size} numbers each" if size >= pays_below else ""

    def _tried(self, training: Training, frozen: Tensors) -> str:
        pair = _pair(training)
        runtime = self._trainer.runtime
        try:
            if runtime.precision != "float32":
                self.train(pair, frozen)  # which torch may not stack where it does in float32
            with runtime.exact():
                stacked = self.train(pair, frozen)
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
            said = "" if isinstance(error, NotCompiledError) else "torch cannot stack it: "
            return f"{said}{(str(error) or type(error).__name__).splitlines()[0]}"
        for t, result in zip(pair, stacked, strict=True):
            with runtime.exact():
                alone = self._trainer.train(t.vector, frozen, t.examples, t.plan, t.seed, t.submodel)
            if not np.isfinite(alone.delta).all():
                return NOT_COMPARED
            off = float(np.linalg.norm(result.delta - alone.delta))
            near = off <= TRIAL_ERROR_MAX * float(np.linalg.norm(alone.delta)) + 1e-12
            losses = result.metrics["loss"], alone.metrics["loss"]
            if not near or not np.isclose(*losses, rtol=TRIAL_LOSS_ERROR_MAX, equal_nan=True):
                return ANOTHER_RESULT
        return ""


class _Stack:
    """Trainings of one kind, the longest first."""

    def __init__(
        self,
        trainer: TorchTrainer,
        trainings: Sequence[Training],
        frozen: Tensors,
        programs: CompiledGradients | None,
    ) -> None:
        self._torch, self._runtime = import_torch(), trainer.runtime
        self._trainings = trainings
        self._resident = trainer.resident(trainings[0].submodel)
        self._steps = [t.steps for t in trainings]
        self._draws = drawn_together(trainings)
        self._given = self._stacked()
        self._weights, self._fixed = _unstacked(self._resident, self._given)
        self._chain = _chain_of(self._resident, trainings[0].examples)
        self._written_out = self._chain is not None and self._runtime.precision == "float32"
        self._gradients_of = self._recorded
        if programs is not None and self._chain is None:
            longest = max(training.plan.batch_size for training in trainings)
            self._gradients_of = partial(programs, self._resident.module, longest)
        self._resident.load(trainings[0].vector, frozen)
        self._resident.module.train()
        self._sgd = StackedSgd.of(trainings[0].plan, self._weights)
        self._losses = self._torch.zeros(len(trainings), device=self._runtime.device)

    def _stacked(self) -> torch.Tensor:
        """What they start from, (count, size): one row for all where that is one version."""
        vectors = [t.vector for t in self._trainings]
        one = all(vector is vectors[0] for vector in vectors)
        rows: torch.Tensor = self._torch.from_numpy(np.stack(vectors[:1] if one else vectors))
        return rows.to(self._runtime.device).expand(len(vectors), -1)

    def run(self) -> tuple[list[Vector], list[float]]:
        """Each training's delta, and the sum of the losses of its steps."""
        sgd, live = self._sgd, 0
        for x, classes, m in self._batches():
            if len(x) != live:
                live = len(x)
                sgd = self._sgd.first(live)
            self._losses[:live] += self._step(sgd, x, classes, m)
        return self._deltas(), self._losses.tolist()

    def _step(self, sgd: StackedSgd, x: torch.Tensor, classes: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of each training's batch, (live,), before the step."""
        if self._chain is not None and self._written_out:
            return self._chain.descend(sgd, x, classes, m)
        fixed = {name: tensor[: len(x)] for name, tensor in self._fixed.items()}
        losses, gradients = self._gradients_of(sgd.weights, fixed, x, classes, m)
        with self._torch.no_grad():
            for name, gradient in gradients.items():
                sgd.add(name, gradient)
            sgd.step(gradients)
        return losses

    def _recorded(
        self, weights: Stacked, fixed: Stacked, x: torch.Tensor, classes: torch.Tensor, m: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The losses (live,) and gradients, by going back over what autograd has recorded."""
        loss = self._loss(weights, fixed, x, classes, m)
        found = self._torch.autograd.grad(loss.sum(), list(weights.values()), allow_unused=True)
        return loss.detach(), {n: g for n, g in zip(weights, found, strict=True) if g is not None}

    def _loss(
        self, weights: Stacked, fixed: Stacked, x: torch.Tensor, classes: torch.Tensor, m: torch.Tensor
    ) -> torch.Tensor:
        """The mean cross entropy of each training's batch, (live,), which autograd can go back from."""
        module, chain = self._resident.module, self._chain
        with self._runtime.autocast(), written_out_attention():
            scores = stacked_scores(module, weights, fixed, x) if chain is None else chain(weights, x)
            return stacked_losses(scores, classes, m)

    def _batches(self) -> Iterator[Batch]:
        """The x (live, length, ...), classes and m (live, length) of every step."""
        for first in range(0, self._steps[0], STEPS_GATHERED):
            rows, lengths = self._drawn(first)
            x, classes, m = self._gathered(rows, lengths)
            for step in range(rows.shape[1]):
                each_step()
                live = sum(count > first + step for count in self._steps)
                yield x[:live, step], classes[:live, step], m[:live, step]

    def _drawn(self, first: int) -> tuple[Indices, Indices]:
        """Of the next steps the rows (live, steps, length) and how many of them are no padding."""
        live, end = sum(count > first for count in self._steps), first + STEPS_GATHERED
        lengths = np.zeros((live, min(end, self._steps[0]) - first), np.int64)
        found = [
            (places, step - first, draws.of(step))
            for places, draws in self._draws
            for step in range(first, min(end, draws.steps))
        ]
        for places, step, some in found:
            lengths[places, step] = some.shape[1]
        rows = np.zeros((*lengths.shape, lengths.max()), np.int64)
        for places, step, some in found:
            rows[places, step, : some.shape[1]] = some
            rows[places, step, some.shape[1] :] = some[:, :1]  # padding is of the batch: its first again
        return rows, lengths

    def _gathered(self, rows: Indices, lengths: Indices) -> Batch:
        """The x, classes and m of some steps of each training, (live, steps, length, ...)."""
        real = np.arange(rows.shape[2]) < lengths[:, :, np.newaxis]
        like = self._trainings[0].examples
        x = np.empty((*rows.shape, *like.x.shape[1:]), like.x.dtype.newbyteorder("="))
        y = np.empty(rows.shape, like.y.dtype.newbyteorder("="))
        for i, training in enumerate(self._trainings[: len(rows)]):
            _take(training.examples.x, rows[i], x[i])
            _take(training.examples.y, rows[i], y[i])
        y = y.astype(np.int64)
        counted = real & (y != IGNORED)
        counts = counted.sum(2)
        void = ((counts == 0) & (lengths > 0)).any(1)  # a batch of which no example counts has no mean
        self._losses[: len(rows)][self._torch.from_numpy(void)] = float("nan")
        m = (counted / np.maximum(counts, 1)[:, :, np.newaxis]).astype(self._resident.spec.vector_dtype)
        y[~counted] = 0 if self._written_out else IGNORED  # which torch's cross entropy passes over
        dtype = next(iter(self._weights.values())).dtype
        xs, classes, ms = (self._torch.from_numpy(array) for array in (x, y, m))
        xs = xs.to(dtype) if xs.is_floating_point() else xs
        device = self._runtime.device
        return xs.to(device), classes.to(device), ms.to(dtype).to(device)

    def _deltas(self) -> list[Vector]:
        """Trained - given, (size,) each, in memory of its own: one that is kept keeps no others."""
        count = len(self._trainings)
        found = self._torch.empty(self._given.shape, dtype=self._given.dtype, device=self._given.device)
        for name, at in self._resident.spec.slices.items():
            if name in self._weights:
                trained = self._weights[name].reshape(count, -1)
                start = self._given[:, at].to(trained.dtype).to(found.dtype)  # as it was loaded
                self._torch.sub(trained.to(found.dtype), start, out=found[:, at])
            else:
                found[:, at].zero_()
        return [delta.copy() for delta in found.cpu().numpy()]


def _chain_of(resident: Resident, examples: Examples | None = None) -> LayerChain | None:
    """The chain of layers that a module is, if it is one, and one that takes these examples."""
    chain = LayerChain.of(resident.module, _trained(resident))
    takes = chain is not None and (examples is None or chain.takes(examples.x.shape))
    return chain if takes else None


def _trained(resident: Resident) -> set[str]:
    """The names of what is trained of a module."""
    named = resident.module.named_parameters()
    return {name for name, p in named if p.requires_grad and name in resident.spec.slices}


def _pair(training: Training) -> list[Training]:
    """Two trainings of a few steps, whose batches are all of their examples: the first's are padded.

    A mean over a batch of one is the same with that one again, so they are of two, and of three or more. What
    torch stacks wrongly is right in the first place: in the second are the most examples.
    """
    given, size = training.examples, max(TRIAL_BATCH, training.plan.batch_size)
    rows = np.array([0, 1, 0]) if len(given) == 2 else np.arange(min(size, len(given)))
    plan = replace(training.plan, steps=min(TRIAL_STEPS, training.steps), batch_size=size)
    parts = (rows[: max(1, 2 * len(rows) // 3)], rows)
    return [replace(training, plan=plan, examples=Examples(given.x[of], given.y[of])) for of in parts]


def _take(array: npt.NDArray[Any], rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Put these rows of an array there; of one that is not in C order, `take` would copy all first."""
    if array.flags.c_contiguous:
        array.take(rows, 0, out, "clip")  # other modes go by a buffer
    else:
        out[...] = array[rows]


def _unstacked(
    resident: Resident, given: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of the stacked vectors (count, size), by name: those that are trained, and the others."""
    shapes = dict(resident.module.state_dict())
    trained = _trained(resident)
    weights: dict[str, torch.Tensor] = {}
    fixed: dict[str, torch.Tensor] = {}
    for name, at in resident.spec.slices.items():
        like = shapes[name]
        tensor = given[:, at].reshape(len(given), *like.shape).to(like.dtype)
        tensor = tensor.clone(memory_format=import_torch().contiguous_format)
        (weights if name in trained else fixed)[name] = tensor
    return weights, fixed
