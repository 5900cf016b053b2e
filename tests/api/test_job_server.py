"""A server of several runs in one process: its jobs, their devices, and what goes wrong with one of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guarded import issued

import anabranch as ab
from anabranch.api.live import InProcessServer
from anabranch.core.errors import ConfigError, FolderMissing, NotPermitted, PortInUse, Unavailable
from anabranch.core.model.params import digest
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import Kind
from anabranch.workloads.synthetic import Synthetic

FEW: dict[str, Any] = {"strategy": "fedasync", "training": ab.Training(steps=3, batch_size=8)}
LONG_S = 600.0


def work(job: ab.ServedJob, name: str, tasks: int = 0) -> None:
    """A device serves a job, to its end or so many tasks."""
    ab.Client(Synthetic, job, id=name, tasks_max=tasks).start().wait(LONG_S)


def test_two_jobs_come_to_runs_that_replay(tmp_path: Path) -> None:
    with ab.JobServer(tmp_path / "jobs") as server:
        assert server.jobs() == []
        wards = server.add("wards", "synthetic", **FEW, until=ab.Until(updates=4), devices=("ward-*",))
        everybody = server.add("everybody", Synthetic, **FEW, until=ab.Until(updates=6), seed=1)
        work(wards, "ward-1")
        work(everybody, "lab-1")
        wards.wait(LONG_S)
        everybody.wait(LONG_S)
        assert (wards.state, wards.why) == ("ended", "the run ended after 4 updates, its budget")
        assert [(s.run, s.version) for s in (wards.status(), everybody.status())] == [
            ("wards", 4),
            ("everybody", 6),
        ]
        with pytest.raises(NotPermitted, match="'lab-1' is not of this job"):
            work(wards, "lab-1")
        weights = everybody.weights()
        with pytest.raises(ConfigError, match=r"job 'wards' is served: call its stop\(\)"):
            wards.report()
        assert [job.name for job in server.jobs()] == ["everybody", "wards"]
    run = everybody.report()
    spec = InProcessServer("synthetic").local.spec
    assert digest(spec.flatten(weights)) == run.result.model_sha256 == run.replay().model_sha256
    assert (run.result.kind, run.result.versions, run.result.seed) == ("live", 6, 1)
    found = ab.JobServer(tmp_path / "jobs").job("wards").report(tmp_path / "report")
    assert {row["client"] for row in found.events("decided")} == {"ward-1"}
    assert found.app.name == "synthetic"


def test_a_job_stops_and_goes_on_while_another_is_served() -> None:
    with ab.JobServer() as server:
        one, other = server.add("one", Synthetic, **FEW), server.add("other", Synthetic, **FEW)
        work(one, "device-0", tasks=2)
        one.stop()
        one.stop()
        assert one.state == "stopped"
        with pytest.raises(Unavailable, match="job 'one' is not served: it is stopped"):
            one.status()
        assert one.report().result.versions == 2
        work(other, "device-0", tasks=1)
        one.start()
        assert one.status().version == 2
        work(one, "device-0", tasks=1)
        assert (one.status().version, other.status().version) == (3, 1)
        late = server.add("late", Synthetic, **FEW)
        late.stop()
        late.start()
        assert late.status().version == 0


def test_it_goes_on_from_its_folder_and_knows_what_is_stopped(tmp_path: Path) -> None:
    server = ab.JobServer(tmp_path / "jobs")
    for name in ("one", "idle"):
        server.add(name, Synthetic, **FEW)
    server.job("idle").stop()
    with server:
        work(server.job("one"), "device-0", tasks=2)
        before = server.job("one").weights()
    with ab.JobServer(tmp_path / "jobs") as again:
        after = again.job("one").weights()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        with pytest.raises(Unavailable, match="job 'idle' is not served: it is stopped"):
            again.job("idle").wait(LONG_S)
        again.job("idle").start()
        assert again.job("idle").status().version == 0


def test_what_is_wrong_with_one_comes_out_of_that_one(tmp_path: Path) -> None:
    server = ab.JobServer(tmp_path / "jobs")
    broken, sound = server.add("broken", Synthetic, **FEW), server.add("sound", Synthetic, **FEW)
    (broken.folder / "settings.toml").write_text("[strategy]\nname = 'nonsense'\n")
    with server:
        with pytest.raises(Unavailable, match=r"job 'broken' has failed, and is tried again: .*nonsense"):
            broken.wait(LONG_S)
        assert sound.status().version == 0
        with pytest.raises(Unavailable, match=r"job 'sound' is not ended within 0\.01 s"):
            sound.wait(0.01)
        with pytest.raises(FolderMissing, match="no job 'neither'"):
            server.job("neither")
        with pytest.raises(ConfigError, match="there is a job 'sound'"):
            server.add("sound", Synthetic)
        with pytest.raises(PortInUse), ab.JobServer(address=server.address):
            pass
        broken.stop()
        assert broken.state == "stopped"
    with pytest.raises(Unavailable, match="job 'sound' is not served: the server is stopped"):
        sound.wait(LONG_S)
    with pytest.raises(ConfigError, match="not running: enter its context"):
        ab.JobServer(tmp_path / "jobs").job("sound").wait(LONG_S)


@pytest.mark.parametrize("devices", ["ward-*", [1], [""]])
def test_who_may_serve_a_job_is_a_list_of_names(devices: Any, tmp_path: Path) -> None:
    """Of a text each letter would be one, and `*` everybody."""
    server = ab.JobServer(tmp_path / "jobs")
    with pytest.raises(ConfigError, match=r"^devices"):
        server.add("wards", "synthetic", **FEW, devices=devices)
    assert server.jobs() == []


def test_a_file_is_no_folder_of_jobs(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("mine")
    with pytest.raises(ConfigError, match="jobs is a file: name the folder of the jobs"):
        ab.JobServer(tmp_path / "jobs")
    with pytest.raises(ConfigError, match="settings is a list: give a dict"):
        ab.JobServer(settings=["server.address"])  # type: ignore[arg-type]


def test_its_own_settings_say_where_and_who(tmp_path: Path) -> None:
    (tmp_path / "host.toml").write_text('[server]\ndrain_s = 3.0\nmetrics_address = "127.0.0.1:0"\n')
    Authority.create(tmp_path / "ca").close()
    guarded = {"identity.folder": str(tmp_path / "ca"), "identity.tls": "always"}
    server = ab.JobServer(tmp_path / "jobs", config=tmp_path / "host.toml", settings=guarded)
    assert (server.config.server.drain_s, server.config.server.address) == (3.0, "127.0.0.1:0")
    with Authority.open(tmp_path / "ca") as authority, server:
        issued(authority, Kind.OPERATOR, "alice", tmp_path / "alice")
        job = server.add("one", Synthetic, **FEW)
        with job.operator(tmp_path / "alice") as operator:
            assert operator.status().run == "one"
    with pytest.raises(ConfigError, match=r"'table\.key'"):
        ab.JobServer(settings={"limits": 5})


def test_passwords_of_a_job_are_its_own_and_not_masked(tmp_path: Path) -> None:
    database = "postgresql://me:secret@nowhere/one"
    server = ab.JobServer(tmp_path / "jobs")
    job = server.add("one", Synthetic, settings={"server.database": database})
    assert f'database = "{database}"' in (job.folder / "settings.toml").read_text()
    assert (job.folder / "settings.toml").stat().st_mode & 0o077 == 0


def test_it_is_there_for_an_event_loop_of_others() -> None:
    async def federation() -> int:
        async with ab.JobServer() as server:
            job = server.add("one", Synthetic, **FEW, until=ab.Until(updates=3))
            async with ab.Client(Synthetic, job, id="device-0"):
                await job.wait_async(LONG_S)
            return (await asyncio.to_thread(job.status)).version

    assert asyncio.run(federation()) == 3
