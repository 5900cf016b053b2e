"""What is written of state and read again, and what is said of a file that is none."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import pytest
from machines import Bench, vector

from anabranch.core import events as ev
from anabranch.core.journal import from_record, to_record
from anabranch.core.model.updates import Update
from anabranch.core.plain import FieldError, from_plain, make_converter
from anabranch.core.snapshot import packed, restore, state_digest, take_changes, take_snapshot, unpacked


class Tide(StrEnum):
    EBB = "ebb"
    FLOOD = "flood"


@dataclass(frozen=True)
class Reach:
    tide: Tide = Tide.EBB
    depth: int | str = 0


def test_a_choice_is_written_as_its_word() -> None:
    plain = make_converter().unstructure(Reach(Tide.FLOOD))
    assert plain == {"tide": "flood", "depth": 0}
    assert type(plain["tide"]) is str
    assert from_plain(plain, Reach, make_converter()) == Reach(Tide.FLOOD)


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ({"tide": "high"}, "tide must be one of 'ebb', 'flood', not 'high'"),
        ({"depth": 2.5}, "depth must be int or str, not 2.5"),
    ],
)
def test_what_is_no_value_is_shown(plain: dict[str, object], words: str) -> None:
    with pytest.raises(FieldError) as caught:
        from_plain(plain, Reach, make_converter())
    assert words in str(caught.value)


def test_an_update_of_another_base_is_one_in_the_log() -> None:
    spec = Bench().engine.spec
    update = Update("u-1", "t-1", "a", 3, 10, vector(1, 2, 3, 4))
    for other in (False, True):
        event = ev.UpdateArrived(2.0, update, ev.Payload("00" * 32, 16), other_base=other)
        read = from_record(to_record(event), spec, lambda *_: update.delta)
        assert isinstance(read, ev.UpdateArrived)
        assert read.other_base is other


@dataclass(frozen=True)
class Basin:
    water: npt.NDArray[np.float32]
    tide: Tide = Tide.EBB


def test_arrays_lie_beside_the_json_by_their_paths() -> None:
    arrays: dict[str, npt.NDArray[np.float32]] = {}
    plain = packed({"here": Basin(vector(1, 2, 3, 4), Tide.FLOOD)}, "state", arrays)
    assert plain == {"here": {"water": {"$array": "state/here/water"}, "tide": "flood"}}
    assert {name: a.tolist() for name, a in arrays.items()} == {"state/here/water": [1.0, 2.0, 3.0, 4.0]}
    back = unpacked(plain, arrays, dict[str, Basin])["here"]
    assert (back.water.tolist(), back.tide) == ([1.0, 2.0, 3.0, 4.0], Tide.FLOOD)


def at_sea() -> Bench:
    """Two versions on, while a task trains from the first: its base is kept."""
    bench = Bench("fedasync", vector(8, 8, 8, 8), alpha=0.5, staleness={"name": "constant"})
    bench.enrol(*"ab")
    bench.ask("a", "a0")
    for n in range(2):
        bench.work("b", f"b{n}")
    assert sorted(bench.engine.history) == [0]
    return bench


def test_a_snapshot_has_the_bases_that_are_trained_from() -> None:
    engine = at_sea().engine
    snapshot = take_snapshot(engine)
    assert snapshot.meta["format"] == 2
    back = restore(snapshot, engine.spec, engine.strategy, engine.settings)
    assert {version: base.tolist() for version, base in back.history.items()} == {0: [8.0] * 4}
    assert state_digest(back) == state_digest(engine)


def test_a_snapshot_in_pieces_has_what_came_since_the_last() -> None:
    bench = at_sea()
    bench.engine.ledger.track(saved=True)
    bench.work("b", "b7")
    snapshot = take_changes(bench.engine)
    assert snapshot.rows is not None
    assert [(receipt.task_id, answers) for receipt, answers in snapshot.rows.receipts] == [("b7", True)]
    assert list(snapshot.rows.clients) == ["b"]
    assert snapshot.rows.enrolled == []
    assert snapshot.meta["rows"] == {"clients": 2, "receipts": [0, 3]}
