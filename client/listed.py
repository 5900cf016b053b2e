"""The jobs of a server, as it lists them."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.identity.addresses import checked_job
from anabranch.protos.v1 import jobs_pb2 as jobs_pb


@dataclass(frozen=True)
class ListedBundle:
    """The bundle of a job, as its server lists it. `signer`: who has signed it, as the server says."""

    sha256: str
    size_bytes: int
    signer: str


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
    bundle: ListedBundle | None = None


def read_jobs(answer: jobs_pb.ListJobsResponse) -> list[ListedJob]:
    """Of an answer of `ListJobs`. Raises `ConfigError` for what is no job's name: folders are called so."""
    return [
        ListedJob(
            checked_job(j.name) if j.name else "",
            j.state,
            j.why,
            j.run_id,
            j.version,
            j.app,
            tuple(j.devices),
            _bundle(j),
        )
        for j in answer.jobs
    ]


def _bundle(job: jobs_pb.Job) -> ListedBundle | None:
    if not job.HasField("bundle"):
        return None
    return ListedBundle(job.bundle.sha256.hex(), job.bundle.size_bytes, job.bundle.signer)
