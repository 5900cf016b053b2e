"""A run of adapters: the bytes of an update and of a download, and what is frozen, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file

from anabranch.core.model.params import ParamSpec, Tensors
from anabranch.reports.result import Result
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import simulate
from anabranch.testing.federation import config
from anabranch.workloads.adapters import merged
from anabranch.workloads.app import App, Shard, load_app
from anabranch.workloads.torch_loop import evaluate
from anabranch.workloads.trainer import trainer_for
from scripts import EXAMPLES

UPDATES = 40
RUN = {"seed": 3, "updates_max": UPDATES}
LOCAL = {"steps": 2, "batch_size": 8, "learning_rate": 0.003}


@pytest.fixture
def pretrained(tmp_path: Path) -> str:
    """The file that the Apps of the example load their weights from."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        weights = load_app(f"{EXAMPLES / 'adapters.py'}:Whole").model().state_dict()
    save_file({name: tensor.numpy() for name, tensor in weights.items()}, tmp_path / "pretrained.safetensors")
    return str(tmp_path / "pretrained.safetensors")


def example(name: str, weights: str) -> App:
    return load_app(f"{EXAMPLES / 'adapters.py'}:{name}", weights)


def run(app: App, folder: Path, **more: Any) -> Result:
    return simulate(config(run=RUN | more, client=LOCAL), folder, app)


def downloads(folder: Path) -> dict[str, list[int]]:
    """The bytes of each device's, in their order."""
    found: dict[str, list[int]] = {}
    for event in map(json.loads, (folder / "events.jsonl").read_text().splitlines()):
        if event["kind"] == "downloaded":
            found.setdefault(event["client"], []).append(event["bytes"])
    return found


def still(spec: ParamSpec, tensors: Tensors) -> dict[str, bytes]:
    return {t.name: tensors[t.name].tobytes() for t in spec.tensors if not t.aggregated}


@pytest.mark.parametrize("name", ["Adapted", "OneHalf", "Prompts", "Head"])
def test_what_is_trained_is_all_that_travels_and_the_rest_stays_to_the_bit(
    name: str, pretrained: str, tmp_path: Path
) -> None:
    app = example(name, pretrained)
    result = run(app, tmp_path / "run")
    model: torch.nn.Module = app.model()
    values = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rest = sum(t.nbytes for t in model.state_dict().values()) - 4 * values
    assert rest > 5 * 4 * values
    assert result.uplink_bytes <= UPDATES * 4 * values * 1.01
    spec, start = trainer_for(app).spec, {n: t.numpy() for n, t in app.model().state_dict().items()}
    for first, *later in downloads(tmp_path / "run").values():
        assert (first, set(later) | {4 * values}) == (rest + 4 * values, {4 * values})
    final = load_file(tmp_path / "run" / "final.safetensors")
    assert still(spec, final) == still(spec, start)
    matrices = [n for n in spec.slices if n.rpartition(".")[2] in ("B", "prompts", "weight")]
    assert matrices
    assert all((final[n] != start[n]).any() for n in matrices)


def test_a_run_is_merged_into_the_model_that_it_is_of(pretrained: str, tmp_path: Path) -> None:
    """The plain model, which never heard of adapters, is as good with the merged weights."""
    app, plain = example("Adapted", pretrained), example("Pretrained", "").model()
    last = run(app, tmp_path / "run").history[-1]
    found = merged(app.model(), load_file(tmp_path / "run" / "final.safetensors"))
    assert list(found) == list(plain.state_dict())
    plain.load_state_dict({name: torch.from_numpy(array) for name, array in found.items()})
    measured = evaluate(plain, app.data(Shard("test")))
    assert measured["loss"] == pytest.approx(last.loss, rel=1e-4)


def test_halves_in_turns_replay(pretrained: str, tmp_path: Path) -> None:
    run(example("Turns", pretrained), tmp_path, keep_payloads=True, updates_max=20)
    assert replay_run(tmp_path).matches


def test_halves_in_turns_by_the_planner_are_the_same_in_half_of_the_bytes(
    pretrained: str, tmp_path: Path
) -> None:
    """One device after the other: what `take_turn` leaves at zero is not sent, and nothing else changes."""
    one: dict[str, Any] = {
        "run": RUN | {"updates_max": 20},
        "client": LOCAL,
        "fleet": {"clients": 1},
        "strategy": {"name": "fedbuff", "buffer_size": 1},
    }
    whole = simulate(config(**one), tmp_path / "whole", example("Turns", pretrained))
    halves = {"submodel": {"name": "alternate"}}
    parts = simulate(config(**one, **halves), tmp_path / "parts", example("Adapted", pretrained))
    assert parts.model_sha256 == whole.model_sha256
    spec = trainer_for(example("Adapted", pretrained)).spec
    size = {half: sum(t.size for t in spec.tensors if t.name.endswith(f".{half}")) for half in "AB"}
    head = spec.size - size["A"] - size["B"]
    assert whole.uplink_bytes == 20 * 4 * spec.size
    assert parts.uplink_bytes == 4 * (20 * head + 12 * size["B"] + 8 * size["A"])
    assert replay_run(tmp_path / "parts").matches
