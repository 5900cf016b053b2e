"""Sub-models that drop channels: what they save of a device's traffic, arithmetic and time.

    python -m benchmarks.submodels [--quick] [--device cuda]

Two residual networks (He et al. 2016): the built-in `fashion-mnist-resnet`, and one of the shape of ResNet-18
for pictures of 32 x 32 x 3, whose stem is a 3 x 3 convolution without a pool. Of every group of units the
share `drop` is left out. Whole and smaller steps take turns; times are medians, one thread on a CPU. Beside
them 1 / (1 - drop), the speed-up that AsyncDrop (Dun et al. 2023) assumes of a device that drops so much.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import UnitMap, unit_map
from anabranch.core.rng import stream
from anabranch.workloads.app import Examples
from anabranch.workloads.fashion_mnist_resnet import FashionMnistResNet
from anabranch.workloads.model_graph import find_units
from anabranch.workloads.residual import BasicBlock
from anabranch.workloads.step_cost import operations
from anabranch.workloads.submodule import smaller
from anabranch.workloads.torch_loop import TorchRuntime

DROPS = (0.125, 0.25, 0.5)
BATCH, CLASSES, WARM_UP = 32, 10, 2


@dataclass(frozen=True)
class Model:
    """A model, the shape of one example, and how many pairs of steps to time."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    pairs: int
    pairs_quick: int


@dataclass(frozen=True)
class Measured:
    """One model at one drop. `operations`: of a step, the whole one's being 1; times in seconds."""

    model: str
    drop: float
    parameters: int
    kept: int
    operations: float
    whole_s: float
    smaller_s: float


def resnet18() -> nn.Module:
    """ResNet-18 with a stem for small pictures: 11.17 million numbers."""
    blocks: list[nn.Module] = []
    before = 64
    for i, width in enumerate((64, 128, 256, 512)):
        blocks += [BasicBlock(before, width, 2 if i else 1), BasicBlock(width, width, 1)]
        before = width
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(before, CLASSES),
    )


MODELS = (
    Model("fashion-mnist-resnet", lambda: FashionMnistResNet().model(), (1, 28, 28), 200, 20),
    Model("ResNet-18, 32 x 32 x 3", resnet18, (3, 32, 32), 20, 2),
)


def chosen(module: nn.Module, drop: float) -> UnitMap:
    """Random units of each group, the share `drop` left out."""
    tensors = {name: t.detach().cpu().numpy() for name, t in module.state_dict().items()}
    spec = ParamSpec.of(tensors, find_units(module))
    draws = stream(0, "submodels")
    kept = [np.sort(draws.permutation(g.size)[: round(g.size * (1 - drop))]).tolist() for g in spec.groups]
    return unit_map(spec, kept)


def stepper(module: nn.Module, examples: Examples, runtime: TorchRuntime) -> Callable[[], float]:
    """A training step of SGD, which returns its seconds."""
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    x, y = runtime.batch(examples, np.arange(BATCH), torch.float32)

    def step() -> float:
        _wait(runtime)
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with runtime.autocast():
            loss = cross_entropy(module(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        _wait(runtime)
        return time.perf_counter() - started

    return step


def _wait(runtime: TorchRuntime) -> None:
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)


def measure(model: Model, drop: float, runtime: TorchRuntime, pairs: int) -> Measured:
    """Whole and smaller steps in turns."""
    torch.manual_seed(0)
    module = model.build()
    part = chosen(module, drop)
    small = smaller(module, part)
    with torch.no_grad():
        for parameter in small.parameters():
            if parameter.dim() > 1:
                nn.init.kaiming_normal_(parameter)  # zeros would be faster on some machines
    module, small = module.to(runtime.device), small.to(runtime.device)
    draws = stream(0, "pictures")
    pictures = draws.standard_normal((BATCH, *model.shape)).astype(np.float32)
    examples = Examples(pictures, draws.integers(0, CLASSES, BATCH))
    ratio = operations(small, examples, runtime) / operations(module, examples, runtime)
    steps = [stepper(m, examples, runtime) for m in (module, small)]
    for step in steps * WARM_UP:
        step()
    times = np.array([[step() for step in steps] for _ in range(pairs)])
    whole_s, smaller_s = np.median(times, axis=0)
    return Measured(model.name, drop, part.spec.size, part.size, ratio, float(whole_s), float(smaller_s))


def table(rows: list[Measured]) -> str:
    """The figures as a Markdown table."""
    head = ("model", "drop", "numbers", "kept", "bytes raw each way", "of the whole", "operations")
    times = ("step, whole, ms", "smaller, ms", "faster by", "1 / (1 - drop)")
    lines = ["| " + " | ".join([*head, *times]) + " |", "|---" * len([*head, *times]) + "|"]
    lines += [
        f"| {m.model} | {m.drop:.1%} | {m.parameters:,} | {m.kept:,} | {4 * m.kept:,} |"
        f" {m.kept / m.parameters:.3f} | **{m.operations:.3f}** | {1e3 * m.whole_s:.2f} |"
        f" {1e3 * m.smaller_s:.2f} | **{m.whole_s / m.smaller_s:.2f}** | {1 / (1 - m.drop):.2f} |"
        for m in rows
    ]
    return "\n".join(lines)


def section(quick: bool = False, device: str = "cpu", precision: str = "float32") -> str:
    """The part of `docs/benchmarks.md` that is about sub-models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runtime = TorchRuntime(device, precision)
    rows = [
        measure(model, drop, runtime, model.pairs_quick if quick else model.pairs)
        for model in MODELS
        for drop in DROPS
    ]
    torch.set_num_threads(threads)
    place = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else "one thread"
    return f"""## Sub-models

Batch {BATCH}, {place}, {runtime.precision}. "Numbers" are float32 weights and running statistics; a device
gets and sends those that are kept. Operations are counted by torch, a step of the whole model being 1.

{table(rows)}
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Whole models against sub-models")
    parser.add_argument("--quick", action="store_true", help="a few steps of each")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--precision", default="float32", help="auto: mixed precision on a GPU")
    given = parser.parse_args()
    print(section(given.quick, given.device, given.precision))


if __name__ == "__main__":
    main()
