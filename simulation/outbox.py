"""What a simulated device has in its outbox."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.core.model.updates import Task
from anabranch.core.unwritten import dataclass
from anabranch.simulation.executors.base import LocalResult


@dataclass(frozen=True, eq=False)
class FinishedUpdate:
    """A finished update, kept until the server has answered for good. `sha256`: of its payload.

    `base_head` names the version that it was trained from, where its number may not do.
    """

    task: Task
    update_id: str
    examples: int
    result: LocalResult
    sha256: Callable[[], str]
    base_head: str = ""
