"""Which App a device runs for a job: the bundle's, its own, or none; and no other job waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import anabranch
from hand_bundles import signer, whole
from job_hosts import UNHELD, Host, with_job

from anabranch.client.jobs import serve_jobs
from anabranch.client.listed import ListedJob
from anabranch.client.run import ClientOptions
from anabranch.client.stopping import Bell
from anabranch.identity.bundle import open_bundle
from anabranch.server.job import JobState

JOBS = ("foreign", "needy", "bare", "good")
NEEDY = whole(needs=["no-such-distribution"])


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """One job of a foreign signer, one that needs what is not there, one without a bundle, and a good one."""
    for name, data in (("foreign", whole(number=2)), ("needy", NEEDY), ("bare", b""), ("good", whole())):
        (tmp_path / f"{name}.bundle").write_bytes(data)
        with_job(tmp_path, name, UNHELD, (), tmp_path / f"{name}.bundle" if data else None)
    with Host(tmp_path) as served:
        for name in JOBS:
            served.until(name, JobState.RUNNING)
        yield served


class Ended:
    """A process of a job that has ended well."""

    def poll(self) -> int:
        return 0

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        return 0


Said = dict[str, dict[str, Any]]


def work(host: Host, folder: Path, own: str, *signers: str) -> tuple[dict[str, str], Said]:
    """What a device runs of each job, and what it says of the others, once it has looked at all of them."""
    bell, begun, said = Bell(), dict[str, str](), Said()

    def seen() -> None:
        if {*begun, *(name for name, told in said.items() if "why" in told)} == {*JOBS}:
            bell.stop()

    def begin(job: ListedJob, app: str, *_: object) -> Ended:
        begun[job.name] = app
        return Ended()

    def tell(kind: str, **data: Any) -> None:
        if kind in ("opened", "unopened", "left"):
            said[data["job"]] = {"kind": kind, **data}
        seen()

    options = ClientOptions(own, host.info.address, "device-1", state_dir=folder)
    serve_jobs(options, begin, tell, bell, signers)
    return begun, said


def test_a_device_without_an_app_of_its_own_runs_what_is_allowed(host: Host, tmp_path: Path) -> None:
    begun, said = work(host, tmp_path / "device", "", signer(1))
    unpacked = tmp_path / "device" / "bundles" / open_bundle(whole()).sha256
    assert begun == {"good": f"bundle:{unpacked}:app:Mine"}
    assert {name: told["kind"] for name, told in said.items()} == {
        "foreign": "left",
        "needy": "left",
        "bare": "left",
        "good": "opened",
    }
    assert said["good"]["signer"] == signer(1)
    assert f"signed by {signer(2)}, who is not allowed here" in said["foreign"]["why"]
    assert "no-such-distribution must be installed" in said["needy"]["why"]
    assert "it has no bundle" in said["bare"]["why"]


def test_an_own_app_is_used_where_no_bundle_is_allowed(host: Host, tmp_path: Path) -> None:
    begun, said = work(host, tmp_path / "device", "synthetic", signer(1))
    assert begun["foreign"] == begun["bare"] == "synthetic"
    assert begun["good"].startswith("bundle:")
    assert "needy" not in begun, "the code that was allowed is not there, and another is not taken for it"
    assert (said["foreign"]["kind"], said["foreign"]["app"]) == ("unopened", "synthetic")


def test_without_a_signer_nothing_is_fetched_and_that_is_said(host: Host, tmp_path: Path) -> None:
    begun, said = work(host, tmp_path / "device", "synthetic")
    assert begun == dict.fromkeys(JOBS, "synthetic")
    assert {name: told["kind"] for name, told in said.items()} == dict.fromkeys(
        ("foreign", "needy", "good"), "unopened"
    )
    assert not (tmp_path / "device" / "bundles").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--jobs",), "name one App: APP, or --flower DIR"),
        (("--jobs", "--signer", "me"), "64 hex digits"),
        (("synthetic", "--signer", "0" * 64), "--signer is for --jobs"),
        (("--signer", "0" * 64), "--signer is for --jobs"),
    ],
    ids=["no App", "no signer", "one run", "one run, no App"],
)
def test_what_a_device_cannot_be_told(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = anabranch(tmp_path, "client", *words)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
