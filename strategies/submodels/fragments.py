"""Fragments: the model's blocks are dealt to P parts once, and each device sends one part after the other.

| symbol | name    | meaning                                                                            |
|--------|---------|------------------------------------------------------------------------------------|
| P      | parts   | parts of the model                                                                 |
| b      |         | a block: the tensors whose names are the same up to the last dot, such as a layer  |
| k      | turn    | tasks of the device so far                                                         |
| o      |         | the device's own place to begin, drawn from the run's seed: devices are not in step |

    a task is of part (k + o) mod P
    balanced:    blocks by falling bytes, each to the part with the fewest so far
    strided:     block b to part b mod P
    sequential:  runs of neighbours of about equal bytes

A device whose task is of a part needs the whole model to compute. With `client.push = "elastic"` it trains
all of it and exchanges part after part (Streaming DiLoCo); else it trains what it sends, nothing besides. A
task that came to nothing does not count as a turn.

Fragments are of Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512. There
all devices send the same one at a time, since their collective needs all of them; a server does not.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import numpy as np

from anabranch.core.config.tables import SubmodelTable
from anabranch.core.engine.planner import Applicant
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.submodels import TensorSet, tensor_set
from anabranch.core.rng import seed_of
from anabranch.strategies.submodels.planner import Forgetful, NoMemory

Block = list[int]  # places in the spec's tensors


class Fragments(Forgetful):
    """A `Planner`. Raises `ConfigError` for more parts than the model has blocks."""

    name: ClassVar[str] = "fragments"
    of_tensors: ClassVar[bool] = True

    def __init__(self, spec: ParamSpec, parts: int, pattern: str = "balanced", seed: int = 0) -> None:
        blocks = blocks_of(spec)
        if not 1 <= parts <= len(blocks):
            raise ConfigError(
                f"submodel.parts is {parts}, but the model has {len(blocks)} blocks of tensors: "
                "1 to as many parts can be made of them"
            )
        self.seed = seed
        dealt = PATTERNS[pattern](blocks, [_bytes(spec, block) for block in blocks], parts)
        self.parts = tuple(tensor_set(spec, sorted(i for block in part for i in block)) for part in dealt)

    @classmethod
    def of(cls, spec: ParamSpec, table: SubmodelTable, seed: int) -> Fragments:
        """By the `[submodel]` table."""
        return cls(spec, table.parts, table.pattern, seed)

    def plan(
        self, state: NoMemory, vector: Vector, applicant: Applicant
    ) -> tuple[NoMemory, TensorSet | None]:
        """The part whose turn it is; of one part the whole model."""
        count = len(self.parts)
        offset = seed_of(self.seed, "fragment", applicant.client_id) % count
        return state, self.parts[(applicant.turn + offset) % count] if count > 1 else None


def blocks_of(spec: ParamSpec) -> list[Block]:
    """The blocks of what is trained, in the order of their first tensors."""
    blocks: dict[str, Block] = {}
    for i, tensor in enumerate(spec.tensors):
        if tensor.aggregated:
            blocks.setdefault(tensor.name.rpartition(".")[0] or tensor.name, []).append(i)
    return list(blocks.values())


def _bytes(spec: ParamSpec, block: Block) -> int:
    return sum(spec.tensors[i].size for i in block) * spec.vector_dtype.itemsize


def balanced(blocks: list[Block], sizes: list[int], parts: int) -> list[list[Block]]:
    """The largest first, each to the lightest part."""
    dealt: list[list[Block]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for b in sorted(range(len(blocks)), key=lambda b: -sizes[b]):
        # A block without values goes where there is nothing yet, too.
        p = min(range(parts), key=lambda p: (loads[p], len(dealt[p])))
        dealt[p].append(blocks[b])
        loads[p] += sizes[b]
    return dealt


def strided(blocks: list[Block], sizes: list[int], parts: int) -> list[list[Block]]:  # noqa: ARG001
    """In turn."""
    return [blocks[p::parts] for p in range(parts)]


def sequential(blocks: list[Block], sizes: list[int], parts: int) -> list[list[Block]]:
    """Cut where the bytes so far are nearest to the part's share, with a block for each part at least."""
    so_far = np.cumsum([0, *sizes])
    cuts = [0]
    for p in range(1, parts):
        most = len(blocks) - (parts - p)
        candidates = range(cuts[-1] + 1, most + 1)
        cuts.append(min(candidates, key=lambda c: abs(so_far[c] * parts - so_far[-1] * p)))
    cuts.append(len(blocks))
    return [blocks[a:b] for a, b in pairwise(cuts)]


PATTERNS = {"balanced": balanced, "strided": strided, "sequential": sequential}
