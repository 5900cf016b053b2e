"""A sub-model computes, and learns, what the whole model does with the left-out units at 0; or there is none.

The oracle knows nothing of graphs: all that is a left-out unit's becomes 0 in the whole model, and outputs
and gradients are to be those of the smaller module. So they are where only the columns become 0 by which
other layers read it: a sum or a maximum over a scale of the units' own is not changed then.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from counting_models import COUNTING
from model_zoo import GATED, NORMED, ZOO
from torch import nn

from anabranch.core.errors import AppError
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import unit_map
from anabranch.workloads.model_graph import find_units
from anabranch.workloads.submodule import smaller

MODELS = {**ZOO, **{f"counts: {name}": make for name, (make, _) in COUNTING.items()}}
# What has units to leave out. All others are trained whole.
CUT = {
    *(
        "mlp",
        "activations",
        "dropout",
        "prelu",
        "prelu of channels",
        "conv1d",
        "conv2d",
        "conv3d",
        "depthwise",
    ),
    *(
        "transposed 1d",
        "transposed 2d",
        "transposed 3d",
        "pools",
        "padding",
        "residual blocks",
        "frozen",
        "lazy",
    ),
    *("batch norm 1d", "batch norm 2d", "batch norm 3d", "batch norm of rows", "instance norm"),
    *("group norm", "group norm of channels", "rnn", "gru", "lstm", "lstm, both ways"),
    *("attention", "encoder layer", "embedding bag", "weight norm beside it"),
    "squeeze and excite, fixed",  # of it the three units in the middle
    *("product of two", "glu", "chunk", "own tensors", "scale of two widths", *GATED, *NORMED),
    *("the input squared", *(f"counts: {name}" for name, (_, cut) in COUNTING.items() if cut)),
}
DOUBTS = {
    "prelu of steps": "is over the 8 units before it, or over a sequence of 8",
    "batch norm of steps": "is over the 8 units before it, or over a sequence of 8",
    "batch norm of rows or steps": "is over the 8 units before it, or over a sequence of 8",
    "group norm of steps": "is over the 8 units before it, or over a sequence of 8",
    "weight norm, old": "has weights that WeightNorm computes anew",
    "spectral norm, old": "has weights that SpectralNorm computes anew",
    "pruned": "has weights that L1Unstructured computes anew",
    "pruned structure": "has weights that LnStructured computes anew",
    "tied by memory": "tensors '2.weight' and '4.weight' share memory",
    "branching": "torch.fx cannot trace the model",
}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    """The model, which has seen a batch, and what it is called with."""
    torch.manual_seed(3)
    model, x = MODELS[name]()
    model.train()(x)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.5)
    return model, x


def specified(model: nn.Module) -> ParamSpec:
    """The model's layout, with the units that were found."""
    return ParamSpec.of({n: t.detach().numpy() for n, t in model.state_dict().items()}, find_units(model))


def half(spec: ParamSpec) -> list[list[int]]:
    """The units of each group that are kept."""
    draw = np.random.default_rng(4)
    return [sorted(draw.permutation(g.size)[: (g.size + 1) // 2].tolist()) for g in spec.groups]


def masked(
    model: nn.Module, spec: ParamSpec, kept: list[list[int]], only_read: bool
) -> dict[str, torch.Tensor]:
    """The whole model's tensors with the left-out units at 0, or only the columns by which they are read."""
    tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}
    for group, units in zip(spec.groups, kept, strict=True):
        out = torch.tensor([u for u in range(group.size) if u not in units])
        for m in group.members:
            layer = model.get_submodule(m.tensor.rpartition(".")[0])
            read = m.axis == (0 if getattr(layer, "transposed", False) else 1)
            # A variance is what a unit that is 0 in any case is divided by.
            if (read or not only_read) and not m.tensor.endswith("running_var"):
                runs = tensors[m.tensor].unflatten(m.axis, (m.outer, group.size, m.inner))
                runs.index_fill_(m.axis + 1, out, 0.0)
    return tensors


def gradients(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Outputs in evaluation, where norms are constants, and the gradients of a loss of them."""
    random.seed(6)  # some models draw
    output = model.eval()(x)
    model.zero_grad()
    output.sin().sum().backward()
    return output.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def vector(spec: ParamSpec, tensors: dict[str, torch.Tensor]) -> np.ndarray:
    zeros = {t.name: np.zeros(t.shape, t.dtype) for t in spec.tensors}
    return spec.flatten(zeros | {n: t.detach().numpy() for n, t in tensors.items()})


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch tells of its speed
@pytest.mark.parametrize("only_read", [False, True], ids=["all at 0", "not read"])
@pytest.mark.parametrize("name", MODELS)
def test_a_sub_model_is_right_or_there_is_none(name: str, only_read: bool) -> None:
    model, x = made(name)
    if name in DOUBTS:
        with pytest.raises(AppError, match=DOUBTS[name]):
            find_units(model)
        return
    spec = specified(model)
    assert bool(spec.groups) == (name in CUT), spec.groups
    if not spec.groups:
        return
    kept = half(spec)
    chosen = unit_map(spec, kept)
    small, start = smaller(model, chosen), vector(spec, dict(model.state_dict()))
    parts = chosen.small.unflatten(start[chosen.indices])
    small.load_state_dict({n: torch.from_numpy(a.copy()) for n, a in parts.items()}, strict=False)
    model.load_state_dict(masked(model, spec, kept, only_read))
    expected, wanted = gradients(model, x)
    found, got = gradients(small, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert set(got) == set(wanted)
    rows = vector(spec, wanted)[chosen.indices]
    # A sum that nearly cancels is as exact as what it is of.
    np.testing.assert_allclose(
        vector(chosen.small, got), rows, rtol=1e-3, atol=1e-5 * max(1.0, np.abs(rows).max())
    )
