"""The digits, by adapters of rank 4 beside the frozen layers of a network trained on turned pictures.

The pictures that are turned are the devices' own: a stand-in for a start on data of other people.
"""

from __future__ import annotations

from typing import Any, ClassVar

from anabranch.workloads.adapters import lora
from benchmarks.rotated_digits import RotatedDigits

RANK, ALPHA = 4, 8.0


class Both(RotatedDigits):
    """Both halves of each adapter are trained."""

    name = "both"
    train_halves: ClassVar[str] = "both"

    def model(self) -> Any:
        """A `torch.nn.Sequential`; all but the adapters is frozen."""
        model = super().model()
        lora(model, rank=RANK, alpha=ALPHA, train=self.train_halves)
        return model


class Narrow(Both):
    """B alone: A stays as it was drawn (FFA-LoRA)."""

    name = "b"
    train_halves = "b"
