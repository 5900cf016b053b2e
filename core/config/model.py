"""The `[model]` table: what becomes of tensors that no optimizer trains."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelTable:
    """`[model]`: what becomes of its buffers, tensors that are no parameters, such as running statistics.

    `buffers`: `average` (never beyond the current value and those that devices have reached), `latest` (those
    of the newest update), `local` (each device keeps its own). `buffer_names`: patterns of the names of a
    Flower app's buffers, which has them of no other kind than weights.
    """

    buffers: str = "average"
    buffer_names: list[str] = field(
        default_factory=lambda: ["*running_mean", "*running_var", "*moving_mean", "*moving_variance"]
    )
