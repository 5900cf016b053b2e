"""Training that goes on: snapshots are whole, merges come between steps, and errors come out."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from merges import Replacement

from anabranch.client.live_training import LiveTraining
from anabranch.core.model.live import LiveWeights
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.updates import LocalPlan
from anabranch.host.elastic import ElasticAnswer, TrainingMoment
from anabranch.host.merging import ElasticDelta
from anabranch.host.policies import Continuous, EverySteps, OnAdvice, OnChange
from anabranch.workloads.app import App, Examples
from anabranch.workloads.batches import batches
from anabranch.workloads.trainer import Hook, trainer_for

TENSORS = 24
SNAPSHOTS = 1_000
WAIT_S = 600.0


class Counting(App):
    """Every weight is the number of the step, so a snapshot between two steps has one value everywhere."""

    def model(self) -> Any:
        return {f"w{n}": np.zeros(500, np.float32) for n in range(TENSORS)}

    def data(self, shard: Any) -> Examples:
        return Examples(np.zeros((4, 1), np.float32), np.zeros(4, np.int64))

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        for _ in batches(len(examples), plan, seed):
            for array in model.values():
                np.add(array, 1, out=array)
        return {}


class CountingTorch(Counting):
    """The same with a torch module and an optimizer: the gradient of minus the sum is -1."""

    def model(self) -> Any:
        import torch

        return torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(500)) for _ in range(TENSORS)])

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        import torch

        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in batches(len(examples), plan, seed):
            optimizer.zero_grad()
            (-sum(p.sum() for p in model.parameters())).backward()
            optimizer.step()
        return {}


def training_of(app: App) -> tuple[Callable[[Hook], None], ParamSpec]:
    """What `LiveTraining` trains: the App from zero."""
    trainer = trainer_for(app)
    spec = trainer.spec
    frozen = spec.frozen(trainer.initial(0))
    examples = app.data(None)  # type: ignore[arg-type]

    def train(hook: Hook) -> None:
        trainer.train_on(np.zeros(spec.size, np.float32), frozen, examples, LocalPlan(), 5, hook)

    return train, spec


def taken(live: LiveTraining) -> TrainingMoment:
    """Want a snapshot and wait for it."""
    live.want()
    return awaited(live)


def awaited(live: LiveTraining) -> TrainingMoment:
    until = time.monotonic() + WAIT_S
    while (snapshot := live.take()) is None:
        assert time.monotonic() < until, "no snapshot came"
        time.sleep(0)
    return snapshot


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns a hundred times as often, so that what can be torn is torn soon."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(usual_s / 100)
    yield
    sys.setswitchinterval(usual_s)


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize(
    ("app", "snapshots"),
    [
        pytest.param(Counting(), SNAPSHOTS, id="numpy"),
        pytest.param(CountingTorch(), 50, id="torch"),
        pytest.param(CountingTorch(), SNAPSHOTS, id="torch-long", marks=pytest.mark.prove),
    ],
)
def test_of_a_thousand_snapshots_none_is_torn_and_no_merge_is_half_done(app: App, snapshots: int) -> None:
    train, _ = training_of(app)
    live = LiveTraining(train, ElasticDelta(0.5), Continuous(1.0))
    live.start()
    try:
        steps = 0
        for merges in range(snapshots):
            snapshot = taken(live)
            steps += snapshot.steps
            assert snapshot.vector.min() == snapshot.vector.max() == steps + merges
            # Each merge adds 1 everywhere.
            live.answer(ElasticAnswer(snapshot.vector, snapshot.vector + 2, 0.0))
    finally:
        live.stop()


@pytest.mark.usefixtures("restless")
def test_a_snapshot_that_another_thread_takes_is_torn() -> None:
    """What the others rest on: without the hook there is something to tear."""
    train, _ = training_of(Counting())
    weights: list[LiveWeights] = []
    ready, over = threading.Event(), threading.Event()

    class Over(BaseException):
        pass

    def hook(live: LiveWeights) -> None:
        weights.append(live) if not weights else None
        ready.set()
        if over.is_set():
            raise Over

    def run() -> None:
        with pytest.raises(Over):
            train(hook)

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(WAIT_S)
    until = time.monotonic() + WAIT_S
    torn = False
    while not torn and time.monotonic() < until:
        vector = weights[0].flat()
        torn = vector.min() != vector.max()
    over.set()
    thread.join(WAIT_S)
    assert torn


def test_a_snapshot_in_flight_does_not_change() -> None:
    train, _ = training_of(CountingTorch())
    live = LiveTraining(train, ElasticDelta(), EverySteps(3))
    live.start()
    try:
        first = taken(live)
        value = first.vector.copy()
        later = taken(live)
        assert np.array_equal(first.vector, value)
        assert later.vector[0] == value[0] + later.steps
    finally:
        live.stop()


# --- merging -------------------------------------------------------------------------------------


class Stepped:
    """A training loop that a test moves step by step: the hook runs in its own thread all the same."""

    def __init__(self, live: Callable[..., LiveTraining]) -> None:
        self.vector = np.zeros(2, np.float32)
        self.turn, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.live = live(self._train)
        self.live.start()
        assert self.done.acquire(timeout=WAIT_S)

    def flat(self) -> Vector:
        return self.vector.copy()

    def add(self, change: Vector) -> None:
        self.vector += change

    def _train(self, hook: Hook) -> None:
        while True:
            hook(self)
            self.done.release()
            assert self.turn.acquire(timeout=WAIT_S)
            self.vector += 1

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.turn.release()
            assert self.done.acquire(timeout=WAIT_S)

    def stop(self) -> None:
        self.turn.release()
        self.live.stop()


def stepped(rule: Any, policy: Any, **more: Any) -> Stepped:
    return Stepped(lambda train: LiveTraining(train, rule, policy, **more))


def test_what_was_learned_while_the_exchange_lasted_is_kept() -> None:
    loop = stepped(ElasticDelta(0.5), EverySteps(2))
    loop.live.want()
    loop.step(2)
    snapshot = awaited(loop.live)
    assert (snapshot.vector.tolist(), snapshot.steps) == ([2, 2], 2)
    loop.step(3)
    loop.live.answer(ElasticAnswer(snapshot.vector, np.full(2, 10, np.float32), 1.0))
    loop.step()
    assert loop.vector.tolist() == [2 + 4 + 4, 2 + 4 + 4]  # four steps, half of the way from 2 to 10
    loop.stop()


def test_no_snapshot_is_taken_before_the_answer_is_merged() -> None:
    loop = stepped(Replacement(), EverySteps(1))
    loop.live.want()
    loop.step()
    snapshot = awaited(loop.live)
    loop.step(4)
    assert loop.live.take() is None, "one exchange at a time"
    loop.live.answer(ElasticAnswer(snapshot.vector, np.full(2, 100, np.float32), 1.0))
    loop.live.want()
    loop.step()
    second = awaited(loop.live)
    assert (second.vector.tolist(), second.steps) == ([100, 100], 5)
    loop.stop()


def test_the_servers_advice_brings_the_push_forward() -> None:
    loop = stepped(ElasticDelta(), OnAdvice(2, 1000))
    loop.live.want()
    loop.step(5)
    assert loop.live.take() is None
    loop.live.advise()
    loop.step()
    assert awaited(loop.live).steps == 6
    loop.live.want()
    loop.step(5)
    assert loop.live.take() is None, "advice counts once"
    loop.stop()


def test_a_merge_is_no_change_of_the_steps() -> None:
    """The gate sees what the device learns, not what comes from the server."""
    loop = stepped(ElasticDelta(1.0), OnChange(0.3, 1, 1000))
    loop.live.want()
    loop.step(10)
    loop.live.answer(ElasticAnswer(loop.flat(), np.full(2, 1e3, np.float32), 1.0))
    loop.step(10)
    assert loop.live.take() is None
    loop.stop()


def test_what_is_forgone_is_not_taken_later() -> None:
    loop = stepped(ElasticDelta(), EverySteps(1))
    loop.live.want()
    loop.live.forgo()
    loop.step(3)
    assert loop.live.take() is None
    loop.stop()


# --- the end -------------------------------------------------------------------------------------


def test_an_error_of_the_app_comes_out_in_the_sync_thread() -> None:
    rung = threading.Event()

    def train(hook: Hook) -> None:
        raise ZeroDivisionError("a bug of the App")

    live = LiveTraining(train, ElasticDelta(), EverySteps(1), ring=rung.set)
    live.start()
    assert rung.wait(WAIT_S)
    with pytest.raises(ZeroDivisionError, match="bug of the App"):
        live.take()


def test_a_training_function_that_returns_is_called_again() -> None:
    class Short(Counting):
        def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
            for array in model.values():
                np.add(array, 1, out=array)
            return {}

    train, _ = training_of(Short())
    live = LiveTraining(train, ElasticDelta(), EverySteps(4))
    live.start()
    first, second = taken(live), taken(live)
    assert second.vector[0] - first.vector[0] == second.steps >= 4
    live.stop()


def test_the_optimizer_lives_through_merges() -> None:
    """Momentum of SGD: with it the steps keep growing, without it (or with a new one) they do not."""

    class Rolling(CountingTorch):
        def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
            import torch

            optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
            for _ in batches(len(examples), plan, seed):
                optimizer.zero_grad()
                (-sum(p.sum() for p in model.parameters())).backward()
                optimizer.step()
            return {}

    train, _ = training_of(Rolling())
    live = LiveTraining(train, ElasticDelta(1.0), EverySteps(1))
    live.start()
    try:
        for _ in range(60):
            snapshot = taken(live)
            live.answer(ElasticAnswer(snapshot.vector, np.zeros_like(snapshot.vector), 0.0))
        before = taken(live)
        live.answer(ElasticAnswer(before.vector, np.zeros_like(before.vector), 0.0))
        after = taken(live)
        # From the merge on there are only steps made since; with momentum 0.9 each is of about 1 / (1 - 0.9).
        learned = after.vector[0] / after.steps
        assert learned > 9.0
    finally:
        live.stop()
