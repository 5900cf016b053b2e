"""What does the real training of a simulation, whatever the virtual clock shows.

Work is handed over when its virtual time begins and asked for when that ends. In between an executor
may do it whenever and wherever it likes: the result depends on the work alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from anabranch.compress.feedback import Memory
from anabranch.core.model.params import Vector
from anabranch.core.model.updates import Task
from anabranch.core.unwritten import dataclass
from anabranch.host.log import Data

Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True, eq=False)
class Job:
    """Local training of one task on one device, from `vector` (size,), which nobody changes.

    `memory` is what the device's uplink remembers of its earlier updates, `kept` what its App does, `own` the
    bytes of its own buffers. `due_s` is the virtual time at which the result will be asked for; what has
    arrived by `begun_s` is trained on. `known` gives the result where a checkpoint has it, for executors
    whose results depend on what is trained beside them.
    """

    device: int
    vector: Vector
    task: Task
    memory: Memory | None
    due_s: float
    kept: bytes = b""
    own: bytes = b""
    begun_s: float = 0.0
    known: Pending[LocalResult] | None = None


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A measurement of `vector` (size,), a `version`'s, on held-out data, asked for soon after `due_s`."""

    vector: Vector
    due_s: float
    version: int = 0


@dataclass(frozen=True, eq=False)
class LocalResult:
    """What a training has come to: the encoded delta, its codec, steps taken, metrics.

    `memory` is pending until the server has taken the update; `kept` is what the App keeps from now on, `own`
    what the device does of its buffers.
    `examples`: how many it was trained on, where only the App knows (0: as many as the device has).
    """

    payload: Data
    codec: str
    steps: int
    metrics: Mapping[str, float]
    memory: Memory | None = None
    kept: bytes = b""
    examples: int = 0
    own: bytes = b""

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process, which a memoryview cannot."""
        return {**self.__dict__, "payload": bytes(self.payload)}


def without_model(work: Job | Evaluation) -> Job | Evaluation:
    """The same, with an empty vector: whoever sends it elsewhere sends models in another way."""
    return replace(work, vector=np.empty(0, work.vector.dtype))


class Pending(Protocol[Result_co]):
    """Work in hand."""

    def result(self) -> Result_co:
        """The result, waited for if need be. Raises what the work raised."""
        ...

    def cancel(self) -> object:
        """The result will not be asked for."""
        ...


class Executor(Protocol):
    """Does jobs and evaluations; `close` it in the end.

    A class of one has `of(source, problem, workers)` as well, which makes it for a run: `problem` is what
    `source.open()` gives, here and in any other process; `workers` is `--workers`, 0 where nobody said.
    `exact`: its results are those of training in this process, to the bit. A record names one that is not.
    """

    def train(self, job: Job) -> Pending[LocalResult]:
        """Take a training job in hand."""
        ...

    def evaluate(self, evaluation: Evaluation) -> Pending[Mapping[str, float]]:
        """Take an evaluation in hand."""
        ...

    def close(self) -> None:
        """Release what it holds; work that nobody waits for is dropped."""
        ...
