"""Wrong maps of sub-models over real gRPC: each gets its error, and nothing is learned from any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from learning import Recorded, recorded
from wire import Device, Served, server_config

from anabranch.compress.registry import STAGES
from anabranch.core.errors import ConfigError, InvalidUpdate, ManifestMismatch
from anabranch.core.model.params import Vector
from anabranch.core.model.submodels import Coordinates, UnitMap
from anabranch.protos import convert
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import model_pb2 as model
from anabranch.server.manifest import write_manifest
from anabranch.server.verify import verify
from anabranch.testing.models import GROUPS, HIDDEN, SPEC, tensors

Map = model.SubmodelMap
OTHER = Map(kept=[b"\x3f", b"\x07"])  # units 0 to 5, all cells
HALF = Map(kept=[b"\x0f", b"\x07"])


@dataclass(frozen=True)
class Bad:
    """What of a good update is another, and what must come back.

    `map_` is of the task's own; `size` of the payload, in values: as many as the map covers unless given.
    `recorded`: it closes its task, with or without a flaw.
    """

    words: str
    map_: Callable[[UnitMap], Map | None] = lambda own: Map(kept=own.bits)
    size: int | None = None
    recorded: bool = False
    poisoned: str = ""
    status: str = "INVALID_ARGUMENT"
    error: str = "InvalidUpdate"


def runs(own: UnitMap) -> Map | None:
    """The very coordinates of the task, not as units."""
    return convert.submodel_to_proto(Coordinates(own.indices))


def both(own: UnitMap) -> Map:
    found = runs(own)
    assert found is not None
    found.kept.extend(own.bits)
    return found


WRONG = "covers another part of the model than its task"
BAD: dict[str, Bad] = {
    # Good by form, so they are judged: the task is used up.
    "other units": Bad(WRONG, lambda own: OTHER, recorded=True),
    "fewer units": Bad(WRONG, lambda own: HALF, recorded=True),
    "no map": Bad(WRONG, lambda own: None, recorded=True),
    "every unit": Bad(WRONG, lambda own: Map(kept=[b"\xff", b"\x07"]), recorded=True),
    "too few values": Bad("payload has 200 bytes", size=50, recorded=True),
    "no map, the values of a part": Bad(
        f"{SPEC.size} values of float32", lambda own: None, 90, recorded=True
    ),
    "not a number in the LSTM": Bad("tensor 'lstm.weight_hh'", poisoned="lstm.weight_hh", recorded=True),
    "not a number in the last bias": Bad("tensor 'out.bias'", poisoned="out.bias", recorded=True),
    # Bad by form: refused before a byte of the payload is taken, and the task stays open.
    "the whole model's values for a part": Bad(
        "for", size=SPEC.size, status="OUT_OF_RANGE", error="TooLarge"
    ),
    "bits of the wrong length": Bad("8 units need 1 bytes, not 2", lambda own: Map(kept=[b"\1\1", b"\1"])),
    "bits of no length": Bad("3 units need 1 bytes, not 0", lambda own: Map(kept=[b"\1", b""])),
    "a unit beyond the last": Bad("within 0..2", lambda own: Map(kept=[b"\1", b"\x0f"])),
    "the highest bit": Bad("within 0..2", lambda own: Map(kept=[b"\1", b"\x81"])),
    "no unit of a group": Bad("'hidden': units must be", lambda own: Map(kept=[b"\0", b"\7"])),
    "too few groups": Bad("1 groups of units were given, the model has 2", lambda own: Map(kept=[b"\1"])),
    "too many groups": Bad("groups of units were given", lambda own: Map(kept=[b"\1"] * 9999)),
    "units and runs": Bad("one of them", both),
    "an empty map": Bad("at least one", lambda own: Map()),
    "runs beyond the model": Bad("leaves the coordinates", lambda own: Map(starts=[0], lengths=[2**63])),
    "runs that overlap": Bad("must be sorted", lambda own: Map(starts=[0, 3], lengths=[4, 4])),
    "the task's own map as runs": Bad("send the task's own map", runs),
    "all coordinates as runs": Bad(
        "send the task's own map", lambda own: Map(starts=[0], lengths=[SPEC.size]), SPEC.size
    ),
    "a start without its length": Bad("equally many", lambda own: Map(starts=[0, 9], lengths=[4])),
}
NO_GROUPS = Bad("1 groups of units were given, the model has 0", lambda own: Map(kept=[b"\1"]))
FORM = {name: bad for name, bad in BAD.items() if "map" not in name and not bad.recorded and bad.size is None}


def values(bad: Bad, part: UnitMap) -> Vector:
    """As many values as the bad update's map covers, or as it says."""
    message = bad.map_(part)
    size = bad.size
    if size is None and bad.recorded:
        size = SPEC.size if message is None else convert.submodel_from_proto(message, SPEC).size
    found = np.ones(size or part.size, np.float32)
    if bad.poisoned:
        inside = SPEC.slices[bad.poisoned]
        found[np.searchsorted(part.indices, inside.stop) - 1] = np.nan
    return found


@dataclass(frozen=True)
class Seen:
    """What came back, and what the log has of it (None: nothing)."""

    status: str
    error: str
    details: str
    record: Recorded | None = None


def error_of(call: Callable[[], Any]) -> Seen:
    """How a call ended."""
    try:
        decision = call().decision
    except grpc.RpcError as error:
        names = [str(m.value) for m in error.trailing_metadata() or () if m.key == "anabranch-error"]
        return Seen(error.code().name, "".join(names), str(error.details()))
    return Seen("OK", decision.reason, decision.detail)


def sent(device: Device) -> Iterator[tuple[str, Seen]]:
    """Send everything that is bad, a good update after each."""
    for number, (name, bad) in enumerate(BAD.items()):
        task = device.task()
        part = device.submodel(task)
        assert isinstance(part, UnitMap)
        header: dict[str, Any] = {} if (message := bad.map_(part)) is None else {"submodel": message}
        data = values(bad, part).tobytes()
        yield name, error_of(lambda: device.send(task, data, f"bad-{number}", **header))  # noqa: B023
        if bad.recorded:  # it is used up
            task, part = device.task(), None
        part = part or device.submodel(task)
        assert part is not None
        answer = device.push(task, np.full(part.size, 0.01, np.float32))
        assert answer.decision.verdict == "published", f"the server does not go on after {name!r}"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """What became of every bad update."""
    folder = tmp_path_factory.mktemp("bad")
    manifest = write_manifest(folder / "model", "test", tensors(), GROUPS)
    with Served(server_config(folder / "data", strategy={"name": "asyncdrop"}), manifest) as served:
        answers = dict(sent(served.device(codecs=STAGES)))
    assert served.exit_code == 0
    assert verify(folder / "data").problems == ()
    log = recorded(folder / "data")
    assert sum(r.learned for r in log.values()) == len(BAD)  # the good ones
    return {
        name: Seen(a.status, a.error, a.details, log.get(f"bad-{number}"))
        for number, (name, a) in enumerate(answers.items())
    }


@pytest.mark.parametrize("name", BAD)
def test_a_bad_update_of_a_part_is_refused_and_changes_nothing(name: str, seen: dict[str, Seen]) -> None:
    bad, found = BAD[name], seen[name]
    rejected = bad.words == WRONG
    expected = ("OK", "wrong_submodel") if rejected else (bad.status, bad.error)
    assert (found.status, found.error) == expected, found.details
    assert bad.words in found.details
    flaw = bad.words if bad.recorded and not rejected else ""
    if not bad.recorded:
        assert found.record is None
        return
    assert found.record is not None
    assert flaw in found.record.flaw
    assert bool(found.record.flaw) == bool(flaw)
    assert not found.record.learned


@pytest.mark.parametrize("name", [*FORM, "an empty map"])
def test_a_bad_map_of_a_fetch(name: str, tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "model", "test", tensors(), GROUPS)
    with Served(server_config(tmp_path / "data", strategy={"name": "asyncdrop"}), manifest) as served:
        device = served.device(codecs=STAGES)
        task = device.task()
        part = device.submodel(task)
        assert isinstance(part, UnitMap)
        found = error_of(lambda: device.fetch(version=0, submodel=BAD[name].map_(part)))
        assert (found.status, found.error) == ("INVALID_ARGUMENT", "InvalidUpdate")
        assert BAD[name].words in found.details
        assert device.fetch(version=0, submodel=task.submodel)[0].part_only


def test_units_of_a_model_that_has_none(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "model", "test", tensors())
    mean = {"name": "delayed_nesterov", "buffer_size": 1, "server_lr": 1.0, "momentum": 0.0}
    with Served(server_config(tmp_path / "data", strategy=mean), manifest) as served:
        device = served.device(codecs=STAGES)
        task, one = device.task(), Map(kept=[b"\1"])
        data = np.ones(SPEC.size, np.float32).tobytes()
        for call in (
            lambda: device.send(task, data, submodel=one),
            lambda: device.fetch(version=0, submodel=one),
        ):
            found = error_of(call)
            assert (found.status, found.error) == ("INVALID_ARGUMENT", "InvalidUpdate")
            assert NO_GROUPS.words in found.details
        runs_of_all = Map(starts=[0], lengths=[SPEC.size])
        refused = error_of(lambda: device.send(task, data, submodel=runs_of_all))
        assert (refused.error, refused.details.partition(":")[0]) == ("InvalidUpdate", "submodel")
        assert device.work().decision.verdict == "published"
        assert np.array_equal(served.model(), SPEC.flatten(tensors()) + 1)


def test_a_strategy_of_whole_models_does_not_start_with_a_planner(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "model", "test", tensors(), GROUPS)
    config = server_config(tmp_path / "data", submodel={"name": "random"}, strategy={"name": "fadas"})
    with pytest.raises(ConfigError, match="takes whole models only"), Served(config, manifest):
        pass


# --- on the device -------------------------------------------------------------------------------


def member(tensor: str = "hidden.bias", axis: int = 0, outer: int = 1, inner: int = 1) -> model.UnitMember:
    return model.UnitMember(tensor=tensor, axis=axis, outer=outer, inner=inner)


def group(*members: model.UnitMember, name: str = "g", size: int = HIDDEN) -> model.UnitGroup:
    return model.UnitGroup(name=name, size=size, members=members)


MALFORMED: dict[str, tuple[str, list[model.UnitGroup]]] = {
    "a tensor that is not there": ("no float tensor 'nothing'", [group(member("nothing"))]),
    "a frozen tensor": ("no float tensor 'count'", [group(member("count"))]),
    "an axis that is not there": ("has no", [group(member(axis=1))]),
    "an axis beyond counting": ("has no", [group(member(axis=2**32 - 1))]),
    "no outer": ("has no", [group(member(outer=0))]),
    "another length": ("is 8 long, not 1 x 7 x 1", [group(member(), size=7)]),
    "a product that overflows": ("long, not", [group(member(outer=2**32 - 1, inner=2**32 - 1))]),
    "no units": ("units and", [group(member(), size=0)]),
    "too many units": ("units and", [group(member(), size=2**32 - 1)]),
    "no members": ("units and", [group()]),
    "two of one name": ("two groups 'g'", [group(member()), group(member("out.weight", 1, 1, 2))]),
    "an axis twice": ("named twice", [group(member(), member())]),
    "a shared axis": ("share axis 0", [group(member()), group(member(), name="h")]),
    "too many groups": ("over the cap", [group(member(), name=str(i)) for i in range(5000)]),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_manifest_whose_groups_do_not_fit_is_refused(name: str) -> None:
    words, groups = MALFORMED[name]
    message = convert.manifest_to_proto(SPEC)
    del message.groups[:]
    message.groups.extend(groups)
    with pytest.raises(ManifestMismatch, match="damaged on the way") as caught:
        convert.manifest_from_proto(message)
    assert words in str(caught.value)


@pytest.mark.parametrize("dtype", ["float77", "", "object", "O", "f4,f4", "float32 "])
def test_a_manifest_of_tensors_that_numpy_does_not_know_is_refused(dtype: str) -> None:
    message = convert.manifest_to_proto(SPEC)
    message.tensors[0].dtype = dtype
    with pytest.raises(ManifestMismatch, match="damaged on the way"):
        convert.manifest_from_proto(message)


def test_a_task_whose_map_does_not_fit_is_no_task() -> None:
    part = Map(kept=[b"\0", b"\1"])
    message = devices.Task(task_id="t", base_kind=model.BASE_KIND_VERSION, submodel=part, lease_s=9.0)
    with pytest.raises(InvalidUpdate, match="group 'hidden'"):
        convert.task_from_proto(message, "a", SPEC)
