"""The physically smaller torch module of a sub-model: fewer channels, hidden units, gates and heads."""

from __future__ import annotations

from torch import nn

from anabranch.core.errors import AppError
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import UnitMap
from anabranch.workloads.model_graph import find_units
from anabranch.workloads.resized import ADAPT, cut_of, resized


def smaller(module: nn.Module, submodel: UnitMap) -> nn.Module:
    """A copy of `module` with the tensors' shapes of `submodel.small`, on the same device.

    The values are to be loaded: a tensor that was cut holds zeros. Raises `AppError`, naming the layer,
    for a kind that is not known to work in another size: neither a layer of torch's nor one whose use of its
    tensors was followed to the very units that are cut.
    """
    shapes = {t.name: t.shape for t in submodel.small.tensors}
    followed: frozenset[str] | None = None
    for path, part in module.named_modules():
        known = type(part) is nn.MultiheadAttention or type(part) in ADAPT
        if known or not (cut := cut_of(part, shapes, path)):
            continue
        followed = _followed(module, submodel.spec) if followed is None else followed
        if not cut <= followed:
            raise AppError(
                f"module {path or type(part).__name__!r} ({type(part).__name__}) is not known to work "
                "with fewer units: build it from the layers of torch.nn, or leave it out of "
                "units(self, model)"
            )
    return resized(module, shapes)


def _followed(module: nn.Module, spec: ParamSpec) -> frozenset[str]:
    """The tensors whose groups are those that the graph shows: nothing that reads them knows their size.

    Groups that an App declares, or an older release found, may be others.
    """
    try:
        found = frozenset(find_units(module))
    except AppError:
        return frozenset()
    doubted = {m.tensor for group in spec.groups if group not in found for m in group.members}
    return frozenset(m.tensor for group in spec.groups for m in group.members) - doubted
