"""The digits with 256 numbers in the place of 4,810 weights: see docs/subspace.md."""

from anabranch.workloads.digits import Digits
from anabranch.workloads.subspace import Subspace


class Small(Subspace):
    """What travels is 256 numbers; with biases as they are, and each matrix for itself: `layers="each"`."""

    def __init__(self, data_path: str = "") -> None:
        super().__init__(Digits(data_path), dimension=256)
