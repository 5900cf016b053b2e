"""The jobs of a server, as it lists them."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.protos.v1 import jobs_pb2 as jobs_pb


@dataclass(frozen=True)
class ListedJob:
    """A job as its server lists it; see protos/v1/jobs.proto."""

    name: str
    state: str
    why: str
    run_id: str
    version: int
    app: str
    devices: tuple[str, ...]


def read_jobs(answer: jobs_pb.ListJobsResponse) -> list[ListedJob]:
    """Of an answer of `ListJobs`."""
    return [
        ListedJob(j.name, j.state, j.why, j.run_id, j.version, j.app, tuple(j.devices)) for j in answer.jobs
    ]
