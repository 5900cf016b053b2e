"""Small torch models of every family, for the tests of units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anabranch.workloads.residual import BasicBlock


class Mlp(nn.Module):
    """Two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.first(x.view(x.size(0), -1)))
        scores: torch.Tensor = self.out(torch.tanh(self.second(hidden)) * 2)
        return scores


class Cnn(nn.Module):
    """A stem, a cut convolution with a pool, and a linear layer behind the flattened picture."""

    def __init__(self, flatten: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.hidden, self.out = nn.Linear(6 * 16, 7), nn.Linear(7, 3)
        self.flatten = flatten

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(torch.relu(self.conv(self.stem(x).relu())), 2)
        scores: torch.Tensor = self.out(functional.silu(self.hidden(self.flatten(x))))
        return scores


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        BasicBlock(4, 4, 1),
        BasicBlock(4, 8, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def normed(norm: Callable[[], nn.Module], *before: nn.Module) -> nn.Module:
    """A norm over the 8 channels that `before` makes of a stem's 4, or one convolution."""
    made = before or (nn.Conv2d(4, 8, 3),)
    return nn.Sequential(nn.Conv2d(1, 4, 3), *made, norm(), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3))


def rows_normed(norm: nn.Module) -> nn.Module:
    """A norm over 8 units, and 7 before it."""
    hidden = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 8))
    return nn.Sequential(*hidden, norm, nn.ReLU(), nn.Linear(8, 3))


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Conv2d(4, 6, 1),
        nn.ReLU6(),
        nn.Conv2d(6, 6, 3, groups=6, padding=1),
        nn.ReLU6(),
        nn.ConvTranspose2d(6, 5, 2, stride=2),
        nn.PReLU(5),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


class Recurrent(nn.Module):
    """Tokens through a recurrent layer; the last output, or both directions' last states, are classified."""

    def __init__(self, layer: Any, by_state: bool = False) -> None:
        super().__init__()
        self.embed, self.rnn, self.by_state = nn.Embedding(9, 5), layer, by_state
        self.out = nn.Linear(layer.hidden_size * (2 if layer.bidirectional else 1), 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output, state = self.rnn(self.embed(tokens))
        if self.by_state:
            state = state[0] if self.rnn.mode == "LSTM" else state
            last = torch.cat((state[-2], state[-1]), dim=1)
        else:
            last = output[:, -1]
        scores: torch.Tensor = self.out(last)
        return scores


class Transformer(nn.Module):
    """Tokens through torch's encoder."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        layer = nn.TransformerEncoderLayer(8, 4, 12, 0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.encoder(self.embed(tokens)).mean(1))
        return scores


class Attentive(nn.Module):
    """One attention layer with keys and values of other widths, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.keys, self.values = nn.Embedding(9, 8), nn.Linear(8, 6), nn.Linear(8, 4)
        self.attend = nn.MultiheadAttention(8, 4, kdim=6, vdim=4, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        found, _ = self.attend(x, self.keys(x), self.values(x))
        scores: torch.Tensor = self.out((x + found)[:, 0])
        return scores


def pictures() -> torch.Tensor:
    return torch.randn(5, 1, 8, 8)


def tokens() -> torch.Tensor:
    return torch.randint(0, 9, (5, 4))


LSTM = {"batch_first": True, "num_layers": 2}

# The smaller model is exactly the whole one with units unread.
EXACT: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (Mlp, lambda: torch.randn(5, 6)),
    "cnn": (lambda: Cnn(nn.Flatten()), pictures),
    "cnn, torch.flatten": (lambda: Cnn(lambda x: torch.flatten(x, 1)), pictures),
    "cnn, reshape": (lambda: Cnn(lambda x: x.reshape(x.shape[0], -1)), pictures),
    "batch norm": (lambda: normed(lambda: nn.BatchNorm2d(8)), pictures),  # in evaluation it scales
    "instance norm": (lambda: normed(lambda: nn.InstanceNorm2d(8, affine=True)), pictures),
    "group norm of channels": (lambda: normed(lambda: nn.GroupNorm(8, 8)), pictures),
    "group norm": (lambda: normed(lambda: nn.GroupNorm(4, 8)), pictures),
    "depthwise": (depthwise, pictures),
    "residual": (resnet, pictures),
    "lstm": (lambda: Recurrent(nn.LSTM(5, 6, **LSTM)), tokens),
    "lstm, both ways": (lambda: Recurrent(nn.LSTM(5, 6, bidirectional=True, **LSTM)), tokens),
    "lstm, states": (lambda: Recurrent(nn.LSTM(5, 6, bidirectional=True, **LSTM), True), tokens),
    "gru": (lambda: Recurrent(nn.GRU(5, 6, batch_first=True)), tokens),
    "gru, states": (lambda: Recurrent(nn.GRU(5, 6, bidirectional=True, batch_first=True), True), tokens),
    "rnn": (lambda: Recurrent(nn.RNN(5, 6, bias=False, batch_first=True)), tokens),
    "transformer": (Transformer, tokens),
    "transformer, norm first": (lambda: Transformer(norm_first=True), tokens),
    "attention": (Attentive, tokens),
    "group norm of one group": (
        lambda: normed(lambda: nn.GroupNorm(1, 8), nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 8, 3)),
        pictures,
    ),
    "layer norm": (lambda: rows_normed(nn.LayerNorm(8)), lambda: torch.randn(5, 6)),
    "layer norm, bare": (
        lambda: rows_normed(nn.LayerNorm(8, elementwise_affine=False)),
        lambda: torch.randn(5, 6),
    ),
    "root mean square norm": (lambda: rows_normed(nn.RMSNorm(8)), lambda: torch.randn(5, 6)),
}
