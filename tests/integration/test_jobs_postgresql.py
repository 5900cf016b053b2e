"""Several runs on one server, each in a PostgreSQL database of its own; and what sharing one comes to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from job_hosts import UNHELD, Host, with_job
from postgres import new_database
from postgres_gate import PostgresGate

from anabranch.core.errors import ConfigError
from anabranch.server.job import JobState
from anabranch.server.job_folder import SETTINGS, set_stopped
from anabranch.server.verify import verify

RUNNING, FAILED = JobState.RUNNING, JobState.FAILED


def kept_in(url: str, lease_s: float = 600.0) -> str:
    """Settings of a job in this database, whose server may be silent for so long."""
    return f'[server]\ndatabase = "{url}"\nleader_lease_s = {lease_s}\n{UNHELD}'


@pytest.fixture
def another_url(postgresql_cluster: str) -> Iterator[str]:
    """The URL of another new database."""
    with new_database(postgresql_cluster) as url:
        yield url


def work(host: Host, job: str, value: float = 1.0) -> int:
    """An update of a device of this job; the version that came of it."""
    host.until(job, RUNNING)
    device = host.device(job)
    device.enrol()
    return int(device.work(value).version)


def test_each_job_has_its_database_and_a_restart_resumes_them(
    tmp_path: Path, postgresql_url: str, another_url: str
) -> None:
    urls = {"one": postgresql_url, "two": another_url}
    for name, url in urls.items():
        with_job(tmp_path, name, kept_in(url))
    with_job(tmp_path, "three", UNHELD)  # beside them, in its own folder
    ids = []
    for version in (1, 2):
        with Host(tmp_path) as host:
            assert [work(host, name) for name in (*urls, "three")] == [version] * 3
            ids.append({name: job.run_id for name, job in host.jobs().items()})
        assert host.exit_code == 0
    assert ids[0] == ids[1]
    assert len(set(ids[0].values())) == 3
    for name, url in urls.items():
        data = tmp_path / "jobs" / name / "data"
        assert not (data / "anabranch.db").exists()
        found = verify(data, url)
        assert (found.problems, found.version) == ((), 2)


def test_two_jobs_do_not_share_a_database(tmp_path: Path, postgresql_url: str) -> None:
    """However its address is spelt: the second one went on with the run of a first that was stopped."""
    again = postgresql_url.replace("postgresql://", "postgres://") + "&application_name=two"
    with_job(tmp_path, "one", kept_in(postgresql_url))
    for url in (postgresql_url, again):
        with pytest.raises(ConfigError, match=r"server\.database is that of job 'one' too"):
            with_job(tmp_path, "two", kept_in(url))
    job = with_job(tmp_path, "two")
    (job / SETTINGS).write_text((tmp_path / "two.toml").read_text() + kept_in(again))
    set_stopped(tmp_path / "jobs" / "one", True)
    for _ in range(2):  # whether the first is served or not
        with Host(tmp_path) as host:
            assert "is that of job 'one' too" in host.until("two", FAILED)
            set_stopped(tmp_path / "jobs" / "one", False)
            assert work(host, "one") in (1, 2)


def test_a_database_that_somebody_else_serves_fails_its_job_alone(
    tmp_path: Path, postgresql_url: str, another_url: str
) -> None:
    for folder, urls in (("here", (postgresql_url,)), ("there", (postgresql_url, another_url))):
        (tmp_path / folder).mkdir()
        for name, url in zip(("one", "two"), urls, strict=False):
            with_job(tmp_path / folder, name, kept_in(url))
    with Host(tmp_path / "here") as first:
        assert work(first, "one") == 1
        with Host(tmp_path / "there") as second:
            assert "leads this run" in second.until("one", FAILED)
            assert (work(second, "two"), work(first, "one")) == (1, 2)


def test_a_database_that_is_gone_fails_its_job_alone(
    tmp_path: Path, postgresql_url: str, another_url: str
) -> None:
    with PostgresGate(postgresql_url) as gate:
        with_job(tmp_path, "cut", kept_in(gate.url, lease_s=4.0))
        with_job(tmp_path, "sound", kept_in(another_url))
        with Host(tmp_path) as host:
            assert (work(host, "cut"), work(host, "sound")) == (1, 1)
            gate.shut()
            assert "another server may lead by now" in host.until("cut", FAILED)
            assert work(host, "sound") == 2
            gate.open()
            assert work(host, "cut") == 2
    assert host.exit_code == 0
