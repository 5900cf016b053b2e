"""The smaller module computes what the whole one does with its left-out units unread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from unit_models import EXACT, Transformer, resnet

from anabranch.core.errors import AppError
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import UnitMap, unit_map
from anabranch.core.model.units import Member, UnitGroup, places
from anabranch.workloads.model_graph import find_units
from anabranch.workloads.small_attention import SmallAttention
from anabranch.workloads.submodule import smaller


def made(name: str) -> tuple[nn.Module, ParamSpec, torch.Tensor]:
    """A model with random weights and statistics, its spec with groups, and inputs."""
    torch.manual_seed(1)
    model, inputs = EXACT[name][0](), EXACT[name][1]()
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.5 if "var" in key else torch.randn_like(tensor) * 0.4)
    return model, spec_of(model), inputs


def spec_of(model: nn.Module, groups: tuple[UnitGroup, ...] | None = None) -> ParamSpec:
    tensors = {name: t.detach().numpy() for name, t in model.state_dict().items()}
    return ParamSpec.of(tensors, find_units(model) if groups is None else groups)


def flat(model: nn.Module, spec: ParamSpec) -> Any:
    return spec.flatten({name: t.detach().numpy() for name, t in model.state_dict().items()})


def load(model: nn.Module, spec: ParamSpec, vector: Any) -> None:
    model.load_state_dict({n: torch.from_numpy(np.asarray(a)) for n, a in spec.unflatten(vector).items()})


def some_units(spec: ParamSpec, seed: int = 0) -> UnitMap:
    """About two thirds of each group."""
    draw = np.random.default_rng(seed)
    return unit_map(
        spec, [sorted(draw.permutation(g.size)[: max(1, 2 * g.size // 3)].tolist()) for g in spec.groups]
    )


def reads(model: nn.Module, member: Member) -> bool:
    """Whether the units are on the side of the tensor that a layer reads its input with."""
    layer = model.get_submodule(member.tensor.rpartition(".")[0])
    return "weight" in member.tensor and member.axis == (0 if getattr(layer, "transposed", False) else 1)


def leave_unread(model: nn.Module, chosen: UnitMap) -> None:
    """Zeroes the weights that read the units that are left out."""
    state = model.state_dict()
    for group, kept in zip(chosen.spec.groups, chosen.kept, strict=True):
        left = tuple(sorted(set(range(group.size)) - set(kept)))
        consumers = [m for m in group.members if reads(model, m)]
        assert consumers
        for m in consumers:
            state[m.tensor].index_fill_(m.axis, torch.from_numpy(places(m, group.size, left)), 0.0)


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", EXACT)
def test_the_smaller_module_is_the_whole_one_with_units_unread(name: str, training: bool) -> None:
    model, spec, inputs = made(name)
    chosen = some_units(spec)
    small = smaller(model, chosen)
    load(small, chosen.small, flat(model, spec)[chosen.indices])
    model.train(training)
    small.train(training)
    with torch.no_grad():
        before = model(inputs)
        leave_unread(model, chosen)
        found, expected = small(inputs), model(inputs)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before, expected, atol=1e-3)


@pytest.mark.parametrize("name", EXACT)
def test_with_all_units_the_outputs_are_the_same_bit_for_bit(name: str) -> None:
    model, spec, inputs = made(name)
    chosen = unit_map(spec, [range(g.size) for g in spec.groups])
    small = smaller(model, chosen)
    load(small, chosen.small, flat(model, spec)[chosen.indices])
    for training in (False, True):
        assert torch.equal(small.train(training)(inputs), model.train(training)(inputs))


@pytest.mark.parametrize("name", EXACT)
def test_the_smaller_module_learns_alone(name: str) -> None:
    model, spec, inputs = made(name)
    model(inputs).sum().backward()
    before = flat(model, spec)
    chosen = some_units(spec)
    small = smaller(model, chosen)
    assert {n: tuple(t.shape) for n, t in small.state_dict().items()} == {
        t.name: t.shape for t in chosen.small.tensors
    }
    assert all(p.grad is None for p in small.parameters())
    load(small, chosen.small, flat(model, spec)[chosen.indices])
    small.train()
    small(inputs).square().sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in small.parameters())
    np.testing.assert_array_equal(flat(model, spec), before)


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(1, 8)])
def test_units_that_an_app_declares_may_run_through_a_norm_of_all(norm: nn.Module) -> None:
    """As those of older manifests do, in which they were found."""
    model = nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 3))
    through = [("0.weight", 0), ("0.bias", 0), ("3.weight", 1)]
    through += [(f"1.{name}", 0) for name, _ in norm.named_parameters()]
    members = tuple(Member(tensor, axis) for tensor, axis in through)
    small = smaller(model, unit_map(spec_of(model, (UnitGroup("hidden", 8, members),)), [[0, 2, 3]]))
    assert small(torch.randn(5, 6)).shape == (5, 3)
    assert [tuple(p.shape) for p in small.get_submodule("1").parameters()] == [(3,)] * (len(members) - 3)


SPECS = {name: made(name)[1] for name in EXACT}


@settings(max_examples=60)
@given(st.sampled_from(sorted(EXACT)), st.data())
def test_units_and_their_places(name: str, data: Any) -> None:
    """Gather after scatter is the identity; each member's units cover its axis, every place once."""
    spec = SPECS[name]
    kept = [
        sorted(data.draw(st.sets(st.integers(0, g.size - 1), min_size=1), label=g.name)) for g in spec.groups
    ]
    chosen = unit_map(spec, kept)
    small = np.arange(chosen.size, dtype=np.float32)
    whole = np.full(spec.size, -1, np.float32)
    whole[chosen.indices] = small
    np.testing.assert_array_equal(whole[chosen.indices], small)
    parts, found = spec.unflatten(whole), chosen.small.unflatten(small)
    for t in chosen.small.tensors:
        if t.aggregated:
            np.testing.assert_array_equal(parts[t.name][parts[t.name] >= 0], found[t.name].reshape(-1))
    shapes = {t.name: t.shape for t in spec.tensors}
    for group in spec.groups:
        for m in group.members:
            each = np.concatenate([places(m, group.size, (u,)) for u in range(group.size)])
            assert sorted(each) == list(range(shapes[m.tensor][m.axis]))


def test_no_state_is_shared_with_the_whole_module() -> None:
    model, spec, inputs = made("residual")
    small = smaller(model, unit_map(spec, [range(g.size) for g in spec.groups]))
    before = flat(model, spec)
    small.train()(inputs)
    with torch.no_grad():
        for p in small.parameters():
            p.zero_()
    np.testing.assert_array_equal(flat(model, spec), before)


def test_layers_say_their_new_sizes() -> None:
    model, spec, _ = made("depthwise")
    small = smaller(model, unit_map(spec, [[0, 2, 5], [1, 4]]))
    assert [str(small.get_submodule(i)) for i in "13569"] == [
        "Conv2d(4, 3, kernel_size=(1, 1), stride=(1, 1))",
        "Conv2d(3, 3, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), groups=3)",
        "ConvTranspose2d(3, 2, kernel_size=(2, 2), stride=(2, 2))",
        "PReLU(num_parameters=2)",
        "Linear(in_features=8, out_features=3, bias=True)",
    ]
    model, spec, _ = made("group norm")
    assert str(smaller(model, unit_map(spec, [[0, 2, 3]])).get_submodule("2")).startswith("GroupNorm(3, 6")
    model, spec, _ = made("lstm, both ways")
    assert str(smaller(model, unit_map(spec, [[1, 2]])).rnn).startswith("LSTM(5, 2, num_layers=2")


def test_an_unknown_layer_is_named() -> None:
    class Own(nn.Linear):
        """Who knows what it does."""

    model = nn.Sequential(Own(4, 6), nn.Linear(6, 2))
    members = Member("0.weight", 0), Member("0.bias", 0), Member("1.weight", 1)
    spec = spec_of(model, (UnitGroup("mine", 6, members),))
    with pytest.raises(AppError, match=r"module '0' \(Own\) is not known to work with fewer units"):
        smaller(model, unit_map(spec, [[0]]))


@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_and_layouts_of_the_small_attention(batch_first: bool) -> None:
    """As torch's own attention, when it has all heads: a mask of each kind, weights, one example alone."""
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(8, 4, batch_first=batch_first).eval()
    nn.init.normal_(whole.in_proj_bias)
    small = SmallAttention(whole)
    x = torch.randn(3, 5, 8) if batch_first else torch.randn(5, 3, 8)
    causal = torch.ones(5, 5).triu(1).bool()
    padding = torch.tensor([[False] * 4 + [True]] * 3)
    for masks in ({}, {"attn_mask": causal}, {"attn_mask": causal, "key_padding_mask": padding}):
        for more in ({}, {"need_weights": False}, {"average_attn_weights": False}):
            expected, found = (m(x, x, x, **masks, **more) for m in (whole, small))
            torch.testing.assert_close(found[0], expected[0])
            assert (found[1] is None) == (expected[1] is None)
            if expected[1] is not None:
                torch.testing.assert_close(found[1], expected[1])
    one = torch.randn(5, 8)
    for got, wanted in zip(small(one, one, one), whole(one, one, one), strict=True):
        torch.testing.assert_close(got, wanted)
    with pytest.raises(AppError, match="same for all heads"):
        small(x, x, x, attn_mask=torch.zeros(12, 5, 5))


def test_a_causal_transformer_keeps_its_mask() -> None:
    model = Transformer().eval()
    chosen = some_units(spec_of(model))
    small = smaller(model, chosen)
    load(small, chosen.small, flat(model, chosen.spec)[chosen.indices])
    small.eval()
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    x = torch.randn(2, 4, 8)
    changed = x.clone()
    changed[:, 3] += 1
    encode = small.get_submodule("encoder")
    first, second = (encode(v, mask=mask, is_causal=True) for v in (x, changed))
    torch.testing.assert_close(first[:, :3], second[:, :3])
    assert not torch.allclose(first[:, 3], second[:, 3])


def test_the_shapes_of_a_residual_network() -> None:
    model = resnet()
    small = smaller(model, some_units(spec_of(model)))
    assert tuple(small.get_parameter("3.conv1.weight").shape) == (2, 4, 3, 3)
    assert tuple(small.get_parameter("0.weight").shape) == (4, 1, 3, 3)
