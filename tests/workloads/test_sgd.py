"""SGD without torch's class: the same to the bit, and none of what the class brings along."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest
import torch
from torch import nn

from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.objective import Objective
from anabranch.workloads.sgd import LocalSgd
from anabranch.workloads.torch_loop import proximal_pull

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
