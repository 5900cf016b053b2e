"""The steps of a stack of models, beside torch's own SGD of each."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.stacked_sgd import StackedSgd

COUNT = 3
PLANS = [
    LocalPlan(learning_rate=0.1, momentum=momentum, weight_decay=decay, proximal_mu=mu)
    for momentum, decay, mu in product((0.0, 0.9), (0.0, 0.1), (0.0, 0.5))
]


def ids(plan: LocalPlan) -> str:
    return f"momentum {plan.momentum}, decay {plan.weight_decay}, mu {plan.proximal_mu}"


@pytest.mark.parametrize("live", [COUNT, 2])
@pytest.mark.parametrize("plan", PLANS, ids=ids)
def test_each_model_moves_as_by_torchs_own(plan: LocalPlan, live: int) -> None:
    """A gradient as it is, one as a product, and none; those that have left the stack stay."""
    generator = torch.Generator().manual_seed(0)
    given = {name: torch.randn(COUNT, 4, 5, generator=generator) for name in ("sum", "product", "idle")}
    alone = [{name: w[i].clone().requires_grad_() for name, w in given.items()} for i in range(COUNT)]
    optimizers = [
        torch.optim.SGD(own.values(), plan.learning_rate, plan.momentum, weight_decay=plan.weight_decay)
        for own in alone
    ]
    stacked = {name: w.clone() for name, w in given.items()}
    sgd = StackedSgd.of(plan, stacked).first(live)
    for _ in range(4):
        g, left, right = (
            torch.randn(live, *shape, generator=generator) for shape in ((4, 5), (4, 6), (6, 5))
        )
        with torch.no_grad():
            sgd.add("sum", g)
            sgd.add_product("product", left, right)
            sgd.step(("sum", "product"))
        for i in range(live):
            pulls = {n: plan.proximal_mu * (w.detach() - given[n][i]) for n, w in alone[i].items()}
            alone[i]["sum"].grad = g[i] + pulls["sum"]
            alone[i]["product"].grad = left[i] @ right[i] + pulls["product"]
            optimizers[i].step()
    for i, own in enumerate(alone):
        for name, w in own.items():
            torch.testing.assert_close(stacked[name][i], w.detach(), rtol=1e-5, atol=1e-6)
            assert torch.equal(stacked[name][i], given[name][i]) == (name == "idle" or i >= live)
