"""Jobs that fail for days: each is tried again and again, and costs the others nothing."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import NoReturn

import pytest

from anabranch.core.errors import ConfigError
from anabranch.server.job import JobState
from anabranch.server.job_folder import NOTE
from anabranch.server.jobs import AGAIN_MAX_S, Jobs

DAYS = 1100  # tries: more than a float has doublings
SOUND = '{"added_at": 1.0}'


def folder_of(tmp_path: Path, note: str) -> Path:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / NOTE).write_text(note)
    return tmp_path


def unread(_job: Path, _data: Path) -> NoReturn:
    raise ConfigError("its settings are damaged")


def test_a_damaged_note_is_looked_at_for_days_and_its_job_goes_on_at_once_when_it_is_mended(
    tmp_path: Path,
) -> None:
    folder, told = folder_of(tmp_path, "{"), list[tuple[str, JobState]]()

    async def look() -> None:
        jobs = Jobs(folder, unread, None, lambda name, state, _: told.append((name, state)))
        for _ in range(DAYS):
            await jobs.look()
        (folder / "one" / NOTE).write_text(SOUND)
        await jobs.look()
        await jobs.close()

    asyncio.run(look())
    assert told == [("one", JobState.FAILED), ("one", JobState.STARTING), ("one", JobState.FAILED)]


def test_a_job_that_fails_for_days_is_tried_again_after_the_longest_wait(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, SOUND)

    async def fail() -> float:
        jobs = Jobs(folder, unread, None)
        await jobs.look()
        (job,) = jobs.all()
        for _ in range(DAYS):
            assert job.task is not None
            await job.task
            job.not_before = 0.0
            await jobs.look()
        assert job.task is not None
        began = time.monotonic()
        await job.task
        waits_s = job.not_before - began
        await jobs.close()
        return waits_s

    assert AGAIN_MAX_S <= asyncio.run(fail()) < 2 * AGAIN_MAX_S


def test_who_breaks_the_note_of_a_job_that_is_served_is_told_once_and_again_when_it_is_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, told = folder_of(tmp_path, SOUND), list[tuple[JobState, str]]()
    note = folder / "one" / NOTE

    async def look() -> None:
        jobs = Jobs(folder, unread, None, lambda _, state, why: told.append((state, why)))
        await jobs.look()
        (job,) = jobs.all()
        assert job.task is not None
        await job.task
        told.clear()
        job.task = asyncio.create_task(asyncio.sleep(3600))  # as if it were served
        job.state, job.why = JobState.RUNNING, ""
        note.write_text('{"added_at": 1.0, "devices": "lab-1"}')
        for _ in range(3):
            await jobs.look()
        note.write_text(SOUND)
        await jobs.look()
        job.task.cancel()

    with caplog.at_level("WARNING"):
        asyncio.run(look())
    (broken, (mended, why)) = told
    assert (broken[0], mended, why) == (JobState.RUNNING, JobState.RUNNING, "")
    assert "as it was told before" in broken[1]
    assert "devices" in broken[1]
    (line,) = [r.getMessage() for r in caplog.records if "as it was told before" in r.getMessage()]
    assert str(note) in line


def test_a_folder_that_is_not_there_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def look() -> None:
        jobs = Jobs(tmp_path / "jbos", unread, None)
        for _ in range(3):
            await jobs.look()
        (tmp_path / "jbos").mkdir()
        await jobs.look()
        (tmp_path / "jbos").rmdir()
        await jobs.look()

    with caplog.at_level("WARNING"):
        asyncio.run(look())
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2, "once for each time that it goes"
    assert all("jbos is not there: `anabranch admin jobs add` makes it" in line for line in said)
