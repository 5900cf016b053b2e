"""Codec chains on one core, against a copy in memory: speed, bytes a parameter, error.

    python -m benchmarks.codecs

Two deltas: of the Fashion-MNIST CNN after sixty local steps, and a synthetic one of the shape of ResNet-18
(He et al. 2016), with log-normal scales of layers and channels and Laplace entries. Times are of one
thread's processor, the least of some repeats; the copy is numpy's, into memory that is there already.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from anabranch.compress.layout import MAIN, Layout
from anabranch.compress.registry import make_codec
from anabranch.core.model.params import ParamSpec, Vector, dense
from anabranch.core.model.updates import LocalPlan

CHAINS = (
    "raw",
    "bf16",
    "bf16|zstd",
    "int8(256)",
    "int8(256,sr)",
    "int8(256)|zstd",
    "int4(256)",
    "int4(256)|zstd",
    "e3m0(256)",
    "e3m0(256)|zstd",
    "topk(0.25)|int8(256)|bitmap|zstd(3)",
    "topk(0.25)|int4(256)|gaps|zstd",
    "topk(0.1)|int8(256)|gaps|zstd",
    "topk(0.1)|int4(256)|gaps|zstd",
    "deadzone(0.1)|gaps|huffman",
    "topk(0.05)|int8(256)|gaps|zstd",
    "deadzone(0.05)|gaps|huffman",
    "topk(0.01)|int8(256)|gaps|zstd",
    "topk(0.01)|int4(256)|gaps|zstd",
    "threshold(0.01)|int8(256)|gaps|zstd",
    "deadzone(0.01)|gaps|zstd",
    "topk(0.001)|int8(256)|gaps|zstd",
    "mask(0.1)|int4(256)",
)
STEPS, EXAMPLES = 60, 600
SECONDS_MIN, REPEATS_MIN = 0.4, 5


@dataclass(frozen=True)
class Measured:
    """One chain on one delta. Rates in GB of float32 input a second; `nmse` is the squared error's share."""

    chain: str
    bytes_per_parameter: float
    small_group: float
    encode: float
    nmse: float


@dataclass(frozen=True)
class Table:
    """All chains on one delta, and the copy in the same run, in GB/s."""

    parameters: int
    memcpy: float
    rows: list[Measured]


def resnet18_shapes() -> dict[str, tuple[int, ...]]:
    """Weights and biases of ResNet-18 for ImageNet: 11.69 million numbers in 62 tensors."""
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7)}

    def norm(name: str, channels: int) -> None:
        shapes.update({f"{name}.weight": (channels,), f"{name}.bias": (channels,)})

    norm("bn1", 64)
    before = 64
    for layer, channels in enumerate((64, 128, 256, 512), 1):
        for block in range(2):
            name = f"layer{layer}.{block}"
            shapes[f"{name}.conv1.weight"] = (channels, before, 3, 3)
            norm(f"{name}.bn1", channels)
            shapes[f"{name}.conv2.weight"] = (channels, channels, 3, 3)
            norm(f"{name}.bn2", channels)
            if before != channels:
                shapes[f"{name}.downsample.0.weight"] = (channels, before, 1, 1)
                norm(f"{name}.downsample.1", channels)
            before = channels
    shapes.update({"fc.weight": (1000, 512), "fc.bias": (1000,)})
    return shapes


def layered() -> tuple[ParamSpec, Vector]:
    """A synthetic delta: Laplace entries, scales of layers (sigma 1) and channels (sigma 0.7) log-normal."""
    draw = np.random.default_rng(0)
    tensors = {}
    for name, shape in resnet18_shapes().items():
        channels = np.exp(draw.normal(0, 0.7, (shape[0], *(1 for _ in shape[1:]))))
        values = draw.laplace(size=shape) * channels * np.exp(draw.normal(0, 1.0))
        tensors[name] = (1e-3 * values).astype(np.float32)
    spec = ParamSpec.of(tensors)
    return spec, spec.flatten(tensors)


def trained() -> tuple[ParamSpec, Vector]:
    """The delta of a device of two classes, after local training of the first model."""
    import torch

    from anabranch.workloads.app import Examples
    from anabranch.workloads.fashion_mnist import DEFAULT_PATH, FashionMnist, read_pair
    from anabranch.workloads.torch_trainer import TorchTrainer

    torch.set_num_threads(1)
    raw = read_pair(DEFAULT_PATH, "train")
    chosen = np.flatnonzero(raw.y < 2)[:EXAMPLES]
    x = (raw.x[chosen, np.newaxis].astype(np.float32) / 255 - 0.2860) / 0.3530
    trainer = TorchTrainer(FashionMnist())
    initial = trainer.initial(0)
    vector = trainer.spec.flatten(initial)
    plan = LocalPlan(steps=STEPS)
    frozen = trainer.spec.frozen(initial)
    return trainer.spec, trainer.train(vector, frozen, Examples(x, raw.y[chosen]), plan, 0).delta


def least_s(work: Callable[[], object]) -> float:
    """Seconds of this thread's processor, the least of some repeats."""
    seconds: list[float] = []
    started = time.thread_time()
    while len(seconds) < REPEATS_MIN or time.thread_time() - started < SECONDS_MIN:
        before = time.thread_time()
        work()
        seconds.append(time.thread_time() - before)
    return min(seconds)


def measure(spec: ParamSpec, x: Vector) -> Table:
    """Every chain on one delta."""
    layout, gigabytes, target = Layout.of(spec), 4 * x.size / 1e9, np.empty_like(x)
    copied = [least_s(lambda: np.copyto(target, x))]
    small = 2 * sum(group.size for group in layout.groups if group.name != MAIN)
    power = float(np.sum(x.astype(np.float64) ** 2))
    rows = []
    for text in CHAINS:
        codec, notes = make_codec(text), dict[str, float]()
        data = codec.encode(x, layout, 1, notes)
        error = float(np.sum((dense(codec.decode(data, layout)) - x).astype(np.float64) ** 2))
        encode = least_s(partial(codec.encode, x, layout, 1, notes))
        copied.append(least_s(lambda: np.copyto(target, x)))
        own = 0.0 if text == "raw" else small / x.size
        rows.append(Measured(text, len(data) / x.size, own, gigabytes / encode, error / power))
    return Table(x.size, gigabytes / float(np.median(copied)), rows)


def table(measured: Table) -> str:
    """The figures as a Markdown table."""
    head = ("chain", "bytes a parameter", "of them biases, norms", "NMSE")
    lines = [
        "| " + " | ".join([*head, "encode, GB/s", "/ copy"]) + " |",
        "|---" * (len(head) + 2) + "|",
    ]
    lines += [
        f"| `{m.chain.replace('|', chr(92) + '|')}` | {m.bytes_per_parameter:.4f} | {m.small_group:.4f} |"
        f" {m.nmse:.2g} | {m.encode:.2f} | **{m.encode / measured.memcpy:.2f}** |"
        for m in measured.rows
    ]
    return "\n".join(lines)


def main_memory_copy() -> float:
    """GB/s of copying 128 MiB, of which no cache has a part."""
    source = np.ones(1 << 25, np.float32)
    target = np.empty_like(source)
    return source.nbytes / 1e9 / least_s(lambda: np.copyto(target, source))


def section() -> str:
    """The part of `docs/benchmarks.md` that is about codecs."""
    copy = main_memory_copy()
    text = f"""## Codecs

One core. GB/s of float32 input, and the same as a share of a copy of the same vector (`numpy.copyto`) in the
same run; a small vector is copied within the cache; the copy of 128 MiB: {copy:.1f} GB/s. NMSE is
the squared error over the squared length. All sizes include the framing
and the biases and norms, which are bf16 whatever the chain.
"""
    for name, (spec, x) in {
        f"A delta of the Fashion-MNIST CNN after {STEPS} local steps": trained(),
        "A synthetic delta of the shape of ResNet-18": layered(),
    }.items():
        measured = measure(spec, x)
        title = f"{name}: {measured.parameters:,} parameters; the copy: {measured.memcpy:.1f} GB/s"
        text += f"\n### {title}\n\n{table(measured)}\n"
    return text


def main() -> None:
    """Measure and print."""
    print(section())


if __name__ == "__main__":
    main()
