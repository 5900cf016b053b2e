"""SIGKILL during a rollback: after the restart the model is exactly the old one or exactly the new one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from crash import write_model
from server_process import Plan, ServerProcess
from wire import QUICK, Device

from anabranch.client.operator import OperatorClient
from anabranch.core.errors import Unavailable
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.server.verify import verify

VALUES = 300
# The turns of the writer's: a look at the start, the fold begins, all of it, and the rollback itself.
TURN = 4
# A rollback that dies at one of these never was: beside SQLite the log has it before the rows do.
BEFORE = (f"batch_taken:{TURN}",)
ROWS = ("rows_begun:1", "rows_written:1", "projections_written:1")
LOG = ("log_written:1", "log_flushed:1")  # a kill leaves what is written, flushed or not
# It is in the log; the snapshot that follows it may be there or not.
AFTER = (
    f"answers_ready:{TURN}",
    f"answered:{TURN}",
    "committed:1",
    "handled:1",
    "snapshot_written:1",
    "snapshot_named:1",
    "snapshots_cleared:1",
)
DIES_S = 600.0


class Run:
    """A server whose model is the sum of the updates that count, and clients that turn out to be bad."""

    def __init__(self, folder: Path, database: str) -> None:
        self.plan = Plan(database=database)
        self.spec: ParamSpec = write_model(folder, np.zeros(VALUES, np.float32), self.plan)
        self.server = ServerProcess(folder, self.plan)
        self.expected, self.bad = 0, 0

    def push(self) -> tuple[int, str, int]:
        """Good, bad and good again: the version before, who was bad, and by how much."""
        self.bad += 1
        with self.devices("good", f"bad-{self.bad}") as (good, bad):
            good.work(1.0)
            before = bad.task()
            bad.answer(before, 100.0 * self.bad)
            good.work(2.0)
        self.expected += 3 + 100 * self.bad
        return before.base_version, bad.client_id, 100 * self.bad

    def model(self) -> Vector:
        """The newest one."""
        with self.devices("reader") as (reader,):
            _, data = reader.fetch(exact=True)
        return np.frombuffer(data, np.float32, VALUES)

    def roll_back(self, to: int, bad: str) -> bool:
        """Whether the operator heard that it was done."""
        with OperatorClient(self.server.admin_address) as operator:
            try:
                operator.rollback(to, [bad])
            except Unavailable:
                return False
        return True

    @contextmanager
    def devices(self, *names: str) -> Iterator[list[Device]]:
        """Devices that are enrolled, on one connection."""
        with grpc.insecure_channel(self.server.address, options=QUICK) as channel:
            found = [Device(channel, self.spec, name) for name in names]
            for device in found:
                device.enrol()
            yield found


KINDS = ["sqlite", pytest.param("postgresql", marks=pytest.mark.prove)]


@pytest.fixture(params=["sqlite", "postgresql"])
def run(request: Any, tmp_path: Path) -> Run:
    """A run on either database."""
    return Run(tmp_path, request.getfixturevalue("postgresql_url") if request.param == "postgresql" else "")


def steps(database: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those at which a rollback never was, and those at which it is in the log."""
    return ((*BEFORE, *ROWS), AFTER) if database else (BEFORE, (*LOG, *AFTER, *ROWS))


@pytest.mark.parametrize("run", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
def test_a_crash_at_every_other_step_of_a_rollback(run: Run) -> None:
    """Of those that both databases have, each comes on one of them."""
    before, after = steps(run.plan.database)
    begins = 1 if run.plan.database else 0
    crash_at((*before, *after[begins::2]), run)


@pytest.mark.prove
def test_a_crash_at_every_step_of_a_rollback(run: Run) -> None:
    before, after = steps(run.plan.database)
    crash_at((*before, *after), run)


def crash_at(points: tuple[str, ...], run: Run) -> None:
    """The server dies at each of them, and comes back as it was, or as it was to be."""
    _, after = steps(run.plan.database)
    run.server.start()
    for point in points:
        to, bad, by = run.push()
        assert run.server.drain() == 0, run.server.log_tail()  # so that nothing else is written meanwhile
        run.server.start(point)
        run.roll_back(to, bad)
        assert run.server.died(DIES_S), point
        run.server.start()
        run.expected -= by if point in after else 0
        assert (run.model() == run.expected).all(), point
    _is_sound(run)


@pytest.mark.parametrize("run", KINDS, indirect=True)
def test_a_crash_at_any_moment_of_a_rollback(run: Run) -> None:
    chance = random.Random(1)
    run.server.start()
    for _ in range(3):
        to, bad, by = run.push()
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(run.roll_back, to, bad)
            wait([told], chance.uniform(0.0, 0.05))
            run.server.kill()
        run.server.start()
        model = run.model()
        assert (model == model[0]).all()
        done = int(model[0]) == run.expected - by
        assert done or (int(model[0]) == run.expected and not told.result())
        run.expected -= by if done else 0
    _is_sound(run)


def _is_sound(run: Run) -> None:
    assert run.server.drain() == 0
    found = verify(run.server.data_dir, run.plan.database)
    assert found.problems == ()
