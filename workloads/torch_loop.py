"""Training and evaluation of a torch model: the default of `App`, and what a GPU adds to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from anabranch.core.config.extras import how_to_install
from anabranch.core.errors import AnabranchError, AppError, ConfigError, DataError
from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.app import Examples
from anabranch.workloads.batches import batches
from anabranch.workloads.objective import IGNORED, Objective, forward
from anabranch.workloads.sgd import LocalSgd
from anabranch.workloads.streams import Streamed

if TYPE_CHECKING:
    import torch

DEFAULT = Objective()
EVALUATION_BATCH = 512  # small enough for the activations of a small device


def import_torch() -> ModuleType:
    """The torch module. Raises `AppError` with the install command where it is absent."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise AppError(f"this App needs torch: {how_to_install('torch')}") from error
    return torch


def seed_generators(torch_module: Any, seed: int) -> None:
    """`torch.manual_seed`, which takes down a stack trace for every kind of accelerator, be there none."""
    if torch_module.accelerator.is_available():
        torch_module.manual_seed(seed)
    else:
        torch_module.default_generator.manual_seed(seed)


class TorchRuntime:
    """Where and how a torch model runs: its device, its mixed precision, and the data kept there.

    `device`: `auto` (CUDA, else MPS, else CPU) or a name that torch knows. `precision`: `auto` is
    bfloat16 on CUDA (float16 where the GPU has none) and float32 elsewhere. Weights stay float32:
    mixed precision is autocast, with loss scaling for float16. Raises `ConfigError`.
    """

    def __init__(self, device: str = "cpu", precision: str = "float32") -> None:
        self._torch = import_torch()
        self.device: torch.device = _device(self._torch, device)
        self.precision = _precision(self._torch, self.device, precision)
        self._dtype: torch.dtype = getattr(self._torch, self.precision)
        self._on_cuda = self.device.type == "cuda"
        self._scaler = self._torch.amp.GradScaler(self.device.type, enabled=self.precision == "float16")
        self._held: WeakKeyDictionary[Examples, tuple[torch.Tensor, torch.Tensor]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[TorchRuntime], tuple[str, str]]:
        # An App that has trained carries its runtime: it must travel to worker processes all the same.
        return TorchRuntime, (str(self.device), self.precision)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass: mixed precision, or nothing at all in float32."""
        found: AbstractContextManager[Any] = self._torch.autocast(
            self.device.type, self._dtype, enabled=self.precision != "float32"
        )
        return found

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Inside, computing is in float32, whatever the precision is: trainings can be compared."""
        given = self.precision, self._dtype
        self.precision, self._dtype = "float32", self._torch.float32
        try:
            yield
        finally:
            self.precision, self._dtype = given

    def seeded(self, seed: int) -> AbstractContextManager[Any]:
        """Draws of torch inside are fixed by `seed`; outside, torch's generators go on as before."""
        return _Seeded(self._torch, self.device, seed)

    def batch(
        self, examples: Examples, rows: npt.NDArray[Any], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` and `y` of the given rows, on the device; a floating `x` comes as `dtype`."""
        if isinstance(examples, Streamed):
            return self._moved(examples.rows(rows), dtype)
        x, y = self._tensors(examples)
        index = self._torch.from_numpy(rows).to(x.device)
        xs, ys = x.index_select(0, index), y.index_select(0, index)
        if self._on_cuda and x.device.type == "cpu":
            xs, ys = xs.pin_memory(), ys.pin_memory()
        xs, ys = (t.to(self.device, non_blocking=True) for t in (xs, ys))
        return (xs.to(dtype) if xs.is_floating_point() else xs), ys

    def batches(
        self, examples: Examples, plan: LocalPlan, seed: int, dtype: torch.dtype
    ) -> Iterator[tuple[Any, Any]]:
        """The batch of each local step, as `batch` gives it; nested ones of a Dataset too."""
        if isinstance(examples, Streamed):
            yield from (self._moved(batch, dtype) for batch in examples.planned(plan, seed))
        else:
            yield from (self.batch(examples, rows, dtype) for rows in batches(len(examples), plan, seed))

    def in_order(self, examples: Examples, dtype: torch.dtype) -> Iterator[tuple[Any, Any]]:
        """All examples, in batches for an evaluation."""
        if isinstance(examples, Streamed):
            yield from (self._moved(batch, dtype) for batch in examples.in_order(EVALUATION_BATCH))
            return
        for start in range(0, len(examples), EVALUATION_BATCH):
            rows = np.arange(start, min(start + EVALUATION_BATCH, len(examples)))
            yield self.batch(examples, rows, dtype)

    def _moved(self, batch: tuple[Any, Any], dtype: torch.dtype) -> tuple[Any, Any]:
        """A batch of a Dataset on the device: a floating x as `dtype`, class numbers as torch wants them."""

        def moved(t: Any, floating: torch.dtype | None, whole: torch.dtype | None) -> Any:
            if not isinstance(t, self._torch.Tensor):
                return t
            return t.to(self.device, (floating if t.is_floating_point() else whole) or t.dtype)

        x, y = batch
        tree_map = self._torch.utils._pytree.tree_map
        return (
            tree_map(lambda t: moved(t, dtype, None), x),
            tree_map(lambda t: moved(t, None, self._torch.int64), y),
        )

    def step(
        self,
        loss: torch.Tensor,
        optimizer: torch.optim.Optimizer | LocalSgd,
        adjust: Callable[[], None] | None = None,
    ) -> None:
        """One step of `optimizer` on `loss`; `adjust` may change the gradients first, at true scale.

        In float16 the scale of the loss begins high: where gradients overflow it is halved, and the step
        is made again. Where they do at a scale of 1 the loss itself is at fault: the step is left out, and
        the scale, which is that of the trainings to come too, stays what it was.
        """
        scaler, scaled = self._scaler, self._scaler.is_enabled()
        given = after = scaler.get_scale()
        while True:
            before = after
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward(retain_graph=scaled)
            if adjust is not None:
                scaler.unscale_(optimizer)
                adjust()
            scaler.step(optimizer)
            scaler.update()
            after = scaler.get_scale()
            if after >= before:
                return
            if after < 1.0:
                scaler.update(given)
                return

    def _tensors(self, examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
        """The examples as tensors: on the device when they fit, else in the host's memory."""
        held = self._held.get(examples)
        if held is None:
            y = examples.y.astype(np.int64) if examples.y.dtype.kind in "iub" else examples.y
            held = (self._tensor(examples.x), self._tensor(y))
            if self._fits(examples.x.nbytes + y.nbytes):
                held = (held[0].to(self.device), held[1].to(self.device))
            self._held[examples] = held
        return held

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        # torch warns of memory that it may not write, and refuses other byte orders.
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        found: torch.Tensor = self._torch.from_numpy(np.require(native, requirements=["C", "W"]))
        return found

    def _fits(self, size_bytes: int) -> bool:
        if not self._on_cuda:
            return True
        free_bytes, _ = self._torch.cuda.mem_get_info(self.device)
        return bool(size_bytes < free_bytes / 2)


class _Seeded:
    """Seeds all of torch's generators; restores those of the CPU and of the CUDA devices at the end.

    Of the latter also where training is on a CPU: they are seeded, and whoever uses them goes on.
    """

    def __init__(self, torch_module: ModuleType, device: torch.device, seed: int) -> None:
        self._torch, self._seed = torch_module, seed
        cuda = torch_module.cuda
        used = device.type == "cuda" or cuda.is_initialized()  # else asking would take memory there
        self._fork = torch_module.random.fork_rng(devices=range(cuda.device_count()) if used else [])

    def __enter__(self) -> None:
        self._fork.__enter__()
        seed_generators(self._torch, self._seed)

    def __exit__(self, *error: object) -> None:
        self._fork.__exit__(*error)


def sgd(
    model: torch.nn.Module,
    examples: Examples,
    plan: LocalPlan,
    seed: int,
    runtime: TorchRuntime | None = None,
    objective: Objective = DEFAULT,
) -> dict[str, float]:
    """The objective + (mu/2) ||w - w_start||^2, in place: the cross entropy by SGD if nothing else is said.

    Metrics: `loss` (mean), `steps`. On a CPU the result is the same bit for bit whenever the inputs are.
    """
    runtime = runtime or _runtime_of(model)
    params = trained_parameters(model)
    optimizer = objective.make_optimizer(params, plan)
    pull = proximal_pull(params, plan.proximal_mu) if plan.proximal_mu else None
    total, steps = import_torch().zeros((), device=runtime.device), 0  # read at the end: a GPU would wait
    model.train()
    with runtime.seeded(seed):
        for x, y in runtime.batches(examples, plan, seed, examples_dtype(model)):
            with _shapes_noted(x, y):
                with runtime.autocast():
                    loss = objective.batch_loss(forward(model, x), y)
                runtime.step(loss, optimizer, pull)
            total += loss.detach()
            steps += 1
            del loss  # with its graph, which a step in float16 keeps: the next has one of its own
    optimizer.zero_grad(set_to_none=True)
    return {"loss": float(total) / max(1, steps), "steps": float(steps)}


def evaluate(
    model: torch.nn.Module,
    examples: Examples,
    runtime: TorchRuntime | None = None,
    objective: Objective = DEFAULT,
) -> dict[str, float]:
    """The means of what `Objective.measured` says, in the precision of the weights: all devices agree."""
    runtime = runtime or _runtime_of(model)
    dtype = examples_dtype(model)
    sums: dict[str, float] = {}
    count = 0
    was_training = model.training
    model.eval()
    with import_torch().no_grad():  # a part that is TorchScript may not see tensors of inference
        for x, y in runtime.in_order(examples, dtype):
            with _shapes_noted(x, y):
                found, rows = objective.measured(forward(model, x), y)
            if rows:
                sums = {name: sums.get(name, 0.0) + value for name, value in found.items()}
            count += rows
    model.train(was_training)
    if not count:
        raise DataError(f"no example has a label that counts: all of y are {IGNORED}")
    return {name: total / count for name, total in sums.items()}


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Those that require a gradient. Raises `AppError` where there are none."""
    found = [p for p in model.parameters() if p.requires_grad]
    if not found:
        raise AppError(
            "no parameter of the model requires a gradient, so SGD has nothing to train: write train and "
            "evaluate for what learns otherwise"
        )
    return found


def examples_dtype(model: torch.nn.Module) -> torch.dtype:
    """What a floating x is given as, in training and evaluation alike.

    The kind of the first trained parameter: what comes before may be frozen, a table of indices or of half
    precision. Without any, of the first tensor of floats.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    floats = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    kinds = [t.dtype for t in (*trained, *floats)]
    return kinds[0] if kinds else import_torch().get_default_dtype()


@contextmanager
def _shapes_noted(x: Any, y: Any) -> Iterator[None]:
    """What a model or a loss raises of a batch tells of the batch."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, AnabranchError):
            error.add_note(f"x is {_form(x)}, y is {_form(y)}")
        raise


def _form(batch: Any) -> str:
    if not hasattr(batch, "dtype"):
        return f"a {type(batch).__name__}"
    return f"{tuple(batch.shape)} {batch.dtype}".replace("torch.", "")


def proximal_pull(params: list[torch.nn.Parameter], mu: float) -> Callable[[], None]:
    """Adds the gradient of (mu/2) ||w - w_start||^2, mu (w - w_start): FedProx, Li et al. 2020, eq. 2."""
    start = [p.detach().clone() for p in params]

    def add() -> None:
        for param, anchor in zip(params, start, strict=True):
            if param.grad is not None:
                param.grad = param.grad.to_dense()  # of an embedding that is sparse: all rows are pulled
                param.grad.add_(param.detach() - anchor, alpha=mu)

    return add


def _runtime_of(model: torch.nn.Module) -> TorchRuntime:
    held = next(iter((*model.parameters(), *model.buffers())), None)
    return TorchRuntime("cpu" if held is None else str(held.device))


def _device(torch_module: ModuleType, name: str) -> torch.device:
    has_cuda, has_mps = torch_module.cuda.is_available(), torch_module.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "mps" if has_mps else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"client.device must be auto, cpu, cuda or mps, not {name!r}")
    if (kind == "cuda" and not has_cuda) or (kind == "mps" and not has_mps):
        raise ConfigError(f"client.device is {name!r}, which torch cannot use here: write auto or cpu")
    found: torch.device = torch_module.device(name)
    return found


def _precision(torch_module: ModuleType, device: torch.device, name: str) -> str:
    if name not in ("auto", "float32", "bfloat16", "float16"):
        raise ConfigError(f"client.precision must be auto, float32, bfloat16 or float16, not {name!r}")
    if name == "auto":
        if device.type != "cuda":
            return "float32"
        return "bfloat16" if torch_module.cuda.is_bf16_supported() else "float16"
    if name == "float16" and device.type != "cuda":
        raise ConfigError(f"client.precision float16 needs a CUDA GPU; on {device.type} use auto")
    return name
