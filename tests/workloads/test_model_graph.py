"""Which units are found in a module's graph, and what stays whole."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from unit_models import EXACT, Attentive, Cnn, Mlp, Recurrent, Transformer, depthwise, normed, resnet

from anabranch.core.errors import AppError
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import unit_map
from anabranch.workloads import load_app
from anabranch.workloads.model_graph import find_units
from anabranch.workloads.submodule import smaller

Members = set[tuple[str, int, int, int]]


def found(module: nn.Module) -> dict[str, tuple[int, Members]]:
    """By group: its size and its members; checked against the tensors."""
    groups = find_units(module)
    ParamSpec.of({n: t.detach().numpy() for n, t in module.state_dict().items()}, groups)
    return {g.name: (g.size, {(m.tensor, m.axis, m.outer, m.inner) for m in g.members}) for g in groups}


class Fn(nn.Module):
    """A layer that makes units, a function, and a layer that takes them; `made` is the first layer's."""

    def __init__(self, body: Callable[..., Any], make: nn.Module, take: nn.Module, **more: nn.Module) -> None:
        super().__init__()
        self.make, self.take, self.body = make, take, body
        for name, module in more.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def test_hidden_units_of_a_perceptron() -> None:
    assert found(Mlp()) == {
        "first": (8, {("first.weight", 0, 1, 1), ("first.bias", 0, 1, 1), ("second.weight", 1, 1, 1)}),
        "second": (5, {("second.weight", 0, 1, 1), ("second.bias", 0, 1, 1), ("out.weight", 1, 1, 1)}),
    }


@pytest.mark.parametrize("name", [name for name in EXACT if name.startswith("cnn")])
def test_channels_behind_a_flattened_picture(name: str) -> None:
    """The stem stays whole; a channel has 16 places in the flattened picture."""
    assert found(EXACT[name][0]()) == {
        "conv": (6, {("conv.weight", 0, 1, 1), ("conv.bias", 0, 1, 1), ("hidden.weight", 1, 1, 16)}),
        "hidden": (7, {("hidden.weight", 0, 1, 1), ("hidden.bias", 0, 1, 1), ("out.weight", 1, 1, 1)}),
    }


def test_inner_channels_of_residual_blocks_alone() -> None:
    """Stem, shortcuts, second convolutions and the last layer stay whole."""
    assert found(resnet()) == {
        f"{i}.conv1": (
            width,
            {(f"{i}.conv1.weight", 0, 1, 1), (f"{i}.conv2.weight", 1, 1, 1)}
            | {(f"{i}.norm1.{name}", 0, 1, 1) for name in ("weight", "bias")},
        )
        for i, width in ((3, 4), (4, 8))
    }


@pytest.mark.parametrize(
    ("norm", "units", "inner", "own"),
    [
        (lambda: nn.BatchNorm2d(8), 8, 1, {"weight", "bias", "running_mean", "running_var"}),
        (lambda: nn.BatchNorm2d(8, affine=False, track_running_stats=False), 8, 1, set()),
        (lambda: nn.GroupNorm(8, 8), 8, 1, {"weight", "bias"}),
        (lambda: nn.GroupNorm(4, 8), 4, 2, {"weight", "bias"}),
        (lambda: nn.InstanceNorm2d(8, affine=True), 8, 1, {"weight", "bias"}),
    ],
)
def test_norms_go_with_their_channels(
    norm: Callable[[], nn.Module], units: int, inner: int, own: set[str]
) -> None:
    """Groups of a group norm stay together: a unit is a block of channels."""
    tensors = {"1.weight", "1.bias", *(f"2.{name}" for name in own)}
    expected = {(t, 0, 1, inner) for t in tensors} | {("5.weight", 1, 1, 16 * inner)}
    assert found(normed(norm)) == {"1": (units, expected)}


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.GroupNorm(2, 8, affine=False),
        lambda: nn.GroupNorm(1, 8),
        lambda: nn.GroupNorm(1, 8, affine=False),
        lambda: nn.InstanceNorm2d(8),
        lambda: nn.LayerNorm([8, 4, 4]),
        lambda: nn.LocalResponseNorm(2),
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3, padding=1)),
        lambda: nn.Conv2d(8, 8, 3, padding=1, groups=2),
        lambda: nn.PixelShuffle(1),
    ],
)
def test_what_would_be_wrong_in_another_size_locks(norm: Callable[[], nn.Module]) -> None:
    assert "1" not in found(normed(norm))


def test_depthwise_and_transposed_convolutions() -> None:
    groups = found(depthwise())
    assert groups["1"] == (
        6,
        {("1.weight", 0, 1, 1), ("1.bias", 0, 1, 1), ("3.weight", 0, 1, 1), ("3.bias", 0, 1, 1)}
        | {("5.weight", 0, 1, 1)},
    )
    assert groups["5"] == (
        5,
        {("5.weight", 1, 1, 1), ("5.bias", 0, 1, 1), ("6.weight", 0, 1, 1), ("9.weight", 1, 1, 4)},
    )
    assert set(groups) == {"1", "5"}


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("ways", [1, 2])
def test_a_recurrent_layer_is_one_group(kind: Any, gates: int, ways: int) -> None:
    layer = kind(5, 6, num_layers=2, bidirectional=ways == 2, batch_first=True)
    groups = found(Recurrent(layer))
    expected = {("out.weight", 1, ways, 1)}
    for end in [f"_l{i}{way}" for i in range(2) for way in ("", "_reverse")[:ways]]:
        expected |= {(f"rnn.{n}{end}", 0, gates, 1) for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
        expected.add((f"rnn.weight_hh{end}", 1, 1, 1))
        if "_l1" in end:
            expected.add((f"rnn.weight_ih{end}", 1, ways, 1))
    assert groups == {"rnn": (6, expected)}
    assert find_units(Recurrent(layer, by_state=True))[0].size == 6 if ways == 2 else True


def test_a_projected_recurrent_layer_stays_whole() -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(5, 6, proj_size=2), nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.out(self.rnn(x)[0])

    assert found(Projected()) == {}


def test_heads_and_hidden_units_of_a_transformer() -> None:
    expected = {}
    for i in range(2):
        at = f"encoder.layers.{i}"
        heads = {(f"{at}.self_attn.in_proj_{n}", 0, 3, 2) for n in ("weight", "bias")}
        expected[f"{at}.self_attn"] = (4, heads | {(f"{at}.self_attn.out_proj.weight", 1, 1, 2)})
        hidden = {(f"{at}.linear1.weight", 0, 1, 1), (f"{at}.linear1.bias", 0, 1, 1)}
        expected[f"{at}.linear1"] = (12, hidden | {(f"{at}.linear2.weight", 1, 1, 1)})
    assert found(Transformer()) == expected
    assert list(found(Transformer())) == list(expected)
    alone = find_units(nn.TransformerEncoderLayer(8, 4, 12))
    assert [g.name for g in alone] == ["self_attn", "linear1"]


def test_heads_with_keys_and_values_of_their_own_width() -> None:
    """The widths of the inputs stay whole, whatever made them."""
    assert found(Attentive()) == {
        "attend": (
            4,
            {(f"attend.{n}_proj_weight", 0, 1, 2) for n in "qkv"}
            | {("attend.in_proj_bias", 0, 3, 2), ("attend.out_proj.weight", 1, 1, 2)},
        )
    }


CUT: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "mean over the picture": lambda m, x: m.take(m.make(x).mean((2, 3))),
    "mean, axes from the end": lambda m, x: m.take(m.make(x).amax(dim=[-1, -2])),
    "mean, by numpy's words": lambda m, x: m.take(m.make(x).mean(axis=(2, 3), keepdims=True).flatten(1)),
    "mean, then flatten": lambda m, x: m.take(m.make(x).mean((2, 3), keepdim=True).flatten(1)),
    "two squeezes": lambda m, x: m.take(functional.adaptive_avg_pool2d(m.make(x), 1).squeeze(-1).squeeze(2)),
    "a place": lambda m, x: m.take(m.make(x)[:, :, 0, 1]),
    "the last axis": lambda m, x: m.take(m.make(x).permute(0, 2, 3, 1)).mean((1, 2)),
    "turned round": lambda m, x: m.take(m.make(x).mean(3).transpose(1, 2)).mean(1),
    "the batch by name": lambda m, x: m.take(m.make(x).mean((2, 3)).view(len_of(x), -1)),
    "scaled": lambda m, x: m.take(m.make(x).div(2).mean((2, 3)) * 3 + 1),
    "one less it": lambda m, x: m.take(1 - m.make(x).mean((2, 3))),
    "one more axis": lambda m, x: m.take(m.make(x).mean((2, 3)).unsqueeze(1))[:, 0],
}


def len_of(x: torch.Tensor) -> Any:
    return x.shape[0]


@pytest.mark.parametrize("name", CUT)
def test_units_are_followed_through(name: str) -> None:
    module = Fn(CUT[name], nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 4, 1)), nn.Linear(4, 3))
    assert module(torch.randn(5, 1, 3, 3)).shape == (5, 3)
    assert set(found(module)) == {"make.1"}
    spec = ParamSpec.of({n: t.detach().numpy() for n, t in module.state_dict().items()}, find_units(module))
    small = smaller(module, unit_map(spec, [[0, 3]]))
    assert small(torch.randn(5, 1, 3, 3)).shape == (5, 3)


def gated_and_shared(m: Any, x: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return functional.softmax(gate, -1), m.take(x * gate)


WHOLE: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "added to another": lambda m, x: m.take(m.make(x) + m.other(x)),
    "joined to another": lambda m, x: m.take(m.make(x) + torch.cat((m.other(x), m.other2(x)), 1)[:, :4]),
    "a gate that is an output": lambda m, x: (g := m.make(x).sigmoid(), m.take(g * m.other(x))),
    "a gate that is read otherwise": lambda m, x: gated_and_shared(m, m.make(x), m.other(x)),
    "an outer product": lambda m, x: m.take((m.make(x).unsqueeze(1) * m.other(x).unsqueeze(2)).mean(1)),
    "a product": lambda m, x: m.take(m.make(x) @ m.other(x).transpose(0, 1) @ m.make2(x)),
    "a choice": lambda m, x: m.take(torch.where(m.make(x) > 0, m.make(x), 0.0)),
    "softmax over units": lambda m, x: m.take(functional.softmax(m.make(x), -1)),
    "mean over units": lambda m, x: m.take(m.make(x) - m.make(x).mean(-1, keepdim=True)),
    "split": lambda m, x: m.take(torch.cat(m.make(x).chunk(2, 1)[::-1], 1)),
    "a constant view": lambda m, x: m.take(m.make(x).view(-1, 4)),
    "the number of units": lambda m, x: m.take(m.make(x) / m.make(x).shape[1]),
    "the spread over units": lambda m, x: m.take(m.make(x).var(-1, keepdim=True).expand(-1, 4)),
    "an unusual argument": lambda m, x: m.take(
        m.make(x).sum((x.dim() - 2,), keepdim=True) * torch.ones(5, 4)
    ),
    "written to": lambda m, x: m.take(m.make(x).index_fill(1, torch.tensor([0]), 0.0)),
    "used twice": lambda m, x: m.take(m.make(x)) + m.take(m.make(x)),
    "an output too": lambda m, x: {"hidden": [h := m.make(x)], "scores": m.take(h)},
    "another layer's parameter": lambda m, x: m.take(m.make(x) * m.other.bias) + m.other(x).mean(),
    "a constant": lambda m, x: m.take(m.make(x) * torch.arange(4.0)),
    "parts of a fixed length": lambda m, x: m.take(m.make(x).split(4, 1)[0]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_width_that_tensors_share_stays_whole(name: str) -> None:
    layers = {name: nn.Linear(6, 4) for name in ("other", "other2", "make2")}
    assert found(Fn(WHOLE[name], nn.Linear(6, 4), nn.Linear(4, 3), **layers)) == {}


def test_an_argument_with_a_default_is_as_in_training() -> None:
    class Masked(Mlp):
        def forward(self, x: torch.Tensor, mask: Any = None, scale: float = 1.0) -> torch.Tensor:
            if mask is not None:
                raise ValueError(mask)
            return super().forward(x) * scale if scale > 0 else x

    assert set(found(Masked())) == {"first", "second"}


def test_tied_and_shared_layers_stay_whole() -> None:
    tied = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    tied[2].weight = tied[0].weight
    assert found(tied) == {}
    shared = nn.Linear(6, 6)
    assert found(nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(6, 3))) == {}
    hooked = Mlp()
    hooked.second.register_forward_hook(lambda module, inputs, output: output * 2)
    assert found(hooked) == {}


def test_a_single_unit_or_layer_has_no_group() -> None:
    assert found(nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 3))) == {}
    assert found(nn.Linear(6, 3)) == {}
    assert found(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3))) == {}


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_a_model_that_branches_on_values_says_where() -> None:
    with pytest.raises(
        AppError, match=r"cannot trace the model, in module '1': TraceError.*control flow.*units"
    ):
        find_units(nn.Sequential(nn.Linear(6, 4), Branching()))
    with pytest.raises(AppError, match="in forward of Branching"):
        find_units(Branching())


def test_finding_leaves_the_module_as_it_was() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp()
            self.calls: torch.Tensor
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            scores: torch.Tensor = self.inner(x)
            return scores * self.calls

    module = Counting()
    assert set(found(module)) == {"inner.first", "inner.second"}
    assert float(module.calls) == 0.0


@pytest.mark.parametrize(
    ("app", "groups"),
    [
        ("digits", {"0": 64}),
        ("fashion-mnist", {"3": 32, "6": 60}),
        ("fashion-mnist-resnet", {"3.conv1": 16, "4.conv1": 32, "5.conv1": 64}),
    ],
)
def test_built_in_models(app: str, groups: dict[str, int]) -> None:
    assert {name: size for name, (size, _) in found(load_app(app).model()).items()} == groups


@pytest.mark.parametrize("name", EXACT)
def test_every_family_has_units(name: str) -> None:
    assert found(EXACT[name][0]())


def test_a_norm_over_all_units_of_a_layer_keeps_them_all() -> None:
    for name, units in (
        ("group norm of one group", {"1": 6}),
        ("layer norm", {"0": 7}),
        ("layer norm, bare", {"0": 7}),
        ("root mean square norm", {"0": 7}),
    ):
        assert {group: size for group, (size, _) in found(EXACT[name][0]()).items()} == units, name
    after_a_sequence = Recurrent(nn.LSTM(5, 6, batch_first=True))
    after_a_sequence.add_module("out", nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)))
    assert not found(after_a_sequence)


def test_an_unknown_flatten_is_whole() -> None:
    assert set(found(Cnn(lambda x: x.flatten(0, 1)[:5]))) == {"hidden"}


def test_devices_of_one_process_train_while_others_find_units() -> None:
    """torch.fx patches the calls of all modules as long as it traces, and two at a time for good."""
    begun, go_on = (Event(), Event()), (Event(), Event())

    def slow(number: int) -> nn.Module:
        def body(m: Any, x: torch.Tensor) -> Any:
            begun[number].set()
            assert go_on[number].wait(600)
            return m.take(functional.relu(m.make(x)))

        return Fn(body, nn.Linear(4, 6), nn.Linear(6, 3))

    model, x = Mlp(), torch.ones(2, Mlp().first.in_features)
    expected = model(x)
    with ThreadPoolExecutor(2) as threads:
        try:
            first = threads.submit(found, slow(0))
            assert begun[0].wait(600)
            second = threads.submit(found, slow(1))
            begun[1].wait(0.5)  # it should not, until the first is done
            assert torch.equal(model(x), expected)
        finally:
            for event in go_on:
                event.set()
    assert first.result().keys() == second.result().keys() == {"make"}
    assert torch.equal(model(x), expected)
