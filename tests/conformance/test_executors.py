"""What every executor promises, checked on each: the same results for the same jobs, in whatever order."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import Broken, Deadly, Ones, config
from local_apps import Brief, Linear, Loading, OddOne
from proving import in_slices
from ray_cluster import ray_cluster

from anabranch.core.config.tables import Config
from anabranch.core.errors import AppError, ConfigError, InvalidUpdate
from anabranch.core.model.submodels import UnitMap
from anabranch.core.model.updates import LocalPlan
from anabranch.simulation.executors import ray as ray_executor
from anabranch.simulation.executors.base import Evaluation, Executor, LocalResult
from anabranch.simulation.executors.choice import make_executor
from anabranch.simulation.executors.processes import ProcessesExecutor
from anabranch.simulation.executors.serial import SerialExecutor
from anabranch.simulation.problem import OneThread, Problem, ProblemSource
from anabranch.simulation.run import simulate
from anabranch.testing import ExecutorConformance
from anabranch.testing.executor import delta_of, jobs_of
from anabranch.workloads.app import App, Examples, Shard

HAS_RAY = importlib.util.find_spec("ray") is not None
ON_RAY = (pytest.mark.skipif(not HAS_RAY, reason="ray is not installed"), pytest.mark.slow)
WITH_RAY = pytest.param("ray", marks=ON_RAY)
EXACT = ["serial", "processes", WITH_RAY]
BATCHED = ["batched", "batched by workers"]
EXECUTORS = [*EXACT, *BATCHED]
EACH_WAY = [*EXACT, "batched"]  # those that batch by workers differ from both their halves in three tests
PLANS = {
    "plain": LocalPlan(steps=5, batch_size=16),
    "epochs of unequal lengths": LocalPlan(epochs=2, batch_size=16),
    "momentum": LocalPlan(steps=20, batch_size=8, momentum=0.9, learning_rate=0.01),
    "weight decay": LocalPlan(steps=5, weight_decay=0.1),
    "proximal": LocalPlan(steps=7, batch_size=16, proximal_mu=0.5),
    "all of them": LocalPlan(steps=18, momentum=0.5, weight_decay=0.01, proximal_mu=0.1),
}
Make = Callable[..., tuple[Problem, Executor]]
Shared = Callable[[str], tuple[Problem, Executor]]
APP = """
import numpy as np
from anabranch import App, Examples

class Mine(App):
    def model(self):
        return {"w": np.zeros(3, np.float32)}

    def data(self, shard):
        return Examples(np.ones((2, 1), np.float32), np.zeros(2, np.int64))

    def train(self, model, examples, plan, seed):
        model["w"] += seed % 7

    def evaluate(self, model, examples):
        return {"accuracy": 0.0, "loss": 0.0}
"""


def fleet(**tables: Any) -> Config:
    """Twelve devices with parts of the digits of unequal sizes."""
    tables["fleet"] = {
        "clients": 12,
        "split": "dirichlet",
        "examples_per_client": 0,
        **tables.get("fleet", {}),
    }
    return config(**tables)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray, with GPUs that are pretended: what is reserved is counted, and nothing computes there."""
    with ray_cluster(num_cpus=2, num_gpus=1):
        yield


def opened(name: str, source: ProblemSource, problem: Problem) -> Executor:
    """The executor of that name; "by workers" says that it has two of them."""
    kind, _, by_workers = name.partition(" by ")
    return make_executor(kind, source, problem, 2 if by_workers else int(kind != "batched"))


@pytest.fixture(scope="module")
def digits() -> tuple[ProblemSource, Problem]:
    """A net on the digits, as executors are given it."""
    source = ProblemSource(fleet(ray={"cpus": 0.25}), Linear())
    return source, source.open()


@pytest.fixture(scope="module")
def on_ray(cluster: None, digits: tuple[ProblemSource, Problem]) -> Iterator[Executor]:
    """Ray's executor of the digits, which is closed before Ray is."""
    found = opened("ray", *digits)
    yield found
    found.close()


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, digits: tuple[ProblemSource, Problem]) -> Iterator[Shared]:
    """The executor of that name for the digits, which one test after the other uses.

    Workers load torch, which takes longer than the tests; what one test leaves behind is to harm no other.
    """
    found: dict[str, Executor] = {}
    threads = OneThread()

    def take(name: str) -> tuple[Problem, Executor]:
        if name == "ray":
            return digits[1], request.getfixturevalue("on_ray")
        if name not in found:
            found[name] = opened(name, *digits)
        return digits[1], found[name]

    yield take
    for executor in found.values():
        executor.close()
    threads.restore()


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Executors of a test's own, and the problem that they train; torch has one thread here too."""
    made: list[Executor] = []
    threads = OneThread()

    def build(
        name: str, app: App | None, settings: Config | None = None, problem: Problem | None = None
    ) -> tuple[Problem, Executor]:
        if name == "ray":
            request.getfixturevalue("cluster")
        source = ProblemSource(settings or fleet(), app)
        problem = problem or source.open()
        made.append(opened(name, source, problem))
        return problem, made[-1]

    yield build
    for executor in made:
        executor.close()
    threads.restore()


def assert_near(result: LocalResult, expected: LocalResult) -> None:
    """Equal to float tolerance: the sums of a float32 product of some hundred terms, over some steps."""
    found, wanted = delta_of(result), delta_of(expected)
    assert found.shape == wanted.shape
    assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)


class TestSerial(ExecutorConformance):
    executor = SerialExecutor


class TestProcesses(ExecutorConformance):
    executor = ProcessesExecutor


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("serial", "all of them"),
        ("processes", "all of them"),
        pytest.param("ray", "all of them", marks=WITH_RAY.marks),
        ("batched by workers", "all of them"),
        *(("batched", plan) for plan in PLANS),
    ],
)
def test_every_executor_comes_to_the_serial_results(name: str, plan: str, shared: Shared) -> None:
    problem, executor = shared(name)
    jobs = jobs_of(problem, PLANS[plan])
    serial = [problem.train(job) for job in jobs]
    pending = [executor.train(job) for job in jobs]
    for expected, work in zip(serial, pending, strict=True):
        result = work.result()
        assert result.steps == expected.steps
        assert result.codec == expected.codec
        if name not in BATCHED:
            assert result.payload == expected.payload
            assert result.metrics == expected.metrics
        else:
            assert_near(result, expected)
            assert result.metrics == pytest.approx(dict(expected.metrics), rel=1e-5)


@pytest.mark.parametrize("name", EXECUTORS)
def test_a_cancelled_job_disturbs_no_other(name: str, shared: Shared) -> None:
    problem, executor = shared(name)
    jobs = jobs_of(problem, PLANS["plain"])
    pending = [executor.train(job) for job in jobs]
    for work in pending[::2]:
        work.cancel()
    for job, work in list(zip(jobs, pending, strict=True))[1::2]:
        np.testing.assert_allclose(
            delta_of(work.result()), delta_of(problem.train(job)), rtol=1e-3, atol=2e-7
        )


@pytest.mark.parametrize("name", EXECUTORS)
def test_only_the_job_that_diverged_raises(name: str, shared: Shared) -> None:
    problem, executor = shared(name)
    jobs = jobs_of(problem, PLANS["plain"], uplink="int8(256)")
    hopeless = replace(jobs[3], vector=jobs[3].vector * np.float32(1e30))  # no training survives that
    jobs[3] = hopeless
    pending = [executor.train(job) for job in jobs]
    for job, work in zip(jobs, pending, strict=True):
        if job is hopeless:
            with pytest.raises(InvalidUpdate, match="not finite"):
                work.result()
        else:
            assert work.result().steps == 5


@pytest.mark.parametrize("name", EACH_WAY)
def test_an_evaluation_is_that_of_the_problem(name: str, shared: Shared) -> None:
    problem, executor = shared(name)
    vector = problem.spec.flatten(problem.initial)
    assert executor.evaluate(Evaluation(vector, 0.0)).result() == problem.evaluate(Evaluation(vector, 0.0))


@pytest.mark.parametrize("name", [WITH_RAY])  # the others: ExecutorConformance
def test_a_failure_in_training_comes_out_of_the_result(name: str, make: Make) -> None:
    problem, executor = make(name, Broken(), config())
    (job,) = jobs_of(problem, PLANS["plain"], count=1)
    with pytest.raises(AppError, match="ZeroDivisionError: by design"):
        executor.train(job).result()


@pytest.mark.parametrize("name", EACH_WAY)
def test_hostile_devices_send_the_same(name: str, make: Make) -> None:
    attack = {"attackers": 0.5, "attack": "alie"}
    if name == "batched":
        problem, executor = make(name, Linear(), fleet(fleet=attack))
    else:  # what is sent is up to the problem, whoever trains: workers have it sooner without torch
        problem, executor = make(name, None, config(fleet={"clients": 12, **attack}))
    jobs = jobs_of(problem, PLANS["plain"])
    pending = [executor.train(job) for job in jobs]
    for job, work in zip(jobs, pending, strict=True):
        np.testing.assert_allclose(
            delta_of(work.result()), delta_of(problem.train(job)), rtol=2e-3, atol=1e-6
        )


@pytest.mark.parametrize("name", EACH_WAY)
def test_sub_models_are_trained_in_their_own_size(name: str, shared: Shared) -> None:
    problem, executor = shared(name)
    part = UnitMap(problem.spec, (tuple(range(0, 32, 2)),))
    jobs = jobs_of(problem, PLANS["momentum"], submodel=part)
    pending = [executor.train(job) for job in jobs]
    for job, work in zip(jobs, pending, strict=True):
        assert len(delta_of(work.result())) == part.size
        np.testing.assert_allclose(
            delta_of(work.result()), delta_of(problem.train(job)), rtol=1e-3, atol=2e-7
        )


def begun_of(pending: list[Any]) -> list[int]:
    return [i for i, work in enumerate(pending) if work.stack is not None]


@pytest.mark.parametrize(("devices", "stack"), [(5, [0, 5, 6, 7, 8]), (64, list(range(9)))])
def test_a_stack_has_the_jobs_that_are_due_first(devices: int, stack: list[int], make: Make) -> None:
    problem, executor = make("batched", Linear(), fleet(fleet={"batch_devices": devices}))
    pending: list[Any] = [executor.train(job) for job in jobs_of(problem, PLANS["plain"])]
    assert begun_of(pending) == []
    pending[0].result()
    assert begun_of(pending) == stack, "the last are due first"


def test_where_two_stacks_wait_one_is_begun(make: Make) -> None:
    problem, executor = make("batched", Linear(), fleet(fleet={"batch_devices": 3}))
    pending: list[Any] = []
    for job in jobs_of(problem, PLANS["plain"], count=9):
        pending.append(executor.train(job))
        whole = max(0, len(pending) - 3) // 3
        assert len(begun_of(pending)) == 3 * whole
    assert begun_of(pending) == [3, 4, 5, 6, 7, 8], "the last are due first"


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        ("norm", r"1 \(BatchNorm1d\) mixes the examples of a batch"),
        ("dropout", r"1 \(Dropout\) draws at random"),
        ("hidden dropout", "torch cannot stack it"),
        ("hidden norm", "a trial in a stack came to another result"),
        ("tied", "layers share their weights"),
        ("convolution", "a CPU is slower with stacks of convolutions"),
        ("wide norm", "a CPU is slower with stacks of 35942 numbers each"),
        ("widest", "a CPU is slower with stacks of 210442 numbers each"),
        ("train", "brief has a train of its own"),
    ],
)
def test_what_cannot_be_stacked_is_trained_one_by_one_and_the_log_says_why_once(
    layer: str, why: str, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    problem, executor = make("batched", Brief() if layer == "train" else Linear(layer))
    jobs = jobs_of(problem, PLANS["plain"], count=3)
    results = [work.result() for work in [executor.train(job) for job in jobs]]
    assert [r.payload for r in results] == [problem.train(job).payload for job in jobs]
    (record,) = caplog.records
    assert record.getMessage().startswith("devices are trained one by one: ")
    assert re.search(why, record.getMessage())


class Uneven(Linear):
    """Of the devices some have a single example."""

    def data(self, shard: Shard) -> Examples:
        whole = super().data(Shard("test"))
        count = 1 if shard.index % 3 else 9
        return Examples(whole.x[:count], whole.y[:count])


def test_a_device_of_one_example_does_not_speak_for_its_stack(make: Make) -> None:
    """A batch of one is the same mean with that one again: what mixes examples shows in others' alone."""
    problem, executor = make("batched", Uneven("hidden norm"))
    jobs = jobs_of(problem, PLANS["plain"])
    assert len(problem.trainings(jobs[-1])[0].examples) == 1, "it is due first"
    results = [work.result() for work in [executor.train(job) for job in jobs][::-1]]
    assert [r.payload for r in results] == [problem.train(job).payload for job in jobs[::-1]]


@pytest.mark.parametrize("layer", ["", "hidden norm"])
def test_a_device_that_diverges_does_not_speak_for_its_stack(
    layer: str, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """NaN beside NaN says nothing of a model, as to which the next device is asked."""
    problem, executor = make("batched", OddOne(layer))
    jobs = jobs_of(problem, PLANS["plain"])
    pending = [executor.train(job) for job in jobs]
    results = [work.result() for work in pending[1:]]
    assert np.isnan(delta_of(pending[0].result())).any()
    alone = [problem.train(job) for job in jobs[1:]]
    for result, expected in zip(results, alone, strict=True):
        assert_near(result, expected)
    said = ["devices are trained one by one: a trial in a stack came to another result"] if layer else []
    assert [r.getMessage().partition(", with")[0] for r in caplog.records] == said
    assert ([r.payload for r in results] == [r.payload for r in alone]) == bool(layer), (
        "one by one, to the bit"
    )


class AllOdd(OddOne):
    """Every device is."""

    def data(self, shard: Shard) -> Examples:
        return super().data(Shard("train", self.device))


def test_where_all_diverge_nothing_is_said_of_stacks(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    problem, executor = make("batched", AllOdd())
    pending = [executor.train(job) for job in jobs_of(problem, PLANS["plain"], count=3)]
    assert all(np.isnan(delta_of(work.result())).any() for work in pending)
    assert not caplog.records


@pytest.mark.parametrize("name", in_slices(BATCHED, (), ["batched by workers"]))
def test_who_is_stacked_hangs_on_no_process(name: str, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """What the first stack shows holds, though another process had that one: who goes on has it on record.

    The model mixes the examples of one device alone, so those of another stack would show nothing.
    """
    odd = OddOne("norm of large", device=8, unit=1e3)
    problem, executor = make(name, odd, fleet(fleet={"batch_devices": 5}))
    jobs = jobs_of(problem, PLANS["plain"])
    first = [problem.train(job) for job in jobs]
    ended = [Future[LocalResult]() for _ in jobs[4:]]
    for future, result in zip(ended, first[4:], strict=True):
        future.set_result(result)
    jobs[4:] = [replace(job, known=known) for job, known in zip(jobs[4:], ended, strict=True)]
    pending = [executor.train(job) for job in jobs]
    assert [work.result().payload for work in reversed(pending)] == [r.payload for r in reversed(first)]
    (record,) = caplog.records
    assert record.getMessage().endswith("came to another result, with the examples of device-0008")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("app", "loads"),
    [
        pytest.param(Loading(), [4, 4], id="the first stack is judged"),
        pytest.param(Loading("norm"), [0, 0], id="no examples tell more than the layer"),
        pytest.param(
            Loading(unit=float("nan")), [4 + 3 + 1, 8 + 1 + 1, 10], id="three of a stack, each once"
        ),
    ],
)
def test_with_workers_examples_are_loaded_here_to_judge_alone(
    app: Loading, loads: list[int], make: Make
) -> None:
    """Nine jobs are stacks of four, four and one; those that were known before are judged like others."""
    problem, executor = make("batched by workers", app, fleet(fleet={"batch_devices": 4}))
    jobs = [replace(job, known=Future()) for job in jobs_of(problem, PLANS["plain"])]
    for job in jobs:
        assert isinstance(job.known, Future)
        job.known.set_result(LocalResult(b"", "raw", 5, {}))
    for expected in loads:
        pending = [executor.train(job) for job in jobs]
        assert {work.result().steps for work in pending} == {5}
        assert len(app.given) == expected
    assert not any(given() for given in app.given), "they are not kept"


class Counted(Brief):
    """Knows how many of its tasks were trained."""

    begun = 0

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        self.begun += 1
        return super().train(model, examples, plan, seed)


def test_what_is_trained_one_by_one_is_trained_when_it_is_asked_for(make: Make) -> None:
    app = Counted()
    problem, executor = make("batched", app)
    pending = [executor.train(job) for job in jobs_of(problem, PLANS["plain"])]
    for asked in (1, 2):
        pending[-asked].result()
        pending[-asked].result()
        assert app.begun == asked, "no neighbour, and nobody twice"


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.slow
def test_devices_of_different_speed_groups_have_actors_with_other_shares_of_a_gpu(make: Make) -> None:
    settings = config(fleet={"clients": 12}, ray={"cpus": 0.5, "gpus_by_group": [0.5, 0.25, 0.0]})
    problem, executor = make("ray", None, settings)
    jobs = jobs_of(problem, PLANS["plain"])
    assert len(set(problem.profiles.group[:9].tolist())) > 3
    pending = [executor.train(job) for job in jobs]
    assert [w.result().payload for w in pending] == [problem.train(job).payload for job in jobs]


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.slow
def test_more_than_ray_has_is_not_waited_for(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"need 1.5 GPUs, and Ray has 1: lower --workers"):
        make("ray", Linear(), fleet(ray={"gpus": 1.5}))


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.slow
def test_actors_find_an_app_by_the_path_that_this_process_knows_it_by(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    problem, executor = make("ray", None, fleet(run={"workload": "mine.py:Mine"}))
    (job,) = jobs_of(problem, PLANS["plain"], count=1)
    assert executor.train(job).result().payload == problem.train(job).payload


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.slow
def test_an_app_that_actors_cannot_open_is_an_error_in_its_own_words(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    settings = fleet(run={"workload": "mine.py:Mine"})
    source = ProblemSource(settings)
    problem = source.open()
    (tmp_path / "mine.py").unlink()
    with pytest.raises(AppError, match=r"^mine.py: there is no such file in "):
        make("ray", None, settings, problem)


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.slow
def test_actors_that_are_killed_in_the_middle_of_their_work_cost_nothing_else(
    cluster: None, tmp_path: Path
) -> None:
    """Two kill -9 in trainings of the only actor, work queued at it: the digests are the serial ones."""
    settings = config(run={"updates_max": 20}, ray={"cpus": 0.25})
    serial = simulate(settings, app=Deadly())
    on_ray = replace(settings, fleet=replace(settings.fleet, executor="ray"))
    found = simulate(on_ray, app=Deadly(str(tmp_path)), workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"], "all have struck"
    assert (found.journal_sha256, found.model_sha256) == (serial.journal_sha256, serial.model_sha256)


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.slow
def test_work_that_no_process_survives_is_given_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_executor, "DEATHS_MAX", 1)
    problem, executor = make("ray", Deadly(always=True), config(ray={"cpus": 0.25}))
    (job,) = jobs_of(problem, PLANS["plain"], count=1)
    with pytest.raises(AppError, match=r"training on device 0 has ended the process that does it 2 times"):
        executor.train(job).result()


class Large(Ones):
    """Two megabytes, which Ray keeps in its store."""

    def model(self) -> dict[str, Any]:
        return {"w": np.zeros(500_000, np.float32)}


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.slow
def test_the_object_store_holds_no_more_than_the_newest_models(make: Make) -> None:
    import ray

    problem, executor = make("ray", Large(), config(ray={"cpus": 0.25}))
    (job,) = jobs_of(problem, PLANS["plain"], count=1)
    before = _free_bytes(ray)
    for version in range(2 * ray_executor.MODELS_KEPT):
        moved = replace(job, vector=job.vector + np.float32(version))
        assert len(executor.train(moved).result().payload) >= 2_000_000
    models_max = ray_executor.MODELS_KEPT + 2
    deadline = time.monotonic() + 600.0  # Ray tells of its store now and then
    while (held := before - _free_bytes(ray)) > models_max * 2_100_000:
        assert time.monotonic() < deadline, f"{held / 2e6:.0f} models and updates are held"
        time.sleep(0.1)


def _free_bytes(ray: Any) -> float:
    return float(ray.available_resources()["object_store_memory"])


@pytest.mark.skipif(HAS_RAY, reason="ray is installed")
def test_without_ray_the_error_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match=r"anabranch\[ray\]"):
        make_executor("ray", ProblemSource(fleet(), Linear()), ProblemSource(fleet(), Linear()).open(), 1)


def test_arrays_cannot_be_stacked() -> None:
    source = ProblemSource(config())
    with pytest.raises(ConfigError, match=r"fleet\.executor = 'batched' needs a torch model"):
        make_executor("batched", source, source.open(), 0)
