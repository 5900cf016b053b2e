"""How many times less a training costs in a stack of many than by itself, on a processor or a GPU.

    python -m benchmarks.stacks [--device cuda] [--compiled] [--stacks 4,16,64] [--rounds 3]

Trainings of 8 steps of 32 examples with momentum, one after the other as `serial` has them and stacked as
`batched` has them, in turns; every model is forced into stacks, even where the executor would not. Times
are of one thread on a processor; on a GPU of the clock, with the copies to it and back. With --compiled the
stacks are those of `compiled`; its programs are made in the round that is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from anabranch.core.model.updates import LocalPlan
from anabranch.core.rng import stream
from anabranch.workloads import App, Examples, Shard, trainer_for
from anabranch.workloads.batched import BatchedTraining
from anabranch.workloads.fashion_mnist import FashionMnist
from anabranch.workloads.torch_trainer import TorchTrainer
from anabranch.workloads.trainer import Training

PLAN = LocalPlan(steps=8, batch_size=32, learning_rate=0.05, momentum=0.9)
EXAMPLES, CLASSES = 200, 10
SERIAL = 16  # trainings that are timed one after the other


class Attention(nn.Module):
    """One layer of attention over 8 rows of 8 numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(8, width)
        self.layer = nn.MultiheadAttention(width, 4, batch_first=True)
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores, (count, classes)."""
        rows = self.inner(x)
        scores: torch.Tensor = self.out(self.layer(rows, rows, rows, need_weights=False)[0].mean(1))
        return scores


def dense(*widths: int) -> Callable[[], nn.Module]:
    """A chain of linear layers."""

    def made() -> nn.Module:
        pairs = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
        return nn.Sequential(*[layer for pair in pairs for layer in pair][:-1])

    return made


def one_convolution() -> nn.Module:
    """8 channels on 28 x 28."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 14 * 14, CLASSES),
    )


IMAGE = (1, 28, 28)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "64-64-10": (dense(64, 64, 10), (64,)),
    "64-1300-10": (dense(64, 1300, 10), (64,)),
    "784-400-10": (dense(784, 400, 10), (784,)),
    "64-13000-10": (dense(64, 13000, 10), (64,)),
    "one layer of attention, 32 wide": (lambda: Attention(32), (8, 8)),
    "one layer of attention, 128 wide": (lambda: Attention(128), (8, 8)),
    "one convolution, 8 channels": (one_convolution, IMAGE),
    "CNN of `fashion-mnist`": (lambda: FashionMnist().model(), IMAGE),
}


class Drawn(App):
    """A model, and examples of its shape that are drawn at random."""

    def __init__(self, made: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
        super().__init__()
        self._made, self._shape = made, shape

    def model(self) -> Any:
        """As it was given."""
        return self._made()

    def data(self, shard: Shard) -> Examples:
        """As many for every device."""
        draws = stream(shard.index, "stacks")
        x = draws.standard_normal((EXAMPLES, *self._shape), np.float32)
        return Examples(x, draws.integers(0, CLASSES, EXAMPLES))


@dataclass(frozen=True)
class Measured:
    """A model; how long one training takes by itself, and in stacks of so many."""

    name: str
    parameters: int
    serial_s: float
    stacked_s: dict[int, float]

    def __str__(self) -> str:
        gains = " | ".join(f"{self.serial_s / each:.1f}x" for each in self.stacked_s.values())
        return f"| {self.name} | {self.parameters:,} | {1000 * self.serial_s:.1f} | {gains} |"


def measured(
    name: str, device: str, precision: str, compiled: bool, stacks: list[int], rounds: int
) -> Measured:
    """Both ways in turns, after a round that is not counted."""
    app = Drawn(*MODELS[name])
    trainer = cast("TorchTrainer", trainer_for(app, device, precision))
    now = time.process_time if trainer.runtime.device.type == "cpu" else time.perf_counter
    vector = trainer.spec.flatten(trainer.initial(0))
    count = max(*stacks, SERIAL)
    trainings = [Training(vector, app.data(Shard("train", i, count)), PLAN, i) for i in range(count)]
    batched = BatchedTraining(trainer, compiled)

    def serial() -> None:
        for t in trainings[:SERIAL]:
            trainer.train(t.vector, {}, t.examples, t.plan, t.seed)

    def stacked(size: int) -> None:
        batched.train(trainings[:size], {})

    def taken_s(work: Callable[..., None], *size: int) -> float:
        begun = now()
        work(*size)
        return now() - begun

    alone: list[float] = []
    together: dict[int, list[float]] = {size: [] for size in stacks}
    for _ in range(rounds + 1):
        alone.append(taken_s(serial) / SERIAL)
        for size, found in together.items():
            found.append(taken_s(stacked, size) / size)
    medians = {size: statistics.median(found[1:]) for size, found in together.items()}
    return Measured(name, trainer.spec.size, statistics.median(alone[1:]), medians)


def rows(arguments: argparse.Namespace) -> Iterator[str]:
    """The table, row after row as they are measured."""
    stacks = [int(each) for each in arguments.stacks.split(",")]
    yield "| model | parameters | serial, ms a task | " + " | ".join(f"{n} at a time" for n in stacks) + " |"
    yield "|---" * (3 + len(stacks)) + "|"
    for name in MODELS:
        given = arguments.device, arguments.precision, arguments.compiled
        yield str(measured(name, *given, stacks, arguments.rounds))


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--precision", default="float32", help="auto: mixed precision on a GPU")
    parser.add_argument("--compiled", action="store_true", help="stacks by programs that torch compiles")
    parser.add_argument("--stacks", default="4,16,64,256", help="sizes of stacks")
    parser.add_argument("--rounds", type=int, default=3, help="that are counted")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    place = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "one thread"
    print(f"{place}, {arguments.precision}, torch {torch.__version__}", flush=True)
    for row in rows(arguments):
        print(row, flush=True)


if __name__ == "__main__":
    main()
