"""The ports of a server of several runs: each call goes to its job, but for those that are of none."""

# ruff: noqa: N802 - the names of the calls are gRPC's

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpc_health.v1 import health, health_pb2

from anabranch.core.config.tables import Config
from anabranch.core.limits import Limits
from anabranch.identity.addresses import JOB_HEALTH
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1.devices_pb2_grpc import add_DevicesServicer_to_server
from anabranch.protos.v1.jobs_pb2_grpc import add_JobsServicer_to_server
from anabranch.protos.v1.operators_pb2_grpc import add_OperatorsServicer_to_server
from anabranch.server.by_job import by_job
from anabranch.server.calls import Calls
from anabranch.server.exchange import DevicesAndExchange, add_exchange
from anabranch.server.gate import Caller, Gate, job_of
from anabranch.server.job_list import ListsJobs
from anabranch.server.jobs import Jobs
from anabranch.server.metrics import Metrics
from anabranch.server.operators import Operators
from anabranch.server.outage import Outage
from anabranch.server.ports import CALLERS, NOT_SERVING, OPERATORS, SERVING, Ports, gate_of, reflect
from anabranch.server.rpc import renewed
from anabranch.server.rpc_errors import Context, Guarded, answers
from anabranch.server.streams import Streams
from anabranch.server.tls import ServerIdentity

Exchange = Callable[[object, Context], Awaitable[None]]


class JobPorts(Ports):
    """Those of a server of several runs."""

    def __init__(
        self,
        jobs: Jobs,
        config: Config,
        limits: Limits,
        identity: ServerIdentity | None,
        insecure: bool,
        metrics: Metrics,
    ) -> None:
        super().__init__(config, limits, identity, insecure, metrics)
        self._jobs, self._calls = jobs, Calls(limits)
        self._streams = Streams(limits.rpcs_max // 2)
        self._health = HealthWithJobs(jobs)

    def _add_services(self, server: Any, admin: bool, identity: ServerIdentity | None) -> None:
        kinds, service = (OPERATORS, Operators) if admin else (CALLERS, DevicesAndExchange)
        every = gate_of(identity, kinds, job=None)

        @contextmanager
        def chosen(context: Context) -> Iterator[Any]:
            with self._jobs.calling(job_of(context)) as (job, run):
                yield service(run, gate_of(identity, kinds, job.name, lambda: job.scope))

        answer = by_job(service, chosen)
        add_JobsServicer_to_server(ListsJobs(self._jobs.all, every, admin, self._calls, self._limits), server)
        if admin:
            add_OperatorsServicer_to_server(answer, server)
            reflect(server)
            return
        answer.RenewCertificate = Renewals(every, identity, self._calls).RenewCertificate
        answer.Exchange = self._with_a_place(answer.Exchange)
        add_DevicesServicer_to_server(answer, server)
        add_exchange(answer, server)

    def _with_a_place(self, exchange: Exchange) -> Exchange:
        """An exchange, of which the port takes as many for all jobs together as a server of one run takes."""
        streams = self._streams

        async def method(requests: object, context: Context) -> None:
            with streams.opened() as place:
                if place is not None:
                    await exchange(requests, context)

        return method


class HealthWithJobs(health.aio.HealthServicer):
    """Knows each job as `job/NAME` beside the server's own names; one that there is not is `NOT_FOUND`."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__()
        self._jobs = jobs

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Any:
        """A job serves while its calls are answered. The server drains for all of them."""
        name = request.service.removeprefix(JOB_HEALTH)
        job = next((job for job in self._jobs.all() if job.name == name), None)
        if name == request.service or job is None:
            return await super().Check(request, context)
        whole = await super().Check(health_pb2.HealthCheckRequest(), context)
        serves = job.run is not None and whole.status == SERVING
        return health_pb2.HealthCheckResponse(status=SERVING if serves else NOT_SERVING)


class Renewals(Guarded):
    """Certificates are renewed whatever job their device has, and if it has none."""

    def __init__(self, gate: Gate, identity: ServerIdentity | None, calls: Calls) -> None:
        self.gate, self.outage = gate, Outage()
        self._identity, self._calls = identity, calls

    @answers
    async def RenewCertificate(
        self, request: devices.RenewCertificateRequest, caller: Caller
    ) -> devices.RenewCertificateResponse:
        """See `Devices.RenewCertificate`."""
        return await renewed(self._identity, self._calls, request, caller)
