"""What a simulated device remembers of its uplink, and what the server takes of it."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fleets import Ones, config

from anabranch.compress.feedback import Memory
from anabranch.core.config.goal import Goal
from anabranch.core.config.tables import Config
from anabranch.core.model.updates import Ask, Capability, Decision, Reason, Task, Verdict
from anabranch.reports.journal_files import DigestJournal
from anabranch.reports.recorder import Recorder
from anabranch.simulation.executors.base import Evaluation, Executor, Job, LocalResult, Pending
from anabranch.simulation.executors.serial import SerialExecutor
from anabranch.simulation.hasher import Hasher
from anabranch.simulation.problem import ProblemSource
from anabranch.simulation.run import Simulation, open_simulation
from anabranch.simulation.storage import FinishedUpdate

UPLINK = {"codec": "ef(0.9)|topk(0.25)|int8|gaps|zstd"}


class Watched:
    """An executor that shows every job to `seen` before it is done."""

    def __init__(self, executor: Executor, seen: list[Job]) -> None:
        self._executor, self._seen = executor, seen

    def train(self, job: Job) -> Pending[LocalResult]:
        self._seen.append(job)
        return self._executor.train(job)

    def evaluate(self, evaluation: Evaluation) -> Pending[Mapping[str, float]]:
        return self._executor.evaluate(evaluation)

    def close(self) -> None:
        self._executor.close()


@dataclass
class Watch:
    """A simulation, its jobs so far, and every push with its answer."""

    simulation: Simulation
    jobs: list[Job]
    pushes: list[tuple[str, FinishedUpdate, Decision]]


@contextmanager
def watched(settings: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    problem = ProblemSource(settings, Ones(64)).open()
    jobs: list[Job] = []
    recorder = Recorder("fedbuff", "ones", 0, Goal(), {}, "simulated")
    executor = Watched(SerialExecutor(problem), jobs)
    journal = DigestJournal(problem.spec, settings)
    watch = Watch(Simulation(settings, problem, executor, journal, recorder, None), jobs, [])
    push = watch.simulation.world.push

    def pushed(client_id: str, done: FinishedUpdate) -> Decision:
        decision = push(client_id, done)
        assert isinstance(decision, Decision), "none has a flaw"
        watch.pushes.append((client_id, done, decision))
        return decision

    monkeypatch.setattr(watch.simulation.world, "push", pushed)
    yield watch
    executor.close()


def rough(**server: Any) -> Config:
    return config(
        uplink=UPLINK,
        run={"virtual_s_max": 400.0},
        fleet={"dropout": 0.2, "availability": 0.7, "availability_period_s": 20.0, "latency_s": 0.5},
        server=server,
    )


def test_a_residual_is_committed_by_an_update_that_was_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(rough(staleness_max=1), monkeypatch) as watch:
        watch.simulation.run()
    held: dict[str, Memory | None] = {}
    answers = {o.update_id: (c, o, d) for c, o, d in watch.pushes}
    verdicts = {d.verdict for _, _, d in answers.values()}
    assert verdicts == set(Verdict), "the run has rejected updates, too"
    by_task = {o.task.task_id: (o, d) for _, o, d in answers.values()}
    for job in watch.jobs:
        client = job.task.client_id
        assert job.memory is held.get(client)
        if job.task.task_id in by_task:
            done, decision = by_task[job.task.task_id]
            assert done.result.memory is not None
            if decision.verdict is not Verdict.REJECTED:
                held[client] = done.result.memory
    lost = len(watch.jobs) - len(by_task)
    assert lost > 3, "devices vanish in the middle of tasks, and keep what they remember"


def test_a_resent_update_has_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(rough(), monkeypatch) as watch:
        watch.simulation.run()
    digests: dict[str, set[str]] = {}
    for _, done, _ in watch.pushes:
        payload = hashlib.sha256(done.result.payload).hexdigest()
        assert payload == done.sha256()
        digests.setdefault(done.update_id, set()).add(payload)
    assert len(watch.pushes) > len(digests), "some were sent twice"
    assert all(len(found) == 1 for found in digests.values())


def test_no_memory_travels_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(config(), monkeypatch) as watch:
        watch.simulation.run()
    assert all(job.memory is None for job in watch.jobs)
    assert all(done.result.memory is None for _, done, _ in watch.pushes)


def task_of(simulation: Simulation) -> Task:
    simulation.world.enrol("a", Capability(64, codecs=("int8:1", "zstd:1")))
    answer = simulation.world.ask(Ask("a", "t"))
    assert isinstance(answer, tuple)
    return answer[0]


@pytest.mark.parametrize(
    ("codec", "why"),
    [("raw", ""), ("bf16", "'bf16', the task asked for 'int8|zstd'"), ("int8|zstd|zstd", "is enough")],
)
def test_an_update_has_the_codec_of_its_task_or_raw(codec: str, why: str) -> None:
    with open_simulation(config(uplink={"codec": "int8|zstd"}), app=Ones()) as simulation:
        task = task_of(simulation)
        assert task.uplink == "int8|zstd"
        payload = np.ones(4, np.float32).tobytes()
        result = LocalResult(payload, codec, 1, {})
        done = FinishedUpdate(task, "u", 64, result, Hasher().begin(payload))
        objection = simulation.world.objection("a", done)
        assert (objection is None) == (not why)
        if not why:
            decision = simulation.world.push("a", done)
            assert isinstance(decision, Decision)
            assert decision.reason is Reason.NONE
        else:
            assert why in str(objection)


def test_what_a_run_held_is_free_at_its_end() -> None:
    gc.collect()
    gc.disable()
    try:
        with open_simulation(config(uplink=UPLINK), app=Ones()) as simulation:
            simulation.run()
            engine = weakref.ref(simulation.engine)
        del simulation
        assert engine() is None
    finally:
        gc.enable()
