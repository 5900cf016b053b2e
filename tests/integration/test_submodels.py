"""Sub-models over real gRPC: who gets which bytes, and what an update of a part changes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from wire import CALL_S, UNHELD, Device, Served, server_config

from anabranch.api.live_result import report_of_data
from anabranch.compress.codec import Raw
from anabranch.compress.downloads import apply_download
from anabranch.compress.layout import Layout
from anabranch.compress.model import encode_model
from anabranch.compress.registry import STAGES, make_codec, stages
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import payload_codec
from anabranch.core.model.holdings import PARTS_MAX
from anabranch.core.model.params import Vector, dense, digest
from anabranch.core.model.submodels import UnitMap, unit_map
from anabranch.protos import convert
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import model_pb2 as model
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.models import PARTS_SPARE
from anabranch.server.verify import verify
from anabranch.simulation.replay import replay_run
from anabranch.testing.models import GROUPS, SPEC, tensors

DROP = {"strategy": {"name": "asyncdrop"}}
FIRST = SPEC.flatten(tensors())
FROZEN = SPEC.frozen(tensors())
WHOLE = encode_model(Raw(), SPEC, FIRST, FROZEN)
CHAIN = "topk(0.5)|int8(64)|gaps|zstd"


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """A model with units, and a frozen counter."""
    return write_manifest(tmp_path / "model", "test", tensors(), GROUPS)


@pytest.fixture
def served(tmp_path: Path, manifest: Manifest) -> Iterator[Served]:
    """A server of sub-models, raw both ways."""
    with Served(server_config(tmp_path / "data", **DROP), manifest) as server:
        yield server


def part_of(device: Device, task: devices.Task) -> UnitMap:
    """The units of a task, which must be of some."""
    found = device.submodel(task)
    assert isinstance(found, UnitMap)
    return found


def deltas(size: int, seed: int = 1) -> Vector:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def work(device: Device, seed: int = 1) -> devices.PushUpdateResponse:
    task = device.task()
    answer: devices.PushUpdateResponse = device.push(task, deltas(part_of(device, task).size, seed))
    return answer


def fetch_part(device: Device, task: devices.Task, **fields: Any) -> tuple[devices.ModelHeader, bytes]:
    return device.fetch(version=task.base_version, submodel=task.submodel, codecs=STAGES, **fields)


def part_bytes(part: UnitMap) -> bytes:
    """The payload of a part: its coordinates and the frozen tensors, nothing else."""
    frozen = b"".join(array.tobytes() for array in FROZEN.values())
    return bytes(FIRST[part.indices].tobytes()) + frozen


# --- downloads -----------------------------------------------------------------------------------


def test_a_task_carries_its_map_in_a_few_bytes_and_announces_its_part(served: Served) -> None:
    device = served.device(codecs=STAGES)
    task = device.task()
    part = part_of(device, task)
    assert [len(units) for units in part.kept] == [6, 3]  # a quarter of 8 units and of 3 is left out
    assert [len(bits) for bits in task.submodel.kept] == [math.ceil(g.size / 8) for g in GROUPS]
    assert not task.submodel.starts
    assert task.submodel.ByteSize() == sum(2 + len(bits) for bits in task.submodel.kept)
    (announced,) = task.parts
    assert announced.size_bytes == len(part_bytes(part)) < len(WHOLE)
    assert announced.sha256 == hashlib.sha256(part_bytes(part)).digest()


def test_a_device_gets_exactly_its_part_and_the_frozen_tensors(served: Served) -> None:
    device = served.device(codecs=STAGES)
    task = device.task()
    part = part_of(device, task)
    header, data = fetch_part(device, task)
    assert header.part_only
    assert (header.part, data) == (task.parts[0], part_bytes(part))
    vector, frozen = apply_download(part.small, header.part.encoding.codec, data, None, None)
    assert np.array_equal(vector, FIRST[part.indices])
    assert frozen is not None
    assert {name: array.tolist() for name, array in frozen.items()} == {"count": 0}


@pytest.mark.parametrize("codecs", [(), STAGES], ids=["no stages", "all stages"])
def test_a_device_that_asks_without_a_map_gets_the_whole(codecs: tuple[str, ...], served: Served) -> None:
    device = served.device(codecs=codecs)
    task = device.task()
    for fields in ({"version": task.base_version}, {}, {"exact": True}):
        header, data = device.fetch(codecs=codecs, **fields)
        assert (header.part_only, data) == (False, WHOLE)
    header, data = device.fetch(codecs=codecs, submodel=task.submodel, exact=True)
    assert (header.part_only, data) == (False, WHOLE)


def test_the_part_of_another_s_task_comes_whole(served: Served) -> None:
    """Else whoever can reach the server could fill its disk, one choice of units after the other."""
    device, other = served.device(codecs=STAGES), served.device("other", STAGES)
    task = device.task()
    kept = part_of(device, task).kept
    foreign = unit_map(SPEC, [tuple(u for u in range(8) if u not in kept[0]), (0,)])
    for asking, part in ((other, task.submodel), (device, convert.submodel_to_proto(foreign))):
        header, data = asking.fetch(version=0, submodel=part, codecs=STAGES)
        assert (header.part_only, data) == (False, WHOLE)
    assert fetch_part(device, task)[0].part_only


@pytest.mark.parametrize("moment", ["at once", "after two versions", "after a restart"])
def test_a_broken_download_of_a_part_goes_on(moment: str, served: Served, manifest: Manifest) -> None:
    device = served.device(codecs=STAGES)
    task = device.task()
    header, data = fetch_part(device, task)
    if moment != "at once":
        other = served.device("other", STAGES)
        for seed in range(3):
            assert work(other, seed).decision.verdict == "published"
    with ExitStack() as stack:
        if moment == "after a restart":
            assert served.close() == 0
            device = stack.enter_context(Served(served.config, manifest)).device(codecs=STAGES)
        for cut in (len(data) // 2, 1, len(data) - 1, len(data)):
            resumed, rest = fetch_part(device, task, offset=cut)
            assert (resumed.part, resumed.part_only, data[:cut] + rest) == (header.part, True, data)
        assert device.push(task, deltas(part_of(device, task).size)).decision.verdict == "published"


def test_parts_of_one_version_are_payloads_of_their_own(tmp_path: Path, manifest: Manifest) -> None:
    halves = {"name": "random", "drop": 0.5}
    with Served(server_config(tmp_path / "data", submodel=halves, **DROP), manifest) as served:
        fleet = [served.device(f"device-{i}", STAGES) for i in range(4)]
        tasks = {device: device.task() for device in fleet}
        assert len({task.submodel.SerializeToString() for task in tasks.values()}) > 2
        for device, task in tasks.items():
            assert fetch_part(device, task)[1] == part_bytes(part_of(device, task))


def test_parts_that_no_task_is_of_any_more_leave_the_disk(tmp_path: Path) -> None:
    """A device may ask again and again, while the version stays; parts of zeros have the same bytes."""
    zeros = {name: np.zeros_like(array) for name, array in tensors().items()}
    manifest = write_manifest(tmp_path / "model", "test", zeros, GROUPS)
    halves = {"name": "random", "drop": 0.5}
    with Served(server_config(tmp_path / "data", submodel=halves, **DROP), manifest, UNHELD) as served:
        fleet = [served.device(f"device-{i}", STAGES) for i in range(3)]
        tasks = {device: device.task() for device in fleet}
        other = served.device("other", STAGES)
        for _ in range(100):
            other.task()
        served.model()  # whatever is to be written or removed was so before
        assert len(list((tmp_path / "data").rglob("*-part-*"))) <= 2 * 4 + PARTS_SPARE
        for device, task in tasks.items():
            header, data = fetch_part(device, task)
            assert (header.part_only, data) == (True, bytes(4 * part_of(device, task).size + 8))


@pytest.mark.parametrize("codec", ["log(1)", "int8(256)"])
def test_with_encoded_versions_the_whole_comes_although_a_part_was_asked_for(
    codec: str, tmp_path: Path, manifest: Manifest
) -> None:
    tables = {**DROP, "downlink": {"codec": codec}}
    with Served(server_config(tmp_path / "data", **tables), manifest) as served:
        device = served.device(codecs=STAGES)
        assert served.device("late", STAGES).task().base_version == 0  # its base has to be kept
        for seed in range(3):
            task = device.task()
            header, data = fetch_part(device, task)
            assert not header.part_only
            assert header.part == task.parts[0]
            vector, _ = apply_download(SPEC, header.part.encoding.codec, data, None, None)
            assert digest(vector) == header.vector_sha256.hex()
            before, part = served.model().copy(), part_of(device, task)
            delta = deltas(part.size, seed)
            assert device.push(task, delta).decision.verdict == "published"
            # What is mixed in is what the device had: its replica, cut to the task's coordinates.
            assert np.array_equal(served.model(), mixed(before, vector, part, delta))
    assert verify(tmp_path / "data").problems == ()


OWN = {"codec": "log(1)", "parts": "own"}


def test_what_leads_from_parts_is_made_for_who_has_a_task(tmp_path: Path, manifest: Manifest) -> None:
    """Else whoever can reach the server could fill its disk, one list of parts after the other."""
    with Served(server_config(tmp_path / "data", **DROP, downlink=OWN), manifest, UNHELD) as served:
        device, other = served.device(codecs=stages()), served.device("other", stages())
        task = device.task()
        part = part_of(device, task)
        header, data = device.fetch(version=0, submodel=task.submodel, codecs=stages())
        assert (header.part_only, header.part) == (True, task.parts[0])
        vector, frozen = apply_download(SPEC, header.part.encoding.codec, data, None, None, part)
        assert digest(vector) == header.vector_sha256.hex()
        assert frozen is not None
        parts = [devices.HeldPart(version=0, submodel=task.submodel)]
        for asking in (other, served.device("third", stages())):
            header, _ = asking.fetch(version=0, submodel=task.submodel, codecs=stages(), holds_parts=parts)
            assert (header.part_only, header.HasField("from_version")) == (False, False)
        header, data = device.fetch(version=0, submodel=task.submodel, codecs=stages(), holds_parts=parts)
        assert (header.part_only, header.from_version) == (True, 0)
        again, _ = apply_download(SPEC, header.part.encoding.codec, data, 0, (0, vector), part)
        assert np.array_equal(again, vector)
        for n in range(100):
            units = convert.submodel_to_proto(unit_map(SPEC, [[n % 8], [n % 3]]))
            few = [devices.HeldPart(version=0, submodel=units), *parts[: n % 2]]
            device.fetch(version=0, submodel=task.submodel, codecs=stages(), holds_parts=few)
            device.task()
        served.model()
        assert len(list((tmp_path / "data").rglob("*-part-*"))) <= 2 * 2 + PARTS_SPARE
        old = served.device("old", STAGES)
        whole = old.task()
        header, _ = old.fetch(version=0, submodel=whole.submodel, codecs=STAGES)
        assert (header.part_only, header.part) == (False, whole.parts[0])


def test_files_for_tasks_are_bounded_though_nothing_happens_but_fetches(
    tmp_path: Path, manifest: Manifest
) -> None:
    """A device with a task may name one list of parts after the other."""
    tables = {**DROP, "downlink": OWN}
    with Served(server_config(tmp_path / "data", **tables), manifest, UNHELD) as served:
        device = served.device(codecs=stages())
        task = device.task()
        for n in range(3 * PARTS_SPARE):
            units = convert.submodel_to_proto(
                unit_map(SPEC, [range(n % 7, 8 - n // 21 % 2), range(n % 3 + 1)])
            )
            parts = [devices.HeldPart(version=0, submodel=units)]
            header, data = device.fetch(version=0, submodel=task.submodel, codecs=stages(), holds_parts=parts)
            assert (header.part_only, len(data)) == (True, header.part.size_bytes)
        served.model()  # whatever is to be written or removed was so before
        assert 0 < len(list((tmp_path / "data").rglob("*-part-*"))) <= 2 * 1 + PARTS_SPARE


def test_a_broken_download_of_a_part_of_the_log_goes_on_after_a_restart(
    tmp_path: Path, manifest: Manifest
) -> None:
    """What was made of the log is made again, from the parts that the device says again."""
    with Served(server_config(tmp_path / "data", **DROP, downlink=OWN), manifest) as served:
        device, other = served.device(codecs=stages()), served.device("other", stages())
        first = device.task()
        parts = [devices.HeldPart(version=0, submodel=first.submodel)]
        device.push(first, deltas(part_of(device, first).size))
        asked = device.asked("task-2")
        asked.holds_parts.extend(parts)
        task = device.stub.AskTask(asked, timeout=CALL_S).task
        wanted = {"version": 1, "submodel": task.submodel, "codecs": stages(), "holds_parts": parts}
        header, data = device.fetch(**wanted)
        assert (header.part, header.part_only, header.from_version) == (task.parts[0], True, 0)
        for seed in range(3):
            theirs = other.task()
            other.push(theirs, deltas(part_of(other, theirs).size, seed))
        assert served.close() == 0
        with Served(served.config, manifest) as again:
            device = again.device(codecs=stages())
            for cut in (0, 1, len(data) // 2, len(data)):
                resumed, rest = device.fetch(offset=cut, **wanted)
                assert (resumed.part, resumed.from_version, data[:cut] + rest) == (header.part, 0, data)
            answer = device.push(task, deltas(part_of(device, task).size))
            assert answer.decision.verdict == "published"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"holds_parts": [devices.HeldPart()] * (PARTS_MAX + 1)}, "at most"),
        ({"holds_parts": [devices.HeldPart()], "holds_version": 0}, "no holds_version beside them"),
        ({"holds_parts": [devices.HeldPart(version=2), devices.HeldPart(version=1)]}, "below one before"),
        (
            {"holds_parts": [devices.HeldPart(submodel=model.SubmodelMap(starts=[0], lengths=[2]))]},
            "not of runs",
        ),
        ({"holds_parts": [devices.HeldPart(submodel=model.SubmodelMap(kept=[b"1"]))]}, "groups"),
    ],
)
def test_parts_that_are_none_are_refused(wrong: dict[str, Any], why: str, served: Served) -> None:
    device = served.device(codecs=stages())
    asked = device.asked("task-1")
    fields = devices.AskTaskRequest(**wrong)
    asked.MergeFrom(fields)
    for call in (
        lambda: device.fetch(version=0, codecs=stages(), **wrong),
        lambda: device.stub.AskTask(asked, timeout=CALL_S),
    ):
        with pytest.raises(grpc.RpcError) as error:
            call()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert why in (error.value.details() or "")
    assert device.task().base_version == 0


# --- uplinks -------------------------------------------------------------------------------------


def mixed(vector: Vector, base: Vector, part: UnitMap, delta: Vector) -> Vector:
    """AsyncDrop's rule with alpha = 0.5, in float32, by hand."""
    half, after, at = np.float32(0.5), vector.copy(), part.indices
    after[at] = half * vector[at] + half * base[at] + half * delta
    return after


@pytest.mark.parametrize("uplink", ["raw", CHAIN, f"ef(0.9)|{CHAIN}", "int8(256)|zstd"])
def test_an_update_is_applied_on_the_coordinates_of_its_part_alone(
    uplink: str, tmp_path: Path, manifest: Manifest
) -> None:
    with Served(server_config(tmp_path / "data", uplink={"codec": uplink}, **DROP), manifest) as served:
        slow, fast = served.device("slow", STAGES), served.device("fast", STAGES)
        late = slow.task()
        model = FIRST
        for device, task, base in ((fast, fast.task(), FIRST), (slow, late, FIRST)):
            part = part_of(device, task)
            codec, delta = make_codec(payload_codec(uplink)), deltas(part.size, part.kept[0][0])
            layout = Layout.of(SPEC, part)
            data = codec.encode(delta, layout)
            answer = device.send(task, data, codec=codec.text, submodel=task.submodel)
            assert (answer.decision.verdict, answer.decision.weight) == ("published", 0.5)
            expected = mixed(model, base, part, dense(codec.decode(data, layout)))
            model = served.model().copy()
            np.testing.assert_allclose(model[part.indices], expected[part.indices], rtol=1e-6, atol=1e-6)
            outside = np.setdiff1d(np.arange(SPEC.size), part.indices)
            assert np.array_equal(model[outside], expected[outside])
    assert verify(tmp_path / "data").problems == ()


def test_a_raw_update_of_a_part_has_no_bytes_but_its_values(served: Served) -> None:
    device = served.device(codecs=STAGES)
    task = device.task()
    part = part_of(device, task)
    delta = deltas(part.size)
    bare = device.header(task, b"")
    with_map = device.header(task, b"", submodel=task.submodel, update_id=bare.update_id)
    assert with_map.ByteSize() - bare.ByteSize() == 2 + task.submodel.ByteSize() == 8
    device.push(task, delta)
    status = served.operator().GetStatus(operators.GetStatusRequest())
    assert status.uplink_bytes == status.uplink_bytes_raw == 4 * part.size == delta.nbytes


def test_a_served_run_keeps_its_planner(served: Served, manifest: Manifest) -> None:
    """A log replays to other tasks under another planner."""
    work(served.device(codecs=STAGES))
    served.close()
    data_dir = Path(served.config.server.data_dir)
    changes: dict[str, Any] = {"name": "random", "drop": 0.5, "coverage_versions": 7}
    for key, value in changes.items():
        changed = server_config(data_dir, **DROP, submodel={key: value})
        with pytest.raises(ConfigError, match=f"submodel.{key} is"), Served(changed, manifest):
            pass
    with Served(served.config, manifest) as again:
        assert work(again.device(codecs=STAGES)).decision.verdict == "published"


def test_the_folder_of_a_served_run_says_who_trained_what_and_replays(served: Served, tmp_path: Path) -> None:
    one, two = served.device("one", STAGES), served.device("two", STAGES)
    trained = {"one": np.zeros(8, int), "two": np.zeros(8, int)}
    for seed, device in enumerate((one, two, one, one)):
        task = device.task()
        trained[device.client_id][list(part_of(device, task).kept[0])] += 1
        assert device.push(task, deltas(part_of(device, task).size, seed)).decision.verdict == "published"
    refused = two.push(two.task(), deltas(SPEC.size), submodel=None)
    assert refused.decision.reason == "wrong_submodel"
    status = served.operator().GetStatus(operators.GetStatusRequest())
    served.close()
    result = report_of_data(tmp_path / "data", "", tmp_path / "run")
    assert (result.updates_applied, result.updates_rejected) == (4, 1)
    hidden, lstm = result.coverage
    assert {name: tuple(counts) for name, counts in trained.items()} == hidden.device_trained
    assert (hidden.device_updates, sum(lstm.updates)) == ({"one": 3, "two": 1}, 4)
    assert (result.uplink_bytes, result.uplink_bytes_raw) == (status.uplink_bytes, status.uplink_bytes_raw)
    assert "Who trained which units of lstm" in (tmp_path / "run" / "report.html").read_text()
    assert replay_run(tmp_path / "run").matches
