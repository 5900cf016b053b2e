"""Bundles on a guarded port: nobody fetches in another's name, and no server chooses whose code is run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from guarded import issued
from hand_bundles import signer, whole
from job_hosts import UNHELD, Host, with_job

from anabranch.client.bundles import BundleFiles
from anabranch.client.jobs import JobOffice
from anabranch.client.link import Link
from anabranch.client.listed import ListedBundle, ListedJob
from anabranch.core.errors import NotAuthenticated, NotPermitted
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import Kind
from anabranch.server.job import JobState


class Guarded:
    """A job with a bundle behind mutual TLS, for ward-*."""

    def __init__(self, folder: Path, authority: Authority, host: Host, stack: ExitStack) -> None:
        self.folder, self.authority, self._host, self._stack = folder, authority, host, stack

    def office(self, name: str, kind: Kind = Kind.DEVICE, says: str = "") -> JobOffice:
        wallet = issued(self.authority, kind, name, self.folder / name)
        link = Link(self._host.info.address, wallet=wallet)
        self._stack.callback(link.close)
        return JobOffice(link, says or name)

    def job(self) -> tuple[ListedJob, ListedBundle]:
        (job,) = self.office("ward-9").listing().jobs
        assert job.bundle is not None
        return job, job.bundle


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    (tmp_path / "a.bundle").write_bytes(whole())
    with_job(tmp_path, "wards", UNHELD, ("ward-*",), tmp_path / "a.bundle")
    identity = {"folder": str(tmp_path / "ca"), "tls": "always"}
    with (
        Authority.create(tmp_path / "ca") as authority,
        Host(tmp_path, identity=identity) as host,
        ExitStack() as stack,
    ):
        host.until("wards", JobState.RUNNING)
        yield Guarded(tmp_path, authority, host, stack)


def test_a_bundle_goes_to_the_devices_of_its_job(guarded: Guarded) -> None:
    job, bundle = guarded.job()
    data = b"".join(piece for _, piece in guarded.office("ward-1").bundle(job, bundle, 0))
    assert data == whole()
    outsiders = (
        guarded.office("lab-1"),
        guarded.office("lab-2", says="ward-1"),
        guarded.office("alice", Kind.OPERATOR, says="ward-1"),
    )
    for office in outsiders:
        with pytest.raises(NotPermitted):
            list(office.bundle(job, bundle, 0))
    ward = guarded.office("ward-2")
    guarded.authority.revoke("ward-2")
    with pytest.raises(NotAuthenticated):
        list(ward.bundle(job, bundle, 0))


def test_membership_of_the_federation_signs_no_code(guarded: Guarded, tmp_path: Path) -> None:
    """The server of one's own federation, which one trusts with updates, cannot have its code run."""
    job, bundle = guarded.job()
    for allowed in ((), (signer(2),)):
        files = BundleFiles(tmp_path / "device", allowed)
        with pytest.raises(NotPermitted, match="who is not allowed here"):
            files.prepare(guarded.office("ward-1"), job, bundle)
    assert not (tmp_path / "device").exists()
