"""Turns: tensors that are trained and sent in some versions, and others in the next ones.

| symbol | name   | meaning                                                                    |
|--------|--------|----------------------------------------------------------------------------|
| G      | turns  | sets of whole tensors, each by a pattern of names; what none names is in all |
| T      | period | versions of a turn                                                         |
| v      |        | the version that a task starts from                                        |

    a task is of turn (v div T) mod G

Without patterns the turns are the halves of low-rank adapters, B and then A: of this project's
(`workloads/adapters.py`) and of peft's. The device needs the whole model to compute, trains what it sends,
and nothing besides. An update that comes in another turn is folded as any late one; its staleness counts the
versions that changed its tensors.

The halves in turns are of RoLoRA, arXiv 2502.01755, where they are exact in rounds: the mean of the products
is the product of the means, as one factor is the same everywhere. Late updates of the other half are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import ClassVar

from anabranch.core.config.tables import SubmodelTable
from anabranch.core.engine.planner import Applicant
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.submodels import TensorSet, tensor_set
from anabranch.strategies.submodels.planner import Forgetful, NoMemory

# The names of the halves B and A, of this project's adapters and of peft's.
HALVES = (("*.parametrizations.*.B", "*.lora_B.*"), ("*.parametrizations.*.A", "*.lora_A.*"))

Patterns = Sequence[str]


class Alternate(Forgetful):
    """A `Planner`. Raises `ConfigError` for turns of which the model has nothing, or that overlap."""

    name: ClassVar[str] = "alternate"
    of_tensors: ClassVar[bool] = True

    def __init__(self, spec: ParamSpec, turns: Sequence[Patterns] = HALVES, period: int = 4) -> None:
        self.period = period
        named = [_named(spec, patterns) for patterns in turns]
        _check(spec, turns, named)
        always = set(_trained(spec)) - {i for places in named for i in places}
        self.parts = tuple(tensor_set(spec, sorted(always | places)) for places in named)

    @classmethod
    def of(cls, spec: ParamSpec, table: SubmodelTable, seed: int) -> Alternate:
        """By the `[submodel]` table."""
        return cls(spec, [[pattern] for pattern in table.turns] or HALVES, table.period)

    def plan(self, state: NoMemory, vector: Vector, applicant: Applicant) -> tuple[NoMemory, TensorSet]:
        """The tensors whose turn it is at the version."""
        return state, self.parts[applicant.version // self.period % len(self.parts)]


def _trained(spec: ParamSpec) -> list[int]:
    return [i for i, tensor in enumerate(spec.tensors) if tensor.aggregated]


def _named(spec: ParamSpec, patterns: Patterns) -> set[int]:
    """The places of the trained tensors that one of the patterns names."""
    return {i for i in _trained(spec) if any(fnmatchcase(spec.tensors[i].name, p) for p in patterns)}


def _check(spec: ParamSpec, turns: Sequence[Patterns], named: Sequence[set[int]]) -> None:
    if len(turns) < 2:
        raise ConfigError(f"submodel.turns has {len(turns)} pattern: two turns are needed, or none at all")
    for patterns, places in zip(turns, named, strict=True):
        if not places:
            raise ConfigError(
                f"submodel.name is 'alternate', but no trained tensor is named {' or '.join(patterns)}: name "
                "in submodel.turns a pattern for each turn, such as 'body.*'; without any they are adapters'"
            )
    for number, places in enumerate(named):
        if both := places & set().union(*named[number + 1 :]):
            name = spec.tensors[min(both)].name
            raise ConfigError(f"submodel.turns: {name!r} is in two turns: let one pattern name it")
