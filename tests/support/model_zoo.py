"""Models as people write them: whatever may stand between two layers, odd weights and all."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

Tensor = torch.Tensor
Made = tuple[nn.Module, Tensor]


class Body(nn.Module):
    """Layers by name, and a function of them and the input."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.body = body
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def rows() -> Tensor:
    return torch.randn(5, 6)


def series() -> Tensor:
    """8 steps of 6 values: as many steps as there are units."""
    return torch.randn(5, 8, 6)


def between(*layers: nn.Module, width: int = 8) -> nn.Sequential:
    """Two linear layers, and others between them."""
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(width, 3))


def conv(axes: int, *layers: nn.Module) -> nn.Module:
    """A stem, a convolution of 8 channels, and what comes behind it."""
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    return nn.Sequential(kind(2, 4, 3), kind(4, 8, 1), *layers, nn.Flatten(), nn.LazyLinear(3))


def grid(axes: int) -> Tensor:
    return torch.randn(5, 2, *[6] * axes)


def weighted(norm: Callable[..., Any], *options: object) -> nn.Module:
    """A model one of whose layers has computed weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old ones say that they are old
        layer = nn.Linear(8, 8)
        norm(layer, *options)
    return between(nn.ReLU(), layer, nn.ReLU())


def shared(by_memory: bool) -> nn.Module:
    """Two layers of one weight."""
    one, two = nn.Linear(8, 8), nn.Linear(8, 8)
    two.weight = nn.Parameter(one.weight.data) if by_memory else one.weight
    return between(nn.ReLU(), one, nn.ReLU(), two, nn.ReLU())


def autoencoder(body: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return Body(body, one=nn.Linear(6, 8), two=nn.Linear(8, 6))


def frozen() -> nn.Module:
    """The first layer's weight does not learn."""
    model = between(nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    model.get_parameter("0.weight").requires_grad_(False)
    return model


def pair(body: Callable[[Any, Tensor], Tensor], width: int = 8) -> nn.Module:
    """Two layers that make 8 units each of the input, and one that takes what the body makes of them."""
    return Body(body, a=nn.Linear(6, 8), b=nn.Linear(6, 8), out=nn.Linear(width, 3))


def steps(layer: nn.Module, width: int = 8) -> nn.Module:
    """A layer over series, of which the last step is classified."""
    return Body(lambda self, x: self.out(self.layer(x)[0][:, -1]), layer=layer, out=nn.Linear(width, 3))


class Scaled(nn.Module):
    """A parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))
        self.shift: Tensor
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.two(self.one(x) * self.scale + self.shift)
        return scores


class Branching(nn.Module):
    """What it does depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        scores: Tensor = self.two(hidden if hidden.sum() > 0 else -hidden)
        return scores


class Blocks(nn.Module):
    """A list of layers, in a loop, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 7), nn.GELU(), nn.Linear(7, 8)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        scores: Tensor = self.last(x)
        return scores


def bag() -> Tensor:
    return torch.randint(0, 9, (5, 4))


def tied_language_model() -> nn.Module:
    model = Body(
        lambda self, x: self.out(functional.relu(self.hidden(self.embed(x)))),
        embed=nn.Embedding(9, 8),
        hidden=nn.Linear(8, 8),
        out=nn.Linear(8, 9, bias=False),
    )
    model.get_submodule("out").weight = model.get_submodule("embed").weight
    return model


def gated(body: Callable[[Any, Tensor], Tensor], **more: nn.Module) -> Made:
    """The body gates the channels that a depthwise convolution makes, within a residual block."""
    squeeze = {"down": nn.Conv2d(8, 3, 1), "up": nn.Conv2d(3, 8, 1)}
    expand = {"stem": nn.Conv2d(2, 4, 3), "wide": nn.Conv2d(4, 8, 1), "norm": nn.BatchNorm2d(8)}
    narrow = {"depth": nn.Conv2d(8, 8, 3, padding=1, groups=8), "narrow": nn.Conv2d(8, 4, 1)}

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.stem(x)
        found: Tensor = self.out(
            (x + self.narrow(body(self, self.depth(self.norm(self.wide(x)))))).mean((2, 3))
        )
        return found

    return Body(forward, **expand, **narrow, out=nn.Linear(4, 3), **(more or squeeze)), grid(2)


def squeezed(self: Any, x: Tensor) -> Tensor:
    """As torchvision writes it: squeeze-and-excitation by convolutions."""
    found: Tensor = self.up(self.down(F.adaptive_avg_pool2d(x, 1)).relu()).sigmoid() * x
    return found


def squeezed_by_view(self: Any, x: Tensor) -> Tensor:
    """As it was published."""
    b, c, _, _ = x.size()
    scale = self.up(self.down(F.adaptive_avg_pool2d(x, 1).view(b, c)).relu()).sigmoid().view(b, c, 1, 1)
    found: Tensor = x * scale.expand_as(x)
    return found


def squeezed_by_index(self: Any, x: Tensor) -> Tensor:
    scale: Tensor = torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3))))))
    return x.mul_(scale[:, :, None, None])


class ChannelScale(nn.Module):
    """LayerScale, and a shift, over the channels of pictures or the last axis."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class RootMeanSquare(nn.Module):
    """RMSNorm as transformers of today write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class RotaryAttention(nn.Module):
    """Causal attention whose queries and keys are turned by their places."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in "qkvo")
        self.angles: Tensor
        rates = 10 ** -torch.arange(0, 1, 2 / self.head_width)
        self.register_buffer("angles", torch.outer(torch.arange(8.0), rates), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        mixed: Tensor = self.o(found.transpose(1, 2).reshape(b, t, -1))
        return mixed

    def turned(self, x: Tensor) -> Tensor:
        cos, sin = self.angles.cos(), self.angles.sin()
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class SwiGlu(nn.Module):
    """The feed-forward part of transformers of today."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return found


class Llama(nn.Module):
    """A language model of today's form, which classifies."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(9, 8), norm(8), nn.Linear(8, 3, bias=False)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"a": norm(8), "attend": RotaryAttention(8, 2), "b": norm(8), "mlp": SwiGlu(8, 11)})
            for _ in "xy"
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["attend"](layer["a"](x))  # type: ignore[index]
            x = x + layer["mlp"](layer["b"](x))  # type: ignore[index]
        scores: Tensor = self.out(self.norm(x)[:, -1])
        return scores


def sentence() -> Tensor:
    """As many tokens as `RotaryAttention` has angles."""
    return torch.randint(0, 9, (5, 8))


F = functional
# Products of two values of one size.
GATED: dict[str, Callable[[], Made]] = {
    "swiglu": lambda: (nn.Sequential(nn.Linear(6, 6), SwiGlu(6, 8), nn.Linear(6, 3)), rows()),
    "swiglu of one layer": lambda: (
        Body(
            lambda s, x: s.out(F.silu((h := s.wide(x).chunk(2, dim=-1))[0]) * h[1]),
            wide=nn.Linear(6, 16),
            out=nn.Linear(8, 3),
        ),
        rows(),
    ),
    "glu of steps": lambda: (
        Body(lambda s, x: s.out(F.glu(s.wide(x))).mean(1), wide=nn.Linear(6, 16), out=nn.Linear(8, 3)),
        series(),
    ),
    "glu of channels": lambda: (conv(2, nn.BatchNorm2d(8), nn.GLU(1), nn.ReLU()), grid(2)),
    "gate of three": lambda: (
        Body(
            lambda s, x: s.out(s.a(x).sigmoid() * s.b(x) * s.c(x).tanh()),
            a=nn.Linear(6, 8),
            b=nn.Linear(6, 8),
            c=nn.Linear(6, 8),
            out=nn.Linear(8, 3),
        ),
        rows(),
    ),
    "highway within": lambda: (pair(lambda s, x: s.out(s.a(x).relu() * (1 - s.b(x).sigmoid()))), rows()),
    "gate of one unit": lambda: (
        Body(
            lambda s, x: s.out(s.a(x).relu() * s.b(x).sigmoid()),
            a=nn.Linear(6, 8),
            b=nn.Linear(6, 1),
            out=nn.Linear(8, 3),
        ),
        rows(),
    ),
    "gate of places": lambda: gated(
        lambda s, x: x * s.where(x).sigmoid(), where=nn.Conv2d(8, 1, 3, padding=1)
    ),
    "squeeze and excite": lambda: gated(squeezed),
    "squeeze and excite, viewed": lambda: gated(squeezed_by_view, down=nn.Linear(8, 3), up=nn.Linear(3, 8)),
    "squeeze and excite, indexed": lambda: gated(squeezed_by_index, down=nn.Linear(8, 3), up=nn.Linear(3, 8)),
    "channel scale": lambda: gated(lambda s, x: s.own(x), own=ChannelScale(8, 1, 1)),
    "channel scale, batched": lambda: gated(lambda s, x: s.own(x), own=ChannelScale(1, 8, 1, 1)),
    "channel scale, viewed": lambda: gated(
        lambda s, x: x * s.own.scale.view(1, -1, 1, 1) + s.own.shift[:, None, None], own=ChannelScale(8)
    ),
    "layer scale": lambda: (between(ChannelScale(8), nn.GELU(), ChannelScale(1)), rows()),
    "gate of normed channels": lambda: gated(
        lambda s, x: x * s.groups(s.up(x)).sigmoid(), up=nn.Conv2d(8, 8, 1), groups=nn.GroupNorm(4, 8)
    ),
    "a layer's bias as a gate": lambda: (pair(lambda s, x: s.out(s.a(x) * s.a.bias)), rows()),
    "today's transformer": lambda: (Llama(nn.RMSNorm), sentence()),
    "today's transformer, own norms": lambda: (Llama(RootMeanSquare), sentence()),
}


def normed_product(norm: nn.Module, body: Callable[[Any, Tensor], Tensor], **more: nn.Module) -> Made:
    """A norm behind a product, whose axes are not known, and a hidden layer behind the norm."""
    return (
        Body(
            lambda s, x: s.out(s.hidden(s.norm(body(s, x))).relu()),
            a=nn.Linear(6, 8),
            b=nn.Linear(6, 8),
            norm=norm,
            hidden=nn.Linear(8, 7),
            out=nn.Linear(7, 3),
            **more,
        ),
        rows(),
    )


def gate(self: Any, x: Tensor) -> Tensor:
    found: Tensor = self.a(x) * self.b(x).sigmoid()
    return found


# What a norm takes for units or for steps is whole where it was multiplied; the layers behind it have units.
NORMED: dict[str, Callable[[], Made]] = {
    "batch norm behind a gate": lambda: normed_product(nn.BatchNorm1d(8), gate),
    "group norm behind a gate": lambda: normed_product(nn.GroupNorm(2, 8), gate),
    "prelu behind a gate": lambda: normed_product(nn.PReLU(8), gate),
    "batch norm behind a scale": lambda: normed_product(
        nn.BatchNorm1d(8), lambda s, x: s.own(s.a(x)), own=ChannelScale(8)
    ),
    "batch norm behind a scale of one number": lambda: normed_product(
        nn.BatchNorm1d(8), lambda s, x: s.own(s.a(x)), own=ChannelScale(1)
    ),
    "batch norm behind a glu": lambda: normed_product(
        nn.BatchNorm1d(8), lambda s, x: F.glu(s.wide(x)), wide=nn.Linear(6, 16)
    ),
    "batch norm behind a half": lambda: normed_product(
        nn.BatchNorm1d(8), lambda s, x: s.wide(x).chunk(2, -1)[0], wide=nn.Linear(6, 16)
    ),
}


def flat_and_dealt(self: Any, x: Tensor) -> Tensor:
    """One map as a whole and as two halves: flattened, its places would be other units'."""
    wide = self.wide(self.stem(x))
    a, b = wide.chunk(2, 1)
    found: Tensor = self.out((a * b).flatten(1)) + self.flat(wide.relu().flatten(1))
    return found


ZOO: dict[str, Callable[[], Made]] = {
    "mlp": lambda: (between(nn.ReLU(), nn.Linear(8, 7), nn.Tanh(), width=7), rows()),
    "dropout": lambda: (between(nn.Dropout(0.5), nn.AlphaDropout(0.1), nn.ReLU()), rows()),
    "activations": lambda: (between(nn.SiLU(), nn.Softplus(), nn.Mish(), nn.Hardtanh()), rows()),
    "prelu": lambda: (between(nn.PReLU()), rows()),
    "prelu of channels": lambda: (nn.Sequential(nn.Flatten(), *between(nn.PReLU(8))), rows()),
    "prelu of steps": lambda: (between(nn.PReLU(8)), series()),
    "softmax": lambda: (between(nn.Softmax(-1)), rows()),
    "glu": lambda: (between(nn.GLU(), width=4), rows()),
    "threshold": lambda: (between(nn.Threshold(0.1, 0.0)), rows()),
    "channel shuffle": lambda: (conv(2, nn.ChannelShuffle(2)), grid(2)),
    "pixel shuffle": lambda: (conv(2, nn.PixelShuffle(2)), grid(2)),
    "pixel unshuffle": lambda: (conv(2, nn.PixelUnshuffle(2)), grid(2)),
    "unflatten": lambda: (between(nn.Unflatten(1, (2, 4)), nn.Flatten()), rows()),
    "fold": lambda: (conv(2, nn.Unfold(2)), grid(2)),
    "upsample": lambda: (conv(2, nn.Upsample(scale_factor=2)), grid(2)),
    "conv1d": lambda: (conv(1, nn.ReLU()), grid(1)),
    "conv2d": lambda: (conv(2, nn.ReLU()), grid(2)),
    "conv3d": lambda: (conv(3, nn.ReLU()), grid(3)),
    "transposed 1d": lambda: (conv(1, nn.ConvTranspose1d(8, 5, 2), nn.ReLU()), grid(1)),
    "transposed 2d": lambda: (conv(2, nn.ConvTranspose2d(8, 5, 2), nn.ReLU()), grid(2)),
    "transposed 3d": lambda: (conv(3, nn.ConvTranspose3d(8, 5, 2), nn.ReLU()), grid(3)),
    "transposed, grouped": lambda: (conv(2, nn.ConvTranspose2d(8, 4, 2, groups=2)), grid(2)),
    "grouped": lambda: (conv(2, nn.Conv2d(8, 6, 1, groups=2), nn.ReLU()), grid(2)),
    "depthwise": lambda: (conv(2, nn.Conv2d(8, 8, 3, groups=8), nn.ReLU()), grid(2)),
    "depthwise, twice as many": lambda: (conv(2, nn.Conv2d(8, 16, 1, groups=8)), grid(2)),
    "pools": lambda: (conv(2, nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)), grid(2)),
    "pool over channels": lambda: (conv(1, nn.Flatten(), nn.Unflatten(1, (1, 32)), nn.MaxPool1d(2)), grid(1)),
    "power pool": lambda: (conv(2, nn.LPPool2d(2, 2)), grid(2)),
    "padding": lambda: (conv(2, nn.ReflectionPad2d(1), nn.ZeroPad2d(1)), grid(2)),
    "batch norm 1d": lambda: (conv(1, nn.BatchNorm1d(8), nn.ReLU()), grid(1)),
    "batch norm 2d": lambda: (conv(2, nn.BatchNorm2d(8), nn.ReLU()), grid(2)),
    "batch norm 3d": lambda: (conv(3, nn.BatchNorm3d(8, affine=False), nn.ReLU()), grid(3)),
    "batch norm of rows": lambda: (nn.Sequential(nn.Flatten(), *between(nn.BatchNorm1d(8))), rows()),
    "batch norm of rows or steps": lambda: (between(nn.BatchNorm1d(8), nn.ReLU()), rows()),
    "batch norm of steps": lambda: (between(nn.BatchNorm1d(8), nn.ReLU()), series()),
    "group norm of channels": lambda: (conv(2, nn.GroupNorm(8, 8)), grid(2)),
    "group norm": lambda: (conv(2, nn.GroupNorm(4, 8)), grid(2)),
    "group norm of steps": lambda: (between(nn.GroupNorm(8, 8)), series()),
    "instance norm": lambda: (conv(2, nn.InstanceNorm2d(8, affine=True)), grid(2)),
    "instance norm, bare": lambda: (conv(1, nn.InstanceNorm1d(8)), grid(1)),
    "response norm": lambda: (conv(2, nn.LocalResponseNorm(3)), grid(2)),
    "rnn": lambda: (steps(nn.RNN(6, 8, batch_first=True)), series()),
    "gru": lambda: (steps(nn.GRU(6, 8, 2, batch_first=True)), series()),
    "lstm": lambda: (steps(nn.LSTM(6, 8, batch_first=True)), series()),
    "lstm, both ways": lambda: (steps(nn.LSTM(6, 8, batch_first=True, bidirectional=True), 16), series()),
    "lstm, projected": lambda: (steps(nn.LSTM(6, 8, batch_first=True, proj_size=4), 4), series()),
    "lstm cell": lambda: (
        Body(lambda s, x: s.out(s.cell(x)[0]), cell=nn.LSTMCell(6, 8), out=nn.Linear(8, 3)),
        rows(),
    ),
    "attention": lambda: (
        Body(
            lambda s, x: s.out(s.layer(x, x, x)[0][:, -1]),
            layer=nn.MultiheadAttention(6, 2, batch_first=True),
            out=nn.Linear(6, 3),
        ),
        series(),
    ),
    "attention by hand": lambda: (
        pair(lambda s, x: s.out(F.softmax(s.a(x) @ s.b(x).transpose(1, 2), -1) @ s.a(x)).mean(1)),
        series(),
    ),
    "scaled dot product": lambda: (
        pair(lambda s, x: s.out(F.scaled_dot_product_attention(s.a(x), s.b(x), s.b(x))).mean(1)),
        series(),
    ),
    "encoder layer": lambda: (
        nn.Sequential(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), nn.Linear(6, 3)),
        series(),
    ),
    "embedding": lambda: (
        Body(
            lambda s, x: s.out(s.hidden(s.embed(x)).mean(1)),
            embed=nn.Embedding(9, 8),
            hidden=nn.Linear(8, 7),
            out=nn.Linear(7, 3),
        ),
        bag(),
    ),
    "embedding bag": lambda: (nn.Sequential(nn.EmbeddingBag(9, 6), *between(nn.ReLU())), bag()),
    "embedding, tied": lambda: (tied_language_model(), bag()),
    "tied": lambda: (shared(by_memory=False), rows()),
    "tied by memory": lambda: (shared(by_memory=True), rows()),
    "transposed weight": lambda: (
        autoencoder(lambda s, x: F.linear(s.one(x).relu(), s.one.weight.t()) + s.two(s.one(x))),
        rows(),
    ),
    "weight norm, old": lambda: (weighted(nn.utils.weight_norm), rows()),
    "spectral norm, old": lambda: (weighted(nn.utils.spectral_norm), rows()),
    "weight norm": lambda: (weighted(parametrizations.weight_norm), rows()),
    "weight norm beside it": lambda: (
        nn.Sequential(nn.Linear(6, 6), parametrizations.weight_norm(nn.Linear(6, 6)), *between(nn.ReLU())),
        rows(),
    ),
    "spectral norm": lambda: (weighted(parametrizations.spectral_norm), rows()),
    "orthogonal": lambda: (weighted(parametrizations.orthogonal), rows()),
    "pruned": lambda: (weighted(prune.L1Unstructured.apply, "weight", 0.5), rows()),
    "pruned structure": lambda: (weighted(prune.LnStructured.apply, "weight", 0.5, 2, 0), rows()),
    "residual blocks": lambda: (Blocks(), rows()),
    "sum of two": lambda: (pair(lambda s, x: s.out(s.a(x) + s.b(x))), rows()),
    "product of two": lambda: (pair(lambda s, x: s.out(s.a(x) * torch.sigmoid(s.b(x)))), rows()),
    "concatenation": lambda: (pair(lambda s, x: s.out(torch.cat([s.a(x), s.b(x)], -1)), 16), rows()),
    "stack": lambda: (pair(lambda s, x: s.out(torch.stack([s.a(x), s.b(x)], 1).mean(1))), rows()),
    "split": lambda: (pair(lambda s, x: s.out(torch.cat(s.a(x).split(4, -1)[::-1], -1)), 8), rows()),
    "chunk": lambda: (pair(lambda s, x: s.out(s.a(x).chunk(2, -1)[0]), 4), rows()),
    "slice of units": lambda: (pair(lambda s, x: s.out(s.a(x)[:, :4]), 4), rows()),
    "flip and roll": lambda: (pair(lambda s, x: s.out(s.a(x).flip(-1).roll(1, -1))), rows()),
    "sort": lambda: (pair(lambda s, x: s.out(s.a(x).sort(-1)[0])), rows()),
    "mean over units": lambda: (pair(lambda s, x: s.out(s.a(x) - s.a(x).mean(-1, keepdim=True))), rows()),
    "bilinear": lambda: (
        Body(lambda s, x: s.two(s.one(x), x), one=nn.Linear(6, 8), two=nn.Bilinear(8, 6, 3)),
        rows(),
    ),
    "einsum": lambda: (pair(lambda s, x: s.out(torch.einsum("bi,bj->bi", s.a(x), s.b(x)))), rows()),
    "functional linear": lambda: (
        pair(lambda s, x: F.linear(s.a(x).relu(), s.out.weight, s.out.bias)),
        rows(),
    ),
    "view": lambda: (pair(lambda s, x: s.out(s.a(x).view(-1, 2, 4).reshape(-1, 8))), rows()),
    "permute": lambda: (pair(lambda s, x: s.out(s.a(x).permute(1, 0, 2).transpose(0, 1)[:, -1])), series()),
    "transposed steps": lambda: (pair(lambda s, x: s.out(s.a(x).transpose(1, 2)).mean(1)), series()),
    "own tensors": lambda: (Scaled(), rows()),
    "frozen": lambda: (frozen(), rows()),
    "lazy": lambda: (nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3)), rows()),
    "branching": lambda: (Branching(), rows()),
    "hidden twice": lambda: (pair(lambda s, x: s.out(s.a(x)) + s.out(s.b(x))), rows()),
    **GATED,
    **NORMED,
    "the input squared": lambda: (
        Body(
            lambda s, x: s.out(s.wide(s.stem(x * x)).relu().mean((2, 3))),
            stem=nn.Conv2d(2, 4, 1),
            wide=nn.Conv2d(4, 8, 1),
            out=nn.Linear(8, 3),
        ),
        grid(2),
    ),
    "softmax over an axis kept by numpy's word": lambda: (
        Body(
            lambda s, x: s.out(s.wide(s.stem(x)).mean(2, keepdims=True).softmax(-2).flatten(1)),
            stem=nn.Conv1d(2, 4, 1),
            wide=nn.Conv1d(4, 8, 1),
            out=nn.Linear(8, 3),
        ),
        grid(1),
    ),
    "one unit viewed as all": lambda: (
        Body(
            lambda s, x: s.out(
                ((h := s.wide(s.stem(x))) * s.one(h).view(h.size(0), h.size(1), 1, 1)).mean((2, 3))
            ),
            stem=nn.Conv2d(2, 4, 1),
            wide=nn.Conv2d(4, 8, 1),
            one=nn.Conv2d(8, 1, 1),
            out=nn.Linear(8, 3),
        ),
        torch.randn(5, 2, 2, 4),
    ),
    "halves of a map that is read whole": lambda: (
        Body(
            flat_and_dealt,
            stem=nn.Conv2d(2, 4, 1),
            wide=nn.Conv2d(4, 8, 1),
            out=nn.Linear(4 * 36, 3),
            flat=nn.Linear(8 * 36, 3),
        ),
        grid(2),
    ),
    "squeeze and excite, fixed": lambda: gated(
        lambda s, x: x * s.up(s.down(x.mean((2, 3)))).view(-1, 8, 1, 1),
        down=nn.Linear(8, 3),
        up=nn.Linear(3, 8),
    ),
    "scale of two widths": lambda: (
        Body(
            lambda s, x: s.out(s.a(x) * s.own.scale) + s.out2(s.b(x) * s.own.scale),
            a=nn.Linear(6, 8),
            b=nn.Linear(6, 8),
            own=ChannelScale(8),
            out=nn.Linear(8, 3),
            out2=nn.Linear(8, 3),
        ),
        rows(),
    ),
    "a tensor that no layer makes": lambda: (
        Body(
            lambda s, x: s.out(s.own.scale.relu()) + s.two(x),
            own=ChannelScale(8),
            out=nn.Linear(8, 3),
            two=nn.Linear(6, 3),
        ),
        rows(),
    ),
    "two readers": lambda: (pair(lambda s, x: s.out(s.a(x).relu()) - s.out(s.a(x).tanh())), rows()),
}
