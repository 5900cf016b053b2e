"""Data that arrive while a run goes on: who has what when, and that updates are of that."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from anabranch.core import events as ev
from anabranch.core.config.tables import Config, FleetTable
from anabranch.core.errors import ConfigError, DataError
from anabranch.core.model.params import digest
from anabranch.simulation.run import open_simulation
from anabranch.testing.federation import config
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.arrival import Arrivals, turned
from anabranch.workloads.synthetic import Synthetic

COUNT = 60
STREAM = {"arrival": "stream", "arrival_rate": 4.0}


def fleet(**keys: Any) -> FleetTable:
    return FleetTable(**{**STREAM, **keys})


def arrivals(**keys: Any) -> Arrivals:
    found = Arrivals.of(fleet(**keys), 7)
    assert found is not None
    return found


class Numbered(App):
    """One weight, to which a task adds the sum of the numbers of the examples that it sees."""

    name = "numbered"

    def model(self) -> Any:
        return {"w": np.zeros(1, np.float64)}

    def data(self, shard: Shard) -> Examples:
        rows = np.arange(COUNT)
        return Examples(rows[:, None].astype(np.float32), rows % 3)

    def train(self, model: Any, examples: Examples, plan: Any, seed: int) -> dict[str, float]:
        model["w"] += float(examples.x.sum())
        return {}

    def evaluate(self, model: Any, examples: Examples) -> dict[str, float]:
        return {"loss": 0.0}


def settings(**tables: Any) -> Config:
    base: dict[str, dict[str, Any]] = {
        "run": {"updates_max": 40},
        "fleet": {"clients": 3, **STREAM},
        "client": {"steps": 2},
    }
    return config(**{name: {**base.get(name, {}), **tables.get(name, {})} for name in {*base, *tables}})


def updates_of(app: App, settings: Config) -> tuple[list[tuple[ev.UpdateArrived, float]], str]:
    """Each update with the moment at which its training began, and the digest of the last version."""
    found: list[tuple[ev.UpdateArrived, float]] = []
    began: dict[str, float] = {}
    with open_simulation(settings, app=app) as simulation:
        train = simulation.executor.train

        def noted(job: Any) -> Any:
            began[job.task.task_id] = simulation.clock.now
            return train(job)

        simulation.executor.train = noted  # type: ignore[method-assign]

        def observe(event: ev.Event, _: Any) -> None:
            if isinstance(event, ev.UpdateArrived):
                found.append((event, began[event.update.task_id]))

        simulation.world.observers.append(observe)
        simulation.run()
        return found, digest(simulation.engine.vector)


def test_gaps_are_exponential_of_the_rate_and_each_device_has_its_own() -> None:
    """Of 4 a second: a mean of 1/4, a deviation as large, and e^-1 of the gaps are longer than the mean."""
    many, count = arrivals(), 20_000
    ends = [many.first_s(device, 1) for device in range(200)]
    assert len(set(ends)) == 200
    times = np.array([t for t in np.arange(0, 5100, 0.25) if t])
    present = np.array([many.present(3, count, t) for t in times])
    assert present[-1] == pytest.approx(4 * times[-1], rel=0.03)
    assert (np.diff(present) >= 0).all()
    # How many come in a quarter of a second is Poisson of 1: of mean and variance 1, none with e^-1.
    steps = np.diff(present[present < count])
    assert steps.mean() == pytest.approx(1, abs=0.03)
    assert steps.var() == pytest.approx(1, abs=0.05)
    assert (steps == 0).mean() == pytest.approx(math.exp(-1), abs=0.02)


def test_a_window_is_of_the_newest_and_what_has_left_does_not_come_back() -> None:
    some, left = arrivals(arrival_window=10), -1
    for now in np.arange(0, 60, 0.5):
        rows = some.rows(1, 100, float(now))
        assert 1 <= rows.stop - rows.start <= 10
        assert rows.start == max(0, rows.stop - 10)
        assert rows.start >= left
        left = rows.start
    assert rows == slice(90, 100)
    assert arrivals().rows(1, 100, 1e9) == slice(0, 100)


def test_classes_come_one_after_the_other_in_an_order_of_each_device() -> None:
    labels = np.tile(np.arange(5), 200)
    x = np.arange(1000)[:, None]
    orders = []
    for device in range(6):
        found = arrivals(arrival_drift="classes").in_order(Synthetic(), device, Examples(x, labels))
        assert sorted(found.x[:, 0].tolist()) == list(range(1000))
        assert (labels[found.x[:, 0]] == found.y).all(), "each keeps its label"
        # A place is moved by up to 100 of 1000, and so by 50 in the middle of a fifth.
        middles = [set(found.y[200 * k + 60 : 200 * k + 140].tolist()) for k in range(5)]
        assert all(len(middle) == 1 for middle in middles)
        assert len(set.union(*middles)) == 5
        assert len(set(found.y[180:220].tolist())) == 2, "and their borders are mixed"
        orders.append(tuple(min(middle) for middle in middles))
    assert len(set(orders)) > 1


def test_pictures_are_turned_by_quarters() -> None:
    one = np.array([[1, 2], [3, 4]], np.float32)
    quarters = [[[1, 2], [3, 4]], [[2, 4], [1, 3]], [[4, 3], [2, 1]], [[3, 1], [4, 2]]]
    share = np.arange(8) / 8
    shapes: list[tuple[int, ...]] = [(8, 2, 2), (8, 1, 2, 2), (8, 4)]
    for shape in shapes:
        found = turned(np.tile(one.ravel(), 8).reshape(shape), share)
        assert found.shape == shape
        assert [p.tolist() for p in found.reshape(8, 2, 2)] == [quarters[int(4 * u)] for u in share.tolist()]
    shapes = [(8, 3), (8, 2, 3), (8,)]
    for shape in shapes:
        with pytest.raises(DataError, match=r"drift\(examples, share\)"):
            turned(np.zeros(shape), share)


def test_an_app_says_how_its_examples_change() -> None:
    class Louder(Numbered):
        def drift(self, examples: Examples, share: Any) -> Examples:
            return Examples(examples.x + 100 * share[:, None], examples.y)

    app = Louder()
    found = arrivals(arrival_drift="rotate").in_order(app, 0, app.data(Shard("train")))
    assert found.x[:, 0].tolist() == pytest.approx([row + 100 * row / 60 for row in range(60)])


def test_an_update_is_of_what_had_arrived_when_its_training_began() -> None:
    """By its examples and by their sum: they come in their order, and the newest 20 are kept."""
    plain = settings(fleet={"arrival_window": 20})
    found, _ = updates_of(Numbered(), plain)
    every = Arrivals.of(plain.fleet, plain.run.seed)
    assert every is not None
    stops = defaultdict(list)
    for event, began in found:
        rows = every.rows(int(event.update.client_id[-4:]), COUNT, began)
        stops[event.update.client_id].append(rows.stop)
        assert event.update.examples == rows.stop - rows.start
        assert isinstance(event.update.delta, np.ndarray)
        assert event.update.delta[0] == pytest.approx(sum(range(rows.start, rows.stop)))
    assert len(stops) == 3
    assert all(len(set(of)) > 2 and of == sorted(of) for of in stops.values()), "more and more"
    assert max(max(of) for of in stops.values()) > 20


@pytest.mark.parametrize(("executor", "workload"), [("processes", "synthetic"), ("batched", "digits")])
def test_whoever_trains_trains_on_the_same(executor: str, workload: str) -> None:
    """In a worker process to the bit; in stacks to float tolerance."""

    def run(executor: str) -> tuple[list[tuple[str, int]], Any]:
        learning = {"workload": workload, "updates_max": 30, "seed": 2}
        drifting = {"arrival_drift": "classes", "arrival_window": 30, "arrival_rate": 20.0}
        plain = settings(run=learning, fleet={"executor": executor, "clients": 6, **drifting})
        found = []
        with open_simulation(plain, workers=int(executor == "processes")) as simulation:

            def observe(event: ev.Event, _: Any) -> None:
                if isinstance(event, ev.UpdateArrived):
                    found.append((event.update.update_id, event.update.examples))

            simulation.world.observers.append(observe)
            simulation.run()
            return found, simulation.engine.vector

    serial, other = run("serial"), run(executor)
    assert len({examples for _, examples in serial[0]}) > 5
    assert other[0] == serial[0]
    tolerance = 1e-4 if executor == "batched" else 0.0
    np.testing.assert_allclose(other[1], serial[1], rtol=0.0, atol=tolerance)


def test_all_at_once_is_what_it_was() -> None:
    """A rate beyond every clock: the same versions, to the bit, as where all is there from the start."""
    apart = {"speed": "measured", "step_times_s": [0.1, 0.2, 0.3], "latencies_s": [0.01, 0.02, 0.03]}
    quick = settings(fleet={"arrival_rate": 1e12, **apart})
    plain = settings(fleet={"arrival": "all", "arrival_rate": 0.0, **apart})
    assert updates_of(Synthetic(), quick)[1] == updates_of(Synthetic(), plain)[1]


def test_a_device_asks_when_it_has_its_first_example() -> None:
    slow = settings(fleet={"arrival_rate": 0.05}, run={"updates_max": 6})
    every = Arrivals.of(slow.fleet, slow.run.seed)
    assert every is not None
    asked: dict[str, float] = {}
    with open_simulation(slow, app=Numbered()) as simulation:

        def observe(event: ev.Event, _: Any) -> None:
            if isinstance(event, ev.Enrolled):
                asked.setdefault(event.client_id, simulation.clock.now)

        simulation.world.observers.append(observe)
        simulation.run()
    assert asked
    for name, at in asked.items():
        assert at == pytest.approx(every.first_s(int(name[-4:]), 60) + slow.fleet.latency_s)


def test_drift_that_the_data_cannot_have_is_refused() -> None:
    with pytest.raises(DataError, match="needs a class number for each example"):
        arrivals(arrival_drift="classes").in_order(
            Synthetic(), 0, Examples(np.zeros((4, 1)), np.zeros(4, np.float32))
        )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"arrival": "slowly"}, r"fleet\.arrival must be one of all, stream"),
        ({"arrival": "stream"}, r"fleet\.arrival = 'stream' needs fleet\.arrival_rate"),
        ({"arrival": "stream", "arrival_rate": -1.0}, r"fleet\.arrival_rate"),
        ({**STREAM, "arrival_rate": math.inf}, r"fleet\.arrival_rate"),
        ({"arrival_rate": 1.0}, r"fleet\.arrival_rate is set, and all examples are there"),
        ({"arrival_window": 5}, r"fleet\.arrival_window is set"),
        ({"arrival_drift": "classes"}, r"fleet\.arrival_drift needs fleet\.arrival = 'stream'"),
        ({**STREAM, "arrival_window": -1}, r"fleet\.arrival_window must not be negative"),
        ({**STREAM, "arrival_drift": "wind"}, r"fleet\.arrival_drift must be one of none, classes, rotate"),
    ],
)
def test_bad_words_name_the_key(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(fleet=keys)


def test_devices_that_train_on_have_all_their_data() -> None:
    with pytest.raises(ConfigError, match=r"does not go with client\.push = 'elastic'"):
        config(fleet=STREAM, client={"push": "elastic"}, strategy={"name": "fedasync"})
