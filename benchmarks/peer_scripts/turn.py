"""What every script here does alike: read the data, warm up, train under two clocks, say what came of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

DIGITS, PICTURES = "digits", "fashion-mnist"
HIDDEN, CLASSES = 64, 10


@dataclass(frozen=True)
class SharedWork:
    """The work of a turn: every device trains in every round. `x` is (devices, examples, ...), as `y`."""

    problem: str
    rounds: int
    epochs: int
    batch_size: int
    learning_rate: float
    x: np.ndarray[Any, Any]
    y: np.ndarray[Any, Any]
    test_x: np.ndarray[Any, Any]
    test_y: np.ndarray[Any, Any]

    @property
    def devices(self) -> int:
        """How many there are."""
        return len(self.x)


def read(path: str) -> SharedWork:
    """A task, of the file that `benchmarks.peers` writes."""
    with np.load(path) as file:
        one = {name: value.item() if value.ndim == 0 else value for name, value in file.items()}
    return SharedWork(**one)


def take_turn(train: Callable[[SharedWork, int], float]) -> None:
    """`train(task, rounds)` trains a new model, and looks once at the test set: its accuracy.

    One round before it counts: what has to be compiled, chosen or imported is not timed. Prints JSON.
    """
    task = read(sys.argv[1])
    train(task, 1)
    wall, cpu = time.perf_counter(), time.process_time()
    accuracy = train(task, task.rounds)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    found = {"tasks": task.rounds * task.devices, "wall_s": wall_s, "cpu_s": cpu_s, "accuracy": accuracy}
    print(json.dumps(found), flush=True)
