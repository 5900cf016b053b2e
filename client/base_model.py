"""A version of the model as a device has it, decoded: what it trains from, whole or a part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.model.holdings import HeldPart, since
from anabranch.core.model.params import Vector
from anabranch.core.model.submodels import Submodel, TensorSet, UnitMap, gathered, scatter


@dataclass(frozen=True, eq=False)
class BaseModel:
    """A decoded version: `vector` (spec.size,), and the `frozen` tensors unless they travel apart.

    With a `submodel` the vector is that part of it, (submodel.size,): a smaller model, or what a stage needs.
    `head` (hex) names the version with all that led to it: after a restore another one may have its number.
    Empty where it is not known.
    """

    version: int
    vector: Vector
    frozen: Mapping[str, npt.NDArray[Any]]
    submodel: UnitMap | TensorSet | None = None
    head: str = ""

    def part(self, submodel: Submodel | None) -> Vector:
        """What is trained in a task of this sub-model: its own tensors' values, or the whole vector.

        Of that what a stage does not need is zero.
        """
        if isinstance(self.submodel, TensorSet):
            whole = np.zeros(self.submodel.spec.size, self.vector.dtype)
            scatter(self.vector, whole, self.submodel)
            return whole
        if not isinstance(submodel, UnitMap) or self.submodel == submodel:
            return self.vector
        assert self.submodel is None, "a part was fetched for another task"
        return gathered(self.vector, submodel)

    def cut(self, part: UnitMap | TensorSet | None) -> BaseModel:
        """That part of a whole one, as if it had been fetched by itself; without one itself."""
        return self if part is None else replace(self, vector=gathered(self.vector, part), submodel=part)

    def base(
        self, version: int | None, part: UnitMap | TensorSet | None, parts: tuple[HeldPart, ...]
    ) -> tuple[int, Vector] | None:
        """What a payload leads from that says it is from a version, as far as it is of `part`.

        Zero where the `parts` since then have nothing; None where there are none.
        """
        if not parts:
            return self.version, gathered(self.vector, part)
        used = since(parts, version)
        if not used:
            return None
        found = np.zeros_like(self.vector)
        for held in used:  # the newest of them that has a coordinate is the newest of all
            scatter(gathered(self.vector, held.part), found, held.part)
        return used[0].version, gathered(found, part)
