"""The log as a chain of hashes, against one worked out here; and what its heads and marks decide."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from anabranch.core.effects import Finished, Published
from anabranch.core.journal import Record
from anabranch.host.chain import HEADS_KEPT, HashChain, Mark, is_base, is_of_other_base
from anabranch.identity.heads import follow_links
from anabranch.server.store.base import Entry

ORIGIN, FIRST = "0a" * 32, "0b" * 32
PUBLISHED = Published(1, np.zeros(1, np.float32), ())


def record(number: int) -> Record:
    return {"now": float(number), "kind": "ticked"}


def lines(*numbers: int) -> bytes:
    """The bytes that these records add to the log."""
    texts = [json.dumps(record(n), sort_keys=True, separators=(",", ":")) + "\n" for n in numbers]
    return "".join(texts).encode()


def joined(head: str, data: bytes) -> str:
    return hashlib.sha256(bytes.fromhex(head) + data).hexdigest()


def chain(version: int = 0) -> HashChain:
    return HashChain("run", ORIGIN, FIRST, version)


def test_a_head_stands_for_all_events_up_to_its_version() -> None:
    made = chain(version=3)
    made.add(record(1))
    made.add(record(2))
    first = made.publish(4)
    assert first.link == hashlib.sha256(lines(1, 2)).hexdigest()
    assert first.head == made.head == joined(FIRST, bytes.fromhex(first.link))
    made.add(record(5))
    second = made.publish(5)
    assert second.link == hashlib.sha256(lines(5)).hexdigest(), "a link begins after the version before"
    assert second.head == follow_links(FIRST, bytes.fromhex(first.link + second.link))
    assert made.version == 5
    assert [made.head_of(v) for v in (2, 3, 4, 5, 6)] == [None, FIRST, first.head, second.head, None]


def test_an_event_and_its_line_are_one_link() -> None:
    made, other, entry = chain(), chain(), Entry({**record(1), "why": "Größe \ud800", "at": [1e16, -0.0]})
    made.add(entry.record)
    other.add(entry.line)
    assert made.mark(1) == other.mark(1)
    assert entry.line is entry.line
    assert made.follow(record(2), [PUBLISHED]) == other.follow(Entry(record(2)).line, [PUBLISHED])


def test_an_event_publishes_the_versions_among_its_effects() -> None:
    made, other = chain(), chain()
    assert made.follow(record(1), [Finished("why")]) == {}
    other.add(record(1))
    other.add(record(2))
    assert made.follow(record(2), [PUBLISHED, Finished("why")]) == {1: other.publish(1)}
    assert made.version == 1


def test_a_mark_is_of_every_event_also_of_those_after_the_newest_version() -> None:
    made = chain()
    made.add(record(1))
    head = made.publish(1).head
    assert made.mark(1) == Mark("run", 1, joined(joined(ORIGIN, bytes.fromhex(head)), _sha(b"")))
    made.add(record(2))
    assert made.mark(2) == Mark("run", 2, joined(joined(ORIGIN, bytes.fromhex(head)), _sha(lines(2))))
    assert HashChain("run", FIRST, head, 1).mark(1).head != made.mark(1).head, "of another origin"


def test_a_copy_goes_on_by_itself() -> None:
    made = chain()
    made.add(record(1))
    made.publish(1)
    made.add(record(2))
    copy, kept = made.copy(), made.mark(2)
    assert copy.mark(2) == kept
    assert [copy.head_of(v) for v in (0, 1)] == [made.head_of(v) for v in (0, 1)]
    copy.add(record(3))
    copy.publish(2)
    assert (made.mark(2), made.version, made.head_of(2)) == (kept, 1, None)
    made.add(record(3))
    assert made.publish(2).head == copy.head


def test_the_newest_heads_are_at_hand() -> None:
    made = chain()
    for version in range(1, HEADS_KEPT):
        made.publish(version)
    assert made.head_of(0) == FIRST
    made.publish(HEADS_KEPT)
    assert made.head_of(0) is None
    assert made.head_of(1) is not None
    made.publish(HEADS_KEPT + 1)
    assert [made.head_of(v) is None for v in (1, 2)] == [True, False]


@pytest.mark.parametrize(("end", "lost"), [(0, 7), (6, 1), (7, 0), (8, 0)])
def test_what_was_acknowledged_and_is_not_in_the_log_is_lost(end: int, lost: int) -> None:
    assert Mark("run", 7, FIRST).lost(end) == lost


def test_a_mark_contradicts_a_log_that_is_another_at_its_event() -> None:
    made = chain()
    made.add(record(1))
    kept = made.mark(1)
    assert not kept.contradicts(made, 1)
    other = chain()
    other.add(record(9))
    assert kept.contradicts(other, 1)
    assert not kept.contradicts(other, 2), "it says nothing of another event"
    assert not kept.contradicts(other, 0)


def test_a_version_is_named_by_its_head_where_both_sides_know_it() -> None:
    assert is_base("aa", "aa")
    assert not is_base("aa", "bb")
    assert is_base("aa", "")
    assert not is_base("", "bb")
    assert is_of_other_base("aa", "bb")
    assert not is_of_other_base("aa", "aa")
    assert not is_of_other_base("", "bb"), "the device does not say"
    assert not is_of_other_base("aa", None), "the server cannot say"


def _sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
