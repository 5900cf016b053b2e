"""What a server says of its jobs: on both ports, to operators of all of them."""

# ruff: noqa: N802 - the names of the calls are gRPC's

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from anabranch.core.errors import Unavailable
from anabranch.core.ids import checked_id
from anabranch.core.limits import Limits
from anabranch.protos.v1 import jobs_pb2 as jobs_pb
from anabranch.protos.v1 import model_pb2 as model
from anabranch.protos.v1.jobs_pb2_grpc import JobsServicer
from anabranch.server.bundles import OfferedBundle
from anabranch.server.calls import Calls
from anabranch.server.gate import Caller, Gate
from anabranch.server.job import HostedJob, JobState
from anabranch.server.outage import Outage
from anabranch.server.rpc_errors import Guarded, answers, streams

LOOK_AGAIN_S = (5.0, 15.0)  # what devices are told: a fleet does not come at once
JOB_CHARS_MAX = 64  # of what may be no job
OPEN = (JobState.STARTING, JobState.RUNNING)


class ListsJobs(Guarded, JobsServicer):
    """See protos/v1/jobs.proto."""

    def __init__(
        self, jobs: Callable[[], list[HostedJob]], gate: Gate, admin: bool, calls: Calls, limits: Limits
    ) -> None:
        self.gate, self.calls, self.outage = gate, calls, None if admin else Outage()
        self._jobs, self._admin, self._limits = jobs, admin, limits

    @answers
    async def ListJobs(self, request: jobs_pb.ListJobsRequest, caller: Caller) -> jobs_pb.ListJobsResponse:
        """Every job to operators; to a device those that it may serve and that go on."""
        if self._admin:
            return jobs_pb.ListJobsResponse(jobs=[_shown(job, whole=True) for job in self._jobs()])
        client_id = checked_id(request.client_id, "client_id")
        caller.check_name(client_id)
        self.calls.take("ListJobs", client_id, caller)
        found = [job for job in self._jobs() if job.state in OPEN and job.scope.has(client_id)]
        earliest_s, latest_s = LOOK_AGAIN_S
        return jobs_pb.ListJobsResponse(
            jobs=[_shown(job, whole=False) for job in found],
            look_again=model.RetryWindow(earliest_s=earliest_s, latest_s=latest_s),
        )

    @streams
    async def FetchBundle(
        self, request: jobs_pb.FetchBundleRequest, caller: Caller
    ) -> AsyncIterator[jobs_pb.FetchBundleResponse]:
        """A job's bundle from an offset on, to a device that may serve the job."""
        client_id = checked_id(request.client_id, "client_id")
        caller.check_name(client_id)
        self.calls.take("FetchBundle", client_id, caller)
        job = next((job for job in self._jobs() if job.name == request.job and job.state in OPEN), None)
        if job is None:
            raise Unavailable(f"no job {request.job[:JOB_CHARS_MAX]!r} is served here now")
        job.scope.check(client_id)
        bundle = job.bundle
        if bundle is None or bundle.sha256 != request.sha256.hex():
            raise Unavailable(f"job {job.name!r} has no such bundle now: look again at what is listed")
        for chunk in bundle.chunks(request.offset, self._limits.sent_chunk_bytes):
            yield jobs_pb.FetchBundleResponse(offset=chunk.offset, data=bytes(chunk.data))


def _shown(job: HostedJob, whole: bool) -> jobs_pb.Job:
    run = job.run
    return jobs_pb.Job(
        name=job.name,
        state=job.state,
        why=job.why if whole else "",
        run_id="" if run is None else run.info.run_id,
        version=0 if run is None else run.writer.glance.version,
        app=job.app,
        devices=job.note.devices if whole else (),
        bundle=None if job.bundle is None else _offered(job.bundle),
    )


def _offered(bundle: OfferedBundle) -> jobs_pb.Bundle:
    return jobs_pb.Bundle(
        sha256=bytes.fromhex(bundle.sha256), size_bytes=bundle.size_bytes, signer=bundle.signer
    )
