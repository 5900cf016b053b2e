"""Tensor sets and the planner that deals them: golden values, what covers what, staleness of parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept_state import Life
from machines import decision

from anabranch.compress.layout import Layout
from anabranch.core import events as ev
from anabranch.core.config.tables import SubmodelTable
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.part_changes import ALL, KEPT, PartChanges
from anabranch.core.engine.planner import Applicant
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.errors import ConfigError, InvalidUpdate
from anabranch.core.model.params import ParamSpec, SparseVector
from anabranch.core.model.submodels import (
    TensorSet,
    gathered,
    scatter,
    submodel_from_json,
    submodel_json,
    tensor_set,
    tensor_set_of_bits,
)
from anabranch.core.model.updates import Ask, Capability, Reason, Update
from anabranch.core.snapshot import restore, state_digest, take_snapshot
from anabranch.host.run import AdviceKind, advice
from anabranch.protos.convert import submodel_from_proto, submodel_to_proto
from anabranch.protos.v1.model_pb2 import SubmodelMap
from anabranch.strategies.registry import make_strategy
from anabranch.strategies.submodels.fragments import Fragments, blocks_of

GOLDEN_BYTES = (
    640,
    64,
    4096,
    64,
    4096,
    64,
    640,
    10,
)
SIZES = {"a.weight": (2, 3), "a.bias": (2,), "count": (), "b.weight": (4,), "c": (5,), "d.weight": (1, 2)}
SPEC = ParamSpec.of(
    {n: np.zeros(s, np.int64 if n == "count" else np.float32) for n, s in SIZES.items()}, buffers=["c"]
)
AB, CD = tensor_set(SPEC, (0, 1, 3)), tensor_set(SPEC, (4, 5))


def of_bytes(sizes: Sequence[int]) -> ParamSpec:
    """A model whose blocks are so large, two bytes standing for one number."""
    return ParamSpec.of({f"t{i}": np.zeros(n // 2, np.float32) for i, n in enumerate(sizes)})


def dealt(pattern: str, parts: int, spec: ParamSpec) -> list[list[int]]:
    table = SubmodelTable(name="fragments", parts=parts, pattern=pattern)
    return [list(part.tensors) for part in Fragments.of(spec, table, 0).parts]


# --- the planner ---------------------------------------------------------------------------------


def test_golden_balanced() -> None:
    spec = of_bytes(GOLDEN_BYTES)
    found = dealt("balanced", 3, spec)
    assert found == [[2], [4], [0, 1, 3, 5, 6, 7]]
    assert [2 * sum(spec.tensors[i].size for i in part) for part in found] == [4096, 4096, 1482]


def test_strided_and_sequential() -> None:
    assert dealt("strided", 3, of_bytes([2] * 8)) == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert dealt("sequential", 3, of_bytes([2] * 6)) == [[0, 1], [2, 3], [4, 5]]
    assert dealt("sequential", 2, of_bytes([2, 2, 2, 6])) == [[0, 1, 2], [3]]
    assert dealt("sequential", 3, of_bytes([60, 2, 2])) == [[0], [1], [2]]  # each has one at least


@pytest.mark.parametrize("pattern", ["balanced", "strided", "sequential"])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_every_trained_tensor_is_in_one_part_and_blocks_stay_together(pattern: str, parts: int) -> None:
    found = dealt(pattern, parts, SPEC)
    assert sorted(i for part in found for i in part) == [0, 1, 3, 4, 5]  # 2 is a counter
    assert all(found)
    assert any({0, 1} <= set(part) for part in found)
    assert blocks_of(SPEC) == [[0, 1], [3], [4], [5]]


def test_turns_go_round_and_devices_are_not_in_step() -> None:
    planner = Fragments(of_bytes([2] * 4), 4, seed=3)
    zero = np.zeros(4, np.float32)

    def turns(client: str) -> list[Any]:
        asks = [Applicant(None, 0, 0, client, turn) for turn in range(8)]
        return [planner.plan(planner.init(zero), zero, ask)[1] for ask in asks]

    one = turns("device-0")
    assert one[:4] == one[4:]
    assert set(one) == set(planner.parts)
    places = [planner.parts.index(part) for part in one]
    assert all((b - a) % 4 == 1 for a, b in pairwise(places))
    assert len({tuple(map(hash, turns(f"device-{n}"))) for n in range(20)}) == 4


def test_one_part_is_the_whole_model_and_too_many_are_refused() -> None:
    planner = Fragments(SPEC, 1)
    assert planner.plan(planner.init(np.zeros(19)), np.zeros(19), Applicant(None, 0, 0))[1] is None
    with pytest.raises(ConfigError, match=r"submodel\.parts is 5, but the model has 4 blocks"):
        Fragments(SPEC, 5)


# --- a set of tensors ----------------------------------------------------------------------------


def test_a_set_covers_its_tensors_and_nothing_else() -> None:
    whole = np.arange(19, dtype=np.float32)
    assert [AB.size, CD.size] == [12, 7]
    assert AB.runs == (slice(0, 12),)  # neighbours in the vector, though a counter lies between
    assert gathered(whole, CD).tolist() == [12, 13, 14, 15, 16, 17, 18]
    sparse = tensor_set(SPEC, (1, 4))
    assert gathered(whole, sparse).tolist() == [6, 7, 12, 13, 14, 15, 16]
    assert sparse.indices.tolist() == sparse.places(np.arange(7)).tolist() == [6, 7, 12, 13, 14, 15, 16]
    assert [a.tolist() for a in sparse.covered(["c"])] == [[2, 3, 4, 5, 6], [12, 13, 14, 15, 16]]
    out = whole.copy()
    scatter(np.zeros(7, np.float32), out, sparse)
    assert out.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 8, 9, 10, 11, 0, 0, 0, 0, 0, 17, 18]
    assert [t.name for t in sparse.small.tensors] == ["a.bias", "c"]
    assert sparse.small.buffers == ("c",)


def test_its_layout_is_that_of_its_tensors_and_no_other_set_has_its_fingerprint() -> None:
    layout = Layout.of(SPEC, AB)
    assert layout.size == AB.size
    assert [group.size for group in layout.groups] == [6, 6]
    assert Layout.of(SPEC, CD).exact.size == 5
    prints = {Layout.of(SPEC, s).fingerprint for s in (AB, CD, tensor_set(SPEC, (0,)), None)}
    assert len(prints) == 4


def test_it_travels_and_is_kept_as_bits() -> None:
    message = submodel_to_proto(CD)
    assert message is not None
    assert message.tensors == bytes([0b110000])
    assert submodel_from_proto(message, SPEC) == CD
    assert submodel_json(CD) == {"tensors": ["30"]}
    assert submodel_from_json({"tensors": ["30"]}, SPEC) == CD


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (SubmodelMap(tensors=b"\x01\x01"), "6 tensors need 1 bytes, not 2"),
        (SubmodelMap(tensors=b"\x00"), "at least one"),
        (SubmodelMap(tensors=b"\x41"), "within 0..5"),  # a padding bit
        (SubmodelMap(tensors=b"\x04"), "tensor 'count' is not trained"),
        (SubmodelMap(tensors=b"\x01", starts=[0], lengths=[1]), "one of them"),
        (SubmodelMap(tensors=b"\x01", kept=[b"\x01"]), "one of them"),
    ],
)
def test_wrong_sets_are_refused_by_form(message: SubmodelMap, words: str) -> None:
    with pytest.raises(InvalidUpdate, match=words):
        submodel_from_proto(message, SPEC)


@pytest.mark.parametrize("tensors", [(), (1, 1), (3, 1), (-1,), (6,), (2,)])
def test_no_set_has_what_is_not_trained_or_not_there(tensors: tuple[int, ...]) -> None:
    with pytest.raises(InvalidUpdate, match="submodel: tensor"):
        tensor_set(SPEC, tensors)


@pytest.mark.parametrize("kept", [{"tensors": ["30", "30"]}, {"tensors": ["xy"]}, {"other": ["30"]}])
def test_what_is_kept_of_a_set_is_checked(kept: dict[str, list[str]]) -> None:
    with pytest.raises(InvalidUpdate, match="submodel"):
        submodel_from_json(kept, SPEC)


# --- staleness -----------------------------------------------------------------------------------


def changed(*sets: TensorSet | None) -> PartChanges:
    found = PartChanges()
    for one in sets:
        found = found.taken(one).published()
    return found


def test_staleness_counts_the_versions_that_changed_the_part() -> None:
    a, b = tensor_set(SPEC, (0,)), tensor_set(SPEC, (1,))
    c = tensor_set(SPEC, (3, 4))
    found = changed(*[(a, b, c)[n % 3] for n in range(10)])
    # The specification's: parts in turn, granted at version 4, here at version 10.
    assert [found.staleness(b, 6), found.staleness(None, 6)] == [2, 6]
    assert found.staleness(tensor_set(SPEC, (0, 3)), 6) == 4
    assert found.staleness(b, -1) == -1
    assert changed(a, None, a).staleness(b, 3) == 1
    assert changed(None, None) == PartChanges()  # of whole models nothing is to be remembered
    buffered = PartChanges().taken(a).taken(c).taken(a).published()
    assert [buffered.staleness(one, 1) for one in (a, b, c)] == [1, 0, 1]
    assert PartChanges().taken(a).taken(None).published().of == ()
    assert PartChanges().published().of == ()


def test_versions_that_are_forgotten_count() -> None:
    a, b = tensor_set(SPEC, (0,)), tensor_set(SPEC, (1,))
    found = changed(*[a] * (KEPT + 5))
    assert len(found.of) == KEPT
    assert ALL not in found.of
    assert found.staleness(b, KEPT + 5) == 5


class Parts:
    """An engine of fragments, each of one tensor, whose devices are asked by hand."""

    def __init__(self, strategy: str, settings: EngineSettings | None = None, **params: Any) -> None:
        self.spec = ParamSpec.of({f"t{i}": np.zeros(2, np.float32) for i in range(3)})
        self.planner = Fragments(self.spec, 3, "strided")
        made, start = make_strategy(strategy, params), np.ones(6, np.float32)
        self.engine = Engine(self.spec, made, settings or EngineSettings(), start, planner=self.planner)
        self.count = 0

    def device(self, part: int) -> str:
        """A new device whose first task is of this part."""
        while True:
            self.count += 1
            name = f"d{self.count}"
            ask = Applicant(None, 0, 0, name)
            if (
                self.planner.plan(self.planner.init(self.engine.vector), self.engine.vector, ask)[1]
                == (self.planner.parts[part])
            ):
                break
        self.engine.handle(ev.Enrolled(0.0, name, Capability()))
        self.engine.handle(ev.TaskAsked(0.0, Ask(name, f"task-{name}")))
        return name

    def push(self, name: str, delta: Any = (1.0, 1.0), **more: Any) -> Any:
        task = self.engine.ledger.tasks[f"task-{name}"]
        values = delta if isinstance(delta, SparseVector) else np.asarray(delta, np.float32)
        submodel = more.pop("submodel", task.submodel)
        update = Update(f"u-{name}", task.task_id, name, task.base_version, 1, values, submodel)
        return decision(self.engine.handle(ev.UpdateArrived(1.0, update, ev.Payload("00" * 32, 8))))


def test_golden_staleness_of_a_part() -> None:
    run = Parts("fedbuff", buffer_size=1, staleness={"name": "polynomial", "a": 0.5})
    for n in range(4):
        run.push(run.device(n % 3))
    late = run.device(1)
    for n in range(4, 10):
        run.push(run.device(n % 3))
    assert run.engine.version == 10
    found = run.push(late)
    assert (found.staleness, found.weight) == (2, pytest.approx(0.577350, abs=1e-6))


def test_the_bound_of_staleness_is_of_the_part() -> None:
    run = Parts("fedbuff", EngineSettings(staleness_max=1), buffer_size=1)
    first, second, third = run.device(0), run.device(0), run.device(1)
    for n in range(3):
        run.push(run.device(0) if n else first)
    assert run.push(second).reason is Reason.STALE
    assert run.push(third).staleness == 0


def test_an_update_of_another_part_or_of_all_is_refused() -> None:
    run = Parts("fedasync")
    device = run.device(0)
    assert run.push(device, submodel=run.planner.parts[1]).reason is Reason.WRONG_SUBMODEL
    device = run.device(0)
    assert run.push(device, np.ones(6), submodel=None).reason is Reason.WRONG_SUBMODEL
    assert run.engine.version == 0


def test_a_refused_update_changes_no_part() -> None:
    run = Parts("fedbuff", buffer_size=1)
    late, refused, taken = run.device(1), run.device(0), run.device(0)
    assert run.push(refused, submodel=run.planner.parts[1]).reason is Reason.WRONG_SUBMODEL
    assert run.push(taken).staleness == 0
    assert run.engine.version == 1
    assert run.push(late).staleness == 0, "nobody has changed its part"


def test_turns_count_answers_of_both_kinds_and_tasks_under_way() -> None:
    turns = []

    class Counting(Fragments):
        def plan(self, state: Any, vector: Any, applicant: Applicant) -> Any:
            turns.append(applicant.turn)
            return super().plan(state, vector, applicant)

    run = Parts("fedbuff", EngineSettings(tasks_per_client=3), buffer_size=1)
    name = run.device(0)
    run.push(name)
    run.engine.planner = Counting(run.spec, 3, "strided")
    for n in range(2):
        run.engine.handle(ev.TaskAsked(1.0, Ask(name, f"more {n}")))
    task = run.engine.ledger.tasks["more 0"]
    broken = Update("broken", "more 0", name, task.base_version, 1, np.ones(2, np.float32), task.submodel)
    run.engine.handle(ev.UpdateArrived(2.0, broken, ev.Payload("00" * 32, 8), "it was cut"))
    assert run.engine.ledger.clients[name].rejected == 1
    run.engine.handle(ev.TaskAsked(3.0, Ask(name, "the last")))
    assert turns == [1, 2, 3]


def test_a_planner_hears_once_of_each_task_that_it_planned() -> None:
    """That its part was taken, or that nothing came of it; what comes of a late one only if it is taken."""
    told: list[tuple[str, int | None]] = []

    class Noting(Fragments):
        def applied(self, state: Any, submodel: Any, version: int) -> Any:
            told.append((submodel.bits.hex(), version))
            return super().applied(state, submodel, version)

        def released(self, state: Any, submodel: Any) -> Any:
            told.append((submodel.bits.hex(), None))
            return super().released(state, submodel)

    run = Parts("fedbuff", EngineSettings(lease_s=5.0), buffer_size=1)
    run.planner = run.engine.planner = Noting(run.spec, 3, "strided")
    bits = [one.bits.hex() for one in run.planner.parts]
    taken, refused = run.device(0), run.device(1)
    run.push(taken)
    run.push(refused, submodel=run.planner.parts[0])
    assert told == [(bits[0], 1), (bits[1], None)]
    late, too_late = run.device(2), run.device(1)
    told.clear()
    run.engine.handle(ev.Ticked(5.0))
    assert sorted(told) == sorted([(bits[2], None), (bits[1], None)])
    told.clear()
    run.push(too_late, submodel=run.planner.parts[0])
    assert told == []
    run.push(late)
    assert told == [(bits[2], 2)]


def test_a_buffer_is_divided_by_the_updates_that_cover_a_part() -> None:
    run = Parts("fedbuff", buffer_size=3, server_lr=0.5, momentum=0.5)
    for part, delta in ((0, 2.0), (0, 4.0), (1, 8.0)):
        run.push(run.device(part), (delta, delta))
    assert run.engine.vector.tolist() == [2.5, 2.5, 5.0, 5.0, 1.0, 1.0]
    for part, delta in ((1, 2.0), (1, 2.0), (1, 2.0)):
        run.push(run.device(part), (delta, delta))
    # m of the second part: 8, then .5 x 8 + 2 = 6; that of the first stays 3 and moves nothing.
    assert run.engine.vector.tolist() == [2.5, 2.5, 8.0, 8.0, 1.0, 1.0]
    assert run.engine.state.moment.tolist() == [3.0, 3.0, 6.0, 6.0, 0.0, 0.0]
    assert run.engine.state.covered is None


def test_fedasync_of_a_constant_is_asyncdrop_to_the_bit() -> None:
    rng, runs = np.random.default_rng(0), []
    deltas = rng.standard_normal((12, 2)).astype(np.float32)
    constant: dict[str, Any] = {"alpha": 0.5, "staleness": {"name": "constant"}}
    for name, params in (("fedasync", constant), ("asyncdrop", {})):
        run = Parts(name, **params)
        waiting = [run.device(n % 3) for n in range(6)]
        for n, delta in enumerate(deltas):
            sparse = SparseVector(np.array([1]), delta[:1], 2)
            run.push(waiting.pop(0), sparse if n % 4 == 3 else delta)
            waiting.append(run.device(n % 3))
        runs.append(run.engine.vector.tobytes())
    assert runs[0] == runs[1]


@pytest.mark.parametrize("strategy", ["fedbuff", "fedasync", "fedavg"])
def test_a_state_of_parts_goes_on_from_its_snapshot(strategy: str) -> None:
    size: dict[str, Any] = {"fedbuff": {"buffer_size": 4}, "fedavg": {"clients_per_round": 4}}.get(
        strategy, {}
    )
    run = Parts(strategy, **size)
    names = [run.device(n % 3) for n in range(4)]
    for name in names[:3]:
        run.push(name, (1.0, 2.0))
    settings, made = EngineSettings(), make_strategy(strategy, size)
    again = restore(take_snapshot(run.engine), run.spec, made, settings, None, run.planner)
    assert state_digest(again) == state_digest(run.engine)
    assert again.part_changes == run.engine.part_changes
    run.push(names[3])
    other = Parts(strategy, **size)
    other.engine = again
    other.push(names[3])
    assert state_digest(again) == state_digest(run.engine)
    assert again.version > 0


def test_a_cache_weighs_a_part_by_the_versions_that_changed_it() -> None:
    run = Parts("teasq_drop", cache_size=2, concurrency_fraction=1.0)
    late = [run.device(1), run.device(1)]
    for _ in range(4):
        run.push(run.device(0))
    assert run.engine.version == 2
    before = run.engine.vector.copy()
    fresh = Parts("teasq_drop", cache_size=2, concurrency_fraction=1.0)
    for name in late:
        assert run.push(name).staleness == 0
        fresh.push(fresh.device(1))
    moved, wanted = run.engine.vector - before, fresh.engine.vector - 1.0
    assert moved.tolist() == wanted.tolist()
    assert moved[2:4].all()


def test_another_part_of_a_device_does_not_take_the_place_of_its_first() -> None:
    run = Parts("teasq_drop", cache_size=3, concurrency_fraction=1.0)
    name = run.device(0)
    run.push(name)
    for turn in (1, 2):
        ask = Ask(name, f"task-{name}-{turn}")
        run.engine.handle(ev.TaskAsked(2.0, ask))
        task = run.engine.ledger.tasks[ask.task_id]
        assert task.base_version == 0
        update = Update(f"u-{turn}", task.task_id, name, 0, 1, np.ones(2, np.float32), task.submodel)
        run.engine.handle(ev.UpdateArrived(3.0, update, ev.Payload("00" * 32, 8)))
    assert run.engine.version == 1
    assert len(run.engine.vector[run.engine.vector > 1.0]) == 6


def test_a_device_is_hurried_by_the_versions_that_changed_its_part() -> None:
    run = Parts("fedasync", EngineSettings(upload_now_versions=2))
    of_first, of_second = run.device(0), run.device(1)
    for _ in range(2):
        run.push(run.device(0))
    assert advice(run.engine, of_first, f"task-{of_first}").notice is AdviceKind.UPLOAD_NOW
    assert advice(run.engine, of_second, f"task-{of_second}").notice is AdviceKind.NONE


def test_what_waits_for_its_version_is_known_after_a_rollback_too(tmp_path: Path) -> None:
    buffered: dict[str, Any] = {
        "strategy": {"name": "fedbuff", "buffer_size": 4},
        "submodel": {"name": "fragments", "parts": 3},
        "uplink": {"codec": "raw"},
    }
    life, waiting, whole = Life("", tmp_path, buffered), [], []
    for number in range(80):
        life.play(number, number + 1)
        engine = life.books.engine
        covered = np.zeros(engine.spec.size, np.bool_)
        for bits in engine.part_changes.held:
            covered[tensor_set_of_bits(engine.spec, bytes.fromhex(bits)).indices] = True
        buffered_of = engine.state.covered
        assert np.array_equal(covered, buffered_of > 0 if buffered_of is not None else covered & False)
        waiting.append(bool(covered.any()))
        whole.append(engine.part_changes.of.count(ALL))
    life.close()
    around = (39, 40, 74, 75)  # before and after each of the rollbacks
    assert [waiting[number] for number in around] == [True] * 4
    assert [whole[number] for number in around] == [0, 1, 1, 2], "which change every part of the model"


@pytest.mark.parametrize("strategy", ["fedasync", "fedbuff"])
def test_all_parts_once_are_one_whole_exchange_where_nothing_else_happens(strategy: str) -> None:
    params: dict[str, Any] = {"fedasync": {"alpha": 0.25}, "fedbuff": {"buffer_size": 1, "server_lr": 0.25}}[
        strategy
    ]
    run, delta = Parts(strategy, **params), np.arange(6, dtype=np.float32)
    for part in (2, 0, 1):
        run.push(run.device(part), delta[run.planner.parts[part].indices])
    assert run.engine.vector.tolist() == (1 + 0.25 * delta).tolist()
    assert run.engine.version == 3
