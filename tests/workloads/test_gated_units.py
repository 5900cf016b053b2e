"""Units of products: a hidden unit of SwiGLU dropped is the whole model with that unit's output at 0.

The oracle is arithmetic of numpy's, which knows of neither graphs nor torch.
"""

from __future__ import annotations

from functools import reduce
from operator import mul
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import GATED, NORMED, ZOO, Body, ChannelScale, Llama, SwiGlu
from torch import nn

from anabranch.core.errors import AppError
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import UnitMap, gathered, scatter, unit_map
from anabranch.core.model.units import MEMBERS_MAX, Member, UnitGroup
from anabranch.workloads import load_app
from anabranch.workloads.model_graph import find_units, units_and_widths
from anabranch.workloads.submodule import smaller
from anabranch.workloads.torch_trainer import TorchTrainer
from anabranch.workloads.unit_values import Variable

Array = np.ndarray[Any, Any]


def described(model: nn.Module, groups: tuple[UnitGroup, ...] | None = None) -> ParamSpec:
    tensors = {name: t.detach().numpy() for name, t in model.state_dict().items()}
    return ParamSpec.of(tensors, find_units(model) if groups is None else groups)


def flat(model: nn.Module, spec: ParamSpec) -> Array:
    return spec.flatten({name: t.detach().numpy() for name, t in model.state_dict().items()})


def part_of(model: nn.Module, chosen: UnitMap) -> nn.Module:
    """The smaller module with the whole one's weights."""
    small, values = smaller(model, chosen), gathered(flat(model, chosen.spec), chosen)
    parts = chosen.small.unflatten(values)
    small.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in parts.items()})
    return small


def members(group: UnitGroup) -> set[tuple[str, int, int, int]]:
    return {(m.tensor, m.axis, m.outer, m.inner) for m in group.members}


def swiglu_with_units_at_0(mlp: SwiGlu, x: Array, kept: list[int]) -> Array:
    gate, up, down = (
        layer.weight.detach().numpy().astype(np.float64) for layer in (mlp.gate, mlp.up, mlp.down)
    )
    z = x @ gate.T
    hidden = z / (1 + np.exp(-z)) * (x @ up.T)
    left = np.zeros_like(hidden)
    left[:, kept] = hidden[:, kept]
    found: Array = left @ down.T
    return found


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 7), st.integers(2, 9), st.integers(0, 99))
def test_a_hidden_unit_dropped_is_the_whole_model_with_that_unit_at_0(
    data: st.DataObject, width: int, hidden: int, seed: int
) -> None:
    torch.manual_seed(seed)
    mlp = SwiGlu(width, hidden)
    spec = described(mlp)
    (group,) = spec.groups
    assert (group.name, group.size) == ("gate", hidden)
    assert members(group) == {("gate.weight", 0, 1, 1), ("up.weight", 0, 1, 1), ("down.weight", 1, 1, 1)}
    kept = sorted(data.draw(st.sets(st.integers(0, hidden - 1), min_size=1)))
    chosen = unit_map(spec, [kept])
    small = part_of(mlp, chosen)
    shapes = {name: tuple(t.shape) for name, t in small.state_dict().items()}
    assert shapes == {"gate.weight": (len(kept), width), "up.weight": (len(kept), width)} | {
        "down.weight": (width, len(kept))
    }
    x = np.random.default_rng(seed).normal(size=(3, width))
    found = small(torch.from_numpy(x.astype(np.float32))).detach().numpy()
    np.testing.assert_allclose(found, swiglu_with_units_at_0(mlp, x, kept), rtol=1e-4, atol=1e-5)
    # What a part sends lands on the unit's own rows and columns, and nowhere else.
    whole, sent = np.zeros(spec.size, np.float32), np.arange(1, chosen.size + 1, dtype=np.float32)
    scatter(sent, whole, chosen)
    np.testing.assert_array_equal(gathered(whole, chosen), sent)
    left = sorted(set(range(hidden)) - set(kept))
    rows = spec.unflatten(whole)
    assert not rows["gate.weight"][left].any()
    assert not rows["down.weight"][:, left].any()
    assert rows["up.weight"][kept].all()
    assert rows["down.weight"][:, kept].all()


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(GATED)), st.data())
def test_any_choice_of_gated_units_computes(name: str, data: st.DataObject) -> None:
    """Shapes are those that the map says, whichever units are kept; with all of them nothing changes."""
    torch.manual_seed(1)
    model, x = ZOO[name]()
    model(x)  # lazy layers have their sizes from now on
    spec = described(model)
    chosen = unit_map(
        spec, [sorted(data.draw(st.sets(st.integers(0, g.size - 1), min_size=1))) for g in spec.groups]
    )
    small = part_of(model, chosen)
    assert {n: tuple(t.shape) for n, t in small.state_dict().items()} == {
        t.name: t.shape for t in chosen.small.tensors
    }
    assert small(x).shape == model(x).shape
    everything = part_of(model, unit_map(spec, [range(g.size) for g in spec.groups]))
    assert torch.equal(everything.eval()(x), model.eval()(x))


def test_one_layer_that_makes_both_halves_is_cut_in_both() -> None:
    (group,) = find_units(ZOO["swiglu of one layer"]()[0])
    assert group.size == 8
    assert members(group) == {("wide.weight", 0, 2, 1), ("wide.bias", 0, 2, 1), ("out.weight", 1, 1, 1)}


def test_a_gate_of_channels_goes_with_the_layer_that_it_gates() -> None:
    gated, squeezed = find_units(ZOO["squeeze and excite"]()[0])
    assert (gated.name, gated.size) == ("wide", 8)
    norm = {(f"norm.{name}", 0, 1, 1) for name in ("weight", "bias", "running_mean", "running_var")}
    made = {(f"{name}.{kind}", 0, 1, 1) for name in ("wide", "depth", "up") for kind in ("weight", "bias")}
    assert members(gated) == norm | made | {("down.weight", 1, 1, 1), ("narrow.weight", 1, 1, 1)}
    assert (squeezed.name, squeezed.size) == ("down", 3)


def test_a_transformer_of_todays_form_has_units() -> None:
    groups, whole = units_and_widths(Llama(nn.RMSNorm))
    assert [(g.name, g.size) for g in groups] == [(f"layers.{i}.mlp.gate", 11) for i in range(2)]
    because = {width.name: width.because for width in whole}
    assert because["layers.0.attend.q"] == "view"
    assert because["layers.0.mlp.down"] == "add"
    assert because["out"] == "the model's output"
    assert {width.units for width in whole} == {8, 3}
    assert not {g.name for g in groups} & set(because)


def test_what_stays_whole_is_named_with_what_needs_it() -> None:
    shared = nn.Linear(6, 6)
    model = nn.Sequential(
        shared, nn.ReLU(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)
    )
    model[4].weight = shared.weight
    found = {width.name: width.because for width in units_and_widths(model)[1]}
    elsewhere = "its weights are used elsewhere too"
    assert found == {"0": elsewhere, "2": "LayerNorm 3", "4": elsewhere, "5": "the model's output"}


def test_a_scale_of_its_own_is_cut_only_along_the_units_that_tracing_finds() -> None:
    """An App's word is not enough for a module whose code nobody knows."""
    model = nn.Sequential(nn.Linear(4, 6), ChannelScale(6), nn.Linear(6, 2))
    spec = described(model)
    assert [w for w, _ in part_of(model, unit_map(spec, [[0, 3]])).named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    tensors = [("0.weight", 0), ("0.bias", 0), ("1.scale", 0), ("1.shift", 0)]
    unread = UnitGroup("mine", 6, tuple(Member(tensor, axis) for tensor, axis in tensors))
    with pytest.raises(AppError, match=r"module '1' \(ChannelScale\) is not known to work with fewer units"):
        smaller(model, unit_map(described(model, (unread,)), [[0, 3]]))


def test_a_stem_of_the_input_squared_stays_whole() -> None:
    assert [group.name for group in find_units(ZOO["the input squared"]()[0])] == ["wide"]


@pytest.mark.parametrize("name", NORMED)
def test_a_norm_behind_a_product_keeps_its_units_and_no_others(name: str) -> None:
    assert [(group.name, group.size) for group in find_units(ZOO[name]()[0])] == [("hidden", 7)]


def test_a_product_of_more_layers_than_a_group_may_have_is_whole() -> None:
    """In any order, and what else there is has its units."""
    layers = nn.ModuleList(nn.Linear(6, 4) for _ in range(MEMBERS_MAX // 2 + 1))  # of two tensors each
    model = Body(
        lambda s, x: s.out(s.hidden(reduce(mul, [layer(x).sigmoid() for layer in s.layers][::-1])).relu()),
        layers=layers,
        hidden=nn.Linear(4, 5),
        out=nn.Linear(5, 3),
    )
    assert [group.name for group in described(model).groups] == ["hidden"]
    assert ("layers.0", "mul") in [(width.name, width.because) for width in units_and_widths(model)[1]]


def test_what_is_joined_to_a_product_is_in_one() -> None:
    first, second = Variable("first", 4, place=0), Variable("second", 4, shared=True, place=1)
    first.join(second)
    assert second.root is first
    assert first.shared


def test_looking_for_units_draws_nothing() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.own, self.two = nn.Linear(4, 6), ChannelScale(6), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.two(self.own(self.one(x))) * float(torch.rand(()))
            return scores

    model = Noisy()
    chosen = unit_map(described(model), [[1, 2]])
    torch.manual_seed(5)
    smaller(model, chosen)
    after = torch.rand(())
    torch.manual_seed(5)
    assert torch.equal(torch.rand(()), after)


def test_a_trainer_says_which_layers_stay_whole() -> None:
    trainer = TorchTrainer(load_app("examples/gated.py:Gated"))
    assert [(g.name, g.size) for g in trainer.spec.groups] == [(f"blocks.{i}.mlp.gate", 64) for i in range(2)]
    assert trainer.whole_because == ""
    assert ("blocks.0.mlp.down", 32, "add") in [(w.name, w.units, w.because) for w in trainer.whole_widths]
