"""What devices send is checked in one place."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from machines import Bench

from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core import events as ev
from anabranch.core.errors import InvalidUpdate, TooLarge, UnknownCodec, UnknownTask
from anabranch.core.events import Payload
from anabranch.core.journal import from_record, line, to_record
from anabranch.core.limits import Limits
from anabranch.core.model.params import ParamSpec, dense
from anabranch.core.model.submodels import Coordinates
from anabranch.core.model.updates import Capability, Reason
from anabranch.host.submission import (
    Submission,
    announced,
    answered,
    arrived,
    check_codec,
    check_coming,
    check_seals,
    check_size,
    checked_metrics,
    decode,
    examined,
    loader,
)

SPEC = ParamSpec.of({"w": np.zeros(4, np.float32)})
SAID: dict[str, Any] = {
    "update_id": "u-1",
    "task_id": "t-1",
    "client_id": "a",
    "base_version": 0,
    "examples": 10,
    "local_steps": 3,
    "metrics": {"loss": 1.5},
    "sha256": "5678",
    "size_bytes": 16,
    "codec": "raw",
}
SUBMISSION = announced(SPEC, **SAID)


def raw(*values: float) -> bytes:
    return make_codec("raw").encode(np.array(values, np.float32), Layout.of(SPEC))


@pytest.mark.parametrize("codec", ["raw", "topk(0.1)|int8"])
def test_the_tasks_codec_and_raw_are_taken(codec: str) -> None:
    check_codec(codec, "ef(0.9)|topk(0.1)|int8")


@pytest.mark.parametrize("codec", ["int8", "topk(0.2)|int8", "ef(0.9)|topk(0.1)|int8"])
def test_any_other_codec_is_refused(codec: str) -> None:
    with pytest.raises(InvalidUpdate, match=r"the task asked for 'topk\(0.1\)\|int8'"):
        check_codec(codec, "ef(0.9)|topk(0.1)|int8")


def test_only_who_holds_a_task_sends_an_update_of_it() -> None:
    bench = Bench("fedasync", uplink="int8")
    bench.do(ev.Enrolled(0.0, "a", Capability(codecs=("int8:1",))))
    bench.enrol("b")
    bench.ask("a", "t-1")
    for codec in ("int8", "raw"):
        check_coming(bench.engine, "a", "t-1", "u-1", codec)
    for client_id, task_id in (("b", "t-1"), ("a", "t-2")):
        with pytest.raises(UnknownTask, match=f"task {task_id!r} is not open for {client_id!r}"):
            check_coming(bench.engine, client_id, task_id, "u-1", "int8")
    with pytest.raises(InvalidUpdate, match="the task asked for 'int8'"):
        check_coming(bench.engine, "a", "t-1", "u-1", "int4")
    bench.engine.handle(arrived(SUBMISSION, examined(SUBMISSION, raw(1, 2, 3, 4), SPEC), 1.0))
    check_coming(bench.engine, "a", "t-1", "u-1", "int4")  # it has its answer
    with pytest.raises(UnknownTask):
        check_coming(bench.engine, "a", "t-1", "u-2", "int8")


def test_a_part_of_a_model_has_the_bytes_of_that_part() -> None:
    part = Coordinates(np.array([1, 3]))
    check_size(8, "raw", SPEC, part)
    with pytest.raises(TooLarge, match="payload of 9 bytes: raw needs at most 8 for 2 values"):
        check_size(9, "raw", SPEC, part)
    with pytest.raises(UnknownCodec):
        check_size(1, "nothing", SPEC, None)
    data = np.array([5, 7], np.float32).tobytes()
    assert dense(decode(Payload("", 8), data, SPEC, part)).tolist() == [5, 7]
    submission = announced(SPEC, **SAID | {"size_bytes": 8, "submodel": part})
    assert submission.payload == Payload("5678", 8, "raw", values=2)
    found, flaw = examined(submission, data, SPEC)
    assert (dense(found.delta).tolist(), flaw) == ([5, 7], "")
    assert dense(loader(lambda _: data, SPEC)(Payload("", 8), part)).tolist() == [5, 7]


def test_more_bytes_than_the_codec_can_need_are_refused() -> None:
    check_size(16, "raw", SPEC, None)
    with pytest.raises(TooLarge, match="payload of 17 bytes: raw needs at most 16 for 4 values"):
        check_size(17, "raw", SPEC, None)


def test_a_good_update_has_its_values() -> None:
    assert SUBMISSION.payload == Payload("5678", 16, "raw")
    update, flaw = examined(SUBMISSION, raw(1, 2, 3, 4), SPEC)
    assert flaw == ""
    assert dense(update.delta).tolist() == [1, 2, 3, 4]
    # Not the updates themselves: since Python 3.13 `==` asks arrays that are the same one, too.
    assert vars(replace(update, delta=SUBMISSION.update.delta)) == vars(SUBMISSION.update)
    assert SUBMISSION.update.delta.size == 0


@pytest.mark.parametrize(
    ("data", "limits", "flaw"),
    [
        (raw(1, 2, 3, 4)[:-1], Limits(), "payload has 15 bytes"),
        (np.full(4, np.nan, np.float32).tobytes(), Limits(), "are not finite"),
        (raw(1, 2, 3, 11), Limits(delta_abs_max=10.0), "are over 10"),
        (raw(1, 2, 3, 4), Limits(examples_max=9), "examples is 10"),
    ],
)
def test_a_flawed_one_comes_back_as_it_was(data: bytes, limits: Limits, flaw: str) -> None:
    update, found = examined(SUBMISSION, data, SPEC, limits)
    assert update is SUBMISSION.update
    assert flaw in found


@pytest.mark.parametrize(
    ("said", "known", "other"),
    [("", "ab", False), ("ab", None, False), ("ab", "ab", False), ("ab", "cd", True)],
    ids=["it does not say", "nobody knows", "the same", "another"],
)
def test_who_trained_from_a_lost_version(said: str, known: str | None, other: bool) -> None:
    submission = Submission(SUBMISSION.update, SUBMISSION.payload, said)
    assert arrived(submission, (submission.update, ""), 1.0, known).other_base is other


def test_a_flaw_is_an_error_when_it_is_found_and_a_verdict_when_it_is_known() -> None:
    bench = Bench("fedasync")
    bench.enrol("a")
    bench.ask("a", "t-1")
    event = arrived(SUBMISSION, examined(SUBMISSION, raw(1, 2, 3, np.nan), SPEC), 1.0)
    with pytest.raises(InvalidUpdate, match=r"update u-1: .* not finite"):
        answered(event, bench.engine.handle(event))
    again = answered(event, bench.engine.handle(event))
    assert (again.duplicate, again.receipt.decision.reason) == (True, Reason.INVALID)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [({"kind": 1.0}, "the name of metric 'kind'"), ({"loss": np.inf}, "'loss' is not finite")],
    ids=["a name", "a number"],
)
def test_metrics_that_nobody_may_send(metrics: dict[str, float], words: str) -> None:
    assert checked_metrics({"mse": 1.0}) == {"mse": 1.0}
    with pytest.raises(InvalidUpdate, match=words):
        checked_metrics(metrics)


def test_a_journals_values_are_read_by_their_reference() -> None:
    load = loader(lambda payload: raw(*map(float, payload.sha256)), SPEC)
    assert dense(load(Payload("5678", 16), None)).tolist() == [5, 6, 7, 8]
    assert dense(decode(Payload("", 16), raw(1, 1, 1, 1), SPEC, None)).tolist() == [1, 1, 1, 1]


def test_seals_are_on_record_with_the_head_that_they_are_bound_to() -> None:
    seals, head = {"ab" * 32: "Ym94"}, "0a" * 32
    sealed = announced(SPEC, **SAID, base_head=head, seals=seals)
    event = arrived(sealed, (sealed.update, "its values came wrong"), 2.0, head=head)
    record = to_record(event)
    assert (record["seals"], record["base_head"]) == (seals, head)
    again = from_record(json.loads(line(record)), SPEC, loader(lambda _: b"", SPEC))
    assert isinstance(again, ev.UpdateArrived)
    assert (again.seals, again.base_head) == (seals, head)
    plain = to_record(arrived(replace(sealed, seals={}), (sealed.update, ""), 2.0))
    assert not {"seals", "base_head"} & plain.keys()  # as it was before there were any


def test_an_update_is_sealed_for_the_runs_keepers_and_for_nobody_else() -> None:
    box, south, north = "Ym94", "0a" * 32, "0b" * 32
    check_seals({}, ())
    check_seals({north: box, south: box}, (south, north))
    for seals, keepers in (({}, (south,)), ({south: box}, ()), ({south: box}, (north,))):
        with pytest.raises(InvalidUpdate, match="seals are for"):
            check_seals(seals, keepers)
    for seals in ({south: box}, {south: box, north: box, "0c" * 32: box}):
        with pytest.raises(InvalidUpdate, match=f"the run wants {south}, {north}"):
            check_seals(seals, (south, north))
