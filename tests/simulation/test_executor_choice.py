"""Who trains a run, and what its record says of that."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fleets import config
from local_apps import Brief, Linear

from anabranch.core.config.ray import RayTable
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError, StoreError
from anabranch.reports.journal_files import JournalReader
from anabranch.simulation.executors import pool
from anabranch.simulation.executors.choice import chosen, settled
from anabranch.simulation.executors.ray import start_ray
from anabranch.simulation.problem import ProblemSource
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import open_simulation, simulate
from anabranch.workloads.app import App

DIGITS = {"virtual_s_max": 8.0}
IN_PROCESSES = pytest.param(2, marks=pytest.mark.prove)  # each compiles for itself


def digits(**tables: Mapping[str, Any]) -> Config:
    fleet = {"clients": 16, "split": "dirichlet", "dropout": 0.1, **tables.pop("fleet", {})}
    run = tables.pop("run", {"workload": "digits", **DIGITS})
    return config("fedbuff", run=run, fleet=fleet, **tables)


def name_of(settings: Config, app: App | None = None, workers: int = 0) -> str:
    return chosen(settings, ProblemSource(settings, app).open(), workers)


def test_stacks_are_chosen_for_small_torch_models_and_many_devices() -> None:
    assert name_of(digits()) == name_of(digits(), workers=2) == "batched"
    assert name_of(digits(fleet={"clients": 15})) == "serial"
    assert name_of(digits(server={"concurrency": 8})) == "serial"
    assert name_of(config(fleet={"clients": 16})) == "serial", "numpy"
    assert name_of(digits(), Brief()) == "serial", "a train of its own"


@pytest.mark.parametrize(
    ("layer", "name"), [("wide", "batched"), ("wide norm", "serial"), ("widest", "serial")]
)
def test_chains_of_linear_layers_pay_longer_than_other_models(layer: str, name: str) -> None:
    assert name_of(digits(), Linear(layer)) == name
    in_bfloat16 = digits(client={"precision": "bfloat16"})
    assert name_of(in_bfloat16, Linear(layer)) == "serial", "autograd goes back through those"


@pytest.mark.parametrize("layer", ["norm", "dropout", "tied", "convolution"])
def test_who_would_be_trained_one_by_one_is_trained_by_the_serial_executor(layer: str) -> None:
    assert name_of(digits(), Linear(layer)) == "serial"


def test_what_is_asked_for_is_taken() -> None:
    assert name_of(digits(fleet={"clients": 15}), workers=2) == "processes"
    for name in ("serial", "batched", "ray", "processes"):
        assert name_of(digits(fleet={"executor": name})) == name
    assert name_of(digits(fleet={"executor": "serial"}), workers=2) == "processes"
    assert name_of(digits(fleet={"executor": "batched"}), workers=2) == "batched"


@pytest.mark.parametrize("workers", [0, 1, IN_PROCESSES])
def test_a_batched_run_repeats_itself_with_any_workers_and_its_folder_replays(
    tmp_path: Path, workers: int
) -> None:
    run = {"workload": "digits", **DIGITS, "keep_payloads": False}
    written = simulate(digits(run=run, fleet={"batch_devices": 5}), tmp_path, workers=workers)
    assert JournalReader(tmp_path).config.fleet.executor == "batched"
    assert json.loads((tmp_path / "result.json").read_text())["config"]["fleet"]["executor"] == "batched"
    again = replay_run(tmp_path)  # by a simulation without workers
    assert (again.way, again.matches) == ("simulation", True)
    assert written.updates_applied > 20


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is here")
@pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning")  # torch of itself
@pytest.mark.parametrize("workers", [0, IN_PROCESSES])
def test_a_compiled_run_is_the_serial_one_but_for_rounding_and_repeats_itself(workers: int) -> None:
    """Stacks of two, of batches of one length: one program, once torch has tried it."""
    serial, here, again = (
        simulate(
            digits(
                fleet={"executor": executor, "batch_devices": 2, "split": "iid"},
                run={"workload": "digits", "virtual_s_max": 3.0},
                client={"batch_size": 16},
            ),
            app=Linear("layer norm"),
            workers=by,
        )
        for executor, by in (("serial", 0), ("compiled", 0), ("compiled", workers))
    )
    assert here.model_sha256 == again.model_sha256 != serial.model_sha256
    assert here.best_accuracy == pytest.approx(serial.best_accuracy, abs=0.01)
    assert here.updates_applied == serial.updates_applied > 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, IN_PROCESSES])
def test_programs_are_compiled_where_they_are_asked_for(workers: int) -> None:
    """What `vmap` takes and a program does not: its devices are trained one by one, as the bits show."""

    def model_by(executor: str, workers: int) -> str:
        settings = digits(fleet={"executor": executor})
        return simulate(settings, app=Linear("paused"), workers=workers).model_sha256

    assert model_by("compiled", workers) == model_by("serial", 0) != model_by("batched", 0)
    assert settled(config(), "compiled") not in (settled(config(), "serial"), settled(config(), "batched"))


def test_the_record_does_not_say_where_the_work_was_done() -> None:
    here, there = config(), config(ray={"address": "10.0.0.1:6379"}, fleet={"executor": "ray"})
    assert settled(there, "ray") == settled(here, "processes") == settled(here, "serial")
    assert settled(here, "batched") != settled(here, "serial")


@pytest.mark.parametrize("uplink", ["raw", "ef(0.9)|topk(0.25)|int8|gaps|zstd"])
def test_a_batched_run_is_the_serial_one_but_for_rounding(uplink: str) -> None:
    vectors = []
    for executor in ("serial", "batched"):
        client = {"momentum": 0.9, "learning_rate": 0.01}
        settings = digits(fleet={"executor": executor}, client=client, uplink={"codec": uplink})
        with open_simulation(settings, app=Linear()) as simulation:
            simulation.run()
            assert simulation.engine.counters.applied > 20
            vectors.append(simulation.engine.vector.copy())
    assert np.linalg.norm(vectors[0] - vectors[1]) < 1e-4 * np.linalg.norm(vectors[0])


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (Exception("The current node timed out during startup."), ConfigError),
        (RuntimeError("Timed out waiting for file /tmp/ray/session/gcs_server_port"), ConfigError),
        (RuntimeError("The current node timed out during startup."), RuntimeError),
    ],
)
def test_a_ray_that_does_not_come_up_is_told_and_another_error_stays(
    raised: Exception, told: type[Exception]
) -> None:
    """Ray's own: of no further kind where its processes take too long to come up; and of a full disk."""

    def init(**_: Any) -> None:
        raise raised

    with pytest.raises(told, match=r"(?i)timed out") as found:
        start_ray(SimpleNamespace(init=init), RayTable())
    says = (
        r"^Ray does not start on this machine: .*[a-z]\. Wait until it is less busy, make room where Ray has"
    )
    assert bool(re.match(says, str(found.value))) == (told is ConfigError)


def test_workers_that_have_no_place_for_their_locks_are_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose /dev/shm is read-only."""

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(pool, "ProcessPoolExecutor", read_only)
    with pytest.raises(StoreError, match=r"/dev/shm cannot be used: Read-only file system.*--workers 0"):
        pool.worker_pool(2, ProblemSource(digits()), print)


def test_a_folder_that_ray_cannot_name_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers would end as they begin, and others after them, for ever."""
    monkeypatch.setattr(sys, "path", [*sys.path, "/home/\u00fcwe", os.fsdecode(b"/home/gr\xfcn")])
    with pytest.raises(ConfigError, match=r"not UTF-8, '/home/gr\\udcfcn': rename it"):
        start_ray(None, RayTable())
