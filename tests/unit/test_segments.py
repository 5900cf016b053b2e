"""The log's files: what was written comes back; damage leaves the whole batches before it, or is told."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import random
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_cache import pages_in_cache, skip_unless_cached

from anabranch.core.errors import LogLost, StoreCorrupt, StoreFull
from anabranch.server.store import segments
from anabranch.server.store.base import DiskFailed
from anabranch.server.store.packs import PackPlace, Packs
from anabranch.server.store.segments import CACHED_BYTES, HEADER_BYTES, LoggedEvent, Segments

RUN = "run-1"
Events = list[tuple[str, bytes | None]]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
events = st.tuples(texts, st.none() | st.binary(max_size=40))
batches = st.lists(st.lists(events, min_size=1, max_size=4), min_size=1, max_size=6)


@dataclass(frozen=True)
class Written:
    """A log, and where its batches end: in which file, and at which byte of it."""

    folder: Path
    batches: list[Events]
    ends: list[tuple[Path, int]]

    @property
    def lasts(self) -> list[int]:
        """The last event of each batch."""
        return list(accumulate(len(batch) for batch in self.batches))

    def lines(self, first: int, last: int) -> list[tuple[int, str]]:
        """The events from one to another."""
        flat = [line for batch in self.batches for line, _ in batch]
        return [(seq, flat[seq - 1]) for seq in range(first, last + 1)]


def opened(folder: Path, segment_bytes: int = 1 << 20) -> Segments:
    made = Segments(folder, segment_bytes)
    made.prepare(RUN, 0)
    return made


def written(folder: Path, parts: list[Events], segment_bytes: int = 1 << 20) -> Written:
    log, seq, ends = opened(folder, segment_bytes), 1, []
    for part in parts:
        log.append(seq, part)
        seq += len(part)
        newest = max((folder / "log").iterdir())
        ends.append((newest, newest.stat().st_size))
    log.close()
    return Written(folder, parts, ends)


def read(folder: Path, after: int = 0) -> tuple[list[tuple[int, str]], bool]:
    """What the log has after an event, and whether it says that something is lost behind that."""
    log = Segments(folder)
    found: list[tuple[int, str]] = []
    with suppress(LogLost):
        for event in log.events(log.needed(RUN, after), after):
            found.append((event.seq, event.line))  # noqa: PERF401 - what came before the loss counts
        return found, False
    return found, True


@given(parts=batches, segment_bytes=st.sampled_from([1, 200, 1 << 20]), data=st.data())
def test_what_was_written_comes_back(parts: list[Events], segment_bytes: int, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        log = written(Path(name), parts, segment_bytes)
        last = log.lasts[-1]
        after = data.draw(st.integers(0, last))
        assert read(log.folder, after) == (log.lines(after + 1, last), False)
        places = {e.seq: e.place for e in _all(log.folder)}
        payloads = [payload for part in parts for _, payload in part]
        for seq, payload in enumerate(payloads, 1):
            place = places[seq]
            if payload is None or place is None:
                assert (payload, place) == (None, None)
            else:
                digest = hashlib.sha256(payload).hexdigest()
                assert Packs(log.folder).read(place, len(payload), digest) == payload


def _all(folder: Path) -> list[LoggedEvent]:
    log = Segments(folder)
    return list(log.events(log.needed(RUN, 0), 0))


@given(parts=batches, data=st.data())
def test_a_cut_leaves_the_whole_batches_before_it(parts: list[Events], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        log = written(Path(name), parts)
        path, size = log.ends[-1]
        cut = data.draw(st.integers(HEADER_BYTES, size - 1))
        os.truncate(path, cut)
        whole = [last for last, (_, end) in zip(log.lasts, log.ends, strict=True) if end <= cut]
        assert read(log.folder) == (log.lines(1, max(whole, default=0)), False)
        # And it goes on from there, in another file, whatever is left of what was cut.
        end, again = max(whole, default=0), opened(log.folder)
        again.append(end + 1, [("next", None)])
        again.close()
        assert read(log.folder) == ([*log.lines(1, end), (end + 1, "next")], False)


@given(parts=batches, segment_bytes=st.sampled_from([1, 200, 1 << 20]), data=st.data())
def test_a_flipped_bit_is_found_or_was_in_the_last_batch(
    parts: list[Events], segment_bytes: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        log = written(Path(name), parts, segment_bytes)
        hit = data.draw(st.integers(0, len(parts) - 1))
        path, end = log.ends[hit]
        same = [at for of, at in log.ends[:hit] if of == path]
        place = data.draw(st.integers(same[-1] if same else HEADER_BYTES, end - 1))
        bits = bytearray(path.read_bytes())
        bits[place] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(bits)
        before, last = log.lasts[hit] - len(parts[hit]), log.lasts[-1]
        assert read(log.folder) == (log.lines(1, before), hit < len(parts) - 1)
        # Where the rows have all that is damaged, it is no loss.
        after = data.draw(st.integers(log.lasts[hit], last))
        assert read(log.folder, after) == (log.lines(after + 1, last), False)


@given(parts=batches, place=st.integers(0, HEADER_BYTES - 1))
def test_a_damaged_beginning_is_told(parts: list[Events], place: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        log = written(Path(name), parts)
        path, _ = log.ends[-1]
        bits = bytearray(path.read_bytes())
        bits[place] ^= 1
        path.write_bytes(bits)
        assert read(log.folder) == ([], True)


def flipped(path: Path, place: int) -> None:
    bits = bytearray(path.read_bytes())
    bits[place] ^= 1
    path.write_bytes(bits)


@given(
    parts=batches.filter(lambda some: len(some) > 1),
    place=st.integers(0, HEADER_BYTES - 1),
    data=st.data(),
)
def test_what_is_whole_before_a_damaged_beginning_is_there(
    parts: list[Events], place: int, data: st.DataObject
) -> None:
    """A file of its own for each batch; of one the header is damaged."""
    with tempfile.TemporaryDirectory() as name:
        log = written(Path(name), parts, segment_bytes=1)
        hit = data.draw(st.integers(1, len(parts) - 1))
        flipped(log.ends[hit][0], place)
        before, last = log.lasts[hit] - len(parts[hit]), log.lasts[-1]
        after = data.draw(st.integers(0, before))
        assert read(log.folder, after) == (log.lines(after + 1, before), True)
        with pytest.raises(LogLost, match=f"{log.ends[hit][0].name} is damaged in its beginning"):
            list((found := Segments(log.folder)).events(found.needed(RUN, after), after))
        # A later one that the rows come to begins anew.
        if hit < len(parts) - 1:
            assert read(log.folder, log.lasts[hit]) == (log.lines(log.lasts[hit] + 1, last), False)
        # And so it does where an operator lets it go on from what is whole.
        opened(log.folder).go_on_from(RUN, before)
        again = opened(log.folder)
        again.append(before + 1, [("next", None)])
        again.close()
        assert read(log.folder, after) == ([*log.lines(after + 1, before), (before + 1, "next")], False)


def test_a_segment_of_which_nothing_came_to_the_disk_is_none(tmp_path: Path) -> None:
    log = written(tmp_path, [[("a", None)]])
    for size in (0, 1, HEADER_BYTES):
        (tmp_path / "log" / "000002.log").write_bytes(bytes(size))
        assert read(tmp_path) == (log.lines(1, 1), False)


def test_a_gap_between_the_rows_and_the_log_is_a_loss(tmp_path: Path) -> None:
    log = written(tmp_path, [[("a", None)], [("b", None)], [("c", None)]], segment_bytes=1)
    log.ends[1][0].unlink()
    assert read(tmp_path) == (log.lines(1, 1), True)
    assert read(tmp_path, 1) == ([], True)
    assert read(tmp_path, 2) == (log.lines(3, 3), False)
    log.ends[0][0].unlink()
    assert read(tmp_path) == ([], True)


@pytest.mark.parametrize("call", ["fdatasync", "pwritev"])
@pytest.mark.parametrize("cuts", [True, False])
def test_what_was_refused_counts_for_nothing(
    call: str, cuts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(tmp_path)
    log.append(1, [("a", b"one")])

    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"os.{call}", no_space)
        if not cuts:
            patch.setattr("os.ftruncate", no_space)
        with pytest.raises(StoreFull):
            log.append(2, [("refused", b"two"), ("refused as well", None)])
    assert log.append(2, [("b", b"three")])[0] == PackPlace(2, _size(tmp_path, 2) - 5)
    log.append(3, [("c", None)])
    log.close()
    assert read(tmp_path) == ([(1, "a"), (2, "b"), (3, "c")], False)


def test_what_is_refused_again_and_again_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for the header of a segment, and for no batch."""
    log, write = opened(tmp_path), os.pwritev
    log.append(1, [("a", None)])

    def no_space(descriptor: int, pieces: list[bytes], at: int) -> int:
        if at:
            raise OSError(errno.EDQUOT, "over its quota")
        return write(descriptor, pieces, at)

    with monkeypatch.context() as patch:
        patch.setattr("os.pwritev", no_space)
        for _ in range(3):
            with pytest.raises(StoreFull):
                log.append(2, [("refused", b"two")])
    assert [path.name for path in (tmp_path / "log").iterdir()] == ["000001.log"]
    log.append(2, [("b", None)])
    log.close()
    assert read(tmp_path) == ([(1, "a"), (2, "b")], False)


def test_a_disk_that_takes_a_little_at_a_time_gets_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may write less than it was given, and takes so many pieces in one call."""
    write = os.pwritev

    def a_little(descriptor: int, pieces: list[bytes], at: int) -> int:
        assert 0 < len(pieces) <= 3
        return write(descriptor, [b"".join(pieces)[:7]], at)

    monkeypatch.setattr("os.pwritev", a_little)
    monkeypatch.setattr(segments, "IOV_MAX", 3)
    payloads = [b"one", None, b"", bytes(range(100)), None]
    events = [(f"event {seq}", payload) for seq, payload in enumerate(payloads)]
    log = written(tmp_path, [events[:4], events[4:]])
    assert read(tmp_path) == (log.lines(1, 5), False)
    for event, payload in zip(_all(tmp_path), payloads, strict=True):
        assert (event.place is None) == (payload is None)
        if event.place is not None and payload is not None:
            digest = hashlib.sha256(payload).hexdigest()
            assert Packs(tmp_path).read(event.place, len(payload), digest) == payload


def _size(folder: Path, number: int) -> int:
    return (folder / "log" / f"{number:06d}.log").stat().st_size


def test_no_payload_is_taken_for_a_batch(tmp_path: Path) -> None:
    other = written(tmp_path / "other", [[("forged", None)], [("too", None)]])
    forged = other.ends[-1][0].read_bytes()
    log = written(tmp_path / "log", [[("a", None)], [("b", forged[HEADER_BYTES:])]])
    path, size = log.ends[-1]
    os.truncate(path, size - 1)
    assert read(log.folder) == (log.lines(1, 1), False)


def test_an_operator_lets_it_go_on_without_what_is_lost(tmp_path: Path) -> None:
    log = written(tmp_path, [[("a", None)], [("b", None)], [("c", None)]])
    bits = bytearray(log.ends[1][0].read_bytes())
    bits[log.ends[1][1] - 1] ^= 1
    log.ends[1][0].write_bytes(bits)
    assert read(tmp_path) == (log.lines(1, 1), True)
    opened(tmp_path).go_on_from(RUN, 1)
    assert read(tmp_path) == (log.lines(1, 1), False)
    again = opened(tmp_path)
    again.append(2, [("other", None)])
    again.close()
    assert read(tmp_path) == ([(1, "a"), (2, "other")], False)


def test_a_batch_that_becomes_whole_while_it_is_read_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process reads: the second batch is half there at its first look, and so is none behind it."""
    log = written(tmp_path, [[("a", None)], [("b", b"payload")], [("c", None)]])
    path, end = log.ends[1]
    whole = path.read_bytes()
    path.write_bytes(whole[: end - 3])
    found = segments._found

    def later(descriptor: int, at: int, salt: bytes) -> object:
        path.write_bytes(whole)  # in place: the descriptor is of the same file
        return found(descriptor, at, salt)

    monkeypatch.setattr(segments, "_found", later)
    assert read(tmp_path) == (log.lines(1, 3), False)


def test_where_the_log_is_trimmed_a_segment_ends_early(tmp_path: Path) -> None:
    log = Segments(tmp_path, held_bytes_max=8 * 400)
    log.prepare(RUN, 0)
    for seq in range(1, 7):
        log.append(seq, [("a", bytes(70))])
        log.end_soon()
    log.close()
    assert [_size(tmp_path, number) < 400 for number in (1, 2, 3)] == [True] * 3
    assert len(read(tmp_path)[0]) == 6


def test_a_look_at_the_end_of_a_long_segment_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fdatasync", lambda _: None)
    log = written(tmp_path, [[("a", bytes(1000))]] * 2000)
    look, looks = segments._batch, []

    def counted(descriptor: int, at: int, salt: bytes) -> object:
        looks.append(at)
        return look(descriptor, at, salt)

    monkeypatch.setattr(segments, "_batch", counted)
    for after in (0, 1, 777, 1990, 1999, 2000):
        looks.clear()
        assert read(tmp_path, after) == (log.lines(after + 1, 2000), False)
        assert len(looks) < 2000 - after + 200


def test_the_last_batch_is_written_anew_before_it_is_taken_for_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush that failed once never comes to what is then taken for written."""
    log = written(tmp_path, [[("a", None)], [("b", b"two"), ("c", None)]])
    path, end = log.ends[-1]
    with path.open("ab") as file:
        file.write(b"torn")
    before, (_, first) = path.read_bytes(), log.ends[0]
    done: list[tuple[str, int, int]] = []
    write, flush = os.pwritev, os.fdatasync

    def noted(descriptor: int, pieces: list[bytes], at: int) -> int:
        done.append(("written", at, sum(map(len, pieces))))
        return write(descriptor, pieces, at)

    def flushed(descriptor: int) -> None:
        done.append(("flushed", 0, 0))
        flush(descriptor)

    monkeypatch.setattr("os.pwritev", noted)
    monkeypatch.setattr("os.fdatasync", flushed)
    again = opened(tmp_path)
    again.make_durable(again.needed(RUN, 1))
    assert done == [("written", first, end - first), ("flushed", 0, 0)]
    assert path.read_bytes() == before


@pytest.mark.parametrize("looks", [0, 1, 3])
def test_a_disk_that_does_not_read_it_now_has_not_lost_it(
    looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its header, or behind it: nobody is told to put an older backup in its place."""
    log, real, left = written(tmp_path, [[("a", None)], [("b", b"two")]]), os.pread, [None] * looks

    def pread(descriptor: int, size: int, at: int) -> bytes:
        if not left:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        left.pop()
        return real(descriptor, size, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        with pytest.raises(DiskFailed, match=r"reading .*000001\.log.*restart to recover"):
            read(tmp_path)
    assert read(tmp_path) == (log.lines(1, 2), False)


def test_what_lies_beside_the_segments_is_none(tmp_path: Path) -> None:
    log = written(tmp_path, [[("a", None)]])
    (tmp_path / "log" / "old.log").write_bytes(b"of somebody else")
    assert read(tmp_path) == (log.lines(1, 1), False)


def test_the_log_of_another_run_is_refused(tmp_path: Path) -> None:
    written(tmp_path, [[("a", None)]])
    with pytest.raises(
        StoreCorrupt,
        match=r"000001\.log is of another run than the database: name the log.s server\.database.* the file",
    ):
        Segments(tmp_path).needed("run-2", 0)


def test_numbers_go_on_from_those_of_older_packs(tmp_path: Path) -> None:
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs" / "000007.pack").write_bytes(b"payload")
    digest = hashlib.sha256(b"payload").hexdigest()
    packs = Packs(tmp_path)
    log = Segments(tmp_path)
    log.prepare(RUN, packs.newest())
    (place,) = log.append(1, [("a", b"other")])
    log.close()
    assert place is not None
    assert place.pack == packs.newest() == 8
    assert packs.read(PackPlace(7, 0), 7, digest) == b"payload"
    packs.remove_before(8)
    assert list((tmp_path / "packs").iterdir()) == []
    assert packs.newest() == 8


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_payload_is_found(damage: str, tmp_path: Path) -> None:
    (place,) = opened(tmp_path).append(1, [("a", b"payload")])
    assert place is not None
    path = tmp_path / "log" / "000001.log"
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "cut" else data[:-1] + b"?")
    with pytest.raises(StoreCorrupt):
        Packs(tmp_path).read(place, 7, hashlib.sha256(b"payload").hexdigest())


def test_little_of_the_segment_at_hand_is_in_the_systems_cache(tmp_path: Path) -> None:
    skip_unless_cached(tmp_path)
    payloads = [random.Random(n).randbytes(1_000_003) for n in range(12)]
    log, found, path = opened(tmp_path, 1 << 30), [], tmp_path / "log" / "000001.log"
    for seq, payload in enumerate(payloads, 1):
        log.append(seq, [(f"event {seq}", payload)])
        found.append(pages_in_cache(path) * mmap.PAGESIZE)
    log.close()
    assert max(found) < CACHED_BYTES + 2 * len(payloads[0])
    assert found[-1] < path.stat().st_size / 2
    needed = log.needed(RUN, 0)
    packs, places = Packs(tmp_path), [event.place for event in log.events(needed, 0)]
    for place, payload in zip(places, payloads, strict=True):
        assert place is not None
        assert packs.read(place, len(payload), hashlib.sha256(payload).hexdigest()) == payload
