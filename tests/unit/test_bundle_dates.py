"""No bundle that is older than what a device has run of its signer and name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hand_bundles import signer, whole

from anabranch.client.bundle_dates import FILE, BundleDates
from anabranch.client.bundles import FOLDER, BundleFiles
from anabranch.client.listed import ListedBundle, ListedJob
from anabranch.core.errors import ConfigError, DataError, NotPermitted
from anabranch.identity.bundle import open_bundle

OLD, NEW = 1_700_000_000, 1_800_000_000
ALLOWED = {signer(1), signer(2)}
JOB = ListedJob("wards", "running", "", "", 0, "", ())


class Shelf:
    """A server that has any bundle."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def bundle(self, job: ListedJob, bundle: ListedBundle, offset: int) -> Iterator[tuple[int, bytes]]:
        yield offset, self._data[offset:]


def run(state_dir: Path, data: bytes, files: BundleFiles | None = None) -> Path:
    """As a device that has just been started runs a bundle: the folder of its files."""
    listed = ListedBundle(hashlib.sha256(data).hexdigest(), len(data), open_bundle(data).signer)
    return (files or BundleFiles(state_dir, ALLOWED)).prepare(Shelf(data), JOB, listed)[0]


def test_an_older_one_is_not_run_again(tmp_path: Path) -> None:
    old, new = whole(created_at=OLD), whole(created_at=NEW)
    run(tmp_path, old)
    run(tmp_path, new)
    with pytest.raises(
        NotPermitted, match=r"mine is of 2023-11-14 22:13:20 UTC.* of 2027-01-15 08:00:00 UTC"
    ):
        run(tmp_path, old)
    assert run(tmp_path, new).is_dir()
    assert not (tmp_path / FOLDER / FILE).stat().st_mode & 0o077


def test_what_was_run_is_remembered_when_its_files_are_gone(tmp_path: Path) -> None:
    files = BundleFiles(tmp_path, ALLOWED)
    run(tmp_path, whole(created_at=NEW), files)
    files.keep(())
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [FILE]
    with pytest.raises(NotPermitted):
        run(tmp_path, whole(created_at=NEW - 1), files)


def test_another_signer_and_another_name_are_apart(tmp_path: Path) -> None:
    run(tmp_path, whole(created_at=NEW))
    run(tmp_path, whole(created_at=OLD, number=2))
    run(tmp_path, whole(created_at=OLD, name="other"))
    run(tmp_path, whole({"app.py": b"class Mine: ...\n"}, created_at=NEW))  # of the same second
    for again in (whole(created_at=NEW - 1), whole(created_at=OLD - 1, number=2)):
        with pytest.raises(NotPermitted):
            run(tmp_path, again)


def test_what_cannot_be_run_here_forbids_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-distribution"):
        run(tmp_path, whole(created_at=NEW, needs=["no-such-distribution"]))
    run(tmp_path, whole(created_at=OLD))


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"a": {"b": "c"}}'])
def test_a_damaged_memory_is_no_empty_one(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(DataError, match="put a copy of it back"):
        BundleDates(tmp_path).check(open_bundle(whole()))


def test_a_date_beyond_all_calendars_is_told(tmp_path: Path) -> None:
    dates = BundleDates(tmp_path)
    dates.note(open_bundle(whole(created_at=10**18)))
    with pytest.raises(NotPermitted, match="1000000000000000000 s after 1970"):
        dates.check(open_bundle(whole()))


def test_a_newer_one_that_another_process_has_run_meanwhile_stays_known(tmp_path: Path) -> None:
    here, elsewhere = BundleDates(tmp_path), BundleDates(tmp_path)
    here.check(open_bundle(whole(created_at=OLD)))
    elsewhere.note(open_bundle(whole(created_at=NEW)))
    here.note(open_bundle(whole(created_at=OLD)))
    with pytest.raises(NotPermitted):
        here.check(open_bundle(whole(created_at=OLD)))
