"""Parts of the delta log: whatever a device holds, it ends at its part of the replica, to the bit."""

from __future__ import annotations

import asyncio
import hashlib
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from broadcasting import Run, motion, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.client.base_model import BaseModel
from anabranch.compress.delta_log import DeltaLog
from anabranch.compress.downloads import SNAPSHOT, SUM, Download, Downloads, apply_download, base_of
from anabranch.compress.recent import Recent
from anabranch.compress.registry import STAGES, stages
from anabranch.core.config.tables import merge
from anabranch.core.errors import ConfigError, InvalidUpdate, UnknownVersion
from anabranch.core.model.holdings import HeldPart, Holdings, joined
from anabranch.core.model.params import ParamSpec, Vector, digest
from anabranch.core.model.submodels import TensorSet, UnitMap, scatter, tensor_set, unit_map
from anabranch.core.model.units import Member, UnitGroup
from anabranch.host.build import Blueprint
from anabranch.server.models import PARTS_SPARE, ModelRequest, Models
from anabranch.simulation.versions import Versions

HIDDEN = UnitGroup("hidden", 40, (Member("first", 0), Member("first_bias", 0), Member("second", 1)))
SPEC = ParamSpec.of(tensors(), (HIDDEN,))
WIDE = ParamSpec.of(tensors(np.float64), (HIDDEN,))
BUFFERED = ParamSpec.of(tensors(), (HIDDEN,), buffers=("second_bias",))

Part = UnitMap | TensorSet | None


def units(*kept: int, spec: ParamSpec = SPEC) -> UnitMap:
    return unit_map(spec, [kept])


def served(codec: str = "log", spec: ParamSpec = SPEC, **options: object) -> Run:
    run = Run(codec, spec=spec, **options)  # type: ignore[arg-type]
    run.downloads = Downloads(spec, run.frozen, own_parts=True)
    return run


class Follower:
    """A device: all that it has is one vector and the list of parts that it is of."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.vector: Vector = np.zeros(run.spec.size, run.spec.vector_dtype)
        self.holds: Holdings = None

    def wanted(self, part: Part, codecs: tuple[str, ...] | None = None) -> Download:
        run = self.run
        make = run.downloads.offer(run.engine, run.engine.version, self.holds, codecs, part)
        assert make is not None
        return make()

    def fetch(self, part: Part) -> Download:
        got = self.wanted(part)
        newest = self.holds if isinstance(self.holds, int) else 0
        base = BaseModel(newest, self.vector, {})
        parts = self.holds if isinstance(self.holds, tuple) else ()
        known = None if self.holds is None else base.base(got.from_version, part, parts)
        values, _ = apply_download(self.run.spec, got.codec, got.data, got.from_version, known, part)
        assert digest(values) == got.vector_sha256
        scatter(values, self.vector, part)
        self.holds = got.version if part is None else joined(self.holds, HeldPart(got.version, part))
        return got

    def check(self, part: Part) -> None:
        """The part is the replica's, by the log's own way back and by numpy's indices."""
        replica = self.run.replica(self.run.engine.version)
        assert replica is not None
        where = slice(None) if part is None else part.indices
        assert self.vector[where].tobytes() == replica[where].tobytes()


SOME = st.sets(st.integers(0, 39), min_size=1, max_size=30).map(lambda kept: units(*sorted(kept)))
TENSORS = st.sets(st.sampled_from([0, 1, 3, 4]), min_size=1).map(lambda kept: tensor_set(SPEC, sorted(kept)))
STEPS = st.lists(st.tuples(st.integers(0, 3), st.one_of(SOME, SOME, TENSORS, st.none())), max_size=14)


@settings(max_examples=25)
@given(STEPS, st.sampled_from(["log", "log(2,3)", "log(0.5)"]))
def test_whatever_it_holds_it_ends_at_its_part_of_the_replica(
    steps: list[tuple[int, Part]], codec: str
) -> None:
    run = served(codec)
    device, moves = Follower(run), iter(motion(42))
    for count, part in steps:
        run.publish(*(next(moves) for _ in range(count)))
        device.fetch(part)
        device.check(part)


@pytest.mark.parametrize("spec", [WIDE, BUFFERED], ids=["float64", "buffers"])
def test_models_of_other_kinds(spec: ParamSpec) -> None:
    run = served(spec=spec)
    device = Follower(run)
    for n, move in enumerate(motion(8)):
        part = None if n == 5 else units(*range(n, 40, 1 + n % 3), spec=spec)
        device.fetch(part)
        device.check(part)
        run.publish(move)


def test_a_new_lineage_leads_from_nothing_of_before() -> None:
    run = served()
    device, part = Follower(run), units(*range(30))
    device.fetch(part)
    run.publish(np.full(SPEC.size, 1e4, np.float32))  # outgrows the grid
    assert device.fetch(part).codec == SNAPSHOT
    device.check(part)
    run.publish(*motion(2))
    other = units(*range(20, 40))
    got = device.fetch(other)
    assert (got.codec, got.from_version) == (SUM, 1)
    device.check(other)


def test_only_what_is_new_to_the_part_travels() -> None:
    run = served()
    run.publish(*motion(3))
    device, low = Follower(run), units(*range(20))
    first = device.fetch(low)
    assert (first.codec, first.from_version, first.part_only) == (SNAPSHOT, None, True)
    again = device.wanted(low)
    assert (again.codec, again.from_version) == (SUM, 3)
    assert len(again.data) < 200, "nothing has changed"
    grown = device.wanted(units(*range(25)))
    whole = Follower(run).wanted(units(*range(25)))
    assert len(again.data) < len(grown.data) < len(whole.data) / 2
    run.publish(*motion(1))
    assert len(device.wanted(low).data) < len(run.download(3).data) < len(first.data)


def away_and_to_zero(run: Run) -> None:
    """What leads there from versions 1 and 2 costs more than zeros do; one lineage all the way."""
    run.publish(*motion(2))
    run.publish(-run.engine.vector)
    run.publish(*[np.zeros(SPEC.size, np.float32)] * 8)


def test_the_part_whole_where_that_is_cheaper() -> None:
    run, part = served(), units(*range(40))
    away_and_to_zero(run)
    device = Follower(run)
    device.holds = (HeldPart(2, part),)
    assert base_of(run.engine, 11, device.holds) == device.holds
    got = device.fetch(part)
    assert (got.codec, got.from_version, got.part_only) == (SNAPSHOT, None, True)
    device.check(part)


def test_a_file_outlives_another_of_the_same_bytes(tmp_path: Path) -> None:
    """For who holds a version from which nothing leads cheaper, and for who holds none."""
    run, part = served(), units(*range(40))
    away_and_to_zero(run)
    newest = run.engine.version
    models = Models(tmp_path / "models", SPEC, run.frozen, own_parts=True)
    others = [(HeldPart(newest, units(n)),) for n in range(PARTS_SPARE + 1)]
    wanted = [ModelRequest(newest, "encoded", holds, part) for holds in (1, None, *others)]
    for one in wanted:
        models.keep(run.engine, one)
    assert base_of(run.engine, newest, 1) == 1
    oldest, other = (asyncio.run(models.get(one)) for one in wanted[:2])
    assert (oldest.codec, oldest.sha256) == (SNAPSHOT, other.sha256)
    models.retain_parts({"task": replace(run.ask(), submodel=part)})
    models.close()
    with pytest.raises(UnknownVersion):
        asyncio.run(models.get(wanted[0]))
    assert hashlib.sha256(other.data()).hexdigest() == other.sha256


@pytest.mark.parametrize("has_it", ["whole", "as a part"])
def test_who_has_another_version_of_that_number_fetches_its_part_in_simulations(has_it: str) -> None:
    """After a restore: what it has was lost, so it takes what a live server sends who holds nothing."""
    run, part = served(), units(*range(6))
    run.publish(*motion(5))
    holds: Holdings = 5 if has_it == "whole" else (HeldPart(5, part),)
    versions = Versions(run.engine, run.frozen, own_parts=True)
    offer = versions.named(versions.offer(holds, part), holds, part, "head of {}".format)
    assert (offer.payload_bytes, offer.from_heads) == (0, "head of 5")
    assert offer.whole_bytes == len(Follower(run).wanted(part, stages()).data)
    assert offer.adds == HeldPart(5, part)
    assert offer.adds.head == offer.head == "head of 5"


def test_a_mosaic_of_eight_versions_takes_the_memory_of_few_models() -> None:
    """Its replicas are made one after the other: all at once they took more than eleven models."""
    group = UnitGroup("rows", 600, (Member("w", 0),))
    spec = ParamSpec.of({"w": np.zeros((600, 600), np.float32)}, (group,))
    log, moves = DeltaLog(spec, 2.0), motion(16, spec.size, 0.1)
    log._recent = Recent(0)  # as with models that are too large to be remembered
    state = log.init(8 * moves[0])
    for version, move in enumerate(moves[1:], 1):
        state = log.publish(state, version, state.replica + move, ())
    parts = [units(*range(n, 600, 2 + n % 2), spec=spec) for n in range(8)]
    base = tuple(HeldPart(2 * n, part) for n, part in enumerate(parts))
    expected = np.zeros(spec.size, np.float32)
    for held in base:
        replica = log.replica(state, held.version)
        assert replica is not None
        assert held.part is not None
        expected[held.part.indices] = replica[held.part.indices]
    downloads = Downloads(spec, {}, own_parts=True)
    tracemalloc.start()
    try:
        found = downloads._mosaic(log, state, base)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.tobytes() == expected.tobytes()
    assert peak < 7 * spec.size * 4


def test_a_frozen_tensor_comes_with_a_part_that_leads_from_nothing() -> None:
    run = served()
    device, part = Follower(run), units(1, 2)
    got = device.wanted(part)
    _, frozen = apply_download(SPEC, got.codec, got.data, None, None, part)
    assert frozen is not None
    assert frozen["steps"] == tensors()["steps"]
    device.fetch(part)
    run.publish(*motion(1))
    got, base = device.wanted(part), (0, device.vector[part.indices])
    assert apply_download(SPEC, got.codec, got.data, 0, base, part)[1] is None


def test_who_does_not_know_parts_gets_whole_versions() -> None:
    run = served()
    device, part = Follower(run), units(*range(10))
    device.fetch(None)
    run.publish(*motion(1))
    assert "logparts:1" in stages()
    assert device.wanted(part, stages()).part_only
    assert not device.wanted(part, STAGES).part_only
    device.fetch(part)
    assert device.wanted(part, STAGES).from_version is None, "parts are nothing to it"
    run.downloads = Downloads(SPEC, run.frozen)
    assert not device.wanted(part).part_only
    assert device.wanted(part).from_version is None


def test_who_knows_parts_and_not_the_log_gets_its_part_as_it_is() -> None:
    run = served()
    part = units(*range(10))
    got = Follower(run).wanted(part, ("raw:1", "logparts:1"))
    assert (got.codec, got.part_only) == ("raw", True)
    replica = run.replica(0)
    assert replica is not None
    assert apply_download(SPEC, "raw", got.data, None, None, part)[0].tobytes() == (
        replica[part.indices].tobytes()
    )


def test_a_base_that_was_kept_comes_as_it_is() -> None:
    run = served("log(1,3)", strategy="fedasync")
    task, part = run.ask(), units(3, 4)
    run.publish(*motion(8))
    make = run.downloads.offer(run.engine, task.base_version, None, None, part)
    assert make is not None
    assert (make().codec, make().part_only) == ("raw", True)


def test_equal_wishes_have_equal_bytes_and_others_do_not_meet() -> None:
    run = served()
    run.publish(*motion(4))
    part, other = units(*range(10)), units(*range(10, 20))
    for holds in (None, 2, (HeldPart(1, part), HeldPart(3, other)), (HeldPart(2), HeldPart(3, other))):
        made = []
        for downloads in (run.downloads, Downloads(SPEC, run.frozen, own_parts=True)):
            for wanted in (part, other, None):
                make = downloads.offer(run.engine, 4, holds, None, wanted)
                assert make is not None
                made.append(make())
        assert made[:3] == made[3:]
        assert len({one.data for one in made}) == 3


def test_a_payload_that_leads_from_parts_that_are_not_held_is_refused() -> None:
    run = served()
    device, part = Follower(run), units(*range(10))
    device.fetch(part)
    run.publish(*motion(1))
    got = device.wanted(part)
    wrong: Vector = device.vector[part.indices][:-1]
    for held in (None, (1, device.vector[part.indices]), (0, wrong)):
        with pytest.raises(InvalidUpdate):
            apply_download(SPEC, got.codec, got.data, got.from_version, held, part)
    moved = units(*range(1, 11))
    with pytest.raises(InvalidUpdate):  # the checksum knows of which part it is
        apply_download(SPEC, got.codec, got.data, 0, (0, device.vector[moved.indices]), moved)
    assert BaseModel(0, device.vector, {}).base(1, part, (HeldPart(0, part),)) is None


def test_what_it_leads_from_is_named_by_its_oldest() -> None:
    run = served("log(1,3)")
    run.publish(*motion(6))
    part, other = units(1, 2), units(3)
    parts = HeldPart(1, part), HeldPart(4, other), HeldPart(6, part)
    assert base_of(run.engine, 6, parts) == parts[1:]
    assert base_of(run.engine, 6, (HeldPart(4),)) == 4
    assert base_of(run.engine, 6, parts[:1]) is None
    assert base_of(run.engine, 5, parts) is None, "none of the newest is of before"


def test_a_chain_has_no_parts() -> None:
    tables = {"downlink": {"codec": "int8(256)", "parts": "own"}, "strategy": {"name": "asyncdrop"}}
    with pytest.raises(ConfigError, match=r"downlink\.parts = 'own' is for the delta log"):
        Blueprint.of(merge([("test", tables)]), SPEC).parts()
