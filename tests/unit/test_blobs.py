"""Uploads and blobs as files: resumable, content-addressed, and never outside their folders."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import resource
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from contents import named
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import (
    ConfigError,
    InvalidUpdate,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreLocked,
    TooLarge,
    Unavailable,
)
from anabranch.core.limits import MIB, Limits
from anabranch.server.store import blobs as blobs_module
from anabranch.server.store.base import Blobs, DiskFailed
from anabranch.server.store.blobs import ADOPTED_S, BETWEEN_IDS, BlobStore, check_id
from anabranch.server.store.files import LOCK, FolderLock, disk_errors, make_folder
from anabranch.server.store.memory import MemoryBlobs
from anabranch.support.allowance import memory_bytes
from anabranch.support.holders import forget_holder

LIMITS = Limits(free_disk_bytes_min=0)
DATA = bytes(range(256)) * 64
YEAR_S = 366 * 86_400.0


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def store(folder: Path) -> BlobStore:
    made = BlobStore(folder, LIMITS)
    made.prepare()
    return made


@pytest.fixture(params=["files", "memory"])
def blobs(request: pytest.FixtureRequest, store: BlobStore) -> Blobs:
    return store if request.param == "files" else MemoryBlobs(LIMITS)


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# --- uploads ---------------------------------------------------------------------------------


def test_an_upload_grows_chunk_by_chunk(blobs: Blobs) -> None:
    assert blobs.received("u1") == 0
    assert blobs.write("u1", 0, DATA[:100]) == 100
    assert blobs.write("u1", 100, memoryview(DATA)[100:]) == len(DATA)
    assert blobs.received("u1") == len(DATA)
    assert blobs.received("u2") == 0
    assert bytes(blobs.seal("u1", sha(DATA))) == DATA
    assert bytes(blobs.seal("u1", sha(DATA))) == DATA  # a call may be repeated
    assert blobs.received("u1") == len(DATA)


def test_a_resent_chunk_replaces_what_lies_after_it(blobs: Blobs) -> None:
    blobs.write("u1", 0, b"abcdef")
    assert blobs.write("u1", 2, b"XY") == 4
    assert bytes(blobs.seal("u1", sha(b"abXY"))) == b"abXY"


@given(st.lists(st.tuples(st.integers(0, 40), st.binary(max_size=30)), min_size=1, max_size=8))
def test_whatever_is_sent_again_the_digest_is_that_of_the_bytes(steps: list[tuple[int, bytes]]) -> None:
    with TemporaryDirectory() as folder:
        store = BlobStore(Path(folder), LIMITS)
        store.prepare()
        whole = b""
        for back, data in steps:
            offset = max(0, len(whole) - back)
            whole = whole[:offset] + data
            store.write("u1", offset, data)
        assert bytes(store.seal("u1", sha(whole))) == whole
        store.write("u1", 0, whole)
        with pytest.raises(InvalidUpdate, match=sha(whole)):
            store.seal("u1", sha(whole + b"x"))


def test_what_two_streams_write_at_a_time_has_the_digest_of_the_file(store: BlobStore, folder: Path) -> None:
    size = 100_000  # so long that the digest is made beside the other's
    with ThreadPoolExecutor(2) as pool:
        for number in range(20):
            store.write("u1", 0, bytes(size))
            streams = [pool.submit(store.write, "u1", size, bytes([number, n]) * size) for n in (1, 2)]
            pieces = [pool.submit(store.write, "u1", 3 * size, bytes([n]) * size) for n in (3, 4)]
            for one in (*streams, *pieces):
                one.exception()
            found = (folder / "spool/u1.part").read_bytes()
            assert bytes(store.seal("u1", sha(found))) == found


def test_a_gap_is_refused_with_the_place_to_go_on(blobs: Blobs) -> None:
    blobs.write("u1", 0, b"abc")
    with pytest.raises(Unavailable, match="go on at byte 3"):
        blobs.write("u1", 4, b"e")
    with pytest.raises(Unavailable):
        blobs.write("u1", -1, b"e")
    assert blobs.received("u1") == 3


def test_another_digest_forgets_the_upload(blobs: Blobs, folder: Path) -> None:
    blobs.write("u1", 0, b"abc")
    with pytest.raises(InvalidUpdate, match=sha(b"abc")):
        blobs.seal("u1", sha(b"abd"))
    assert files_in(folder) == set(), "or whoever sends such would fill the disk"
    assert blobs.received("u1") == 0
    with pytest.raises(Unavailable, match="query it"):
        blobs.seal("u1", sha(b"abc"))


def test_an_empty_upload_is_one_too(blobs: Blobs) -> None:
    assert blobs.write("u1", 0, b"") == 0
    assert bytes(blobs.seal("u1", sha(b""))) == b""
    blobs.adopt("u1", sha(b""))


def test_an_upload_over_the_cap_is_refused() -> None:
    small = MemoryBlobs(replace(LIMITS, payload_bytes_max=10))
    with pytest.raises(TooLarge, match="payload_bytes_max"):
        small.write("u1", 0, bytes(11))


def test_a_file_over_the_cap_is_refused(folder: Path) -> None:
    store = BlobStore(folder, replace(LIMITS, payload_bytes_max=10))
    store.prepare()
    store.write("u1", 0, bytes(10))
    with pytest.raises(TooLarge, match="payload_bytes_max"):
        store.write("u1", 10, b"x")


def test_discarding_is_harmless(blobs: Blobs) -> None:
    blobs.discard("u1")
    blobs.write("u1", 0, b"abc")
    blobs.discard("u1")
    assert blobs.received("u1") == 0


def test_an_upload_goes_on_after_a_restart(store: BlobStore, folder: Path) -> None:
    store.write("u1", 0, DATA[:5000])
    again = BlobStore(folder, LIMITS)
    again.prepare()
    assert again.received("u1") == 5000
    again.write("u1", 5000, DATA[5000:])
    again.seal("u1", sha(DATA))
    sealed = BlobStore(folder, LIMITS)
    assert sealed.received("u1") == len(DATA)
    assert bytes(sealed.seal("u1", sha(DATA))) == DATA


def test_a_late_chunk_cannot_change_what_was_checked(store: BlobStore) -> None:
    store.write("u1", 0, DATA)
    sealed = store.seal("u1", sha(DATA))
    store.write("u1", 0, b"something else")
    assert store.received("u1") == len(b"something else"), "and not what another stream had sent"
    assert bytes(sealed) == DATA
    with pytest.raises(InvalidUpdate):
        store.seal("u1", sha(DATA))
    assert bytes(sealed) == DATA


@pytest.mark.parametrize("restarted", [False, True])
def test_a_stream_may_go_on_from_before_the_end_of_what_was_sealed(
    restarted: bool, store: BlobStore, folder: Path
) -> None:
    """As the protocol allows. Nothing is written then: another thread may read what it has checked."""
    store.write("u1", 0, DATA)
    sealed = store.seal("u1", sha(DATA))
    if restarted:  # it was killed before the payload had its name
        store = BlobStore(folder, LIMITS)
    assert store.received("u1") == len(DATA)
    assert store.write("u1", 100, DATA[100:200]) == 200
    assert store.received("u1") == len(DATA), "the rest of that stream may never come"
    assert store.write("u1", 200, DATA[200:]) == len(DATA)
    assert bytes(sealed) == DATA
    with pytest.raises(Unavailable, match=f"go on at byte {len(DATA)}"):
        store.write("u1", 200, DATA[200:] + b"x")
    assert bytes(store.seal("u1", sha(DATA))) == DATA
    store.adopt("u1", sha(DATA))
    with pytest.raises(Unavailable, match="go on at byte 0"):
        store.write("u1", 100, DATA[100:])


def test_another_stream_of_the_same_update_cannot_put_its_bytes_in_place(store: BlobStore) -> None:
    store.write("u1", 0, DATA)
    store.seal("u1", sha(DATA))
    store.write("u1", 0, b"other")
    store.seal("u1", sha(b"other"))
    with pytest.raises(Unavailable, match="not sealed"):
        store.adopt("u1", sha(DATA))
    store.adopt("u1", sha(b"other"))
    assert bytes(store.read(sha(b"other"))) == b"other"


def test_what_was_not_sealed_is_not_adopted(blobs: Blobs) -> None:
    with pytest.raises(Unavailable, match="query it"):
        blobs.adopt("u1", sha(DATA))


def test_a_crash_in_the_middle_leaves_nothing_behind(store: BlobStore, folder: Path) -> None:
    (folder / "spool" / "0123.tmp").write_bytes(b"half")
    store.prepare()
    assert files_in(folder) == set()


# --- blobs -----------------------------------------------------------------------------------


def test_a_payload_is_named_by_its_content(store: BlobStore, folder: Path) -> None:
    for update_id in ("u1", "u2"):  # twice the same content is one file
        store.write(update_id, 0, DATA)
        sealed = store.seal(update_id, sha(DATA))
        store.adopt(update_id, sha(DATA))
        store.adopt(update_id, sha(DATA))
        assert bytes(sealed) == DATA
    name = sha(DATA)
    assert files_in(folder) == {f"blobs/{name[:2]}/{name}"}
    assert bytes(store.read(name)) == DATA
    assert store.received("u1") == 0


def test_what_finds_no_room_leaves_none_taken(
    store: BlobStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device sends it again: what is left of each try, by a name that nobody knows, would fill the disk."""
    store.write("u1", 0, DATA)
    store.seal("u1", sha(DATA))
    with monkeypatch.context() as patch:
        patch.setattr(blobs_module, "make_folder", no_room)
        with pytest.raises(StoreFull):
            store.adopt("u1", sha(DATA))
    assert files_in(folder) == set()
    assert store.received("u1") == 0, "it begins anew"
    store.write("u1", 0, DATA)
    store.seal("u1", sha(DATA))
    store.adopt("u1", sha(DATA))
    assert files_in(folder) == {f"blobs/{sha(DATA)[:2]}/{sha(DATA)}"}


def no_room(folder: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def test_a_flush_that_fails_is_said_where_nothing_can_be_removed_either(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that is made read-only at its first error."""

    def failed(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    store.write("u1", 0, DATA)
    store.seal("u1", sha(DATA))
    with monkeypatch.context() as patch:
        patch.setattr(blobs_module, "sync_file", failed)
        patch.setattr(Path, "unlink", read_only)
        with pytest.raises(DiskFailed, match="Input/output error"):
            store.adopt("u1", sha(DATA))


def test_an_upload_that_a_flush_has_lost_begins_anew(
    store: BlobStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next flush, by whatever process, would say that it is on the disk."""

    def failed(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store.write("u1", 0, DATA)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failed)
        with pytest.raises(DiskFailed, match="Input/output error"):
            store.received("u1")
    again = BlobStore(folder)
    again.prepare()
    assert again.received("u1") == 0


def test_a_disk_that_does_not_give_an_upload_back_has_failed_and_no_memory_is_missing(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store.write("u1", 0, DATA)
    monkeypatch.setattr(blobs_module, "MappedFile", failed)
    with pytest.raises(DiskFailed, match="Input/output error"):
        store.seal("u1", sha(DATA))


def test_an_upload_that_cannot_be_opened_now_is_kept(store: BlobStore) -> None:
    store.write("u1", 0, DATA)
    store.seal("u1", sha(DATA))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        with pytest.raises(DiskFailed, match="Too many open files"):
            store.received("u1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert store.received("u1") == len(DATA)


def test_an_upload_that_cannot_be_removed_is_told_as_the_stores_trouble(
    store: BlobStore, folder: Path
) -> None:
    store.write("u1", 0, DATA)
    (folder / "spool" / "u1.part").unlink()
    (folder / "spool" / "u1.part").mkdir()
    with pytest.raises(StoreError, match="removing upload u1"):
        store.discard("u1")


def test_adopting_heals_a_damaged_blob(store: BlobStore) -> None:
    for update_id in ("u1", "u2"):
        store.write(update_id, 0, DATA)
        store.seal(update_id, sha(DATA))
        store.adopt(update_id, sha(DATA))
        assert bytes(store.read(sha(DATA))) == DATA
        store.path(sha(DATA)).write_bytes(b"damaged")
        with pytest.raises(StoreCorrupt, match="restore"):
            store.read(sha(DATA))


def test_a_missing_blob_is_corruption(store: BlobStore) -> None:
    with pytest.raises(StoreCorrupt):
        store.read("0" * 64)


def test_everything_is_its_owners_alone(store: BlobStore, folder: Path) -> None:
    store.write("u1", 0, DATA)
    store.seal("u1", sha(DATA))
    store.adopt("u1", sha(DATA))
    store.write("u2", 0, DATA)
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_long_upload_crosses_the_flush_marks(store: BlobStore) -> None:
    data = os.urandom(9 * MIB + 17)
    for offset in range(0, len(data), MIB):
        store.write("u1", offset, data[offset : offset + MIB])
    store.seal("u1", sha(data))
    store.adopt("u1", sha(data))
    assert store.read(sha(data)) == data


def test_uploads_of_many_threads_do_not_meet(store: BlobStore) -> None:
    def upload(number: int) -> str:
        data = bytes([number]) * 100_000
        for offset in range(0, len(data), 10_000):
            store.write(f"u{number}", offset, data[offset : offset + 10_000])
        store.seal(f"u{number}", sha(data))
        store.adopt(f"u{number}", sha(data))
        return sha(data)

    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(upload, range(24)))
    assert [bytes(store.read(name))[:1] for name in names] == [bytes([n]) for n in range(24)]


def adopted(store: BlobStore, number: int) -> str:
    """A payload that is a blob; its name."""
    data = bytes([number]) * 10
    store.write(f"u{number}", 0, data)
    store.seal(f"u{number}", sha(data))
    store.adopt(f"u{number}", sha(data))
    return sha(data)


@pytest.mark.parametrize("first", ["sha256", "blake3"])
@pytest.mark.parametrize("then", ["sha256", "blake3"])
@pytest.mark.parametrize("between", ["", "start"])
def test_an_upload_goes_on_by_another_digest(
    store: BlobStore, folder: Path, first: str, then: str, between: str
) -> None:
    """The device that comes back may have lost the package, or have got it."""
    digest = named(DATA, then)
    named(DATA, first)
    store.write("u1", 0, DATA[:5000], first)
    if between:
        store = BlobStore(folder, LIMITS)
        store.prepare()
    store.write("u1", 5000, DATA[5000:], then)
    assert store.seal("u1", digest) == DATA
    store.adopt("u1", digest)
    assert files_in(folder) == {f"blobs/{digest[-64:-62]}/{digest}"}
    assert store.read(digest) == DATA
    damage(store.path(digest))
    with pytest.raises(StoreCorrupt, match=f"payload {digest} has the digest"):
        store.read(digest)
    assert store.collect_garbage({digest}) == []
    assert store.remove({digest}) == {digest}, "it may be on its way"


def test_the_digest_grows_with_the_chunks(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = named(DATA, "blake3")
    store.write("u1", 0, DATA[:5000], "blake3")
    store.write("u1", 5000, DATA[5000:], "blake3")
    monkeypatch.setattr(blobs_module, "digest_like", lambda *_: pytest.fail("it was read again"))
    assert store.seal("u1", digest) == DATA


def test_digests_by_what_is_not_known_here(store: BlobStore) -> None:
    later = "xxh3-" + "0" * 64
    damaged = ("blake3-" + "0" * 63, "blake3" + "0" * 64, "A" * 64, "../" + "0" * 64)
    for unknown in (later, *damaged):
        with pytest.raises(InvalidUpdate, match="by no algorithm that this release knows"):
            store.seal("u1", unknown)
    with pytest.raises(ConfigError, match="read it with the release that wrote it"):
        store.read(later)
    for name in damaged:
        with pytest.raises(StoreCorrupt, match="which is no digest"):
            store.read(name)


def damage(path: Path) -> None:
    """Change a byte."""
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("ahead_s", [0.0, -YEAR_S, YEAR_S])
def test_a_start_removes_what_nothing_references_whatever_the_clock_was(
    store: BlobStore, folder: Path, ahead_s: float
) -> None:
    """Parts stay for the tasks that they are of, which only the log knows."""
    wanted, orphan = adopted(store, 0), adopted(store, 1)
    part = f"task{BETWEEN_IDS}client{BETWEEN_IDS}update"
    store.write(part, 0, b"x")
    for path in (store.path(wanted), store.path(orphan), folder / "spool" / f"{part}.part"):
        then = path.stat().st_mtime + ahead_s
        os.utime(path, (then, then))
    again = BlobStore(folder, LIMITS)
    again.prepare()
    assert again.make_room() == []
    assert again.collect_garbage({wanted}) == [orphan]
    assert files_in(folder) == {f"blobs/{wanted[:2]}/{wanted}", f"spool/{part}.part"}


def test_a_start_drops_uploads_of_no_task_and_on_a_full_disk_all_that_come_again(folder: Path) -> None:
    store = BlobStore(folder, LIMITS)
    store.prepare()
    kept, (whole, part) = adopted(store, 0), (f"task{BETWEEN_IDS}client{BETWEEN_IDS}u{n}" for n in (1, 2))
    for name in ("of-before", whole, part):
        store.write(name, 0, DATA)
    store.seal(whole, sha(DATA))
    blob = f"blobs/{kept[:2]}/{kept}"
    again = BlobStore(folder, LIMITS)
    assert again.make_room() == ["of-before"]
    assert files_in(folder) == {blob, f"spool/{whole}.whole", f"spool/{part}.part"}
    again.write("of-before", 0, DATA)
    full = BlobStore(folder, replace(LIMITS, free_disk_bytes_min=1 << 60))
    assert sorted(full.make_room()) == sorted(["of-before", whole, part])
    assert files_in(folder) == {blob}


def test_a_blob_that_is_on_its_way_stays_though_the_clock_is_set_forward(folder: Path) -> None:
    """The log has dropped an update, and another one of the same bytes has come, and has no entry yet."""
    passed_s = [0.0]
    store = BlobStore(folder, LIMITS, lambda: passed_s[0])
    store.prepare()
    old = {adopted(store, number) for number in range(3)}
    passed_s[0] = ADOPTED_S
    adopted(store, 2)
    back = adopted(store, 1)
    store.adopt("u1", back)  # and a repeated call
    passed_s[0] += ADOPTED_S - 1.0
    for sha256 in old:
        os.utime(store.path(sha256), (1.0, 1.0))
    kept = store.remove(old)
    assert kept == {sha(bytes([n]) * 10) for n in (1, 2)}
    passed_s[0] += 1.0
    assert store.remove(kept) == set()
    assert files_in(folder) == set()


# --- names -----------------------------------------------------------------------------------

BAD_IDS = ["", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", "a\0b", "a b", "ü", "-x", "a\n", "x" * 65]
BAD_NAMES = [*BAD_IDS, *(f"a{BETWEEN_IDS}{bad}" for bad in ("", "..", "x" * 65)), BETWEEN_IDS.join("abcd")]


@pytest.mark.parametrize("update_id", BAD_NAMES)
def test_a_malformed_id_never_becomes_a_path(blobs: Blobs, folder: Path, update_id: str) -> None:
    with pytest.raises(InvalidUpdate):
        blobs.received(update_id)
    with pytest.raises(InvalidUpdate):
        blobs.write(update_id, 0, b"x")
    with pytest.raises(InvalidUpdate):
        blobs.seal(update_id, sha(b"x"))
    with pytest.raises(InvalidUpdate):
        blobs.adopt(update_id, sha(b"x"))
    with pytest.raises(InvalidUpdate):
        blobs.discard(update_id)
    assert files_in(folder) == set()


@pytest.mark.parametrize("digest", ["", "ab", "../" * 21 + "x", "A" * 64, "g" * 64, "0" * 64 + "\n"])
def test_a_malformed_digest_never_becomes_a_path(blobs: Blobs, digest: str) -> None:
    blobs.write("u1", 0, b"x")
    with pytest.raises(InvalidUpdate, match="sha256"):
        blobs.seal("u1", digest)
    with pytest.raises(InvalidUpdate, match="sha256"):
        blobs.adopt("u1", digest)


@given(st.text(max_size=70))
def test_an_id_is_accepted_or_refused_by_its_alphabet(update_id: str) -> None:
    alphabet = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
    good = 0 < len(update_id) <= 64 and set(update_id) <= alphabet and update_id[0] not in "._-"
    try:
        check_id(update_id, LIMITS)
    except InvalidUpdate:
        assert not good
    else:
        assert good


def test_links_are_not_followed(store: BlobStore, folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    (folder / "spool" / "u1.part").symlink_to(outside)
    with pytest.raises(StoreError):
        store.write("u1", 0, b"x")
    name = sha(b"precious")
    store.path(name).parent.mkdir()
    store.path(name).symlink_to(outside)
    with pytest.raises(StoreCorrupt):
        store.read(name)
    assert outside.read_bytes() == b"precious"


# --- faults ----------------------------------------------------------------------------------


def test_a_disk_below_the_watermark_takes_nothing(folder: Path) -> None:
    store = BlobStore(folder, replace(LIMITS, free_disk_bytes_min=1 << 60))
    store.prepare()
    with pytest.raises(StoreFull, match="watermark"):
        store.write("u1", 0, b"x")
    assert files_in(folder) == set()


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EIO, DiskFailed),
        (errno.EBADF, DiskFailed),
        (errno.EACCES, StoreError),
    ],
)
def test_what_an_error_of_the_disk_means(number: int, error: type[StoreError]) -> None:
    with pytest.raises(StoreError) as caught, disk_errors("writing"):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is error


def test_a_disk_that_is_really_full_says_so() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(StoreFull), disk_errors("writing"):
            os.write(descriptor, b"x")
    finally:
        os.close(descriptor)


SHORT_OF_MEMORY = """
import resource, sys
from pathlib import Path
from anabranch.core.errors import StoreError
from anabranch.core.limits import MIB, Limits
from anabranch.server.store.base import DiskFailed
from anabranch.server.store.blobs import BlobStore
store = BlobStore(Path(sys.argv[1]), Limits(free_disk_bytes_min=0))
store.prepare()
for n in range(64):
    store.write("u1", n * MIB, bytes(MIB))
taken = 1024 * int(Path("/proc/self/status").read_text().split("VmSize:")[1].split()[0])
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (taken + 32 * MIB, hard))
try:
    store.seal("u1", sys.argv[2])
except StoreError as error:
    assert not isinstance(error, DiskFailed), error
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
print(len(store.seal("u1", sys.argv[2])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone bounds what a process maps")
def test_an_upload_that_no_memory_is_left_for_is_no_failed_disk(folder: Path) -> None:
    digest = hashlib.sha256(bytes(64 * MIB)).hexdigest()
    words = [sys.executable, "-c", SHORT_OF_MEMORY, str(folder), digest]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=True)
    said = "no memory is left for an upload: give the server's process more"
    assert done.stdout.splitlines() == [said, str(64 * MIB)], "it stays as it came"


def test_a_folder_has_one_owner_who_may_die(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    lock = FolderLock(tmp_path / "a" / "b")
    with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
        FolderLock(tmp_path / "a" / "b")
    lock.release()
    code = (
        "import os, sys; from pathlib import Path; from anabranch.server.store.files import FolderLock;"
        "FolderLock(Path(sys.argv[1])); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a" / "b"], timeout=600)
    assert done.returncode == 9
    FolderLock(tmp_path / "a" / "b").release()


def test_who_comes_after_a_killed_server_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    FolderLock(tmp_path).release()
    FolderLock(tmp_path).release()
    assert caplog.messages == [], "both have let go of it"
    code = (
        "import os, signal, sys; from pathlib import Path;"
        "from anabranch.server.store.files import FolderLock;"
        "FolderLock(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code, tmp_path])
    assert killed.wait(600) == -signal.SIGKILL
    lock = FolderLock(tmp_path)
    (said,) = caplog.messages
    assert said.startswith(
        f"{tmp_path}: process {killed.pid} on {platform.node()}, which had it before, was kill"
    )
    assert f"memory may have run out: this one may have {memory_bytes() // 1_000_000} MB" in said
    lock.release()
    FolderLock(tmp_path).release()
    assert caplog.messages == [said], "it is said once"


def test_a_note_that_nobody_promised_to_remove_says_nothing_of_an_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier checkouts left it there, however they ended."""
    (tmp_path / LOCK).write_text(f"1 on {platform.node()}\n")
    lock = FolderLock(tmp_path)
    with pytest.raises(StoreLocked, match=rf"process {os.getpid()} on {platform.node()}: stop it"):
        FolderLock(tmp_path)
    lock.release()
    assert caplog.messages == []


def test_a_copy_of_a_server_forgets_no_holder(tmp_path: Path) -> None:
    """The number of the lock, which the copy closed, is another file's by then."""
    lock, other = tmp_path / LOCK, tmp_path / "other"
    lock.write_text(f"{os.getppid()} on {platform.node()}\n")
    other.write_text("of somebody\n")
    for path in (lock, other):
        with path.open("r+") as file:
            forget_holder(file.fileno())
    assert (lock.read_text(), other.read_text()) == (
        f"{os.getppid()} on {platform.node()}\n",
        "of somebody\n",
    )
