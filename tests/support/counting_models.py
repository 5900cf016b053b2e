"""Models whose code makes numbers of how many units there are: in a graph such a number is a constant."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from model_zoo import Body, Made, gated, grid, pair, rows, series
from torch import nn
from torch.nn import functional

Tensor = torch.Tensor


def with_buffer(body: Callable[[Any, Tensor], Tensor], values: Tensor) -> Made:
    """Two layers of 8 units, and a buffer with a value for each unit."""
    model = pair(body)
    model.register_buffer("m", values)
    return model, rows()


def with_parameter(body: Callable[[Any, Tensor], Tensor]) -> Made:
    """Two layers of 8 units, and a parameter with a value for each unit."""
    model = pair(body)
    model.register_parameter("g", nn.Parameter(torch.rand(8) + 0.5))
    return model, rows()


def some() -> Tensor:
    return torch.rand(8) + 0.5


def excited_by_count(self: Any, x: Tensor) -> Tensor:
    gate = self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
    found: Tensor = x * gate / self.up.out_channels
    return found


def of_two_widths(number: Callable[[Any], float]) -> Made:
    """Two pairs of layers, each with 8 units between, and a number that is made of both widths."""
    return (
        Body(
            lambda s, x: s.out(s.b(s.in_b(s.a(x).relu())).relu()) * number(s),
            a=nn.Linear(6, 8),
            in_b=nn.Linear(8, 5),
            b=nn.Linear(5, 8),
            out=nn.Linear(8, 3),
        ),
        rows(),
    )


# By name: the model, and the layers whose units may be left out all the same.
COUNTING: dict[str, tuple[Callable[[], Made], set[str]]] = {
    "numel of a buffer": (
        lambda: with_buffer(lambda s, x: s.out(s.a(x) * s.m / s.m.numel()), some()),
        set(),
    ),
    "shape of a buffer": (
        lambda: with_buffer(lambda s, x: s.out(s.a(x) * s.m * s.m.shape[0] ** -0.5), some()),
        set(),
    ),
    "sum of a buffer": (
        lambda: with_buffer(lambda s, x: s.out(s.a(x) * s.m / s.m.sum().item()), some()),
        set(),
    ),
    "sum of a buffer of zeros": (
        lambda: with_buffer(lambda s, x: s.out(s.a(x) * s.m) + s.m.sum().item(), torch.zeros(8)),
        set(),
    ),
    "largest of a buffer": (
        lambda: with_buffer(lambda s, x: s.out(s.a(x) * s.m / float(s.m.max())), some()),
        set(),
    ),
    "half as many inputs": (
        lambda: with_buffer(
            lambda s, x: s.out(s.a(x) * s.m) + x[:, : s.m.numel() // 2].sum(-1, keepdim=True), some()
        ),
        set(),
    ),
    "numel of a parameter": (
        lambda: with_parameter(
            lambda s, x: s.out(s.a(x) * s.g * sum(p.numel() for p in [s._parameters["g"]]))
        ),
        set(),
    ),
    "a gate's width": (
        lambda: (pair(lambda s, x: s.out(functional.silu(s.a(x)) * s.b(x)) / s.a.out_features), rows()),
        set(),
    ),
    "scaled as muP": (
        lambda: (pair(lambda s, x: s.out(s.a(x).sigmoid() * s.b(x)) * (4 / s.out.in_features)), rows()),
        set(),
    ),
    "a layer's inputs": (
        lambda: (pair(lambda s, x: s.out(s.a(x).relu()) / s.out.in_features), rows()),
        set(),
    ),
    "channels of an excitation": (
        lambda: gated(excited_by_count, down=nn.Conv2d(8, 3, 1), up=nn.Conv2d(3, 8, 1)),
        {"down"},
    ),
    "features of a norm": (
        lambda: (
            Body(
                lambda s, x: s.out((s.norm(s.wide(s.stem(x))) / s.norm.num_features).mean((2, 3))),
                stem=nn.Conv2d(2, 4, 1),
                wide=nn.Conv2d(4, 8, 1),
                norm=nn.BatchNorm2d(8),
                out=nn.Linear(8, 3),
            ),
            grid(2),
        ),
        set(),
    ),
    "a recurrent layer's size": (
        lambda: (
            Body(
                lambda s, x: s.out(s.rnn(x)[0][:, -1] * s.rnn.hidden_size**-0.5),
                rnn=nn.GRU(6, 8, batch_first=True),
                out=nn.Linear(8, 3),
            ),
            series(),
        ),
        set(),
    ),
    "one of two gates": (
        lambda: (
            Body(
                lambda s, x: (
                    s.out(s.a(x) * s.b(x).tanh()) + s.out2(s.c(x) * s.d(x).tanh()) / s.c.out_features
                ),
                **{name: nn.Linear(6, 8) for name in "abcd"},
                out=nn.Linear(8, 3),
                out2=nn.Linear(8, 3),
            ),
            rows(),
        ),
        {"a"},
    ),
    "the ratio of two": (lambda: of_two_widths(lambda s: s.a.out_features / s.b.out_features), {"in_b"}),
    "the larger of two": (lambda: of_two_widths(lambda s: max(s.a.out_features, s.b.out_features)), set()),
    "the same width demanded": (
        lambda: of_two_widths(lambda s: {True: 1.0}[s.a.out_features == s.b.out_features]),
        {"in_b"},
    ),
    "heads beside a scale": (
        lambda: (
            Body(
                lambda s, x: s.out(s.heads(x, x, x)[0] * s.a(x)).mean(1),
                heads=nn.MultiheadAttention(6, 2, batch_first=True),
                a=nn.Linear(6, 1),
                out=nn.Linear(6, 3),
            ),
            series(),
        ),
        {"heads"},
    ),
    "dropout by a function": (
        lambda: (pair(lambda s, x: s.out(functional.dropout(s.a(x), 0.1, s.training))), rows()),
        {"a"},
    ),
    "a random factor": (lambda: (pair(lambda s, x: s.out(s.a(x).relu()) * random.random()), rows()), {"a"}),
    "a buffer that counts calls": (
        lambda: with_buffer(lambda s, x: s.out(s.a(x).relu()) * float(s.m.add_(1.0)[0]), some()),
        {"a"},
    ),
}
