"""What is kept comes back as it was; whatever else is read in its place is an error of ours."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kept_state import SPEC, entries
from rollbacks import World

from anabranch.client.outbox import UpdateEntry
from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.errors import ConfigError, InvalidUpdate, StoreCorrupt, StoreNewer
from anabranch.core.journal import KINDS, canonical_lines, from_record, line, to_record
from anabranch.core.model.params import Delta
from anabranch.core.model.submodels import Coordinates, Submodel, unit_map
from anabranch.core.model.updates import Ask, Capability, Update
from anabranch.core.plain import FieldError
from anabranch.core.snapshot import Snapshot, restore, state_digest, take_snapshot

# --- values ------------------------------------------------------------------------------------

TEXTS = st.text(max_size=8)
NOW = st.floats(0.0, 1e9) | st.integers(0, 10**9)  # a whole number stays one
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-5, 5)
COUNTS = st.integers(0, 10**12)
PAYLOADS = st.builds(ev.Payload, TEXTS, COUNTS, TEXTS, COUNTS)
PARTS = st.sampled_from(
    [None, unit_map(SPEC, [[0, 3, 7], [1]]), unit_map(SPEC, [[2], [0, 2]]), Coordinates(np.array([1, 5, 9]))]
)
CAPABILITIES = st.builds(
    Capability, COUNTS, COUNTS, NUMBERS, NUMBERS, TEXTS, st.lists(TEXTS, max_size=3).map(tuple)
)
UPDATES = st.builds(
    Update,
    *(TEXTS, TEXTS, TEXTS, COUNTS, COUNTS),
    delta=st.just(np.zeros(3, np.float32)),
    submodel=PARTS,
    local_steps=COUNTS,
    metrics=st.dictionaries(TEXTS, NUMBERS, max_size=3),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
PROOFS = st.none() | st.builds(ev.Proof, TEXTS, TEXTS, st.just(0.0) | NUMBERS)
SEALS = st.dictionaries(TEXTS, TEXTS, max_size=3)
IDS = st.lists(TEXTS, max_size=3).map(tuple)
CHANGES = st.dictionaries(TEXTS, NUMBERS | TEXTS, max_size=3)
RULES = st.integers(0, 1)
EVENTS_OF: dict[str, st.SearchStrategy[ev.Event]] = {
    "enrolled": st.builds(ev.Enrolled, NOW, TEXTS, CAPABILITIES),
    "asked": st.builds(ev.TaskAsked, NOW, st.builds(Ask, TEXTS, TEXTS, st.none() | COUNTS)),
    "renewed": st.builds(ev.LeaseRenewed, NOW, TEXTS, TEXTS, NUMBERS),
    "dropped": st.builds(ev.TaskDropped, NOW, TEXTS, TEXTS, TEXTS, st.booleans()),
    "update": st.builds(
        ev.UpdateArrived,
        *(NOW, UPDATES, PAYLOADS, TEXTS, PROOFS, st.booleans(), SEALS, TEXTS, TEXTS),
    ),
    "ticked": st.builds(ev.Ticked, NOW),
    "returned": st.builds(ev.Returned, NOW),
    "paused": st.builds(ev.Paused, NOW),
    "resumed": st.builds(ev.Resumed, NOW),
    "quarantined": st.builds(ev.Quarantined, NOW, TEXTS, TEXTS),
    "released": st.builds(ev.Released, NOW, TEXTS),
    "rolled_back": st.builds(ev.RolledBack, NOW, COUNTS, COUNTS, IDS, st.booleans(), RULES),
    "settings_changed": st.builds(ev.SettingsChanged, NOW, CHANGES, TEXTS, st.booleans(), RULES),
    "mask_sum": st.builds(
        ev.MaskSumArrived, NOW, COUNTS, TEXTS, PAYLOADS, numbers=st.just(np.zeros(3, np.uint32))
    ),
    "cohort_dropped": st.builds(ev.CohortDropped, NOW, COUNTS, TEXTS),
}
EVENTS = st.one_of(*EVENTS_OF.values())

# --- damage ------------------------------------------------------------------------------------


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every table or list in some JSON, with each of its keys."""
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield data, key
        yield from places(data[key])


@st.composite
def damage(draw: st.DrawFn, data: Any) -> Any:
    """A copy with one value changed, gone, or one more."""
    data = json.loads(json.dumps(data))
    holder, key = draw(st.sampled_from(list(places(data))))
    what = draw(st.sampled_from(["other", "gone", "more"]))
    if what == "other":
        holder[key] = draw(JSON)
    elif what == "gone":
        del holder[key]
    elif isinstance(holder, dict):
        holder["unheard_of"] = draw(JSON)
    else:
        holder.append(draw(JSON))
    return data


# --- the journal -------------------------------------------------------------------------------


def no_values(payload: ev.Payload, submodel: Submodel | None) -> Delta:
    return np.zeros(3, np.float32)


@given(record=st.dictionaries(TEXTS, JSON, max_size=4))
def test_a_line_is_the_canonical_json_of_its_record(record: dict[str, Any]) -> None:
    try:
        text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError:
        with pytest.raises(ValueError, match="Out of range"):
            line(record)
    else:
        assert line(record) == text


def test_a_python_without_its_compiled_json_writes_the_same_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"now": 1e16, "client_id": "\u00e9\u2028", "b": {"z": [1, -0.0, 1e-7], "a": None}}
    expected = line(record)
    monkeypatch.setattr(json.encoder, "c_make_encoder", None)
    assert canonical_lines()(record) == expected


@given(event=EVENTS)
def test_an_event_comes_back_from_its_record(event: ev.Event) -> None:
    text = line(to_record(event))
    again = from_record(json.loads(text), SPEC, no_values)
    assert line(to_record(again)) == text
    assert told_by(again) == told_by(event)


def told_by(event: ev.Event) -> dict[str, Any]:
    """All fields, but for arrays, which do not compare: a record has none."""
    found = vars(event) | {"numbers": None, "fold": None}
    return found | {"update": vars(found["update"]) | {"delta": None}} if "update" in found else found


def test_these_are_all_kinds_of_events() -> None:
    assert EVENTS_OF.keys() == KINDS.keys()


@given(data=st.data(), event=EVENTS)
def test_a_damaged_record_is_an_event_or_an_error_of_ours(data: st.DataObject, event: ev.Event) -> None:
    record = data.draw(damage(to_record(event)))
    with suppress(FieldError, InvalidUpdate):
        line(to_record(from_record(record, SPEC, no_values)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"payload": {"sha256": "ab", "size_bytes": "8"}}, "payload.size_bytes must be int, not '8'"),
        ({"examples": True}, "examples must be int, not True"),
        ({"metrics": {"loss": float("nan")}}, "metrics['loss'] must be a finite number, not nan"),
        ({"unheard_of": 1}, "has unknown fields: unheard_of"),
        ({"client_id": ["a"]}, "client_id must be str, not ['a']"),
        ({"kind": "invented"}, "is of an unknown kind, 'invented'"),
    ],
)
def test_what_is_wrong_with_a_record_is_named(change: Mapping[str, Any], said: str) -> None:
    update = Update("u", "t", "c", 0, 1, np.zeros(3, np.float32))
    record = to_record(ev.UpdateArrived(1.0, update, ev.Payload("ab", 8)))
    with pytest.raises(FieldError) as found:
        from_record({**record, **change}, SPEC, no_values)
    assert str(found.value) == said


def test_a_record_of_before_there_were_some_fields_is_read() -> None:
    record = {"kind": "asked", "now": 1, "client_id": "c", "task_id": "t"}
    assert from_record(record, SPEC, no_values) == ev.TaskAsked(1, Ask("c", "t"))


# --- snapshots ---------------------------------------------------------------------------------


def world() -> World:
    """With a bit of everything: rows of a rule, tasks of sub-models, a downlink, changed settings."""
    found = World(
        "teasq_drop", {"cache_size": 5, "concurrency_fraction": 1.0}, {"rule": "median"}, units=True,
        downlink="log(1)", buffer_max=9,
    )  # fmt: skip
    found.enrol()
    found.play([(c, n % 3, float(n)) for n, c in enumerate("abcdabcdabc")])
    found.do(ev.SettingsChanged(100.0, {"server.lease_s": 33.0}, "somebody"))
    found.engine.handle(ev.TaskAsked(101.0, Ask("d", "open-1")))
    return found


WORLD = world()
TAKEN = take_snapshot(WORLD.engine)


def again(meta: dict[str, Any]) -> str:
    """The digest of the engine of a snapshot of the world with this JSON."""
    e = WORLD.engine
    snapshot = Snapshot(meta, TAKEN.arrays)
    return state_digest(restore(snapshot, e.spec, e.strategy, e.settings, e.broadcast, e.planner))


def test_a_snapshot_comes_back() -> None:
    assert TAKEN.meta["strategy"]["cache"]
    assert TAKEN.meta["tasks"]
    assert again(json.loads(json.dumps(TAKEN.meta))) == state_digest(WORLD.engine)


@given(meta=damage(TAKEN.meta))
def test_a_damaged_snapshot_is_a_state_or_an_error_of_ours(meta: dict[str, Any]) -> None:
    with suppress(StoreCorrupt, StoreNewer):
        again(meta)


# --- the outbox --------------------------------------------------------------------------------

(ENTRY, PARTIAL, _) = entries("ab" * 32)


def file_of(header: Any, payload: bytes) -> bytes:
    """A file of an outbox whose digests are right, whatever its header says."""
    text = json.dumps(header).encode()
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text + b"\n" + payload


@given(data=st.data(), entry=st.sampled_from([ENTRY, PARTIAL]))
def test_a_damaged_header_is_an_entry_or_an_error_of_ours(data: st.DataObject, entry: UpdateEntry) -> None:
    head, payload = entry.to_bytes(1)
    header = json.loads(head.splitlines()[1])
    changed = data.draw(damage(header) | JSON)
    with suppress(StoreCorrupt, StoreNewer):
        UpdateEntry.from_bytes(file_of(changed, bytes(payload)))


@given(data=st.data(), entry=st.sampled_from([ENTRY, PARTIAL]))
def test_a_damaged_file_is_an_entry_or_an_error_of_ours(data: st.DataObject, entry: UpdateEntry) -> None:
    whole = b"".join(map(bytes, entry.to_bytes(1)))
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    for broken in (flipped, whole[:at]):
        with pytest.raises(StoreCorrupt):
            UpdateEntry.from_bytes(broken)


# --- the configuration -------------------------------------------------------------------------

TABLES = merge([("test", {"strategy": {"name": "fedbuff", "buffer_size": 3}})]).to_json(every_table=True)


@given(tables=damage(TABLES))
def test_a_damaged_configuration_is_one_or_an_error_of_ours(tables: Any) -> None:
    with suppress(ConfigError, StoreNewer):
        found = Config.from_json(tables)
        assert Config.from_json(json.loads(json.dumps(found.to_json()))) == found
