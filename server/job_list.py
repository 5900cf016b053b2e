"""What a server says of its jobs: on both ports, to operators of all of them."""

# ruff: noqa: N802 - the names of the calls are gRPC's

from __future__ import annotations

from collections.abc import Callable

from anabranch.protos.convert import checked_id
from anabranch.protos.v1 import jobs_pb2 as jobs_pb
from anabranch.protos.v1 import model_pb2 as model
from anabranch.protos.v1.jobs_pb2_grpc import JobsServicer
from anabranch.server.calls import Calls
from anabranch.server.gate import Caller, Gate
from anabranch.server.job import HostedJob, JobState
from anabranch.server.rpc_errors import answers

LOOK_AGAIN_S = (5.0, 15.0)  # what devices are told: a fleet does not come at once
OPEN = (JobState.STARTING, JobState.RUNNING)


class ListsJobs(JobsServicer):
    """See protos/v1/jobs.proto."""

    def __init__(self, jobs: Callable[[], list[HostedJob]], gate: Gate, admin: bool, calls: Calls) -> None:
        self.gate, self.calls = gate, calls
        self._jobs, self._admin = jobs, admin

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
    )
