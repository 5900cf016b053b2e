"""SIGKILL of a server in the middle of a bundle: the device goes on where it was, and has what was signed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from commands import killable
from hand_bundles import signer, whole
from job_hosts import UNHELD, with_job
from nursery import Process
from ports import free_port

from anabranch.client.bundles import BundleFiles
from anabranch.client.jobs import JobOffice
from anabranch.client.link import Link
from anabranch.client.listed import ListedBundle, ListedJob
from anabranch.client.stopping import Bell, persist
from anabranch.core.errors import Unavailable

# So large that no buffer between the two processes holds it all.
FILES = {"app.py": b"class Mine: ...\n", "noise.bin": Random(5).randbytes(15 << 20)}


class Killing:
    """An office whose server is killed after the first piece."""

    def __init__(self, office: JobOffice, server: Process) -> None:
        self._office, self._server = office, server

    def bundle(self, job: ListedJob, bundle: ListedBundle, offset: int) -> Iterator[tuple[int, bytes]]:
        for piece in self._office.bundle(job, bundle, offset):
            yield piece
            self._server.kill()
            self._server.wait()


class Asked:
    """An office that says from where it was asked."""

    def __init__(self, office: JobOffice) -> None:
        self._office, self.offsets = office, list[int]()

    def bundle(self, job: ListedJob, bundle: ListedBundle, offset: int) -> Iterator[tuple[int, bytes]]:
        self.offsets.append(offset)
        return self._office.bundle(job, bundle, offset)


def listed(office: JobOffice) -> tuple[ListedJob, ListedBundle]:
    """The job, once the server has it."""

    def found() -> tuple[ListedJob, ListedBundle]:
        for job in office.listing().jobs:
            if job.bundle is not None:
                return job, job.bundle
        raise Unavailable("not yet")

    return persist(found, Bell(), 0, 0.1, 1.0, lambda _: None)


def test_a_fetch_outlives_its_server(tmp_path: Path) -> None:
    (tmp_path / "app.bundle").write_bytes(whole(FILES))
    with_job(tmp_path, "one", UNHELD, (), tmp_path / "app.bundle")
    port = free_port()
    (tmp_path / "host.toml").write_text(
        f'[server]\naddress = "127.0.0.1:{port}"\nadmin_address = "127.0.0.1:0"\n'
    )
    files = BundleFiles(tmp_path / "device", [signer(1)])
    link = Link(f"127.0.0.1:{port}", reconnect_max_s=0.25)
    office = JobOffice(link, "device-1")
    try:
        with killable(tmp_path, "host.toml", "--jobs", "jobs") as (_, server):
            job, bundle = listed(office)
            with pytest.raises(Unavailable):
                files.prepare(Killing(office, server), job, bundle)
        (part,) = (tmp_path / "device" / "bundles").iterdir()
        begun = part.stat().st_size
        assert part.suffix == ".part"
        assert 0 < begun < bundle.size_bytes
        with killable(tmp_path, "host.toml", "--jobs", "jobs"):
            again, offered = listed(office)
            assert offered == bundle
            asked = Asked(office)
            folder, found = files.prepare(asked, again, offered)
        assert asked.offsets == [begun]
        assert found.files == FILES
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    finally:
        link.close()
