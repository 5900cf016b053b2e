"""The parts of a model that has stages: what a task of one trains, and what a device needs for it.

Nothing but a planner that grows a model deals sets of tensors of one that has stages, so that the head in a
set says which stage it is of: `stages.py` has the symbols.
"""

from __future__ import annotations

from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import CoordinateRuns, Submodel, TensorSet, UnitMap, tensor_set


def stage_set(spec: ParamSpec, stage: int, since: int = 0) -> TensorSet:
    """E_since+1, ..., E_stage and the head of `stage`, which counts from 1."""
    names = {*spec.stages[stage - 1].head}
    for earlier in spec.stages[since:stage]:
        names.update(earlier.blocks)
    return tensor_set(spec, (i for i, tensor in enumerate(spec.tensors) if tensor.name in names))


def stage_in(part: Submodel | None) -> int:
    """The stage that a part of a model is of, from 1; 0 of one that has none, or of the whole."""
    if not isinstance(part, TensorSet):
        return 0
    names = frozenset(part.names)
    return next((n for n, stage in enumerate(part.spec.stages, 1) if stage.head[0] in names), 0)


def needed_for(submodel: Submodel | CoordinateRuns | None) -> UnitMap | TensorSet | None:
    """What a device must have of a model for a task of this part; None: the whole.

    With a stage goes nothing that no device trains: of such a model it needs the whole.
    """
    if isinstance(submodel, UnitMap):
        return submodel
    if not isinstance(submodel, TensorSet) or not (stage := stage_in(submodel)):
        return None
    spec = submodel.spec
    with_each = not spec.apart and any(not tensor.aggregated for tensor in spec.tensors)
    return None if with_each or len(spec.stages) == 1 else stage_set(spec, stage)
