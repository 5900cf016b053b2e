"""An App that keeps its module, or a part of it: no run begins where another ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anabranch as ab
from anabranch.core.errors import AppError
from anabranch.workloads import App, Examples, Shard
from anabranch.workloads.calls import model_of

X = np.random.default_rng(5).integers(0, 9, size=(32, 3))
Y = X.sum(1) % 2


class Bag(nn.Module):
    """Words, and a head."""

    def __init__(self, words: nn.Embedding, head: nn.Module) -> None:
        super().__init__()
        self.words, self.head = words, head
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.words(x).mean(1)
        if self.training:
            self.seen.add_(found.detach().mean(0))
        scores: torch.Tensor = self.head(found)
        return scores


class Keeping(App):
    """Keeps the whole module, a part of it, or the numbers of a part."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self._kept, self._vectors, self._head = kept, torch.randn(9, 4), nn.Linear(4, 2)
        self._whole = self._made()

    def _made(self) -> nn.Module:
        own = self._vectors if self._kept == "vectors" else self._vectors.clone()
        head = self._head if self._kept == "head" else nn.Linear(4, 2)
        return Bag(nn.Embedding.from_pretrained(own, freeze=False), head)

    def model(self) -> Any:
        return self._whole if self._kept == "whole" else self._made()

    def data(self, shard: Shard) -> Examples:
        return Examples(X, Y)


@pytest.mark.parametrize("kept", ["whole", "head", "vectors"])
def test_two_runs_of_one_app_are_the_same(kept: str) -> None:
    app = Keeping(kept)
    held = app._vectors, app._head.weight.detach(), app._whole.state_dict()["seen"]
    before = [tensor.clone() for tensor in held]
    runs = [
        ab.simulate(app, strategy="fedasync", fleet=ab.Fleet(clients=2), until=ab.Until(updates=4))
        for _ in range(2)
    ]
    assert runs[0].result.model_sha256 == runs[1].result.model_sha256
    trained = runs[0].model()
    assert not torch.equal(trained.words.weight, app._vectors)
    assert all(map(torch.equal, held, before))


def test_what_is_made_anew_is_not_copied() -> None:
    made: list[nn.Module] = []

    class New(Keeping):
        def model(self) -> Any:
            made.append(self._made())
            return made[-1]

    app = New("nothing")
    for count in (1, 2, 3):
        assert model_of(app, 0) is made[-1]
        assert len(made) == count


def test_what_is_frozen_is_not_copied() -> None:
    app = Keeping("whole")
    app._whole.words.requires_grad_(False)
    model_of(app, 0)
    copied = model_of(app, 0)
    assert copied.words.weight is app._whole.words.weight  # type: ignore[union-attr]
    assert copied.head.weight is not app._whole.head.weight  # type: ignore[union-attr]
    assert torch.equal(copied.head.weight, app._whole.head.weight)  # type: ignore[union-attr,arg-type]


def test_what_cannot_be_copied_is_named() -> None:
    app = Keeping("whole")
    app._whole.lock = (row for row in X)  # type: ignore[assignment]
    model_of(app, 0)
    with pytest.raises(AppError, match=r"Keeping: model\(\) returned what .* cannot be copied .*generator"):
        model_of(app, 0)
