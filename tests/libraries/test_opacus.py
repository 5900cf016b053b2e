"""DP-SGD on the device with Opacus: what an example counts for, noise, batches, and what it comes to."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import anabranch, answer
from opacus.accountants import PRVAccountant
from torch import nn

import anabranch as ab
from anabranch.core.model.updates import LocalPlan
from anabranch.core.privacy.accountant import epsilon_of
from anabranch.workloads.adapters import lora
from anabranch.workloads.app import App, Examples, Shard, load_app
from anabranch.workloads.subspace import Subspace
from anabranch.workloads.torch_loop import TorchRuntime
from scripts import EXAMPLES

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("default")]

NAME = f"{EXAMPLES / 'dp_sgd.py'}:PrivateDigits"
PrivateDigits: Any = type(load_app(NAME))
PrivateTraining: Any = PrivateDigits.__mro__[1]
CLIP = 0.3


class Plain(PrivateDigits):
    """Without noise: what is cut can be seen, and there is nothing to be counted."""

    clip, noise = CLIP, 0.0

    def epsilon(self, accountant: Any) -> float:
        del accountant
        return 0.0


class Convolved(Plain):
    def model(self) -> Any:
        layers = nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(144, 10))


class Adapted(Plain):
    def model(self) -> Any:
        net = lora(super().model(), rank=2, alpha=4)
        for name, param in net.named_parameters():
            if name.endswith(".B"):
                nn.init.normal_(param)  # at its start, zero, the other half has no gradient
        return net


class Normed(Plain):
    def model(self) -> Any:
        return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))


class Counted(Plain):
    """Of each example the gradient is 1, so that an update tells how many there were."""

    clip = 1.0

    def model(self) -> Any:
        return nn.Linear(1, 1, bias=False)

    def loss(self, output: Any, y: Any) -> Any:
        del y
        return output.mean()


def few(app: App, count: int) -> Examples:
    whole = app.data(Shard("train"))
    return Examples(whole.x[:count], whole.y[:count])


def trained(app: App, model: Any, examples: Examples, **plan: Any) -> dict[str, torch.Tensor]:
    """How far a training moves each parameter that is trained."""
    app.runtime = TorchRuntime()
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    app.train(model, examples, LocalPlan(learning_rate=1.0, **plan), seed=7)
    return {n: (p - before[n]).detach() for n, p in model.named_parameters() if p.requires_grad}


def gradients_one_by_one(model: Any, examples: Examples) -> list[list[torch.Tensor]]:
    """By the definition: a backward pass for each example."""
    params = [p for p in model.parameters() if p.requires_grad]
    found = []
    for x, y in zip(torch.from_numpy(examples.x), torch.from_numpy(examples.y), strict=True):
        loss = nn.functional.cross_entropy(model(x[None]), y[None].long())
        found.append(list(torch.autograd.grad(loss, params)))
    return found


@pytest.mark.parametrize(
    ("kind", "subspace"),
    [(Plain, ""), (Convolved, ""), (Adapted, ""), (Plain, "all"), (Convolved, "each")],
    ids=["linear", "convolved", "adapted", "subspace", "subspace of each layer"],
)
def test_an_example_counts_for_no_more_than_the_clip(kind: Any, subspace: str) -> None:
    inner = kind()
    app = Subspace(inner, 64, layers=subspace) if subspace else inner
    torch.manual_seed(3)
    model, examples = app.model(), few(app, 12)
    gradients = gradients_one_by_one(model, examples)
    lengths = [float(torch.cat([g.flatten() for g in one]).norm()) for one in gradients]
    inner.clip = float(np.median(lengths))  # half of them are cut
    shares = [min(1.0, inner.clip / length) / len(examples) for length in lengths]
    wanted = [
        -sum(s * one[i] for s, one in zip(shares, gradients, strict=True)) for i in range(len(gradients[0]))
    ]
    found = list(trained(app, model, examples, steps=1, batch_size=12).values())
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)


def test_the_noise_is_of_its_size_and_of_nobodys_seed() -> None:
    app = Plain()
    app.noise = 2.0
    examples, model = few(app, 10), app.model()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moved = []
    for _ in range(2):
        model.load_state_dict(start)
        moved.append(
            torch.cat([d.flatten() for d in trained(app, model, examples, steps=1, batch_size=10).values()])
        )
    apart = (moved[0] - moved[1]).numpy()
    # Two draws of deviation noise * clip / B; 4,810 of them, so that the estimate is within 1 %.
    assert apart.std() == pytest.approx(2**0.5 * 2.0 * CLIP / 10, rel=0.06)
    assert abs(apart.mean()) < 6 * apart.std() / apart.size**0.5


def test_the_draws_are_more_than_can_be_tried() -> None:
    """Of a seed torch's twister takes 32 bits, and makes its 624 words of them."""
    drawing = sys.modules[PrivateTraining.__module__]._drawing
    words = [drawing("cpu").get_state()[24 : 24 + 8 * 624].view(torch.int64).numpy() for _ in range(2)]
    for found in words:
        assert found.min() >= 0
        assert found.max() < 2**32
        before = found[:-1].astype(np.uint64)
        made = (
            1812433253 * (before ^ (before >> np.uint64(30))) + np.arange(1, 624, dtype=np.uint64)
        ) % 2**32
        assert np.count_nonzero(made == found[1:]) < 3, "one word follows of another"
    assert np.count_nonzero(words[0] == words[1]) < 3
    draws = torch.normal(0.0, 1.0, (200_000,), generator=drawing("cpu")).numpy()
    assert abs(draws.mean()) < 6 / draws.size**0.5
    assert draws.std() == pytest.approx(1.0, rel=0.01)


def test_each_example_is_in_a_batch_by_its_own_chance() -> None:
    app, ones = Counted(), Examples(np.ones((100, 1), np.float32), np.zeros(100, np.int64))
    model = app.model()
    drawn = [-10 * float(trained(app, model, ones, steps=1, batch_size=10)["weight"]) for _ in range(200)]
    assert np.allclose(drawn, np.round(drawn), atol=1e-3)
    assert 9 < np.mean(drawn) < 11
    assert 4.5 < np.var(drawn) < 15  # 9 of a hundred throws; 0 of batches of ten


def test_epsilon_is_that_of_all_trainings() -> None:
    """Of whole batches the curve of Gaussian noise is exact: Opacus is above it, by its precision."""
    app: Any = PrivateDigits()
    app.noise, app.runtime = 4.0, TorchRuntime()
    examples, model = few(app, 20), app.model()
    for steps in (6, 12):
        found = app.train(model, examples, LocalPlan(steps=6, batch_size=20), 0)["epsilon"]
        exact = epsilon_of(steps**0.5 / 4.0, 1e-5)
        assert exact <= found < exact + 0.02
    app.kept = b""
    assert app.train(model, examples, LocalPlan(steps=12, batch_size=5), 0)["epsilon"] < exact / 2


def test_what_mixes_examples_is_refused() -> None:
    app = Normed()
    with pytest.raises(Exception, match="BatchNorm cannot support training with differential privacy"):
        trained(app, app.model(), few(app, 8), steps=1, batch_size=8)


def test_a_run_says_what_each_device_has_spent(tmp_path: Path) -> None:
    """The command of the page."""
    page = (EXAMPLES.parent / "docs/privacy.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^\$ anabranch (simulate examples/dp_sgd.py.*)$", page, re.M)
    done = anabranch(tmp_path, *line.replace("examples/dp_sgd.py:PrivateDigits", NAME).split(), "--json")
    answer(done)
    found = json.loads((tmp_path / "runs/examples/result.json").read_text())
    assert found["final_accuracy"] > 0.7
    size, epochs = (found["config"]["client"][name] for name in ("batch_size", "epochs"))
    for client in found["clients"].values():
        count = client["examples"] // client["updates"]
        accountant = PRVAccountant()
        accountant.history = [(1.0, size / count, epochs * -(-count // size) * client["updates"])]
        assert client["metrics"]["epsilon"] == pytest.approx(accountant.get_epsilon(1e-5), rel=0.01)
        assert "loss" not in client["metrics"]


@pytest.mark.parametrize("over", ["privacy", "secagg"])
def test_it_goes_together_with_what_others_do(over: str, tmp_path: Path) -> None:
    more: dict[str, dict[str, Any]] = {
        "privacy": {"privacy.clip": 0.5, "privacy.noise": 1.0, "privacy.participations": 4},
        "secagg": {
            "secagg.mode": "keeper",
            "secagg.keepers": ["north"],
            "secagg.clip": 2.0,
            "secagg.cohort_min": 4,
        },
    }
    settings = {"fleet.clients": 8, "strategy.buffer_size": 4, "client.steps": 2, **more[over]}
    done = ab.simulate(
        PrivateDigits(),
        strategy="fedbuff",
        settings=settings,
        until=ab.Until(versions=3),
        out=tmp_path / "run",
    )
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["versions"] == 3
    assert found["masked" if over == "secagg" else over]
    assert not any("epsilon" in client["metrics"] for client in found["clients"].values())
    assert done.replay().matches
