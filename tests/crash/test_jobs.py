"""SIGKILL of a server of two jobs at random moments: in each, what was acknowledged counts, exactly once."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from commands import killable, serving
from crash_writer import VALUES, Writer
from job_hosts import SETTINGS, UNHELD
from ports import free_port
from postgres import new_database
from wire import Device

from anabranch.api.jobs import add_job
from anabranch.client.channel import open_channel
from anabranch.client.operator import open_operator
from anabranch.compress.registry import STAGES
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.server.manifest import write_manifest
from anabranch.server.verify import verify

JOBS, WRITERS, UPDATES, KILLS = ("one", "two"), 2, 25, 3


class JobWriter(Writer):
    """A device of one job: its address names it."""

    @contextmanager
    def device(self) -> Iterator[Device]:
        """How it speaks to the server."""
        with open_channel(self._address, reconnect_max_s=0.25) as channel:
            yield Device(channel, self._spec, self._client_id, STAGES)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.prove)])
def databases(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """That of each job."""
    with ExitStack() as stack:
        yield {name: _database(request, stack) for name in JOBS}


def _database(request: pytest.FixtureRequest, stack: ExitStack) -> str:
    if request.param == "sqlite":
        return ""
    return stack.enter_context(new_database(request.getfixturevalue("postgresql_cluster")))


def jobs_in(folder: Path, first: Vector, databases: dict[str, str]) -> ParamSpec:
    """Two jobs of one model, which is the sum of all deltas."""
    manifest = write_manifest(folder / "model", "crash", {"w": first})
    for name, database in databases.items():
        (folder / "job.toml").write_text(f'{SETTINGS}{UNHELD}[server]\ndatabase = "{database}"\n')
        add_job(folder / "jobs", name, folder / "job.toml", folder / "model")
    return manifest.spec


def until(writers: list[JobWriter], acknowledged: int) -> None:
    """Until so many are, of all jobs together."""
    while sum(len(w.acknowledged) for w in writers) < acknowledged and any(w.is_alive() for w in writers):
        time.sleep(0.01)


def test_two_jobs_keep_their_promises(tmp_path: Path, databases: dict[str, str]) -> None:
    first = np.random.default_rng(5).integers(-100, 101, VALUES).astype(np.float32)
    spec, port, draw = jobs_in(tmp_path, first, databases), free_port(), random.Random(5)
    (tmp_path / "host.toml").write_text(
        f'[server]\naddress = "127.0.0.1:{port}"\nadmin_address = "127.0.0.1:0"\n'
    )
    of_job = {
        name: [JobWriter(n, UPDATES, f"127.0.0.1:{port}/{name}", spec, seed) for n in range(WRITERS)]
        for seed, name in enumerate(JOBS)
    }
    writers = [writer for found in of_job.values() for writer in found]
    total = len(writers) * UPDATES
    for writer in writers:
        writer.start()
    for kill in range(1, KILLS + 1):
        with killable(tmp_path, "host.toml", "--jobs", "jobs"):
            until(writers, kill * total // (KILLS + 1) + draw.randrange(10))
    models = {}
    with serving(tmp_path, "host.toml", "--jobs", "jobs") as said:
        for writer in writers:
            writer.join()
        for name in JOBS:
            with open_operator(f"{said['admin_address']}/{name}", None) as operator:
                assert operator.status().updates_applied == WRITERS * UPDATES
            with open_channel(f"{said['address']}/{name}") as channel:
                _, data = Device(channel, spec, "reader").fetch(exact=True)
                models[name] = np.frombuffer(data, spec.vector_dtype, spec.size)
    assert [problem for writer in writers for problem in writer.problems] == []
    assert sum(writer.retries for writer in writers) > 0, "no kill hit a call"
    for name, found in of_job.items():
        deltas = [applied.delta for writer in found for applied in writer.applied]
        assert len(deltas) == WRITERS * UPDATES
        np.testing.assert_array_equal(models[name], first + np.sum(deltas, axis=0))
        assert verify(tmp_path / "jobs" / name / "data", databases[name]).problems == ()
