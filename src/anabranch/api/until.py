"""`Until`: when a run ends, and what it is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anabranch.core.config.tables import RunTable
from anabranch.core.errors import ConfigError
from anabranch.core.model.metrics import ACCURACY
from anabranch.core.plain import of_python


@dataclass(frozen=True)
class Until:
    """A run ends with the first of these; 0 updates, versions or seconds are no end, nor is a target of None.

    What a file says of an end counts no more.

    `updates` applied, `versions` published, virtual `seconds`, or a measurement as good as the target: an
    `accuracy`, or else a `target` of another `metric` of the App's, with its `mode` (`max`, `min`) where that
    is neither accuracy nor loss. With `go_on` the target ends nothing: the way to it is measured. So is the
    way to a file's own target, where none is said here.
    """

    updates: int = 0
    versions: int = 0
    seconds: float = 0.0
    accuracy: float | None = None
    metric: str = RunTable.metric
    mode: str = RunTable.mode
    target: float | None = None
    go_on: bool = False

    def keys(self) -> dict[str, Any]:
        """The keys of `[run]` that it stands for: its ends, all of them, and what it says of the goal.

        Raises `ConfigError`.
        """
        found: dict[str, Any] = {
            "updates_max": self.updates,
            "versions_max": self.versions,
            "virtual_s_max": of_python(self.seconds),
        }
        if self.accuracy is not None and self.metric not in (RunTable.metric, ACCURACY):
            raise ConfigError(
                f"Until.accuracy is no target of {self.metric!r}: write target={self.accuracy!r} in its place"
            )
        given = {"target_accuracy": self.accuracy, "target": self.target}
        targets = {key: of_python(value) for key, value in given.items() if value is not None}
        named = {key: getattr(self, key) for key in ("metric", "mode") if getattr(self, key) != "auto"}
        return {**found, **named, **targets, "stop_at_target": bool(targets) and not self.go_on}
