"""A small residual network (He et al. 2016) on Fashion-MNIST: inner channels to drop, widths that stay.

Of the norms, those inside the blocks keep no running statistics: they use the batch's, in evaluation too,
as in the published code of AsyncDrop (Dun et al. 2023). Those of the stem and of the shortcuts, whose
channels are never cut, keep them. Running means and variances are
floats and are averaged like weights; integer buffers (`num_batches_tracked`) never are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anabranch.workloads.fashion_mnist import FashionMnist

if TYPE_CHECKING:
    from torch import nn

WIDTHS = (16, 32, 64)


class FashionMnistResNet(FashionMnist):
    """A stem, three blocks, a linear layer: 77,978 numbers; the data of `fashion-mnist`."""

    name = "fashion-mnist-resnet"

    def model(self) -> Any:
        """A `torch.nn.Sequential`: stem, blocks, average over the picture, classes."""
        from torch import nn

        from anabranch.workloads.residual import BasicBlock

        blocks: list[nn.Module] = []
        before = WIDTHS[0]
        for i, width in enumerate(WIDTHS):
            blocks.append(BasicBlock(before, width, stride=2 if i else 1))
            before = width
        return nn.Sequential(
            nn.Conv2d(1, WIDTHS[0], 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(WIDTHS[0]),
            nn.ReLU(),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(before, 10),
        )
