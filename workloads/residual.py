"""The basic block of residual networks, as a torch module. Needs torch."""

from __future__ import annotations

import torch
from torch import nn


class BasicBlock(nn.Module):
    """relu(shortcut(x) + norm2(conv2(relu(norm1(conv1 x))))), He et al. 2016, figure 2.

    The norms inside have no running statistics; that of the shortcut, a 1x1 convolution where the shape
    changes, has.
    """

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width, track_running_stats=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width, track_running_stats=False)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(count, before, h, w) to (count, width, h / stride, w / stride)."""
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(self.shortcut(x) + inner)
