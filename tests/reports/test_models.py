"""The models that a run leaves: which version is the best, and files that plain torch reads."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
from safetensors import safe_open

from anabranch.core.config.goal import Goal
from anabranch.core.model.params import ParamSpec
from anabranch.reports.models import Best, write_model

NAN = math.nan


@pytest.mark.parametrize(
    ("measured", "best"),
    [
        ([{"accuracy": 0.2}, {"accuracy": 0.8}, {"accuracy": 0.5}], 1),
        ([{"accuracy": 0.8, "loss": 2.0}, {"accuracy": 0.8, "loss": 1.0}], 0),  # of equal ones the earliest
        ([{"accuracy": 0.2, "loss": 0.1}, {"accuracy": 0.3, "loss": 9.0}], 1),
        ([{"accuracy": 0.2}, {"accuracy": NAN, "loss": 0.0}], 0),
        ([{"accuracy": NAN}, {"accuracy": 0.1}], 1),
        ([{"accuracy": NAN}], None),
        ([{"loss": 3.0}, {"loss": 1.0}, {"loss": NAN}, {"loss": -math.inf}, {"loss": 2.0}], 1),
        ([{"loss": 0.01}, {"accuracy": 0.0, "loss": 5.0}], 1),  # a loss is nothing beside an accuracy
        ([{"mae": 1.0}], None),
        ([], None),
    ],
)
def test_the_best_version(measured: list[dict[str, float]], best: int | None) -> None:
    found: Best[int] = Best(Goal())
    for version, metrics in enumerate(measured):
        taken = found.offer(version, metrics, partial(int, version))
        assert taken == (found.version == version)
    assert found.version == found.model == best


def test_the_best_version_of_a_run_that_goes_back() -> None:
    found: Best[int] = Best(Goal(), lambda: 0)
    for version, accuracy in enumerate([0.1, 0.5, 0.4, 0.7, 0.9]):
        found.offer(version, {"accuracy": accuracy}, partial(int, version))
    for back_to, best in [(4, 4), (3, 3), (2, 1)]:
        found.taken_back(back_to)
        assert (found.version, found.model) == (best, best)
    assert found.metrics == {"accuracy": 0.5}
    assert not found.offer(3, {"accuracy": 0.3}, partial(int, 3)), "another one of this number"
    assert found.offer(4, {"accuracy": 0.6}, partial(int, 4))
    found.taken_back(0)
    assert (found.version, found.model) == (0, 0)


class Weights:
    """A model that it can be told of whether anybody still has it."""


def test_what_a_run_cannot_go_back_to_is_let_go() -> None:
    oldest, alive = 0, WeakSet[Weights]()
    found: Best[Weights] = Best(Goal(), lambda: oldest)

    def weights() -> Weights:
        made = Weights()
        alive.add(made)
        return made

    for version in range(100):
        oldest = version - version % 10
        assert found.offer(version, {"accuracy": version / 100}, weights)
        assert len(alive) == 1 + version % 10, "from the oldest on, all"
    oldest = 99
    assert not found.offer(100, {"accuracy": 0.0}, weights)
    assert len(alive) == 1


@pytest.mark.parametrize("seed", range(20))
def test_what_is_let_go_is_never_missed(seed: int) -> None:
    """Beside one that has everything: all that was measured, in a list."""
    random = Random(seed)
    oldest, version, measured = 0, 0, list[tuple[int, float]]()
    found: Best[int] = Best(Goal(), lambda: oldest)
    for _ in range(300):
        if random.random() < 0.1:
            version = random.randint(oldest, version)
            measured = [(of, value) for of, value in measured if of <= version]
            found.taken_back(version)
        else:
            version += random.randint(1, 3)
            oldest = random.choice([oldest, oldest, random.randint(oldest, version)])
            measured.append((version, round(random.random(), 1)))
            found.offer(version, {"accuracy": measured[-1][1]}, partial(int, version))
        best = max(measured, key=lambda one: (one[1], -one[0]), default=(None, None))[0]
        assert found.version == found.model == best


def test_a_model_goes_into_plain_torch_with_its_buffers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    def module() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

    trained = module()
    trained(torch.randn(8, 3))
    arrays = {name: t.detach().numpy() for name, t in trained.state_dict().items()}
    spec = ParamSpec.of(arrays)
    assert (spec.elements, spec.size_bytes) == (12 + 4 + 16 + 1, 32 * 4 + 8)
    tensors = spec.unflatten(spec.flatten(arrays), spec.frozen(arrays))
    write_model(tmp_path / "run" / "best.safetensors", tensors, 7, {"accuracy": 0.5, "loss": NAN})
    fresh = module()
    fresh.load_state_dict(load_file(tmp_path / "run" / "best.safetensors"))
    for name, tensor in trained.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)
    with safe_open(tmp_path / "run" / "best.safetensors", "np") as file:
        assert file.metadata()["version"] == "7"
        assert json.loads(file.metadata()["metrics"]) == {"accuracy": 0.5}


def test_a_model_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "final.safetensors"
    write_model(path, {"w": np.ones(3, np.float32).reshape(3)[::2]}, 1)
    before = path.read_bytes()
    with pytest.raises(Exception, match="complex"):
        write_model(path, {"w": np.ones(3, np.clongdouble)}, 2)
    assert path.read_bytes() == before
