"""What the callbacks of other libraries' trainers share: a device inside a training loop that is not ours.

The loop goes on from task to task: what was trained is pushed, and the next task's weights are put into the
same model. The optimizer and its schedules begin each task as they were when the training began, unless they
are kept: nothing but the weights then goes from one task to the next, as on any other device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypedDict

from anabranch.api.joining import COUNTS, METRICS_MAX, JoinedFederation, JoinedTask, check_alone, join
from anabranch.api.live import InProcessServer
from anabranch.api.operated import Operated
from anabranch.client.summary import AgentSummary
from anabranch.core.errors import AppError
from anabranch.core.model.metrics import name_flaw
from anabranch.workloads.metrics import number


class JoinOptions(TypedDict, total=False):
    """As for `join`. `examples`: how many the device has, where its data do not say it."""

    id: str
    examples: int
    state_dir: str | Path | None
    tasks_max: int
    token: str
    ca_sha256: str
    join: str
    insecure: bool
    keepers: Sequence[str]
    cohort_min: int


class Remembering(Protocol):
    """An optimizer, or a schedule of its learning rate."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Remember that."""
        ...


class Participation:
    """One device, from its first task to the end of the run.

    `task` is the one at hand, if any, and `steps` counts the local steps for it. `keeps`: optimizers and
    schedules live on from task to task.
    """

    def __init__(
        self, server: str | Operated | InProcessServer, keep_optimizer: bool, options: JoinOptions
    ) -> None:
        self._server, self.keeps, self._options = server, keep_optimizer, options
        self._fed: JoinedFederation | None = None
        self._tasks: Iterator[JoinedTask] = iter(())
        self._fresh: list[tuple[Remembering, dict[str, Any]]] = []
        self._pull: Any = None
        self._params: list[Any] = []
        self.task: JoinedTask | None = None
        self.steps = 0

    @property
    def summary(self) -> AgentSummary | None:
        """What the device has done, once its training has ended."""
        return self._fed.summary if self._fed else None

    @property
    def examples(self) -> int:
        """As many as the script said; 0: it did not."""
        return self._options.get("examples", 0)

    def remember(self, remembering: Sequence[Remembering]) -> None:
        """With each task these begin as they are now, unless they are kept."""
        if not self.keeps:
            self._fresh = [(it, copy.deepcopy(it.state_dict())) for it in remembering]

    def begin(self, model: Any, processes: int) -> bool:
        """Join with a torch model as it is, and take the first task.

        False where the run has ended. Raises `ConfigError` where several processes train, and as `join`.
        """
        check_alone(processes)
        self._fed = join(self._server, model, **self._options)
        self._tasks = iter(self._fed)
        self._params = [p for p in model.parameters() if p.requires_grad]
        return self.take()

    def take(self) -> bool:
        """The next task, and its weights in the model; False once the run has ended."""
        from anabranch.workloads.torch_loop import proximal_pull

        self.task, self.steps = next(self._tasks, None), 0
        for holder, state in self._fresh:
            holder.load_state_dict(copy.deepcopy(state))
        mu = self.task.plan.proximal_mu if self.task else 0.0
        self._pull = proximal_pull(self._params, mu) if mu else None
        return self.task is not None

    def pull(self) -> None:
        """The gradient of the proximal term, where the strategy counts on one, before a step."""
        if self._pull is not None:
            self._pull()

    def push(self, examples: int, metrics: Mapping[str, Any]) -> None:
        """The model as it is now, for the task at hand, if there is one."""
        if self._fed is not None and self.task is not None:
            self._fed.push(self.examples or examples, numbers(metrics), self.steps)
            self.task = None

    def close(self) -> None:
        """Leave: a task without a result goes to another device."""
        if self._fed is not None:
            self._fed.close()


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Of what a trainer has logged the numbers that a server takes."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if name in COUNTS or name_flaw(name):
            continue
        try:
            found[name] = number(value, name)
        except AppError:
            continue
    return dict(islice(found.items(), METRICS_MAX))
