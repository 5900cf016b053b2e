"""Fashion-MNIST by an MLP of 25,450 weights: a task of it costs a tenth of the CNN's."""

from __future__ import annotations

from typing import Any

from anabranch.workloads.fashion_mnist import FashionMnist


class FashionMlp(FashionMnist):
    """One hidden layer of 32."""

    name = "fashion-mlp"

    def model(self) -> Any:
        """Small enough that devices are trained in stacks."""
        from torch import nn

        return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
