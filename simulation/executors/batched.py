"""Many devices' training in one vectorised pass (`workloads/batched.py`), in this process or in N workers.

A job waits until a result is needed. Then those that are due next, and are alike, are trained with it: a
stack. Where twice as many wait, a stack of those that are due first is begun at once, so that workers train
while this process goes on. What is in a stack follows from the virtual clock alone: a run repeats itself to
the bit, with any number of workers. It differs from a serial run by rounding, and has a digest of its own.
Models that cannot be stacked are trained one by one, and the log says why, once. This process judges that, by
the first stack of a kind of task, as it begins, whose examples are loaded for it; what that shows holds for
those after it. Of other examples than those a stack judges by itself, wherever it is trained: a process that
remembered it would judge by the stack that it happens to get.
"""

from __future__ import annotations

import heapq
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor as Pool
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

from anabranch.core.errors import ConfigError, InvalidUpdate
from anabranch.simulation.executors.base import Evaluation, Job, LocalResult, Pending
from anabranch.simulation.executors.names import BATCHED, COMPILED
from anabranch.simulation.executors.pool import WorkerState, worker_pool
from anabranch.simulation.executors.serial import Deferred
from anabranch.simulation.parts import PARTS
from anabranch.simulation.problem import OneThread, Problem, ProblemSource, device_name
from anabranch.support.own_parts import own_parts
from anabranch.workloads.batched import ANOTHER_RESULT, NOT_COMPARED, BatchedTraining
from anabranch.workloads.torch_trainer import TorchTrainer
from anabranch.workloads.trainer import Training, only, smaller

log = logging.getLogger(__name__)

TRIALS_MAX = 3  # in a stack: where so many diverge, the others may as well
WEIGHTS_BYTES_MAX = 256 << 20  # of a stack; gradients and momentum are as much each
Outcome = LocalResult | InvalidUpdate
Alone = Callable[[], Outcome]  # a training by itself, which nobody has begun
Stackable = Mapping[tuple[Any, ...], bool]  # whether trainings are, by the kind of their examples
Member = tuple[int, Training]  # of a stack: its device, and a training of it


class StackTrainer:
    """Trains the jobs of a stack. Raises `ConfigError` without a torch model."""

    def __init__(self, problem: Problem, compiled: bool) -> None:
        if not isinstance(problem.trainer, TorchTrainer):
            name = COMPILED if compiled else BATCHED
            raise ConfigError(
                f"fleet.executor = {name!r} needs a torch model, and {problem.app.name} has numpy arrays: "
                "write serial or processes"
            )
        self.problem = problem
        self._training = BatchedTraining(problem.trainer, compiled)
        self._said: set[str] = set()
        self._stackable: dict[tuple[Any, ...], Stackable] = {}
        self._diverged: dict[tuple[Any, ...], set[int]] = defaultdict(set)

    def judged(self, jobs: Sequence[Job], keep: bool) -> tuple[frozenset[int], Stackable]:
        """The places of those jobs of a stack that are trained one by one, and what is known of the others.

        Jobs are loaded only until a trial of their kind has told something; `keep` their examples after it.
        """
        kind = _kind(jobs[0])
        parts = {only(job.task): smaller(job.task) for job in jobs}  # few, or one: asking costs a task's step
        said = {of: self._training.objection_to_all(part, of) for of, part in parts.items()}
        why = [said[only(job.task)] for job in jobs]
        for one in said.values():
            self._say(one)
        if not all(why) and kind not in self._stackable:
            self._judge(kind, [job for job, one in zip(jobs, why, strict=True) if not one], keep)
        stackable = self._stackable.get(kind, {})
        return frozenset(i for i, one in enumerate(why) if one or not stackable), stackable

    def train(
        self, jobs: Sequence[Job], unstacked: Collection[int], stackable: Stackable
    ) -> list[Outcome | Alone]:
        """What each job comes to, of what `judged` says; those whose trainings are of one kind are stacked.

        Those that are not are not begun: beside others they gain nothing, and some are never asked for.
        """
        found: dict[int, Outcome | Alone] = {**self._alone(jobs, unstacked)}
        trainings = {i: self.problem.trainings(job) for i, job in enumerate(jobs) if i not in unstacked}
        for members in _alike(trainings):
            stack = [(jobs[i].device, t) for i in members for t in trainings[i]]
            known = stackable.get(_examples_kind(stack))
            if known if known is not None else len(stack) > 1 and not self._tried(_telling(stack))[0]:
                found |= self._stacked(jobs, trainings, members)
            else:
                found |= self._alone(jobs, members)
        return [found[i] for i in range(len(jobs))]

    def _judge(self, kind: tuple[Any, ...], jobs: Sequence[Job], keep: bool) -> None:
        """Find out whether trainings of a kind can be stacked, by the first stack of it that tells something.

        Where all that were tried diverged, others of the next stack are: each device once.
        """
        diverged = self._diverged[kind]
        new = [job for job in jobs if job.device not in diverged]
        alike: dict[tuple[Any, ...], list[Member]] = defaultdict(list)
        for job in new[:TRIALS_MAX] if diverged else new:
            with nullcontext() if keep else self.problem.keeping_none():
                trainings = self.problem.trainings(job)
            members = alike[trainings[0].kind]
            members[:] = _telling([*members, *((job.device, training) for training in trainings)])
        found = {}
        for members in alike.values():
            why, tried = self._tried(members)
            if why == NOT_COMPARED:
                diverged.update(tried)
            else:
                found[_examples_kind(members)] = not why
        if found:
            self._stackable[kind] = found

    def _alone(self, jobs: Sequence[Job], members: Iterable[int]) -> dict[int, Alone]:
        """The jobs at these places, each by itself."""
        return {i: partial(_outcome, partial(self.problem.train, jobs[i])) for i in members}

    def _stacked(
        self, jobs: Sequence[Job], trainings: Mapping[int, list[Training]], members: list[int]
    ) -> dict[int, Outcome]:
        """What the jobs at these places come to, in one stack."""
        try:
            stack = self._training.train([t for i in members for t in trainings[i]], self.problem.frozen)
        except Exception as error:  # noqa: BLE001 - whose it was, only a training of its own can tell
            found = {i: alone() for i, alone in self._alone(jobs, members).items()}
            log.warning("a stack failed, and each of its devices alone did not: %s", error)
            return found
        results = iter(stack)
        own = {i: [next(results) for _ in trainings[i]] for i in members}
        return {i: _outcome(partial(self.problem.finish, jobs[i], own[i])) for i in members}

    def _tried(self, telling: Sequence[Member]) -> tuple[str, list[int]]:
        """Why devices' trainings of one kind are no stack, and who diverged before one told so."""
        diverged: list[int] = []
        for device, training in telling:
            why = self._training.objection(training, self.problem.frozen)
            if why != NOT_COMPARED:
                self._say(why, f", with the examples of {device_name(device)}" * (why == ANOTHER_RESULT))
                return why, diverged
            diverged.append(device)
        return NOT_COMPARED, diverged

    def _say(self, why: str, whose: str = "") -> None:
        if why and why not in self._said:
            self._said.add(why)
            log.warning("devices are trained one by one: %s%s", why, whose)


_opened: WorkerState[StackTrainer] = WorkerState()


class _JobStack:
    """Jobs that are trained together, and their outcomes, computed once."""

    def __init__(self, compute: Callable[[], list[Outcome | Alone]]) -> None:
        self._compute = compute

    def outcome(self, place: int) -> Outcome:
        found = self._outcomes[place]
        if callable(found):
            found = self._outcomes[place] = found()
        return found

    @cached_property
    def _outcomes(self) -> list[Outcome | Alone]:
        return self._compute()


class _Waiting:
    """A job: waiting, then at a place in a stack."""

    def __init__(self, executor: BatchedExecutor, job: Job) -> None:
        self.job = job
        self.stack: _JobStack | None = None
        self.place = 0
        self._executor = executor

    def result(self) -> LocalResult:
        if self.stack is None:
            self._executor.begin_with(self)
        assert self.stack is not None
        if self.job.known is not None:
            return self.job.known.result()
        outcome = self.stack.outcome(self.place)
        if isinstance(outcome, InvalidUpdate):
            raise outcome
        return outcome

    def cancel(self) -> None:
        if self.stack is None:
            self._executor.forget(self)


class BatchedExecutor:
    """Trains jobs that are alike together, in stacks of one vectorised pass.

    `devices_max`: jobs in a stack. Raises `ConfigError` without a torch model.
    """

    exact: ClassVar[bool] = False
    compiled: ClassVar[bool] = False

    def __init__(self, source: ProblemSource, problem: Problem, devices_max: int, workers: int = 0) -> None:
        self._here = StackTrainer(problem, self.compiled)
        self._stack_max = max(1, min(devices_max, WEIGHTS_BYTES_MAX // max(1, 4 * problem.spec.size)))
        self._waiting: dict[tuple[Any, ...], dict[int, _Waiting]] = defaultdict(dict)
        self._pool: Pool | None = None
        if workers:
            self._pool = worker_pool(workers, source, partial(_open, self.compiled))
        self._threads = OneThread()

    @classmethod
    def of(cls, source: ProblemSource, problem: Problem, workers: int) -> BatchedExecutor:
        """See `Executor`."""
        return cls(source, problem, source.config.fleet.batch_devices, workers)

    def train(self, job: Job) -> Pending[LocalResult]:
        """Training with others; it begins when there are enough of them, or when its result is needed."""
        work, waiting = _Waiting(self, job), self._waiting[_kind(job)]
        waiting[id(work)] = work
        if len(waiting) >= 2 * self._stack_max:
            self._begin(waiting, heapq.nsmallest(self._stack_max, waiting.values(), key=_due_s))
        return work

    def evaluate(self, evaluation: Evaluation) -> Pending[Mapping[str, float]]:
        """An evaluation put off until it is needed, or by a worker."""
        if self._pool is not None:
            return self._pool.submit(_evaluate, evaluation)
        return Deferred(partial(self._here.problem.evaluate, evaluation))

    def close(self) -> None:
        """Drops what waits; ends the workers, gives torch its threads back."""
        self._waiting.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._threads.restore()

    def forget(self, work: _Waiting) -> None:
        """The result will not be asked for."""
        self._waiting[_kind(work.job)].pop(id(work), None)

    def begin_with(self, needed: _Waiting) -> None:
        """Begin a job, and with it those of its kind that are due first."""
        waiting = self._waiting[_kind(needed.job)]
        del waiting[id(needed)]
        self._begin(waiting, [needed, *heapq.nsmallest(self._stack_max - 1, waiting.values(), key=_due_s)])

    def _begin(self, waiting: dict[int, _Waiting], works: Sequence[_Waiting]) -> None:
        jobs = [replace(job, known=None) if job.known else job for job in (work.job for work in works)]
        unstacked, stackable = self._here.judged(jobs, keep=self._pool is None)
        if self._pool is None or all(work.job.known for work in works):  # only somebody new asks for it
            stack = _JobStack(partial(self._here.train, jobs, unstacked, stackable))
        else:
            stack = _JobStack(self._pool.submit(_train, jobs, unstacked, stackable).result)
        for place, work in enumerate(works):
            work.stack, work.place = stack, place
            waiting.pop(id(work), None)


class CompiledExecutor(BatchedExecutor):
    """The same by programs that torch compiles, but for models whose passes are written out."""

    compiled: ClassVar[bool] = True


def _alike(trainings: Mapping[int, Sequence[Training]]) -> list[list[int]]:
    """The places of jobs, by the kind of their trainings."""
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, own in trainings.items():
        alike[own[0].kind].append(place)
    return list(alike.values())


def _telling(stack: Sequence[Member]) -> list[Member]:
    """Who has the most examples tells most, and who has one tells nothing where others have more."""
    most = sorted(stack, key=lambda member: -len(member[1].examples))[:TRIALS_MAX]
    return [member for member in most if len(member[1].examples) > 1] or most


def _examples_kind(stack: Sequence[Member]) -> tuple[Any, ...]:
    """What a verdict holds for; with one example each no batch is padded, here or there."""
    return *stack[0][1].examples.kind, any(len(training.examples) > 1 for _, training in stack)


def _outcome(work: Callable[[], LocalResult]) -> Outcome:
    try:
        return work()
    except InvalidUpdate as error:
        return error


def _kind(job: Job) -> tuple[Any, ...]:
    """What is known of a training's kind before its examples are."""
    plan, part = job.task.local, smaller(job.task)
    small = None if part is None else part.small
    return small, plan.learning_rate, plan.momentum, plan.weight_decay, plan.proximal_mu


def _due_s(work: _Waiting) -> float:
    return work.job.due_s


def _open(compiled: bool, source: ProblemSource) -> None:
    _opened.open(lambda: StackTrainer(source.open(), compiled))


def _train(jobs: Sequence[Job], unstacked: Collection[int], stackable: Stackable) -> list[Outcome | Alone]:
    with own_parts(PARTS):
        found = _opened.get().train(jobs, unstacked, stackable)
        return [outcome() if callable(outcome) else outcome for outcome in found]


def _evaluate(evaluation: Evaluation) -> Mapping[str, float]:
    with own_parts(PARTS):
        return _opened.get().problem.evaluate(evaluation)
