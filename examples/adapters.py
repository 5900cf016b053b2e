"""A small transformer over the digits, and ways to fine-tune a part of it: see docs/adapters.md."""

from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import nn

from anabranch.workloads.adapters import bias_only, head_only, lora, prompts, take_turn
from anabranch.workloads.app import Examples, Shard
from anabranch.workloads.digits import Digits

WIDTH, PATCHES = 32, 16


class Patches(nn.Module):
    """Images of 8 x 8 as sequences of 16 patches, 2 x 2 pixels each, with their places."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels = nn.Linear(4, WIDTH)
        self.places = nn.Parameter(torch.randn(PATCHES, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 64) to (batch, 16, width)."""
        found: torch.Tensor = self.pixels(x.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, PATCHES, 4))
        return found + self.places


class Classifier(nn.Module):
    """An encoder of two layers; what it says of the patches is summed up, and the head tells the digit."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.patches = Patches()
        self.encoder: nn.Module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 64) to (batch, 10)."""
        found: torch.Tensor = self.head(self.encoder(self.patches(x)).mean(1))
        return found


class Whole(Digits):
    """All is trained, on digits that lie on their side: what the others begin from."""

    optimizer = torch.optim.Adam

    def model(self) -> Any:
        """Of `data_path`, a file of this App's weights, where there is one."""
        net = Classifier()
        if self.data_path:
            net.load_state_dict({n: torch.from_numpy(a) for n, a in load_file(self.data_path).items()})
        return net

    def data(self, shard: Shard) -> Examples:
        """Turned by 90 degrees."""
        upright = super().data(shard)
        images = np.rot90(upright.x.reshape(-1, 8, 8), axes=(1, 2))
        return Examples(images.reshape(-1, 64).copy(), upright.y)


class Pretrained(Whole):
    """All is trained, on upright digits."""

    def data(self, shard: Shard) -> Examples:
        """As they are."""
        return Digits.data(self, shard)


class Adapted(Pretrained):
    """An adapter of rank 4 at each matrix of the encoder, and the head."""

    train_halves = "both"

    def model(self) -> Any:
        """With `requires_grad` on what is trained: the rest is in no update."""
        net = lora(super().model(), rank=4, alpha=8, targets=("encoder.*",), train=self.train_halves)
        net.head.requires_grad_(True)
        return net


class OneHalf(Adapted):
    """The halves B alone, so that means are exact; half the bytes."""

    train_halves = "b"


class Turns(Adapted):
    """The halves in turns, four versions each."""

    train_halves = "alternate"

    def train(self, model: Any, examples: Examples, plan: Any, seed: int) -> dict[str, float]:
        """As ever, after it is said whose turn it is."""
        take_turn(model, self.version)
        return super().train(model, examples, plan, seed)


class Prompts(Pretrained):
    """Eight tokens before the patches, and the head."""

    def model(self) -> Any:
        """The encoder is frozen by `prompts`, the patches here."""
        net = super().model()
        net.patches.requires_grad_(False)
        net.encoder = prompts(net.encoder, WIDTH, tokens=8)
        return net


class Biases(Pretrained):
    """Biases, those of norms among them, and nothing else."""

    def model(self) -> Any:
        """One line."""
        return bias_only(super().model())


class Head(Pretrained):
    """The last layer."""

    def model(self) -> Any:
        """One line."""
        return head_only(super().model())
