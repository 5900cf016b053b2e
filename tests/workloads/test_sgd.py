"""SGD without torch's class: the same to the bit, and none of what the class brings along."""

from __future__ import annotations

import subprocess
import sys
import weakref
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.app import Examples
from anabranch.workloads.objective import Objective
from anabranch.workloads.sgd import LocalSgd
from anabranch.workloads.torch_loop import TorchRuntime, proximal_pull, sgd

PLANS = [
    LocalPlan(learning_rate=0.1, momentum=momentum, weight_decay=decay)
    for momentum, decay in product((0.0, 0.9), (0.0, 0.01))
]


class Forked(nn.Module):
    """One of its two ends has no gradient in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.ends = nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, x: torch.Tensor, end: int) -> torch.Tensor:
        found: torch.Tensor = self.ends[end](torch.tanh(self.first(x)))
        return found


def losses_of(
    model: Forked, optimizer: torch.optim.Optimizer | LocalSgd, scaler: torch.amp.GradScaler
) -> None:
    """Eight steps on a batch of noise."""
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    for step in range(8):
        optimizer.zero_grad(set_to_none=step != 5)
        scaler.scale(model(x, end=int(step % 3 == 0)).square().mean()).backward()
        scaler.step(optimizer)  # type: ignore[arg-type]
        scaler.update()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_it_steps_as_the_class_does(plan: LocalPlan, scaled: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = Forked(), Forked()
    theirs.load_state_dict(ours.state_dict())
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    optimizer = torch.optim.SGD(
        theirs.parameters(), plan.learning_rate, plan.momentum, weight_decay=plan.weight_decay
    )
    losses_of(theirs, optimizer, torch.amp.GradScaler("cpu", enabled=scaled))
    mine = Objective().make_optimizer(list(ours.parameters()), plan)
    assert isinstance(mine, LocalSgd)
    losses_of(ours, mine, torch.amp.GradScaler("cpu", enabled=scaled))
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name
        assert not torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(
    "plan", [LocalPlan(proximal_mu=0.3), LocalPlan(weight_decay=0.2), LocalPlan(momentum=0.9)]
)
def test_an_embedding_with_sparse_gradients_goes_where_a_dense_one_goes(plan: LocalPlan) -> None:
    found = []
    for sparse in (True, False):
        words = nn.Embedding(9, 3, sparse=sparse)
        with torch.no_grad():
            words.weight.copy_(torch.arange(27).view(9, 3) / 10)
        params = list(words.parameters())
        pull, optimizer = proximal_pull(params, plan.proximal_mu), LocalSgd(params, plan)
        for step in range(3):
            optimizer.zero_grad(set_to_none=True)
            words(torch.tensor([step, 4, 4])).square().sum().backward()
            if plan.proximal_mu:
                pull()
            optimizer.step()
        found.append(words.weight.detach())
    torch.testing.assert_close(*found)


def test_a_step_in_which_loss_scaling_overflowed_is_left_out() -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    optimizer, scaler = LocalSgd(list(model.parameters()), PLANS[0]), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.full((1, 2), 1e38)).sum() * 1e38).backward()
    scaler.step(optimizer)  # type: ignore[arg-type]
    assert torch.equal(model.weight, before)


def scaled() -> TorchRuntime:
    """A processor's, with the scaling of float16, whose numbers are of float32."""
    runtime = TorchRuntime("cpu")
    runtime._scaler = torch.amp.GradScaler("cpu")
    return runtime


def test_a_step_that_overflowed_is_made_once_at_a_lower_scale() -> None:
    model, runtime = nn.Linear(2, 1, bias=False), scaled()
    optimizer = LocalSgd(list(model.parameters()), LocalPlan(learning_rate=1e-36))
    before = model.weight.detach().clone()
    runtime.step(model(torch.full((1, 2), 1e36)).sum(), optimizer)
    torch.testing.assert_close(model.weight.detach(), before - 1.0)
    assert runtime._scaler.get_scale() == 256.0, "float32 ends at 3.4e38"


def test_a_loss_that_is_no_number_changes_nothing_for_those_to_come() -> None:
    model, runtime = nn.Linear(2, 2), scaled()
    before = model.weight.detach().clone()
    examples = Examples(np.full((8, 2), np.nan, np.float32), np.zeros(8, np.int64))
    assert np.isnan(sgd(model, examples, LocalPlan(steps=3), 1, runtime)["loss"])
    assert torch.equal(model.weight, before)
    assert runtime._scaler.get_scale() == torch.amp.GradScaler("cpu").get_scale()


class Kept:
    """What a pass keeps for the way back."""


class Noting(torch.autograd.Function):
    """Says whether the pass before is kept still."""

    last: weakref.ref[Kept] | None = None
    kept = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Noting.kept |= Noting.last is not None and Noting.last() is not None
        ctx.kept = Kept()
        Noting.last = weakref.ref(ctx.kept)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        return g[0]


class Noted(nn.Linear):
    """A layer of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Noting.apply(super().forward(x))
        return found


def test_no_two_passes_are_in_memory_at_a_time() -> None:
    examples = Examples(np.ones((8, 2), np.float32), np.zeros(8, np.int64))
    sgd(Noted(2, 2), examples, LocalPlan(steps=3), 1, scaled())
    assert Noting.last is not None
    assert not Noting.kept


TRAINED = """
import sys
from anabranch.core.config.tables import merge
from anabranch.simulation.run import simulate

run = {"workload": "digits", "updates_max": 2}
tables = {"run": run, "fleet": {"clients": 2}, "strategy": {"name": "teasq_drop", "cache_size": 2}}
print(simulate(merge([("test", tables)])).updates_applied)
print(*sorted({"torch._dynamo", "sklearn", "scipy"} & sys.modules.keys()))
"""


def test_training_loads_neither_the_compiler_nor_the_package_that_has_the_digits() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINED], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["2", ""], done.stderr
