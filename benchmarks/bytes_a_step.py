"""What travels of a task without gradients, by step? Just One Byte's claim, at K numbers a task.

    python -m benchmarks.bytes_a_step

A task of t steps in a subspace of K numbers sends K coded numbers, however many its steps are. Just One Byte
(arXiv 2306.10015) sends a byte a step, from which everybody walks the steps again, and nothing on the way
down. Prints the bytes of a real update of each, by several chains, and what a byte a step would be. It needs
no quiet machine: it counts bytes, of one seed.
"""

from __future__ import annotations

import numpy as np

from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.app import Shard
from anabranch.workloads.digits import Digits
from anabranch.workloads.subspace import Subspace
from anabranch.workloads.trainer import trainer_for
from anabranch.workloads.zeroth import Zeroth

NUMBERS, STEPS = (64, 256, 1024), (15, 60, 240)
CHAINS = ("raw", "int8(256)|zstd", "int4(256)|zstd", "topk(0.1)|int8(256)|gaps|zstd")
HEADER = 9  # bytes of a payload of single bytes: its steps and their scale, as specified


def lengths(numbers: int, steps: int) -> list[int]:
    """The bytes of an update by each chain: `steps` steps by slopes of the digits from their start."""
    app = Subspace(Digits(), numbers)
    trainer = trainer_for(app)
    app.zeroth = Zeroth()
    plan = LocalPlan(steps=steps, batch_size=32, learning_rate=0.05)
    start, frozen = trainer.initial(0), trainer.frozen
    vector = trainer.spec.flatten(start)
    delta = trainer.train(vector, frozen, app.data(Shard("train", 0, 10)), plan, seed=1).delta
    assert np.any(delta), "nothing was learned"
    layout = Layout.of(trainer.spec)
    return [len(make_codec(chain).encode(delta, layout, 1)) for chain in CHAINS]


def main() -> None:
    """Print the table."""
    print("K, steps | " + " | ".join(CHAINS) + " | a byte a step | int8, a step")
    for numbers in NUMBERS:
        for steps in STEPS:
            found = lengths(numbers, steps)
            told = " | ".join(map(str, found))
            print(f"{numbers}, {steps} | {told} | {HEADER + steps} | {found[1] / steps:.1f}")


if __name__ == "__main__":
    main()
