"""Which units cannot be left out because a number of the model's code tells how many there are.

`x / self.out.in_features` is a constant in the graph of a module: it says nothing of where it comes from, but
in a smaller module it is another one. So the module is traced once more with fewer units, and what its
graph has otherwise then was made of their number, or of the values of a tensor that they run through.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn

from anabranch.core.errors import AppError
from anabranch.core.model.units import UnitGroup
from anabranch.workloads.fx_trace import trace
from anabranch.workloads.resized import Shape, resized

SIZES = "a number in the model's code that is made of its size"


def counted(module: nn.Module, graph: fx.Graph, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
    """The groups whose units `graph`, that of the module in training, counts.

    The module stays as it is; it must be one that was not traced, for tracing may change its buffers.
    """
    if not groups or _unchanged(module, graph, groups):
        return []
    found = _alone(module, graph, groups)
    rest = [group for group in groups if group not in found]
    # Numbers may be made of several groups together, and then none of them is to blame alone.
    return found if found and (not rest or _unchanged(module, graph, rest)) else list(groups)


def _alone(module: nn.Module, graph: fx.Graph, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
    """Those that change the graph, each alone; by halves, as most models have few of them."""
    if len(groups) == 1:
        return list(groups)
    halves = groups[: len(groups) // 2], groups[len(groups) // 2 :]
    return [
        group
        for half in halves
        if not _unchanged(module, graph, half)
        for group in _alone(module, graph, half)
    ]


def _unchanged(module: nn.Module, graph: fx.Graph, groups: Sequence[UnitGroup]) -> bool:
    """Whether the graph is the same with fewer units of all these groups.

    Neighbours keep different numbers of them: two layers of one size are to be told apart.
    """
    shapes: dict[str, Shape] = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    for place, group in enumerate(groups):
        kept = 1 + place % (group.size - 1)
        for m in group.members:
            whole = shapes[m.tensor]
            shapes[m.tensor] = (*whole[: m.axis], m.outer * kept * m.inner, *whole[m.axis + 1 :])
    small = resized(module, shapes).train()
    values = small.state_dict()
    for name in {m.tensor for group in groups for m in group.members}:
        # The sum of a tensor that was cut must be another one, also where all its values are 0.
        values[name].fill_(torch.nan)
    try:
        return _nodes(trace(small)) == _nodes(graph)
    except AppError:
        return False


def _nodes(graph: fx.Graph) -> list[tuple[object, ...]]:
    return [(node.op, node.target, str(node.args), str(node.kwargs)) for node in graph.nodes]
