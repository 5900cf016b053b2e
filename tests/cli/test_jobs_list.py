"""What `admin jobs list` says of a job whose run nobody has open."""

from __future__ import annotations

import pytest

from anabranch.cli.jobs import cells_of
from anabranch.client.listed import ListedJob


@pytest.mark.parametrize(("run_id", "version", "shown"), [("r", 1000, "1000"), ("r", 0, "0"), ("", 0, "")])
def test_the_version_of_a_job_that_is_stopped_is_not_known(run_id: str, version: int, shown: str) -> None:
    job = ListedJob("wards", "stopped", "", run_id, version, "synthetic", ())
    assert cells_of(job)[2] == shown
