"""Jobs on a guarded port: whose a job is goes by certificates, and membership is of no job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from guarded import issued
from job_hosts import UNHELD, Host, spec, with_job

from anabranch.client.operator import OperatorClient
from anabranch.client.transport import GrpcTransport
from anabranch.core.effects import Refused
from anabranch.core.errors import ConfigError, NotAuthenticated, NotPermitted
from anabranch.core.model.updates import Ask, Capability, Task
from anabranch.identity.authority import REGISTER, Authority
from anabranch.identity.certificates import Kind
from anabranch.identity.wallet import Wallet
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server.job import JobState


class Guarded:
    """Two jobs behind mutual TLS: `wards` is for ward-*, `all` for everybody."""

    def __init__(self, folder: Path, authority: Authority, host: Host, stack: ExitStack) -> None:
        self.folder, self.authority, self.host, self.stack = folder, authority, host, stack

    def papers(self, name: str, kind: Kind = Kind.DEVICE) -> Wallet:
        return issued(self.authority, kind, name, self.folder / name)

    def transport(self, wallet: Wallet, job: str) -> GrpcTransport:
        address = f"{self.host.info.address}/{job}" if job else self.host.info.address
        return self.stack.enter_context(GrpcTransport(address, wallet.name, wallet=wallet))


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    with_job(tmp_path, "wards", UNHELD, ("ward-*",))
    with_job(tmp_path, "all", UNHELD)
    identity = {"folder": str(tmp_path / "ca"), "tls": "always"}
    with (
        Authority.create(tmp_path / "ca") as authority,
        Host(tmp_path, identity=identity) as host,
        ExitStack() as stack,
    ):
        for name in ("wards", "all"):
            host.until(name, JobState.RUNNING)
        yield Guarded(tmp_path, authority, host, stack)


def ask(transport: GrpcTransport) -> Task | Refused:
    return transport.ask(Ask(transport.client_id, "task-1"), spec())


def test_a_scope_is_of_the_names_in_certificates(guarded: Guarded) -> None:
    ward, lab = guarded.papers("ward-1"), guarded.papers("lab-1")
    guarded.transport(ward, "wards").enrol(Capability())
    guarded.transport(lab, "all").enrol(Capability())
    outside = guarded.transport(lab, "wards")
    for call in (lambda: outside.enrol(Capability()), lambda: ask(outside), lambda: outside.fetch("00" * 32)):
        with pytest.raises(NotPermitted, match="'lab-1' is not of this job"):
            call()
    outside.client_id = "ward-1"  # another's name does not help
    with pytest.raises(NotPermitted):
        outside.enrol(Capability())


def test_an_operators_port_is_for_operators_of_every_job(guarded: Guarded) -> None:
    alice, ward = guarded.papers("alice", Kind.OPERATOR), guarded.papers("ward-1")
    address = guarded.host.info.admin_address
    for job, name in (("/wards", "wards"), ("/all", "all")):
        with OperatorClient(f"{address}{job}", wallet=alice) as operator:
            assert operator.status().run == name
            assert [listed.name for listed in operator.jobs()] == ["wards", "all"]
    with OperatorClient(address, wallet=ward) as device, pytest.raises(NotPermitted):
        device.jobs()


def test_a_revoked_device_is_out_of_every_job(guarded: Guarded) -> None:
    ward = guarded.papers("ward-1")
    transports = [guarded.transport(ward, job) for job in ("wards", "all")]
    for transport in transports:
        transport.enrol(Capability())
    guarded.authority.revoke("ward-1")
    for transport in transports:
        with pytest.raises(NotAuthenticated):
            ask(transport)


def test_a_certificate_is_renewed_without_a_job_and_with_one_that_is_gone(guarded: Guarded) -> None:
    ward = guarded.papers("ward-1")
    for job in ("", "wards", "gone"):
        transport = guarded.transport(ward, job)
        request = devices.RenewCertificateRequest(signing_request=ward.request())
        made = transport._link.stub().RenewCertificate(request, timeout=600)
        assert made.certificate
    with pytest.raises(ConfigError, match="serves several jobs"):
        guarded.transport(ward, "").enrol(Capability())


def test_a_server_of_jobs_does_not_start_on_an_older_register(guarded: Guarded) -> None:
    """Killed before its jobs have ended: what they noted themselves is of their start."""
    register, jobs = guarded.folder / "ca" / REGISTER, guarded.folder / "jobs"
    ward = guarded.papers("ward-1")
    backup = register.read_bytes()
    guarded.authority.revoke("ward-1")
    with pytest.raises(NotAuthenticated):
        guarded.transport(ward, "all").enrol(Capability())
    at_the_kill = (jobs / "register.json").read_bytes()
    guarded.stack.close()
    guarded.host.close()
    for noted in jobs.glob("*/data/register.json"):
        noted.unlink()
    (jobs / "register.json").write_bytes(at_the_kill)
    register.write_bytes(backup)
    identity = {"folder": str(guarded.folder / "ca"), "tls": "always"}
    with pytest.raises(ConfigError, match="older than this server"), Host(guarded.folder, identity=identity):
        pass
    guarded.authority.declare_restored()
    with Host(guarded.folder, identity=identity) as host:
        host.until("all", JobState.RUNNING)
