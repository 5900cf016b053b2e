"""Whatever a model's tensors are like, they come back as they were from every place that arrays go to."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from live_server import live_server
from odd_tensors import Array, assert_same, odd_tensors
from safetensors.numpy import load_file
from stores import LIMITS, Backend
from torch import nn

from anabranch.client.base_model import BaseModel
from anabranch.client.held import keep_model, kept_model
from anabranch.client.kept import Keepsake, KeptState
from anabranch.client.memory import Memories
from anabranch.client.operator import OperatorClient
from anabranch.client.outbox import Outbox, UpdateEntry
from anabranch.client.records import Record, read_record, write_record
from anabranch.compress.downloads import Downloads, apply_download
from anabranch.compress.feedback import Memory, Uplink
from anabranch.compress.model import decode_model, encode_model
from anabranch.compress.registry import STAGES, make_codec
from anabranch.core.config.tables import Config
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.errors import AppError
from anabranch.core.model.arrays import from_bytes, plain, to_bytes
from anabranch.core.model.params import ParamSpec, dense
from anabranch.core.model.updates import LocalPlan
from anabranch.core.snapshot import FORMAT, Snapshot, state_digest
from anabranch.protos.convert import manifest_from_proto, manifest_to_proto
from anabranch.reports.journal_files import JournalReader, JournalWriter
from anabranch.server.manifest import read_manifest, read_weights, write_manifest
from anabranch.simulation.run import simulate
from anabranch.strategies.registry import strategy_of
from anabranch.testing.federation import config
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.trainer import trainer_for

Tensors = dict[str, Array]
Place = Callable[[Tensors, Path], Tensors]


class Odd(App):
    """An App of odd arrays, whose training adds a quarter to all that is aggregated."""

    name = "odd"

    def model(self) -> Tensors:
        return odd_tensors()

    def data(self, shard: Shard) -> Examples:
        return Examples(np.zeros((4, 1)), np.zeros(4))

    def train(self, model: Tensors, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        for name, array in model.items():
            if array.dtype.kind == "f":
                model[name] = array + array.dtype.type(0.25)  # of the number numpy makes a scalar
        return {}

    def evaluate(self, model: Tensors, examples: Examples) -> dict[str, float]:
        return {"accuracy": float(model["number"]), "loss": 0.0}


def a_record(tensors: Tensors, folder: Path) -> Tensors:
    write_record(folder / "record", Record(tensors, {"a": 1}), durable=True)
    found = read_record(folder / "record")
    assert found is not None
    return dict(found.arrays)


def a_held_model(tensors: Tensors, folder: Path) -> Tensors:
    spec = ParamSpec.of(tensors)
    keep_model(folder, BaseModel(3, spec.flatten(tensors), spec.frozen(tensors)), "run", spec)
    found = kept_model(folder, "run", spec)
    assert found is not None
    return spec.unflatten(found.vector, found.frozen)


def a_payload(tensors: Tensors, _: Path) -> Tensors:
    spec = ParamSpec.of(tensors)
    data = encode_model(make_codec("raw"), spec, spec.flatten(tensors), spec.frozen(tensors))
    return spec.unflatten(*decode_model(make_codec("raw"), spec, data))


def downloads(downlink: str) -> Place:
    """What a device has decoded: whole versions, and, from the second on, what leads there."""

    def go(tensors: Tensors, _: Path) -> Tensors:
        from anabranch.compress.broadcast import make_broadcast

        spec, settings = ParamSpec.of(tensors), config(downlink={"codec": downlink})
        strategy = strategy_of(settings)
        broadcast = make_broadcast(spec, strategy, downlink)
        engine = Engine(spec, strategy, EngineSettings.of(settings), spec.flatten(tensors), broadcast)
        offer = Downloads(spec, spec.frozen(tensors)).offer(engine, 0, None, STAGES)
        assert offer is not None
        made = offer()
        vector, frozen = apply_download(spec, made.codec, made.data, None, None)
        assert frozen is not None
        return spec.unflatten(vector, frozen)

    return go


def an_outbox(tensors: Tensors, folder: Path) -> Tensors:
    """An update, through the outbox; frozen tensors never travel in one."""
    spec = ParamSpec.of(tensors)
    payload, _ = Uplink("raw").encode(spec.flatten(tensors), spec, None, None, 0, 0)
    Outbox(folder / "o").put(UpdateEntry("u", "t", spec.layout_hash, 0, 1, 1, "raw", payload, spec.size))
    from anabranch.compress.layout import Layout

    vector = dense(make_codec("raw").decode(Outbox(folder / "o").load("u").payload, Layout.of(spec)))
    return spec.unflatten(vector, spec.frozen(tensors))


def a_manifest(tensors: Tensors, folder: Path) -> Tensors:
    write_manifest(folder, "odd", tensors)
    return dict(read_manifest(folder).tensors)


def given_weights(tensors: Tensors, folder: Path) -> Tensors:
    write_manifest(folder, "odd", tensors)
    return read_weights(folder / "initial.safetensors", ParamSpec.of(tensors))


def a_journal(tensors: Tensors, folder: Path) -> Tensors:
    with JournalWriter(folder, ParamSpec.of(tensors), tensors, Config()):
        pass
    return JournalReader(folder).initial()


def an_export(tensors: Tensors, folder: Path) -> Tensors:
    with live_server(folder, tensors, config()) as info, OperatorClient(info.admin_address) as operator:
        operator.export(folder / "out.safetensors")
    return load_file(folder / "out.safetensors")


def flowers_message(tensors: Tensors, _: Path) -> Tensors:
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'anabranch[flower]'")
    from anabranch.flower.records import array_record, arrays_of

    return arrays_of(array_record(tensors))


def flowers_state(tensors: Tensors, _: Path) -> Tensors:
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'anabranch[flower]'")
    from flwr.app import RecordDict

    from anabranch.flower.records import array_record, arrays_of, from_bytes, to_bytes

    found = from_bytes(to_bytes(RecordDict({"a": array_record(tensors)})))
    return arrays_of(found.array_records["a"])


def flowers_logbook(tensors: Tensors, folder: Path) -> Tensors:
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'anabranch[flower]'")
    from anabranch.flower.logbook import Logbook

    with Logbook(folder, Config(), tensors) as logbook:
        return dict(logbook.initial)


PLACES: dict[str, Place] = {
    "a record": a_record,
    "a held model": a_held_model,
    "a payload": a_payload,
    "an outbox": an_outbox,
    "a raw download": downloads("raw"),
    "a manifest": a_manifest,
    "given weights": given_weights,
    "a journal": a_journal,
    "an export": an_export,
    "a message of Flower's": flowers_message,
    "a state of Flower's": flowers_state,
    "a logbook": flowers_logbook,
}


@pytest.mark.parametrize("place", PLACES)
def test_tensors_come_back_as_they_were(place: str, tmp_path: Path) -> None:
    assert_same(PLACES[place](odd_tensors(), tmp_path), odd_tensors())


@pytest.mark.parametrize("downlink", ["log(1)", "int8(256)"])
def test_what_is_not_aggregated_passes_a_lossy_download_untouched(downlink: str, tmp_path: Path) -> None:
    found, expected = downloads(downlink)(odd_tensors(), tmp_path), odd_tensors()
    spec = ParamSpec.of(expected)
    assert_same(spec.frozen(found), spec.frozen(expected))
    assert {n: a.shape for n, a in found.items()} == {n: a.shape for n, a in expected.items()}


def test_a_snapshot_of_any_store(backend: Backend) -> None:
    store = backend.start(LIMITS)
    store.append([])
    arrays = {f"state/{name}": array for name, array in odd_tensors().items()}
    store.save_snapshot(Snapshot({"format": FORMAT, "version": 0}, arrays), 0, 0.0)
    found = store.load().snapshot
    store.close()
    assert found is not None
    assert_same(found.arrays, arrays)


@pytest.mark.parametrize("name", odd_tensors())
def test_bytes_and_back(name: str) -> None:
    array = odd_tensors()[name]
    data = to_bytes(array)
    assert bytes(data) == array.astype(array.dtype.newbyteorder("<")).tobytes()
    assert_same({name: from_bytes(data, array.dtype.name, array.shape)}, {name: array})
    assert plain(array).flags.c_contiguous


def test_what_is_in_order_is_not_copied() -> None:
    array = np.arange(6.0).reshape(2, 3)
    assert np.shares_memory(plain(array), array)
    assert np.shares_memory(np.asarray(to_bytes(array)), array)


def test_a_digest_takes_states_of_any_shape() -> None:
    tensors = odd_tensors()
    spec = ParamSpec.of(tensors)
    engines = [Engine(spec, strategy_of(config()), EngineSettings(), spec.flatten(tensors)) for _ in "ab"]
    for engine in engines:
        engine.planner_state = MappingProxyType(tensors)
    first = state_digest(engines[0])
    assert first == state_digest(engines[1])
    engines[1].planner_state = {**tensors, "number": np.array([1.5], np.float32)}
    assert first != state_digest(engines[1]), "a number is no row of one"


def test_a_manifest_on_the_wire_has_every_shape() -> None:
    spec = ParamSpec.of(odd_tensors())
    assert manifest_from_proto(manifest_to_proto(spec)) == spec


def test_what_a_device_remembers(tmp_path: Path) -> None:
    residual = np.arange(8, dtype=np.float32)[::2]
    memories = Memories(tmp_path / "m", ["u"])
    memories.put("u", Memory(residual, 3, 1.5, {"tau": 0.25}), "run", "layout")
    memories.commit("u")
    found = Memories(tmp_path / "m").load("run", "layout")
    assert found is not None
    np.testing.assert_array_equal(found.residual, residual)
    for number, kept in enumerate([Keepsake(b"", b"own"), Keepsake(b"app"), Keepsake()]):
        with KeptState(tmp_path / "k").beside(f"u{number}", kept, "run"):
            pass
        assert KeptState(tmp_path / "k").load("run") == kept


def test_a_simulation_trains_them_and_leaves_them_as_they_are(tmp_path: Path) -> None:
    settings = config(
        fleet={"clients": 2},
        run={"updates_max": 20},
        faults={"server_crash_every_s": 1.0, "server_down_s": 0.1, "device_crash_every_s": 1.0},
        server={"snapshot_every_updates": 1},
    )
    result = simulate(settings, tmp_path, app=Odd())
    assert result.updates_applied >= 20
    assert result.final_accuracy is not None
    assert result.final_accuracy > 1.5, "the number was trained"


def test_devices_start_again_with_them(tmp_path: Path) -> None:
    """A trainer, from what a device has kept of the model: 1 for a number that was trained twice."""
    trainer = trainer_for(Odd())
    tensors = trainer.initial(0)
    for _, life in itertools.product("ab", [tmp_path]):
        tensors = a_held_model(tensors, life)
        spec = trainer.spec
        given = spec.flatten(tensors)
        result = trainer.train(given, spec.frozen(tensors), Odd().data(Shard("train")), LocalPlan(), 0)
        tensors = spec.unflatten(given + result.delta, spec.frozen(tensors))
    expected = odd_tensors()
    for name in ("weight", "turned", "gaps", "half", "number", "nothing"):
        expected[name] = np.asarray(expected[name] + expected[name].dtype.type(0.5))
    assert_same(tensors, expected)


class Torch(App):
    """A torch module with one tensor of a kind, or with something else in its state."""

    name = "kinds"

    def __init__(self, tensor: torch.Tensor | None) -> None:
        super().__init__()
        self.tensor = tensor

    def model(self) -> nn.Module:
        module = nn.Linear(2, 2)
        if self.tensor is None:
            return WithState()
        module.register_buffer("odd", self.tensor)
        return module

    def evaluate(self, model: Any, examples: Examples) -> dict[str, float]:
        return {"odd": float(model.odd.double().sum())}


class WithState(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def get_extra_state(self) -> Any:
        return {"not": "a tensor"}

    def set_extra_state(self, state: Any) -> None:
        pass


KINDS: dict[str, tuple[torch.Tensor | None, str]] = {
    "bfloat16": (torch.zeros(2, dtype=torch.bfloat16), "tensor 'odd' is bfloat16.*float32"),
    "float8": (torch.zeros(2, dtype=torch.float8_e4m3fn), "tensor 'odd' is float8_e4m3fn.*float32"),
    "complex": (torch.zeros(2, dtype=torch.complex64), "kinds: tensor 'odd' is complex64"),
    "no tensor": (None, "'_extra_state' in the model's state dict is dict"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_that_cannot_travel_are_refused_at_the_start(kind: str) -> None:
    tensor, words = KINDS[kind]
    with pytest.raises(AppError, match=words):
        trainer_for(Torch(tensor))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_torch_tensors_of_every_kind_are_loaded_again(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape[::-1]).permute(list(range(len(shape)))[::-1]).to(dtype)
    trainer = trainer_for(Torch(tensor))
    first = trainer.initial(0)
    spec = trainer.spec
    examples = Examples(np.zeros((4, 2), np.float32), np.zeros(4, np.int64))
    for odd in (first["odd"], np.zeros_like(first["odd"]), first["odd"]):
        vector, frozen = spec.flatten({**first, "odd": odd}), spec.frozen({**first, "odd": odd})
        result = trainer.train(vector, frozen, examples, LocalPlan(learning_rate=0.0), 0)
        assert not result.delta.any()
        assert trainer.evaluate(vector, frozen, examples) == {"odd": float(odd.sum())}
