"""The bundle of a job on its way from a server to a device that allows its signer, and to no other."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from hand_bundles import key_of, signer, whole
from job_hosts import UNHELD, Host, with_job

from anabranch.client.bundles import BundleFiles, unpack
from anabranch.client.jobs import JobOffice
from anabranch.client.link import Link
from anabranch.client.listed import ListedBundle, ListedJob
from anabranch.core.errors import (
    ConfigError,
    DataError,
    InvalidSignature,
    InvalidUpdate,
    NotPermitted,
    StoreError,
    TooLarge,
    Unavailable,
)
from anabranch.core.limits import BUNDLE_BYTES_MAX
from anabranch.identity.bundle import open_bundle, pack
from anabranch.protos.v1 import jobs_pb2
from anabranch.protos.v1.jobs_pb2_grpc import JobsStub
from anabranch.server.job import JobState
from anabranch.server.job_folder import BUNDLE

LARGE = {"app.py": b"class Mine: ...\n", "noise.bin": Random(5).randbytes(1_500_000)}


class Counted:
    """An office that is asked through this: from which offsets, and it is cut off after so many pieces."""

    def __init__(self, office: JobOffice, pieces_max: int = 10**9) -> None:
        self._office, self._pieces_max = office, pieces_max
        self.offsets: list[int] = []

    def bundle(self, job: ListedJob, bundle: ListedBundle, offset: int) -> Iterator[tuple[int, bytes]]:
        self.offsets.append(offset)
        for number, piece in enumerate(self._office.bundle(job, bundle, offset)):
            if number == self._pieces_max:
                raise Unavailable("cut")
            yield piece


class Served:
    """A server with jobs, and the offices where devices ask."""

    def __init__(self, folder: Path, host: Host, stack: ExitStack) -> None:
        self.folder, self.host, self._stack = folder, host, stack

    def office(self, name: str = "device-1") -> JobOffice:
        link = Link(self.host.info.address)
        self._stack.callback(link.close)
        return JobOffice(link, name)

    def listed(self, name: str, of: str = "device-1") -> tuple[ListedJob, ListedBundle]:
        job = next(job for job in self.office(of).listing().jobs if job.name == name)
        assert job.bundle is not None
        return job, job.bundle


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """Jobs `small` and `large` with bundles, `bare` without one, and `wards` that is for ward-* alone."""
    for name, data in (("small", whole()), ("large", whole(LARGE)), ("wards", whole(number=2))):
        (tmp_path / f"{name}.bundle").write_bytes(data)
        scope = ("ward-*",) if name == "wards" else ()
        with_job(tmp_path, name, UNHELD, scope, tmp_path / f"{name}.bundle")
    with_job(tmp_path, "bare", UNHELD)
    with Host(tmp_path) as host, ExitStack() as stack:
        for name in ("small", "large", "bare", "wards"):
            host.until(name, JobState.RUNNING)
        yield Served(tmp_path, host, stack)


def files_of(served: Served, *signers: str) -> BundleFiles:
    """A device's folder, which allows these signers."""
    return BundleFiles(served.folder / "device", signers)


def test_a_bundle_is_listed_with_its_digest_size_and_signer(served: Served) -> None:
    _, bundle = served.listed("large")
    found = open_bundle(whole(LARGE))
    assert bundle == ListedBundle(found.sha256, len(whole(LARGE)), signer(1))
    jobs = {job.name: job.bundle for job in served.office().listing().jobs}
    assert (jobs["bare"], "wards" in jobs) == (None, False)
    assert served.host.jobs()["wards"].bundle == served.listed("wards", "ward-1")[1]


def test_it_is_fetched_once_and_unpacked_for_its_owner_alone(served: Served) -> None:
    office = Counted(served.office())
    for _ in range(2):
        folder, found = files_of(served, signer(1)).prepare(office, *served.listed("large"))
        assert found.files == LARGE
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == LARGE
    assert office.offsets == [0]
    for path in (served.folder / "device" / "bundles").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_fetch_that_was_cut_goes_on_where_it_was(served: Served) -> None:
    cut, whole_ = Counted(served.office(), pieces_max=2), Counted(served.office())
    with pytest.raises(Unavailable, match="cut"):
        files_of(served, signer(1)).prepare(cut, *served.listed("large"))
    assert {path.suffix for path in (served.folder / "device" / "bundles").iterdir()} == {".part"}
    _, found = files_of(served, signer(1)).prepare(whole_, *served.listed("large"))
    assert (found.files, cut.offsets, whole_.offsets) == (LARGE, [0], [2 * 256 * 1024])


def test_nothing_of_another_signer_is_fetched(served: Served) -> None:
    office = Counted(served.office())
    for signers in ((), (signer(2),)):
        with pytest.raises(NotPermitted, match=f"signed by {signer(1)}, who is not allowed here"):
            files_of(served, *signers).prepare(office, *served.listed("small"))
    assert office.offsets == []
    assert not (served.folder / "device").exists()


def test_a_server_that_lies_about_the_signer_is_found_out(served: Served) -> None:
    job, bundle = served.listed("small")
    with pytest.raises(NotPermitted, match=f"signed by {signer(1)}"):
        files_of(served, signer(2)).prepare(served.office(), job, replace(bundle, signer=signer(2)))
    assert list((served.folder / "device" / "bundles").iterdir()) == []


def test_a_signer_that_was_removed_is_not_run_any_more(served: Served) -> None:
    job, bundle = served.listed("small")
    files_of(served, signer(1)).prepare(served.office(), job, bundle)
    with pytest.raises(NotPermitted):
        files_of(served, signer(2)).prepare(served.office(), job, bundle)
    with pytest.raises(NotPermitted):  # whatever the server says of it
        files_of(served, signer(2)).prepare(served.office(), job, replace(bundle, signer=signer(2)))


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_what_a_disk_has_damaged_is_fetched_anew(served: Served, damage: str) -> None:
    job, bundle = served.listed("small")
    folder, _ = files_of(served, signer(1)).prepare(served.office(), job, bundle)
    kept = folder.with_name(f"{bundle.sha256}.bundle")
    data = kept.read_bytes()
    if damage == "gone":
        kept.unlink()
    else:
        kept.write_bytes(data[:-1] if damage == "cut" else data[:-1] + b"?")
    (folder / "app.py").write_text("raise SystemExit\n")
    office = Counted(served.office())
    _, found = files_of(served, signer(1)).prepare(office, job, bundle)
    assert (office.offsets, kept.read_bytes()) == ([0], data)
    assert {path: (folder / path).read_bytes() for path in found.files} == found.files


def test_a_part_that_is_none_of_it_is_thrown_away(served: Served) -> None:
    job, bundle = served.listed("small")
    part = served.folder / "device" / "bundles" / f"{bundle.sha256}.part"
    for wrong in (b"?" * 10, b"?" * bundle.size_bytes):
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(wrong)
        with pytest.raises(InvalidUpdate, match="its SHA-256 differs"):
            files_of(served, signer(1)).prepare(served.office(), job, bundle)
        assert not part.exists()
    part.write_bytes(b"?" * (bundle.size_bytes + 1))
    files_of(served, signer(1)).prepare(served.office(), job, bundle)


class Hostile:
    """A server that sends what it likes."""

    def __init__(self, *pieces: tuple[int, bytes]) -> None:
        self._pieces = pieces

    def bundle(self, *_: object) -> Iterator[tuple[int, bytes]]:
        yield from self._pieces


def hostile(data: bytes, size_bytes: int | None = None) -> tuple[ListedJob, ListedBundle]:
    """A job with a bundle of these bytes, as a server may list it."""
    bundle = ListedBundle(
        hashlib.sha256(data).hexdigest(), len(data) if size_bytes is None else size_bytes, signer(1)
    )
    return ListedJob("one", "running", "", "", 0, "app", (), bundle), bundle


def test_a_hostile_server_writes_nothing_but_what_was_signed(tmp_path: Path) -> None:
    files = BundleFiles(tmp_path, [signer(1)])
    changed = whole().replace(b"one\n", b"two\n")
    with pytest.raises(InvalidSignature):
        files.prepare(Hostile((0, changed)), *hostile(changed))
    endless = Hostile(*[(n * 1000, bytes(1000)) for n in range(100)])
    with pytest.raises(InvalidUpdate, match="a piece of a bundle at 1000"):
        files.prepare(endless, *hostile(bytes(1500)))
    with pytest.raises(InvalidUpdate, match="expected one at"):
        files.prepare(Hostile((7, b"x")), *hostile(bytes(10)))
    with pytest.raises(TooLarge):
        files.prepare(Hostile(), *hostile(bytes(10), BUNDLE_BYTES_MAX + 1))
    job, bundle = hostile(whole())
    for wrong in (replace(bundle, sha256="../../escaped"), replace(bundle, signer="\x1b[2J")):
        with pytest.raises(InvalidUpdate, match="which is none"):
            files.prepare(Hostile(), job, wrong)
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".part"] == []


def test_what_is_missing_is_named_and_nothing_is_installed(tmp_path: Path) -> None:
    data = whole(needs=["no-such-distribution-a", "no-such-distribution-b", "numpy"])
    files = BundleFiles(tmp_path, [signer(1)])
    said = "no-such-distribution-a, no-such-distribution-b must be installed on this device"
    with pytest.raises(ConfigError, match=f"bundle mine: {said}"):
        files.prepare(Hostile((0, data)), *hostile(data))
    later = whole(requires_python=">=99.0")
    with pytest.raises(ConfigError, match=r"it needs Python >=99\.0, and this is 3\."):
        files.prepare(Hostile((0, later)), *hostile(later))
    assert [path for path in (tmp_path / "bundles").iterdir() if path.is_dir()] == []


def test_bundles_of_jobs_that_are_gone_go_too(served: Served) -> None:
    files = files_of(served, signer(1))
    files.keep(())  # before there is any
    folders = [files.prepare(served.office(), *served.listed(name))[0] for name in ("small", "large")]
    files.keep([folders[0].name])
    left = {path.name for path in folders[0].parent.iterdir()}
    assert left == {folders[0].name, f"{folders[0].name}.bundle", "newest.json"}


def test_a_folder_that_is_no_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        unpack(open_bundle(whole()), tmp_path / "file" / "below")


def code_of(served: Served, **wrong: Any) -> grpc.StatusCode:
    """How a server ends a call for the small bundle."""
    request: dict[str, Any] = {"client_id": "device-1", "job": "small", "sha256": b"", **wrong}
    if not request["sha256"]:
        request["sha256"] = bytes.fromhex(served.listed("small")[1].sha256)
    with grpc.insecure_channel(served.host.info.address) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            list(JobsStub(channel).FetchBundle(jobs_pb2.FetchBundleRequest(**request)))
        found: grpc.StatusCode = raised.value.code()
        return found


def test_who_may_have_it_and_how_it_is_asked_for(served: Served) -> None:
    digest = bytes.fromhex(served.listed("wards", "ward-1")[1].sha256)
    assert code_of(served, job="wards", sha256=digest) is grpc.StatusCode.PERMISSION_DENIED
    assert code_of(served, sha256=digest) is grpc.StatusCode.UNAVAILABLE
    assert code_of(served, job="bare") is grpc.StatusCode.UNAVAILABLE
    assert code_of(served, job="nothing") is grpc.StatusCode.UNAVAILABLE
    assert code_of(served, offset=10**6) is grpc.StatusCode.INVALID_ARGUMENT
    assert code_of(served, client_id="a/b") is grpc.StatusCode.INVALID_ARGUMENT


def test_a_bundle_that_is_none_stops_its_own_job_alone(tmp_path: Path) -> None:
    (tmp_path / "a.bundle").write_bytes(whole())
    for name in ("one", "two"):
        with_job(tmp_path, name, UNHELD, (), tmp_path / "a.bundle")
    (tmp_path / "jobs" / "two" / BUNDLE).write_bytes(whole()[:-1])
    (tmp_path / "bad.bundle").write_bytes(b"bad")
    with pytest.raises(DataError, match="this is no bundle"):
        with_job(tmp_path, "three", UNHELD, (), tmp_path / "bad.bundle")
    assert not (tmp_path / "jobs" / "three").exists()
    with Host(tmp_path) as host:
        host.until("one", JobState.RUNNING)
        assert "changed" in host.until("two", JobState.FAILED)


def test_the_manifest_is_read_only_once_the_signature_is_good() -> None:
    """A signature is asked for first: what is not signed is not even parsed."""
    broken = pack({"a.py": b""}, key_of(1), name="x", entry="a:b", created_at=0).replace(
        b'{"created', b'["created'
    )
    with pytest.raises(InvalidSignature):
        open_bundle(broken)
